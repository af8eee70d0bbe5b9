"""Chooses how many page groups an engine's rows share."""

import sys

import jax

from jsparse.engine.options import EngineOptions
from jsparse.engine.row_memory import DeviceRows
from jsparse.machine import memory
from jsparse.runtime import host_store

# the default share of the free host memory for K and V
DEFAULT_HOST_SHARE = 0.8


def group_bytes(rows: DeviceRows) -> tuple[float, float]:
    """Returns the device bytes of a pool per page group, and those that do not depend on its size.

    A page group has one page for every layer and head, and the policy's state of these pages.
    """
    few, more = 64, 128
    each = (rows.device_bytes(more) - rows.device_bytes(few)) / (more - few)
    return each, rows.device_bytes(few) - few * each


def pool_groups(
    rows: DeviceRows, options: EngineOptions, *, prompts: int = 1, chunk: int = 0
) -> int:
    """Returns the number of page groups of a pool, including a scratch group.

    Without `kv_cache_tokens`, the pool takes all memory that is allowed. It has no more groups than
    all rows can use if other programs need the rest of the memory (on a CPU, or in host memory), or
    if finished prompts cannot be kept for other requests.

    Args:
        rows: the memory of rows, with the policy, whose state takes memory per page and per row.
        options: the tokens that the pool must hold, if given, and the share of the device's memory
            that may be in use.
        prompts: the number of prompts in a prefill program.
        chunk: the tokens of all their chunks.

    Raises:
        ValueError: memory does not suffice.
    """
    policy, spec, on_host = rows.policy, rows.decoding, rows.host_group_bytes
    utilization = options.gpu_memory_utilization
    each, fixed_bytes = group_bytes(rows)
    fixed_bytes += rows.bytes_outside_pool(prompts, chunk)
    free = memory.available_bytes(utilization, spec.ranks) - fixed_bytes
    maximum = int(free // each) if each else sys.maxsize
    maximum = max(0, maximum) if free >= 0 else 0
    host_bytes = host_store.available_host_bytes() if on_host else 0
    if options.kv_cache_tokens is None:
        if on_host:
            maximum = min(maximum, int(DEFAULT_HOST_SHARE * host_bytes) // on_host)
        keeps_prompts = _on_gpu() and policy.shares is not None and not on_host
        # shared pages count once
        all_rows = spec.batch * spec.num_pages + rows.prefill_pages
        wanted = maximum if keeps_prompts else min(maximum, all_rows + 1)
    else:
        wanted = -(-options.kv_cache_tokens // spec.page_size) + 1
    tokens = (max(wanted, 2) - 1) * spec.page_size
    if max(wanted, 2) * on_host > host_bytes:
        raise ValueError(
            f"K and V of {tokens} tokens take {memory.size(max(wanted, 2) * on_host)} of host "
            f"memory: must fit in the {memory.size(host_bytes)} that are free"
            + (f" and {host_store.LIMIT_VARIABLE} allows" if _on_gpu() else "")
        )
    if wanted > maximum or wanted < 2:
        where = f" in host memory, tails of {spec.batch} rows" if on_host else ""
        raise ValueError(
            f"K and V of {tokens} tokens{where} and the state of {policy} take "
            f"{memory.size(fixed_bytes + max(wanted, 2) * each)}: must fit in the "
            f"{memory.size(max(0, free + fixed_bytes))} that gpu_memory_utilization={utilization} "
            "leaves besides the model"
        )
    return wanted


def _on_gpu() -> bool:
    return jax.default_backend() == "gpu"
