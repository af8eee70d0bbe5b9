"""Chooses the backend of an op.

A named backend runs or raises. None runs the first listed backend that supports this call, and logs
its name.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import jax

from jsparse.machine.extras import install

logger = logging.getLogger("jsparse.kernels")


@dataclass(frozen=True)
class Backend:
    """One way to run an op.

    Attributes:
        name: "mosaic", "triton", "reference", "separate" (ops run one after the other), or "parts"
            (XLA multiplies part by part).
        load: imports and returns the kernel, so that a machine imports only packages that it has.
        refusal: returns why this backend cannot run the op's arguments here, or None.
    """

    name: str
    load: Callable[[], Callable[..., Any]]
    refusal: Callable[..., str | None] = lambda *_, **__: None


def run(
    op: str, implementation: str | None, backends: Sequence[Backend], *args: Any, **kwargs: Any
) -> Any:
    """Runs the op on the named backend, or on the first that supports these arguments here.

    Raises:
        ValueError: the op has no backend `implementation`, or it cannot run these arguments here.
    """
    names = [backend.name for backend in backends]
    if implementation is not None and implementation not in names:
        raise ValueError(f"implementation={implementation!r}: {op} has {names}")
    for backend in backends:
        if implementation not in (None, backend.name):
            continue
        reason = backend.refusal(*args, **kwargs)
        if reason is None:
            ran = {"op": op, "backend": backend.name}
            logger.debug("%(op)s: %(backend)s", ran, extra=ran)
            return backend.load()(*args, **kwargs)
        if implementation is not None:
            raise ValueError(f"implementation={implementation!r}: {op} on this backend {reason}")
        logger.debug("%s: not %s, which %s", op, backend.name, reason)
    raise ValueError(f"implementation={implementation!r}: none of {names} can run {op} here")


MAX_HEADS = 2**16 - 1  # programs along the second axis of a CUDA grid
MAX_WIDTH = 256  # channels of a row that one program can hold


@cache
def compute_capability() -> tuple[int, int] | None:
    """Returns (major, minor) of the default device, or None if it is not an NVIDIA GPU."""
    device = jax.local_devices()[0]
    if device.platform != "gpu" or not hasattr(device, "compute_capability"):
        return None
    major, minor = str(device.compute_capability).split(".")
    return int(major), int(minor)


def no_mosaic() -> str | None:
    """Returns why our Mosaic GPU kernels cannot run here, or None."""
    here = compute_capability()
    if here is None:
        return "needs an NVIDIA GPU"
    if here[0] != 9:  # only Hopper has wgmma
        return f"needs compute capability 9, Hopper's: this GPU has {here[0]}.{here[1]}"
    return None


def no_triton() -> str | None:
    """Returns why jax-triton kernels cannot run here, or None."""
    here = compute_capability()
    if here is None:
        return "needs an NVIDIA GPU"
    if here[0] < 8:
        return f"needs compute capability 8 or more: this GPU has {here[0]}.{here[1]}"
    missing = [name for name in ("triton", "jax_triton") if find_spec(name) is None]
    return (
        f"needs the package {missing[0].replace('_', '-')}: {install('cuda13')}"
        if missing
        else None
    )


def wide_rows(width: int) -> str | None:
    """Returns why rows are too wide for one program to hold, or None."""
    return (
        f"takes a head dimension of at most {MAX_WIDTH}, not {width}" if width > MAX_WIDTH else None
    )


def many_heads(heads: int) -> str | None:
    """Returns why a grid with an axis over all rows' heads is too large, or None."""
    return (
        f"takes at most {MAX_HEADS} heads of all rows, not {heads}" if heads > MAX_HEADS else None
    )
