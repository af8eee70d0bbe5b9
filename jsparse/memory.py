"""Measures free memory; this module imports nothing else of jsparse."""

import jax
import psutil


def available_bytes() -> int:
    """Returns the bytes free on the default device, or in the host's memory on a CPU."""
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return psutil.virtual_memory().available


def size(nbytes: float) -> str:
    """Formats a number of bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} TiB"
