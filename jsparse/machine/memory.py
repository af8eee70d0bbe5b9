"""Measures free memory."""

import jax
import psutil

from jsparse.machine import processes


def available_bytes(utilization: float = 1.0, devices: int = 1) -> int:
    """Returns the bytes free on the default device, or in the host's memory on a CPU.

    The least of several devices, and of several processes that run one model. Less than full
    `utilization` leaves the rest of the device's memory, or of what is free on a host.
    """
    free = int(utilization * psutil.virtual_memory().available)
    if jax.default_backend() != "cpu":
        found = [device.memory_stats() or {} for device in jax.local_devices()[:devices]]
        if all("bytes_limit" in stats for stats in found):
            free = min(int(utilization * s["bytes_limit"]) - s["bytes_in_use"] for s in found)
    together = processes.link() if devices > 1 else None
    return free if together is None else min(together.all_gather("free memory", free))


def size(nbytes: float) -> str:
    """Formats a number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
