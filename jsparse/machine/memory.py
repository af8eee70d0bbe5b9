"""Measures free memory."""

import jax
import psutil

from jsparse.machine import processes


def available_bytes(utilization: float = 1.0, devices: int = 1) -> int:
    """Returns the bytes free on the default device, or in the host's memory on a CPU.

    For several devices, and for several processes that run one model, it is the minimum. A
    `utilization` below 1 leaves the rest of the device's memory, or of a host's free memory.
    """
    free = int(utilization * psutil.virtual_memory().available)
    if jax.default_backend() != "cpu":
        found = [device.memory_stats() or {} for device in jax.local_devices()[:devices]]
        if all("bytes_limit" in stats for stats in found):
            free = min(int(utilization * s["bytes_limit"]) - s["bytes_in_use"] for s in found)
    link = processes.link() if devices > 1 else None
    return free if link is None else min(link.all_gather("free memory", free))


def size(nbytes: float) -> str:
    """Formats a number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
