"""Formats the table of `jsparse info`."""

from typing import Any

from jsparse.machine import memory
from jsparse.text.short_names import short_name


def rows(info: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the rows of a table that shows the result of jsparse.evaluation.info.describe."""
    c, per_token = info["config"], memory.size(info["cache_bytes_per_token"])
    extras = [
        name for name, on in (("q, k, v biases", c["qkv_bias"]), ("q, k norms", c["qk_norm"])) if on
    ]
    short, in_blocks = info["weight_bytes"]["bfloat16"], info["weight_bytes"].get("q8_0")
    return [
        ("family", c["family"] + "".join(f", {extra}" for extra in extras)),
        ("layers", str(c["num_layers"])),
        ("heads", f"{c['num_heads']} query, {c['num_kv_heads']} KV, of {c['head_dim']} dimensions"),
        *_ffn(c),
        (
            "vocabulary",
            f"{c['vocab_size']}, "
            + ("tied" if c["tie_word_embeddings"] else "untied")
            + " embeddings",
        ),
        ("RoPE", _rope(c)),
        *_windows(c),
        ("maximum context", f"{c['max_position_embeddings']} tokens"),
        ("parameters", _parameters(info)),
        (
            "weights",
            f"{memory.size(info['weight_bytes']['float32'])} in float32, {memory.size(short)} in "
            "bfloat16 and float16"
            + (f", {memory.size(in_blocks)} in q8_0" if in_blocks is not None else ""),
        ),
        *_formats(info),
        ("KV cache per token", f"{per_token} in {_of_cache(info)}"),
        *_of_each_device(info),
        *(
            [
                (
                    "of it on the device",
                    f"{memory.size(info['device_cache_bytes_per_token'])}, plus "
                    f"{memory.size(info['device_cache_bytes_per_prompt'])} per prompt",
                ),
                ("host memory free now", memory.size(info["free_host_bytes"])),
            ]
            if info["offloaded"]
            else []
        ),
        ("policy", _chosen(info)),
        ("policy keeps", _kept(info)),
        *_cache_of_a_prompt(info),
        ("memory free now", memory.size(info["free_bytes"])),
        (
            "fits beside weights",
            f"one prompt of up to {info['longest_context']} tokens, in {info['types']}",
        ),
        (
            "",
            f"or {info['largest_batch']} {'prompt' if info['largest_batch'] == 1 else 'prompts'} "
            f"of {info['context']} tokens, without outputs",
        ),
    ]


def _formats(info: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns a row per kind of matrix, with the format in which it is loaded."""
    if not info["weight_formats"] and info["weights"] != "q8_0":
        return [("loads", f"files are not here: counted in {info['dtype']}, quantized or not")]
    rows = []
    for kind in info["weight_formats"]:
        count, stored = kind["matrices"], kind["stored"]
        text = f"{count} {'matrix' if count == 1 else 'matrices'} in {kind['format']}, "
        text += memory.size(kind["bytes"])
        text += "" if stored == kind["format"] else f", from {stored}"
        text += f" ({kind['reason']})" if kind["reason"] else ""
        rows.append(("" if rows else "loads", text))
    return rows


def _ffn(c: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the rows on the MLP's or the experts' sizes."""
    if (e := c["experts"]) is None:
        return [("hidden, ffn", f"{c['hidden_size']}, {c['intermediate_size']}")]
    shared = f", and a shared one of {e['shared_size']}" if e["shared_size"] else ""
    of_each = f"{e['number']} of ffn {e['intermediate_size']}, {e['chosen']} per token{shared}"
    return [("hidden", str(c["hidden_size"])), ("experts", of_each)]


def _windows(c: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the row on sliding windows, if there are any."""
    windows = [window for window in c["windows"] if window is not None]
    if not windows:
        return []
    sizes = ", ".join(str(size) for size in sorted(set(windows)))
    return [("sliding windows", f"{sizes} tokens, in {len(windows)} of {c['num_layers']} layers")]


def _parameters(info: dict[str, Any]) -> str:
    """Returns the number of parameters, and of those that a token uses."""
    whole, active = info["parameters"], info["active_parameters"]
    return f"{whole:,}" + (f", {active:,} of them active per token" if active < whole else "")


def _of_cache(info: dict[str, Any]) -> str:
    return info["dtype"] if info["kv_cache_dtype"] == "auto" else info["kv_cache_dtype"]


def _of_each_device(info: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the row on one device's part, if there are several devices."""
    if info["devices"] == 1:
        return []
    weights, cache = info["device_weight_bytes"], info["device_cache_bytes_per_token"]
    sizes = f"{memory.size(weights)} of weights, {memory.size(cache)} of KV cache per token"
    return [(f"each of {info['devices']} devices", f"{sizes}, in {info['types']}")]


def _kept(info: dict[str, Any]) -> str:
    """Describes a policy's memory besides K and V."""
    parts = []
    if info["policy_bytes_per_token"]:
        size = memory.size(info["policy_bytes_per_token"])
        parts.append(f"{size} per token, {100 * info['policy_fraction']:.1f} % of the KV cache")
    if info["policy_bytes_per_prompt"]:
        parts.append(f"{memory.size(info['policy_bytes_per_prompt'])} per prompt")
    return " and ".join(parts) or "nothing beside the KV cache"


def _cache_of_a_prompt(info: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the rows on K and V of one prompt, and of the tokens that may follow it."""
    context, per_token = info["context"], info["cache_bytes_per_token"]
    limit = info["config"]["max_position_embeddings"]
    prompt, max_length = context * per_token, info["max_cache_bytes"]
    lines = [("KV cache of a prompt", f"{memory.size(prompt)} for {context} tokens")]
    if max_length < limit * per_token:
        lines.append(
            ("", f"at most {memory.size(max_length)} after it, since the policy drops tokens")
        )
    elif max_length > prompt:
        lines.append(
            ("", f"{memory.size(max_length)} once its output reaches the model's {limit} tokens")
        )
    return lines


def _chosen(info: dict[str, Any]) -> str:
    original, runs = (short_name(info[name]) for name in ("policy", "policy_that_runs"))
    if original == runs:
        return original
    reason = info["policy_reason"]
    return f"{original} is {runs} here" + (f": {reason}" if reason else "")


def _rope(config: dict[str, Any]) -> str:
    theta = f"theta {config['rope_theta']:g}"
    scaling = config["rope_scaling"]
    if scaling is not None:
        return f"{theta}, {scaling['rope_type']} scaling by {scaling['factor']:g}"
    return (
        theta
        if config["rope_factors"] is None
        else f"{theta}, llama3 scaling by the file's factors"
    )
