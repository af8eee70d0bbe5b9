"""Compiles programs, keeps them on disk, so that the next process starts fast, and counts them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import Any

import jax

from jsparse.folders import cache_folder

# What a GPU runs as a graph: XLA's default and, after it, loops and branches. Where a trip count or
# a condition is computed on the device, the host would otherwise wait for it in the middle of a
# program, and could dispatch nothing behind it. These options cannot add to a default, which is
# what XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE --xla_dump_to=… writes beside it.
COMPILER_OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    )
}
# programs that compile at a time
COMPILERS = 4

_traced = 0
_compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="jsparse-compile")
_tracing = Lock()


def program(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Compiles a function as jax.jit does, so that a GPU runs it without the host.

    Used as a decorator, with jax.jit's options. Another program cannot call it, but what it was
    made of: `inlined(it)`.
    """
    if function is None:
        return partial(program, **options)
    return jax.jit(function, compiler_options=COMPILER_OPTIONS, **options)


def inlined(made: Any) -> Callable[..., Any]:
    """Returns the function that `program` has compiled, for use in another program."""
    return made.__wrapped__


def compile_ahead(jitted: Any, *args: Any, **kwargs: Any) -> Future[Callable[..., Any]]:
    """Begins to compile a `program` for these arguments, or shapes, and returns at once.

    The program itself is compiled for them then, too: called with such, it does not compile again.
    Several compile side by side, but one is traced at a time, in the order in which they were asked
    for: that is Python, of which threads do not make more.
    """

    def work() -> Callable[..., Any]:
        with _tracing:
            lowered = jitted.lower(*args, **kwargs)
        return lowered.compile()

    return _compilers.submit(work)


def note_trace() -> None:
    """Counts a program; to be called in its body, which runs when it is traced and never else."""
    global _traced
    _traced += 1


def traces() -> int:
    """Returns how many programs have called `note_trace` so far, each time they were traced."""
    return _traced


def keep_compilations() -> None:
    """Turns jax's persistent compilation cache on, unless the user has set it up already.

    The cache lies in `cache_folder`, under jax.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
