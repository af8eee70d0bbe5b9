"""Sparse-attention decoding of long contexts for Llama and Qwen models, in JAX.

params = jsparse.load("smollm2")
out = jsparse.generate(params, "Gravity is", max_new_tokens=40)
print(out.text)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsparse.cache import KVCache
    from jsparse.channel_calibration import calibrate_channels
    from jsparse.generation import generate
    from jsparse.models.checkpoint import Params, load, save
    from jsparse.output import Generation, GenerationStats
    from jsparse.policies import parse as parse_policy
    from jsparse.policies.double_sparsity import double_sparsity
    from jsparse.policies.duo_attention import duo_attention
    from jsparse.policies.full import full
    from jsparse.policies.lychee_decode import lychee_decode
    from jsparse.policies.oracle import oracle_top_k, oracle_top_p
    from jsparse.policies.quest import quest
    from jsparse.policies.streaming import streaming
    from jsparse.policies.tidal import tidal
    from jsparse.policies.twilight import twilight
    from jsparse.policies.wrappers import dense_layers, keep
    from jsparse.policy import Policy, dense
    from jsparse.scoring import logits
    from jsparse.selection import Selection

    __version__: str

# Where each name is found when it is first used: jax takes seconds to import, and `jsparse --help` needs none of it.
_HOMES = {
    "Generation": "jsparse.output",
    "GenerationStats": "jsparse.output",
    "KVCache": "jsparse.cache",
    "Params": "jsparse.models.checkpoint",
    "Policy": "jsparse.policy",
    "Selection": "jsparse.selection",
    "calibrate_channels": "jsparse.channel_calibration",
    "dense": "jsparse.policy",
    "dense_layers": "jsparse.policies.wrappers",
    "double_sparsity": "jsparse.policies.double_sparsity",
    "duo_attention": "jsparse.policies.duo_attention",
    "full": "jsparse.policies.full",
    "generate": "jsparse.generation",
    "keep": "jsparse.policies.wrappers",
    "lychee_decode": "jsparse.policies.lychee_decode",
    "load": "jsparse.models.checkpoint",
    "logits": "jsparse.scoring",
    "oracle_top_k": "jsparse.policies.oracle",
    "oracle_top_p": "jsparse.policies.oracle",
    "parse_policy": "jsparse.policies",
    "quest": "jsparse.policies.quest",
    "save": "jsparse.models.checkpoint",
    "streaming": "jsparse.policies.streaming",
    "tidal": "jsparse.policies.tidal",
    "twilight": "jsparse.policies.twilight",
}
__all__ = [
    "Generation",
    "GenerationStats",
    "KVCache",
    "Params",
    "Policy",
    "Selection",
    "__version__",
    "calibrate_channels",
    "dense",
    "dense_layers",
    "double_sparsity",
    "duo_attention",
    "full",
    "generate",
    "keep",
    "load",
    "logits",
    "lychee_decode",
    "oracle_top_k",
    "oracle_top_p",
    "parse_policy",
    "quest",
    "save",
    "streaming",
    "tidal",
    "twilight",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = _version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), "parse" if name == "parse_policy" else name)
    else:
        raise AttributeError(f"module 'jsparse' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("jsparse")
    except PackageNotFoundError:  # a bare checkout on PYTHONPATH
        return "0.0.0+checkout"
