"""StreamingLLM attends to the first few tokens and the newest ones, and drops the middle.

Paper: "Efficient Streaming Language Models with Attention Sinks" (Xiao et al.), arXiv:2309.17453.

Where we differ: keys keep the rotary positions of the text (the paper renumbers them inside the
window), and the middle stays in the cache, unread.
"""

from jsparse.builder import builder
from jsparse.cache import StepView
from jsparse.hooks import State
from jsparse.hyper_parameters import whole_number
from jsparse.policy import Policy
from jsparse.selection import MAX_BITS_PAGE, window


@builder
def streaming(sink: int = 4, recent: int = 512) -> Policy:
    """Attends to exactly the first `sink` and the last `recent` tokens.

    They are listed as pages with bits, or as tokens if pages are too long for bits.
    """
    whole_number("sink", sink, 0)
    whole_number("recent", recent, 1)

    def select(state: State, layer: int, q, view: StepView):
        kv = view.layers[layer]
        chosen = window(
            kv.lengths,
            sink=sink,
            recent=recent,
            num_pages=kv.num_pages,
            page_size=kv.page_size,
            granularity="page" if kv.page_size <= MAX_BITS_PAGE else "token",
        )
        return chosen, None, state

    return Policy(select, reads=0, shares="pages")
