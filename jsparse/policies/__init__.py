"""Registers the methods: each has one entry in REGISTRY, and POLICIES maps its name to its builder.

The tables of README.md, docs/policies.md and docs/api.md and the names in jsparse/__init__.pyi are
written from these entries by .ci/policy_tables.py.
"""

from jsparse.builder import dense
from jsparse.policies.ada_kv import ada_kv
from jsparse.policies.all_pages import all_pages
from jsparse.policies.arkvale import arkvale
from jsparse.policies.auto import auto
from jsparse.policies.cluster_kv import cluster_kv
from jsparse.policies.combinators import dense_layers, keep, retrieval_heads
from jsparse.policies.double_sparsity import double_sparsity
from jsparse.policies.duo_attention import duo_attention
from jsparse.policies.expressions import POLICIES
from jsparse.policies.h2o import h2o
from jsparse.policies.hard_kv import hard_kv
from jsparse.policies.lfps import lfps
from jsparse.policies.lychee_cluster import lychee_cluster
from jsparse.policies.lychee_decode import lychee_decode
from jsparse.policies.method import Method
from jsparse.policies.offloaded import offloaded
from jsparse.policies.oracle import oracle_top_k, oracle_top_p
from jsparse.policies.quest import quest
from jsparse.policies.quest_chunks import quest_chunks
from jsparse.policies.r_kv import r_kv
from jsparse.policies.raas import raas
from jsparse.policies.snapkv import snapkv
from jsparse.policies.streaming import streaming
from jsparse.policies.tidal import tidal
from jsparse.policies.twilight import twilight
from jsparse.policies.verified import verified

