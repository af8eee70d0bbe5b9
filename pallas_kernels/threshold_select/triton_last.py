"""Ends the search of a budget by listing the few entries between two thresholds of a resident row.

Their indices stand in a list, ascending, so that entries of equal score are told apart too: what
all of them count in turn says which is the last that fits.
"""

import triton
import triton.language as tl

from jsparse.pallas_kernels.threshold_select.triton_bits import list_entries, pack, word_index
from jsparse.pallas_kernels.threshold_select.triton_tiles import NOTHING


@triton.jit
def last_that_fits(
    x,  # [T, R, 4]
    row,  # [plan.size]
    sizes,  # [plan.size]
    length,
    words,  # [2 · plan.words]: a bitmap, then the list
    lo,
    hi,
    at_hi,
    budget,
    highest,
    plan: tl.constexpr,
):
    """Find the last entry that fits, best first, among those from lo to below hi.

    Returns:
        Its score; the index behind it, where the ties end that are kept; whether both are known.
        They are not if there are more entries than slots, or none fits and none is above: `hi` is
        then still the `highest`. If none fits but some are above, these are what is kept.
    """
    ids = words + plan.words
    tl.store(words + word_index(plan), pack((x >= lo) & (x < hi), plan))
    tl.debug_barrier()
    number = list_entries(words, length, words, ids, plan.slots, -1, plan)
    tl.debug_barrier()
    slot = tl.arange(0, plan.slots)
    listed = slot < number
    entry = tl.load(ids + slot, mask=listed, other=0).to(tl.int32)
    score = tl.load(row + entry, mask=listed, other=NOTHING).to(tl.float32)
    size = tl.load(sizes + entry, mask=listed, other=0).to(tl.float32)
    # all pairs: what an entry and those that come before it count
    ahead = score[:, None] > score[None, :]
    ahead |= (score[:, None] == score[None, :]) & (slot[:, None] <= slot[None, :])
    taken = at_hi + tl.sum(tl.where(ahead, size[:, None], 0.0), 0)
    fits = listed & (taken <= budget)
    last = tl.min(tl.where(fits, score, hi), 0)
    end = tl.max(tl.where(fits & (score == last), entry + 1, 0), 0)
    known = (number <= plan.slots) & ((end > 0) | (hi < highest))
    tl.debug_barrier()
    return last, tl.where(end > 0, end, length), known
