"""Synchronises programs of one launch.

Programs with adjacent ids may wait for each other if the GPU can run all of them at once, with at
least one per SM. It starts programs in the order of their ids, so none waits for one that cannot
start. CUDA does not guarantee that order; GPUs keep it.
"""

import jax
import triton
import triton.language as tl

MAX_PROGRAMS = 32


def max_programs() -> int:
    """Returns the maximum number of programs that may meet on the default device, a power of 2."""
    multiprocessors = jax.local_devices()[0].core_count
    return min(MAX_PROGRAMS, 1 << (multiprocessors.bit_length() - 1))


@triton.jit
def meet(
    arrived_ptr,  # one int32, 0 before the first meeting, not read if PROGRAMS is 1
    meetings,
    PROGRAMS: tl.constexpr,
):
    """Waits until all stores of the other programs are visible; returns the number of meetings."""
    tl.debug_barrier()  # every thread has stored
    if PROGRAMS > 1:
        tl.atomic_add(arrived_ptr, 1, sem="release")
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") < (meetings + 1) * PROGRAMS:
            pass
        tl.debug_barrier()
    return meetings + 1
