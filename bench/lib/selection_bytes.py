"""Counts the bytes that a step reads to select, besides weights and the attended K and V.

They are a part of the policy's state, by the form of its arrays, for the heads that do not always
attend to everything:

    PageBounds, PageBounds8   both bounds of every page (Quest); in 8 bits, scale and zero also
    Labels                    codes, scale and zero of every token (Double Sparsity)
    Int4Keys                  codes, scale and zero of the tokens that the base lists (Twilight)
    Tables                    both numbers of every token (LFPS)
    Clusters                  every cluster's centroid and radius; with units, those of the units
                              and of the clusters in the chosen ones (LycheeCluster, ClusterKV)

Not counted are the members of clusters, and keys that a policy reads to select (the oracles, LFPS
with exact=True).
"""

from typing import Any

import jax
import jax.numpy as jnp

from bench.lib.llama_8b import key_constants
from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, ReadOnly, step_view
from jsparse.pallas_kernels.int4_keys import Int4Keys
from jsparse.pallas_kernels.key_bounds import PageBounds, PageBounds8
from jsparse.policies.clusters.engine import WIDER, Index
from jsparse.policies.clusters.index import Clusters
from jsparse.policies.clusters.search import MIN_UNITS
from jsparse.policies.double_sparsity import Labels
from jsparse.policies.lfps import Tables
from jsparse.policy import Policy

FORMS = PageBounds, PageBounds8, Labels, Int4Keys, Tables, Clusters
# An index has room for one chunk per 10 tokens if chunks have 8 to 16; those of random tokens have
# 13.6 on average (bench.lib.llama_8b.boundary_constants).
ROOM_PER_CHUNK, TOKENS_PER_CHUNK = 10, 13.6
SMALL = 0.01  # of the bytes of K and V: other arrays that are smaller count as nothing


def selection_bytes(policy: Policy, spec: CacheSpec) -> int | None:
    """Returns the bytes of its state that a step must read to select, with a full cache.

    A policy that drops tokens reads nothing: it attends to all that are left. Nor does one that
    only has lists of earlier picks, such as LycheeDecode. None: the state has other large arrays.
    """
    if policy.evicts:
        return 0
    state = jax.eval_shape(lambda: policy.init(spec))
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, FORMS))
    known = [x for x in leaves if isinstance(x, FORMS)]
    if nbytes(state) - nbytes(known) > SMALL * spec.nbytes:
        return None
    listed = listed_share(policy, spec) if known else 0.0
    used = 1.0
    if isinstance(state, Index) and state.marks is not None:
        used = ROOM_PER_CHUNK / TOKENS_PER_CHUNK
    layers, heads = range(spec.num_layers), spec.model_kv_heads
    always_dense = sum(len(policy.dense_heads(layer, heads)) for layer in layers)
    selecting = 1 - always_dense / (spec.num_layers * heads)
    return round(selecting * sum(read_bytes(x, listed, used) for x in known))


def read_bytes(arrays: Any, listed: float, used: float) -> float:
    """Returns the bytes of one layer's arrays that a step reads if all heads select.

    Args:
        arrays: the arrays, in one of FORMS.
        listed: the share of the tokens that the selection has room for.
        used: the share of an index's clusters that have chunks.
    """
    match arrays:
        case Labels():
            return nbytes(arrays.keys)
        case Int4Keys():
            return listed * nbytes(arrays)
        case Clusters(fine, coarse, tokens):
            of_clusters = used * nbytes((fine.centroid, fine.radius))
            if coarse is None:
                return of_clusters
            chosen = max(WIDER * listed, MIN_UNITS / coarse.size.shape[-1])
            return nbytes((coarse.centroid, coarse.radius, tokens)) + min(chosen, 1) * of_clusters
    return nbytes(arrays)


def listed_share(policy: Policy, spec: CacheSpec) -> float:
    """Returns the share of a head's tokens that the last layer's selection has room for."""
    spec = spec._replace(kv_cache_dtype="auto", ranks=1)

    def select() -> Any:
        cache = kv_cache.init(spec, fields=policy.fields)
        view = step_view(cache, ReadOnly(key_constants(spec)))
        q = jnp.zeros((spec.batch, spec.num_heads, spec.head_dim), spec.dtype)
        return policy.select(policy.init(spec), spec.num_layers - 1, q, view)[0]

    chosen = jax.eval_shape(select)
    units = spec.num_pages if chosen.granularity == "page" else spec.capacity
    return chosen.ids.shape[-1] / units


def nbytes(tree: Any) -> int:
    """Returns the total bytes of arrays, or of their shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
