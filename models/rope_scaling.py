"""Reads RoPE's maximum length and scaling from config.json and GGUF metadata.

Both give fields of `ModelConfig`: max_position_embeddings, rope_theta and rope_scaling.
"""

from collections.abc import Mapping
from typing import Any

from jsparse.models.config import (
    LinearRope,
    Llama3Rope,
    YarnRope,
    refuse,
    require,
    yarn_attention_factor,
)

ROPE_TYPES = {"llama3": Llama3Rope, "yarn": YarnRope, "linear": LinearRope}
"""Rules by their name in configs; "default" is not one of them."""

_ORIGINAL = "original_max_position_embeddings"


def rope_from_hf(config: dict[str, Any]) -> dict[str, Any]:
    """Reads RoPE's fields from config.json.

    transformers 5 nests them in `rope_parameters`; earlier versions have `rope_theta` at the top
    level, beside `rope_scaling`. ValueError if both styles state different rules.
    """
    scaling = _stated_rule(config)
    kind = scaling.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ("default", *ROPE_TYPES):
        raise ValueError(
            f"rope_type={kind!r} is not supported: must be one of {['default', *ROPE_TYPES]}"
        )
    longest = require(config, "max_position_embeddings")
    fields: dict[str, Any] = {
        "max_position_embeddings": longest,
        "rope_theta": float(scaling.get("rope_theta", config.get("rope_theta", 10000.0))),
    }
    if kind == "llama3":
        fields["rope_scaling"] = Llama3Rope(
            factor=float(require(scaling, "factor")),
            low_freq_factor=float(require(scaling, "low_freq_factor")),
            high_freq_factor=float(require(scaling, "high_freq_factor")),
            original_max_position_embeddings=int(require(scaling, _ORIGINAL)),
        )
    elif kind == "yarn":
        rule = _yarn_from_hf(config, scaling)
        fields |= {"rope_scaling": rule, "max_position_embeddings": _reach(rule, longest)}
    elif kind == "linear":
        fields["rope_scaling"] = LinearRope(float(require(scaling, "factor")))
    return fields


def _stated_rule(config: dict[str, Any]) -> dict[str, Any]:
    nested, older = (dict(config.get(key) or {}) for key in ("rope_parameters", "rope_scaling"))
    for kind in (key for key, value in nested.items() if isinstance(value, dict)):
        raise ValueError(f"config field rope_parameters={kind!r}: must be one rule for all layers")
    for rule in (nested, older):
        if "type" in rule:  # the name before transformers 4.45
            rule["rope_type"] = rule.get("rope_type", rule.pop("type"))
    if nested and any(nested.get(key) != value for key, value in older.items()):
        raise ValueError(
            f"config fields rope_parameters={nested} and rope_scaling={older} differ: must be one "
            "of them, with its rope_theta"
        )
    return nested or older


def _yarn_from_hf(config: dict[str, Any], scaling: dict[str, Any]) -> YarnRope:
    """Returns YaRN's rule with the defaults of transformers 5."""
    # A top-level field, as in Phi-3, takes precedence over the rule's.
    original = config.get(_ORIGINAL) or scaling.get(_ORIGINAL)
    factor = scaling.get("factor")
    if factor is None and original is not None:
        factor = require(config, "max_position_embeddings") / original
    if original is None:
        original = require(config, "max_position_embeddings")
    factor = float(require({"factor": factor}, "factor"))
    attention_factor = scaling.get("attention_factor")
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_attention_factor(factor, mscale) / yarn_attention_factor(
            factor, mscale_all_dim
        )
    truncate = scaling.get("truncate")
    return YarnRope(
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=float(_default(scaling.get("beta_fast"), 32.0)),
        beta_slow=float(_default(scaling.get("beta_slow"), 1.0)),
        attention_factor=attention_factor if attention_factor is None else float(attention_factor),
        truncate=True if truncate is None else truncate,
    )


def rope_from_gguf(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads RoPE's fields from a GGUF file's metadata, whose keys lack the architecture's prefix.

    A factor without a type is linear, as in llama.cpp, whose converter writes the config's
    attention_factor as `yarn_attn_factor`.
    """
    fields = dict(fields)
    longest = require(fields, "context_length")
    # 0 represents an unset factor; files of 2023 have only the older key.
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear")) or None
    kind = fields.get("rope.scaling.type", "linear")
    refuse({"rope.scaling.type": kind}, "rope.scaling.type", ("none", "linear", "yarn"))
    refuse(fields, "rope.scaling.attn_factor", (1.0,))
    refuse(fields, "rope.scaling.yarn_ext_factor", (1.0,))
    refuse(fields, "rope.scaling.yarn_log_multiplier", (0.0,))
    read: dict[str, Any] = {
        "max_position_embeddings": longest,
        "rope_theta": fields.get("rope.freq_base", 10000.0),
    }
    if kind == "yarn":
        rule = YarnRope(
            require({"rope.scaling.factor": factor}, "rope.scaling.factor"),
            _default(fields.get("rope.scaling.original_context_length"), longest),
            beta_fast=_default(fields.get("rope.scaling.yarn_beta_fast"), 32.0),
            beta_slow=_default(fields.get("rope.scaling.yarn_beta_slow"), 1.0),
            attention_factor=fields.get("rope.scaling.yarn_attn_factor"),
        )
        read |= {"rope_scaling": rule, "max_position_embeddings": _reach(rule, longest)}
    elif kind == "linear" and factor not in (None, 1.0):
        read["rope_scaling"] = LinearRope(factor)
    return read


def rope_from_saved(fields: Mapping[str, Any]) -> Llama3Rope | YarnRope | LinearRope:
    """Returns the rule that `save` wrote; saves of version 0.1 have only llama3's."""
    kind = fields.get("rope_type", "llama3")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type={kind!r} is not supported: must be one of {list(ROPE_TYPES)}")
    return ROPE_TYPES[kind](**{key: fields[key] for key in fields if key != "rope_type"})


def _reach(rule: YarnRope, longest: Any) -> Any:
    """Returns the maximum context length: Qwen's configs enable YaRN but state the original."""
    if type(longest) is not int or longest < 1:
        return longest  # ModelConfig rejects it
    return max(longest, round(rule.factor * rule.original_max_position_embeddings))


def _default(value: Any, default: Any) -> Any:
    return default if value is None else value
