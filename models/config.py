"""A decoder's sizes and switches: validated once, hashable, and free of I/O."""

import math
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1's RoPE scaling: stretches long wavelengths by `factor`, `rope_type: llama3`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_type: str = field(default="llama3", init=False)

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
class YarnRope:
    """YaRN's RoPE scaling (Peng et al., arXiv 2309.00071), `rope_type: yarn`.

    Pairs with fewer than `beta_slow` turns within the original context turn `factor` times slower.
    Pairs with more than `beta_fast` turns are unchanged. A linear ramp over the pairs' indices
    joins the two.

    Attributes:
        attention_factor: a factor of cos and sin; None: the paper's, 0.1 · ln(factor) + 1.
        truncate: whether the ends of the ramp are rounded outwards to whole pairs.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    rope_type: str = field(default="yarn", init=False)

    def __post_init__(self) -> None:
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            _positive(name, getattr(self, name))
        if self.attention_factor is not None:
            _positive("attention_factor", self.attention_factor)
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"beta_fast={self.beta_fast}: must be at least beta_slow={self.beta_slow}"
            )
        if not isinstance(self.truncate, bool):
            raise ValueError(f"truncate={self.truncate!r}: must be true or false")


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Returns YaRN's factor of cos and sin: 0.1 · mscale · ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class LinearRope:
    """RoPE scaling that slows every pair down by `factor`, `rope_type: linear`."""

    factor: float
    rope_type: str = field(default="linear", init=False)

    def __post_init__(self) -> None:
        _positive("factor", self.factor)


@dataclass(frozen=True)
class Experts:
    """The experts in place of each layer's MLP, of which a router chooses some for each token.

    Attributes:
        number: E, the number of experts.
        chosen: the number of experts of each token.
        intermediate_size: the intermediate size of an expert.
        normalized: whether the weights of a token's experts are divided by their sum.
        shared_size: the intermediate size of an additional expert of all tokens, with a gate; 0:
            there is none.
        ranks: the number of ranks among which experts are divided (jsparse.ranks).
    """

    number: int
    chosen: int
    intermediate_size: int
    normalized: bool
    shared_size: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("number", "chosen", "intermediate_size", "shared_size", "ranks"):
            value, least = getattr(self, name), int(name != "shared_size")
            if type(value) is not int or value < least:
                raise ValueError(
                    f"experts.{name}={value!r}: must be an integer of at least {least}"
                )
        if not isinstance(self.normalized, bool):
            raise ValueError(f"experts.normalized={self.normalized!r}: must be true or false")
        if self.number > MAX_EXPERTS:
            raise ValueError(f"experts.number={self.number}: must be at most {MAX_EXPERTS}")
        if self.chosen > self.number:
            raise ValueError(
                f"experts.chosen={self.chosen}: must be at most experts.number={self.number}"
            )

    @property
    def own(self) -> int:
        """The number of experts on each rank."""
        return self.number // self.ranks

    def of_rank(self, ranks: int) -> "Experts":
        """Returns the sizes of each of several ranks; raises ValueError if they do not divide."""
        for name in ("number", "shared_size"):
            if getattr(self, name) % ranks:
                raise ValueError(
                    f"tensor_parallel_size={ranks}: must divide the model's experts.{name}="
                    f"{getattr(self, name)}"
                )
        return replace(self, shared_size=self.shared_size // ranks, ranks=ranks)


MAX_EXPERTS = 2**14


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of one decoder.

    Attributes:
        family: a name of jsparse.models.families, which selects the name maps for loading.
        max_position_embeddings: the maximum context length; with YaRN at least the context that it
            scales to.
        rope_factors: a divisor per rotary frequency (H/2 of them), by which GGUF files store Llama
            3.1's rule; or None.
        qkv_bias: whether the q, k and v projections have a bias (Qwen2).
        qk_norm: whether queries and keys are RMS-normalised per head before RoPE (Qwen3).
        windows: the number of newest tokens that each layer attends to, the query's own included;
            None: all of them. Empty if no layer has a window.
        experts: the experts in place of each layer's MLP, whose `intermediate_size` is then unused;
            None: there are none.
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
    rope_scaling: Llama3Rope | YarnRope | LinearRope | None = None
    rope_factors: tuple[float, ...] | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    experts: Experts | None = None

    @property
    def layer_weights(self) -> int:
        """The number of weights in the matrices of a layer that a token is multiplied with."""
        heads, ffn = 2 * (self.num_heads + self.num_kv_heads), self.intermediate_size
        if (e := self.experts) is not None:
            ffn = e.chosen * e.intermediate_size + e.shared_size
        return self.hidden_size * (heads * self.head_dim + 3 * ffn)

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
        if isinstance(self.rope_scaling, YarnRope) and self.rope_theta <= 1:
            raise ValueError(
                f"rope_theta={self.rope_theta}: must be above 1 for YaRN, which places its ramp by "
                "the logarithm"
            )
        for i, factor in enumerate(self.rope_factors or ()):
            _positive(f"rope_factors[{i}]", factor)
        if self.rope_factors is not None and len(self.rope_factors) != self.head_dim // 2:
            raise ValueError(
                f"rope_factors has {len(self.rope_factors)} entries: must be head_dim / 2 = "
                f"{self.head_dim // 2}"
            )
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"windows has {len(self.windows)} entries: must have one per layer, "
                f"{self.num_layers}, or none"
            )
        for window in self.windows:
            if window is not None and (type(window) is not int or window < 1):
                raise ValueError(f"windows={self.windows}: must be integers of at least 1 or None")

    def window(self, layer: int, capacity: int) -> int | None:
        """Returns a layer's window, or None if it attends to all of at most `capacity` tokens."""
        window = self.windows[layer] if self.windows else None
        return None if window is None or window >= capacity else window

    def windowed(self, capacity: int) -> bool:
        """Returns whether some layer does not attend to all of `capacity` tokens."""
        return any(self.window(layer, capacity) for layer in range(self.num_layers))

    def of_rank(self, ranks: int) -> "ModelConfig":
        """Returns the sizes of each of several ranks; raises ValueError if they do not divide."""
        divided = ("num_kv_heads",) if self.experts else ("num_kv_heads", "intermediate_size")
        for name in divided:
            if getattr(self, name) % ranks:
                raise ValueError(
                    f"tensor_parallel_size={ranks}: must divide the model's "
                    f"{name}={getattr(self, name)}"
                )
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            intermediate_size=max(self.intermediate_size // ranks, 1),
            experts=None if self.experts is None else self.experts.of_rank(ranks),
        )

    def vocab_parts(self, ranks: int) -> int:
        """Returns the number of parts into which ranks split the logits; 1: each computes all."""
        return 1 if self.vocab_size % ranks else ranks


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
    """Returns config[key]; raises a ValueError that names the field if it is missing."""
    if config.get(key) is None:
        raise ValueError(f"config field {key!r} is missing: every model config must state it")
    return config[key]


def whole_field(config: dict[str, Any], key: str, least: int = 1) -> int:
    """Returns config[key]; raises a ValueError that names it unless it is an integer >= least."""
    value = require(config, key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"config field {key}={value!r}: must be an integer of at least {least}")
    return value


def refuse(config: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError if a field requires something that the decoder does not support."""
    value = config.get(key)
    if value is not None and value not in allowed:
        raise ValueError(
            f"config field {key}={value!r} is not supported: must be one of {list(allowed)}"
        )
