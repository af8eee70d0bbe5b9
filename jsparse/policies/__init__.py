"""Registers the methods: POLICIES maps the name of each to its builder."""

from collections.abc import Callable

from jsparse.builder import dense
from jsparse.policies.ada_kv import ada_kv
from jsparse.policies.all_pages import all_pages
from jsparse.policies.arkvale import arkvale
from jsparse.policies.auto import auto
from jsparse.policies.cluster_kv import cluster_kv
from jsparse.policies.combinators import dense_layers, keep, retrieval_heads
from jsparse.policies.double_sparsity import double_sparsity
from jsparse.policies.duo_attention import duo_attention
from jsparse.policies.h2o import h2o
from jsparse.policies.hard_kv import hard_kv
from jsparse.policies.lfps import lfps
from jsparse.policies.lychee_cluster import lychee_cluster
from jsparse.policies.lychee_decode import lychee_decode
from jsparse.policies.offloaded import offloaded
from jsparse.policies.oracle import oracle_top_k, oracle_top_p
from jsparse.policies.quest import quest
from jsparse.policies.r_kv import r_kv
from jsparse.policies.raas import raas
from jsparse.policies.snapkv import snapkv
from jsparse.policies.streaming import streaming
from jsparse.policies.tidal import tidal
from jsparse.policies.twilight import twilight
from jsparse.policy import AnyPolicy

POLICIES: dict[str, Callable[..., AnyPolicy]] = {
    build.__name__: build
    for build in (
        dense,
        auto,
        streaming,
        quest,
        double_sparsity,
        tidal,
        lychee_decode,
        duo_attention,
        lfps,
        lychee_cluster,
        cluster_kv,
        arkvale,
        all_pages,
        hard_kv,
        snapkv,
        ada_kv,
        h2o,
        r_kv,
        raas,
        oracle_top_k,
        oracle_top_p,
        twilight,
        keep,
        dense_layers,
        retrieval_heads,
        offloaded,
    )
}