REGISTRY: tuple[Method, ...] = (
    Method(
        dense,
        attends="everything",
        when=(
            "as the baseline, and for short contexts: below about 37,000 tokens per batch on an "
            "H100, or 59,000 on an H200, it is faster than Twilight"
        ),
    ),
    Method(
        auto,
        attends="what was measured to be fastest on this device: everything, or Twilight's choice",
        gist=(
            "what `jsparse recommend` found for your model and device; before that, dense "
            "attention unless we measured something faster on your GPU at your batch size"
        ),
        when="to begin with; it stays close to dense",
    ),
    Method(
        streaming,
        attends="the first and the newest tokens",
        paper="StreamingLLM",
        calls="streaming(sink, recent)",
        when=(
            "when only the recent text matters; nothing is scored, but no needle outside the "
            "window is found"
        ),
    ),
    Method(
        quest,
        attends=(
            "the pages whose least and greatest keys allow the greatest logits; these bounds are "
            "kept in K's type or in 8 bits"
        ),
        paper="Quest",
        calls="quest(budget), quest_chunks(budget)",
        gist="the pages, or chunks of the text, whose key bounds allow the greatest logits",
        when=(
            'with nothing to train or calibrate; give it a large budget. `slack=1, group="max"` is '
            "its paper's ranking"
        ),
    ),
    Method(
        quest_chunks,
        attends="the newest tokens, and the chunks of text whose keys allow the greatest logits",
        paper="Quest over chunks, LycheeCluster section 3.1",
    ),
    Method(
        double_sparsity,
        attends="the tokens or pages that rank best by a few heavy channels of K, kept in 4 bits",
        paper="Double Sparsity",
        calls="double_sparsity(budget)",
        gist="the tokens or pages that rank best by a few heavy channels of K",
        when=(
            "when a small budget must still find what matters; slower per step than `quest`, "
            "better once calibrated"
        ),
    ),
    Method(
        tidal,
        attends=(
            "in all later layers, the tokens that two layers weigh most, the same for all heads or "
            "each head's own"
        ),
        paper="TidalDecode",
        calls="tidal(budget)",
        gist="the tokens that two layers weigh most, in all later layers",
        when="to choose tokens only twice per step; set its two layers for your model",
    ),
    Method(
        lychee_decode,
        attends=(
            "everything in retrieval heads; in the others, what the retrieval head of the same "
            "index picked a few layers up"
        ),
        paper="LycheeDecode",
        calls="lychee_decode(gates, value)",
        gist="everything in a few retrieval heads, whose picks the other heads share",
        when="for long contexts, once your model's gates are trained",
    ),
    Method(
        duo_attention,
        attends="everything in retrieval heads; the first and the newest tokens in the others",
        paper="DuoAttention",
        calls="duo_attention(gates)",
        gist="everything in retrieval heads, a window in the others",
        when=(
            "with the same gates, for sparse heads that pick and share nothing; these forget the "
            "middle"
        ),
    ),
    Method(
        lfps,
        attends=(
            "the share `budget` of the tokens, at the positions and distances that earlier steps "
            "attended to"
        ),
        paper="LFPS",
        calls="lfps(budget)",
        gist="the tokens and the distances that earlier steps attended to",
        when=(
            "where a step must not read K to choose, such as with K and V in slow memory; it "
            "cannot find what was never attended to, for instance what a later question asks "
            "about"
        ),
    ),
    Method(
        lychee_cluster,
        attends=(
            "sinks, the newest tokens, and chunks of the text in the clusters whose centroids "
            "point where the query does"
        ),
        paper="LycheeCluster",
        calls="lychee_cluster(budget), cluster_kv(budget), arkvale(budget)",
        gist=(
            "chunks that follow the text, or single tokens, by centroids of their keys; pages, by "
            "cuboids around them"
        ),
        when=(
            "in large batches of long contexts; single tokens may be missed, least by "
            "`cluster_kv`, which ranks more and is slower "
            "([figures](docs/results/lychee_cluster.md))"
        ),
    ),
    Method(
        cluster_kv,
        attends="the same for single tokens, clustered by their keys",
        paper="ClusterKV",
    ),
    Method(
        arkvale,
        attends="the pages whose cuboids around their keys allow the greatest logits",
        paper="ArkVale, NeurIPS 2024",
    ),
    Method(
        all_pages,
        attends="every page, as a list, for `twilight(all_pages())` to prune",
    ),
    Method(
        hard_kv,
        attends=(
            "all that is left: each head keeps what it needs and one slot that stands for what it "
            "dropped"
        ),
        paper="HARD-KV",
        kind="evicts",
        calls="hard_kv(budget, cap)",
        gist=(
            "only what survives eviction: it drops tokens as it decodes, by head, and keeps one "
            "slot that stands for them"
        ),
        when=(
            "for long answers and large batches, where memory is short; its defaults lose "
            "passkeys ([eviction.md](docs/results/eviction.md)), and a later question cannot find "
            "what was dropped"
        ),
    ),
    Method(
        snapkv,
        attends="what the prompt's last queries attended to most, and all new tokens",
        paper="SnapKV",
        kind="evicts",
        calls="snapkv(budget), ada_kv(budget), h2o(budget), r_kv(budget), raas(budget)",
        gist=(
            "also only what survives eviction: `snapkv` and `ada_kv` keep what the prompt's last "
            "queries attended to most, `h2o` what was used most, `r_kv` what is important or "
            "rare, `raas` what was used last"
        ),
        when=(
            "`ada_kv` or `snapkv` for one question at the end of a long prompt, but they miss "
            "needles in real text; the others to compare with `hard_kv` in long answers"
        ),
    ),
    Method(
        ada_kv,
        attends=(
            "the same, with a layer's heads competing for its slots, all but the part `floor`, of "
            "which they get equal shares"
        ),
        paper="Ada-KV",
        kind="evicts",
    ),
    Method(
        h2o,
        attends=(
            "the newest tokens, and those attended to most by the prompt's last `window` queries "
            "and in all decode steps"
        ),
        paper="H2O",
        kind="evicts",
    ),
    Method(
        r_kv,
        attends="the newest tokens, and of the others the important and the rare",
        paper="R-KV",
        kind="evicts",
    ),
    Method(
        raas,
        attends="the prompt, and the `budget` new tokens that were used last",
        paper="RaaS",
        kind="evicts",
    ),
    Method(
        oracle_top_k,
        attends=(
            "the tokens or pages of largest exact attention weight; it reads all keys to find them"
        ),
        calls="oracle_top_k(budget), oracle_top_p(p)",
        gist="the tokens of largest exact weight",
        when="as a yardstick for quality, never for speed: they read all keys",
    ),
    Method(
        oracle_top_p,
        attends="the fewest tokens or pages whose exact weights sum to p; it reads all keys too",
    ),
    Method(
        twilight,
        attends=(
            "the fewest of what another policy selects whose weights, estimated from a 4-bit copy "
            "of K, sum to p"
        ),
        paper="Twilight",
        calls="twilight(base, p)",
        gist="the smallest part of the selection of `base` with a share p of the attention mass",
        when=(
            "around a generous base (`all_pages()` when quality comes first), so that each head "
            "and step takes what it needs; pays in large batches"
        ),
    ),
    Method(
        verified,
        attends=(
            "the newest pages, and those that dense attention weighed most when it last checked "
            "what was drafted"
        ),
        calls="verified(budget)",
        gist="the newest pages, and those that dense attention weighed most at its last check",
        when=(
            "as the draft policy for `exact=True`; not on its own: it cannot find tokens that it "
            "has stopped reading"
        ),
    ),
    Method(
        keep,
        attends="what another policy selects, and always the first and the newest tokens",
        kind="wraps",
        calls="keep(policy, sink, recent), dense_layers(policy, n), retrieval_heads(policy, gates)",
        gist=(
            "what `policy` selects, and always the first and newest tokens, or everything in the "
            "first n layers, or in retrieval heads"
        ),
        when="around selectors that may miss these, such as `quest` and `twilight`",
    ),
    Method(
        dense_layers,
        attends="what another policy selects, but everything in the first n layers",
        kind="wraps",
    ),
    Method(
        retrieval_heads,
        attends="what another policy selects, but everything in the heads that `gates` names",
        kind="wraps",
    ),
    Method(
        offloaded,
        attends="what another policy selects, with K and V in host memory",
        paper="the setting of LFPS",
        kind="wraps",
        calls="offloaded(policy)",
        gist="what `policy` selects, with K and V in host memory",
        when=(
            "for contexts past the device's memory, around `lfps`, `quest` and others with a "
            "small index; it is slower than dense wherever K and V fit on the device"
        ),
    ),
)
POLICIES.update((method.build.__name__, method.build) for method in REGISTRY)
