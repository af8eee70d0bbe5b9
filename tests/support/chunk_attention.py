"""Attention of a prompt chunk's queries over chosen blocks of keys, in float64."""

from collections.abc import Sequence
from typing import Any

import numpy as np

BLOCK = 128


def attended(inputs: Any, row: int, head: int, tokens: Sequence[int]) -> np.ndarray:
    """Returns o, [tokens, H], of a head's queries at these tokens of the chunk, one by one.

    The inputs are those of `block_sparse_prefill`. The pages that a head holds are gathered once.
    """
    q, kv, valid, chosen = (np.asarray(x) if x is not inputs[1] else x for x in inputs)
    kv_heads, size = kv.lengths.shape[1], kv.page_size
    kv_head, length = head // (q.shape[2] // kv_heads), int(kv.lengths[row, 0])
    if kv.block_table is None:
        pages = (row * kv_heads + kv_head) * kv.num_pages + np.arange(kv.num_pages)
    else:
        pages = np.asarray(kv.block_table[row, kv_head])
    held = pages[: -(-length // size)]
    k, v = (np.asarray(x[held], np.float64).reshape(-1, q.shape[-1]) for x in (kv.k, kv.v))
    o = np.zeros((len(tokens), q.shape[-1]))
    for nth, token in enumerate(tokens):
        position = length - valid[row] + token
        keys = np.arange(position + 1)
        keys = keys[chosen[row, head, token // BLOCK, keys // BLOCK]]
        if keys.size:
            logits = k[keys] @ q[row, token, head].astype(np.float64) / np.sqrt(q.shape[-1])
            weights = np.exp(logits - logits.max())
            o[nth] = weights @ v[keys] / weights.sum()
    return o
