"""Sparse-attention decoding of long contexts for Llama and Qwen models, in JAX.

params = jsparse.load("smollm2")
out = jsparse.generate(params, "Gravity is", max_new_tokens=40)
print(out.text)
"""

from importlib.metadata import PackageNotFoundError, version

from jsparse.cache import KVCache
from jsparse.generate import Generation, GenerationStats, generate
from jsparse.models.checkpoint import Params, load, save
from jsparse.policies import parse as parse_policy
from jsparse.policies.oracle import oracle_top_k, oracle_top_p
from jsparse.policies.streaming import streaming
from jsparse.policies.wrappers import dense_layers, keep
from jsparse.policy import Policy, dense
from jsparse.scoring import logits
from jsparse.selection import Selection

try:
    __version__ = version("jsparse")
except PackageNotFoundError:  # a bare checkout on PYTHONPATH
    __version__ = "0.0.0+checkout"

__all__ = [
    "Generation",
    "GenerationStats",
    "KVCache",
    "Params",
    "Policy",
    "Selection",
    "__version__",
    "dense",
    "dense_layers",
    "generate",
    "keep",
    "load",
    "logits",
    "oracle_top_k",
    "oracle_top_p",
    "parse_policy",
    "save",
    "streaming",
]
