"""Measures free memory; this module imports nothing else of jsparse."""

import jax
import psutil


def available_bytes(utilization: float = 1.0) -> int:
    """Returns the bytes free on the default device, or in the host's memory on a CPU.

    With less than full `utilization` the rest of the device's memory, or of what is free on a host,
    is left alone.
    """
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(utilization * stats["bytes_limit"]) - stats["bytes_in_use"]
    return int(utilization * psutil.virtual_memory().available)


def size(nbytes: float) -> str:
    """Formats a number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
