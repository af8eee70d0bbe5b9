"""Lets programs of one launch wait for each other.

Programs whose ids are adjacent may wait for each other as long as the GPU holds all of them at
once, one per multiprocessor at the least: since it starts programs in the order of their ids, none
then waits for one that cannot start. CUDA does not promise that order; GPUs keep it.
"""

import jax
import triton
import triton.language as tl

MAX_PROGRAMS = 32


def max_programs() -> int:
    """Returns the most programs that may meet on the default device, a power of two."""
    multiprocessors = jax.local_devices()[0].core_count
    return min(MAX_PROGRAMS, 1 << (multiprocessors.bit_length() - 1))


@triton.jit
def meet(
    arrived_ptr,  # one int32, 0 before the first meeting, not read where PROGRAMS is 1
    meetings,
    PROGRAMS: tl.constexpr,
):
    """Waits until all that other programs stored is visible; returns the number of meetings."""
    tl.debug_barrier()  # every thread has stored
    if PROGRAMS > 1:
        tl.atomic_add(arrived_ptr, 1, sem="release")
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") < (meetings + 1) * PROGRAMS:
            pass
        tl.debug_barrier()
    return meetings + 1
