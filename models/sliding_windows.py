"""Reads which layers attend to a window of newest tokens, from config.json and GGUF metadata."""

from collections.abc import Mapping
from typing import Any, Literal

from jsparse.models.config import refuse, whole_field

Windows = Literal["never", "stated", "switched"]
"""When a family's `sliding_window` applies: in no model, always, or with `use_sliding_window`."""

FULL, SLIDING = "full_attention", "sliding_attention"
_MOST_LAYERS = 10_000  # a limit on the tuple's memory; models have a hundred
_DEFAULT = {"sliding_window": 4096}  # transformers' for Mistral and Qwen; null: no window


def windows_from_hf(config: dict[str, Any], rule: Windows) -> tuple[int | None, ...]:
    """Returns each layer's window in tokens, None for full attention; () if all layers are full.

    `layer_types` lists the layers with a window. Without it, a window that is switched on applies
    from layer `max_window_layers` on.
    """
    config = _DEFAULT | config
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list):
        raise ValueError(f"config field layer_types={kinds!r}: must be a list")
    for kind in kinds:
        refuse({"layer_types": kind}, "layer_types", (FULL, SLIDING))
    refuse(config, "use_sliding_window", (False, True) if rule == "switched" else (False,))
    off = rule == "never" or (rule == "switched" and not config.get("use_sliding_window"))
    if off or config.get("sliding_window") is None:
        if SLIDING in kinds:
            raise ValueError(f"config field layer_types has {SLIDING!r}: no sliding_window applies")
        return ()
    layers, window = whole_field(config, "num_hidden_layers"), whole_field(config, "sliding_window")
    if kinds and len(kinds) != layers:
        raise ValueError(
            f"config field layer_types has {len(kinds)} entries: must be num_hidden_layers={layers}"
        )
    if layers > _MOST_LAYERS:
        raise ValueError(
            f"config field num_hidden_layers={layers}: must be at most {_MOST_LAYERS} with a window"
        )
    first = whole_field(config, "max_window_layers", 0) if rule == "switched" and not kinds else 0
    kinds = kinds or [FULL if layer < first else SLIDING for layer in range(layers)]
    return tuple(window if kind == SLIDING else None for kind in kinds)


def refuse_gguf_window(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for a window below the context: no key names the layers that it is for."""
    window, longest = fields.get("attention.sliding_window") or 0, fields.get("context_length")
    if window and isinstance(longest, int) and window < longest:
        raise ValueError(
            f"config field attention.sliding_window={window} is not supported: must be absent or "
            f"at least context_length={longest}; the model's safetensors have it"
        )
