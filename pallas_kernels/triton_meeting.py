"""Lets programs of one launch wait for each other.

A GPU starts programs in the order of their ids, and each runs to its end. So programs whose ids are
adjacent may wait for each other, as long as even a small GPU holds MOST of them at once: none of
them waits for one that cannot start.
"""

import triton
import triton.language as tl

MOST = 32


@triton.jit
def meet(
    arrived_ptr,  # one int32, 0 before the first meeting, not read where PROGRAMS is 1
    meetings,
    PROGRAMS: tl.constexpr,
):
    """Wait for the other programs, see all that they stored, and count the meeting."""
    tl.debug_barrier()  # every thread has stored
    if PROGRAMS > 1:
        tl.atomic_add(arrived_ptr, 1, sem="release")
        while tl.atomic_add(arrived_ptr, 0, sem="acquire") < (meetings + 1) * PROGRAMS:
            pass
        tl.debug_barrier()
    return meetings + 1
