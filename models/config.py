"""Defines a decoder's sizes and switches, which are validated once, hashable and free of I/O."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Llama3Rope:
    """Scales frequencies as Llama 3.1 does: long wavelengths are stretched by `factor`.

    Configs call it `rope_type: llama3`.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ):
            _positive(name, getattr(self, name))
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor}: must be above "
                f"low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Holds the sizes and switches of one decoder.

    Attributes:
        family: "llama", "qwen2" or "qwen3", which picks the name maps when loading.
        rope_scaling: Llama 3.1's rule, or None.
        rope_factors: a divisor per rotary frequency (H/2 of them), as GGUF files store the same
            rule; or None.
        qkv_bias: whether the q, k and v projections carry a bias (Qwen2).
        qk_norm: whether queries and keys are RMS-normalised per head before RoPE (Qwen3).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    rope_factors: tuple[float, ...] | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads}: must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, since RoPE rotates pairs")
        for name in ("rms_norm_eps", "rope_theta"):
            _positive(name, getattr(self, name))
        for i, factor in enumerate(self.rope_factors or ()):
            _positive(f"rope_factors[{i}]", factor)
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(
                f"rope_factors has {len(self.rope_factors)} entries: must be head_dim / 2 = "
                f"{self.head_dim // 2}"
            )

    def cache_bytes_per_token(self, itemsize: int) -> int:
        """Returns the bytes of K and V that one token of one sequence takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name}={value!r}: must be a number above 0")


def require(config: dict[str, Any], key: str) -> Any:
    """Returns config[key]; raises a ValueError that names the field if the config lacks it."""
    if config.get(key) is None:
        raise ValueError(f"config field {key!r} is missing: every model config must state it")
    return config[key]


def _count(config: dict[str, Any], key: str) -> int:
    value = require(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config field {key}={value!r}: must be an integer of at least 1")
    return value


def refuse(config: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError if a field asks for something that the decoder does not support."""
    value = config.get(key)
    if value is not None and value not in allowed:
        raise ValueError(
            f"config field {key}={value!r} is not supported: must be one of {list(allowed)}"
        )


def sizes_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that every config.json states alike, under ModelConfig's names."""
    refuse(config, "hidden_act", ("silu",))
    refuse(config, "use_sliding_window", (False,))
    for fields in (config, config.get("rope_parameters") or {}):
        refuse(fields, "partial_rotary_factor", (1, 1.0))
    for kind in config.get("layer_types") or ():
        refuse({"layer_types": kind}, "layer_types", ("full_attention",))
    hidden, heads = (_count(config, key) for key in ("hidden_size", "num_attention_heads"))
    kv_heads, head_dim = config.get("num_key_value_heads"), config.get("head_dim")
    return {
        "vocab_size": require(config, "vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": require(config, "intermediate_size"),
        "num_layers": require(config, "num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": hidden // heads if head_dim is None else head_dim,
        "max_position_embeddings": require(config, "max_position_embeddings"),
        "rms_norm_eps": require(config, "rms_norm_eps"),
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        **rope_from_hf(config),
    }


def rope_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Reads RoPE's fields from either style of config.

    transformers 5 nests them in `rope_parameters`; before that `rope_theta` stood at the top beside
    `rope_scaling`.
    """
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return {"rope_theta": float(theta)}
    if kind != "llama3":
        raise ValueError(f"rope_type={kind!r} is not supported: must be 'default' or 'llama3'")
    return {
        "rope_theta": float(theta),
        "rope_scaling": Llama3Rope(
            factor=float(require(scaling, "factor")),
            low_freq_factor=float(require(scaling, "low_freq_factor")),
            high_freq_factor=float(require(scaling, "high_freq_factor")),
            original_max_position_embeddings=int(
                require(scaling, "original_max_position_embeddings")
            ),
        ),
    }
