"""Finds pages and makes bounds, for tests of page_bounds and bounds_append."""

from functools import partial

import jax


def physical(layer, b, n, page):
    """Returns where a logical page lies."""
    if layer.block_table is not None:
        return int(layer.block_table[b, n, page])
    return (b * layer.lengths.shape[1] + n) * layer.num_pages + page


@partial(jax.jit, static_argnums=0)
def of(form, low, high):
    """Makes bounds of a form."""
    return form.of(low, high)
