"""Maps the entries of a head's tiles to pages and to their attended tokens."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jsparse.pallas_kernels.block_sparse_decode.heads import Head
from jsparse.pallas_kernels.block_sparse_decode.problem import WORD, Problem
from jsparse.pallas_kernels.block_sparse_decode.refs import GlobalRefs


class Entries(NamedTuple):
    """The pages of a head in the order of its tiles.

    They are the listed pages, or all pages of a dense head, then the newest if the list lacks it.
    """

    p: Problem
    g: GlobalRefs
    h: Any  # index of the head: row · K + KV head
    head: Head

    def fetch(self, entry):
        """Loads the logical and physical page of an entry, and its stored bits."""
        p, g = self.p, self.g
        h, page, bits = jnp.minimum(self.h, p.pairs - 1), entry, jnp.int32(-1)
        if p.capacity:
            at = jnp.minimum(entry, p.capacity - 1)  # entries past the count are zeros
            page = g.ids[h, at]
            bits = g.bits[h, at] if p.has_bits else bits
            page = jnp.where(self.head.dense != 0, entry, page) if p.has_dense else page
        page = jnp.minimum(page, p.num_pages - 1)
        return page, g.table[h, page] if p.has_table else h * p.num_pages + page, bits

    def resolve(self, entry, missing, page, physical, chosen):
        """Returns the physical page of an entry, and its attended tokens as words of bits."""
        p, head = self.p, self.head
        newest_page, newest = (
            lax.div(head.length - 1, p.page_size),
            lax.rem(head.length - 1, p.page_size),
        )
        last = missing & (entry == head.count)  # the entry after the list: the newest page
        listed = entry < head.count
        if p.has_dense:
            dense = head.dense != 0
            # the last tile may have more entries than the head has pages
            listed = jnp.where(dense, entry * p.page_size < head.length, listed)
            chosen = jnp.where(dense, -1, chosen)
        page = jnp.where(last, newest_page, page)
        moved = (
            self.g.table[self.h, newest_page] if p.has_table else self.h * p.num_pages + newest_page
        )
        held, words = head.length - page * p.page_size, []  # tokens from the page's first one on
        for w in range(0, p.page_size, WORD):
            word = jnp.where(listed, chosen & _lowest_bits(held - w, min(p.page_size, WORD)), 0)
            # the newest token is always attended, even if its bit is off
            at_newest = (
                (page == newest_page) & (lax.div(newest, WORD) == w // WORD) & (listed | last)
            )
            words.append(
                word | jnp.where(at_newest, lax.shift_left(jnp.int32(1), newest & (WORD - 1)), 0)
            )
        return jnp.where(last, moved, physical), words


def _lowest_bits(n, maximum: int):
    """Returns a word with its lowest min(n, maximum) bits set; n may be negative."""
    n = jnp.clip(n, 0, maximum)
    # a shift by 32 bits is undefined
    return jnp.where(n >= 32, -1, lax.shift_left(jnp.int32(1), n & 31) - 1)
