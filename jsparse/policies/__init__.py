"""Registers the methods: each has one entry in REGISTRY, and POLICIES maps its name to its builder.

.ci/policy_tables.py writes the tables of docs/policies.md and docs/api.md and the names in
jsparse/__init__.pyi from these entries.
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
            "as the baseline and for short contexts: below about 37,000 tokens per batch on an "
            "H100, or 59,000 on an H200, faster than Twilight"
        ),
    ),
    Method(
        auto,
        attends=(
            "everything, or the selection of the policy that was measured to be fastest on this "
            "device"
        ),
        gist=(
            "the selection of the policy that `jsparse recommend` found; without a measurement, "
            "Twilight's for large batches on an H100 or H200, else everything"
        ),
        when="to start with; it stays close to dense attention",
    ),
    Method(
        streaming,
        attends="the first and the newest tokens",
        paper="StreamingLLM",
        calls="streaming(sink, recent)",
        when=(
            "if only the recent text matters; it scores nothing, and finds nothing outside its "
            "window"
        ),
    ),
    Method(
        quest,
        attends=(
            "the pages that rank highest by the least and greatest keys of each channel; these "
            "bounds have K's type or 8 bits"
        ),
        paper="Quest",
        calls="quest(budget), quest_chunks(budget)",
        gist=(
            "the pages, or chunks of text, that rank highest by the least and greatest keys of "
            "each channel"
        ),
        when=(
            'with a large budget; needs no training or calibration. `slack=1, group="max"` is the '
            "ranking of [the paper](#quest)"
        ),
    ),
    Method(
        quest_chunks,
        attends=(
            "the newest tokens, and the chunks of text that rank highest by the least and greatest "
            "keys of each channel"
        ),
        paper="Quest over chunks, LycheeCluster section 3.1",
    ),
    Method(
        double_sparsity,
        attends=(
            "the tokens or pages that score highest on a few heavy channels of K, stored in 4 bits"
        ),
        paper="Double Sparsity",
        calls="double_sparsity(budget)",
        gist="the tokens or pages that score highest on a few heavy channels of K",
        when="with a small budget; slower per step than `quest`, but better once calibrated",
    ),
    Method(
        tidal,
        attends=(
            "in later layers, the tokens with the highest weights in two selection layers, shared "
            "by all heads or per head"
        ),
        paper="TidalDecode",
        calls="tidal(budget)",
        gist="the tokens with the highest weights in two selection layers, in all later layers",
        when="to select tokens only twice per step; set the two selection layers for your model",
    ),
    Method(
        lychee_decode,
        attends=(
            "everything in retrieval heads; in other heads, the picks that the retrieval head of "
            "the same index made in an earlier layer"
        ),
        paper="LycheeDecode",
        calls="lychee_decode(gates, value)",
        gist="everything in a few retrieval heads; the other heads reuse their picks",
        when="for long contexts, once you have trained gates for your model",
    ),
    Method(
        duo_attention,
        attends="everything in retrieval heads; the first and the newest tokens in the others",
        paper="DuoAttention",
        calls="duo_attention(gates)",
        when=(
            "with the same gates, if sparse heads should select and share nothing; these forget "
            "the middle of the text"
        ),
    ),
    Method(
        lfps,
        attends=(
            "a share `budget` of the tokens, at positions and distances that earlier steps "
            "attended to"
        ),
        paper="LFPS",
        calls="lfps(budget)",
        gist="the tokens at positions and distances that earlier steps attended to",
        when=(
            "with K and V in slow memory, as selecting reads no keys; misses tokens that no "
            "earlier step attended to, as for a later question"
        ),
    ),
    Method(
        lychee_cluster,
        attends=(
            "sinks, the newest tokens, and the chunks of text in the clusters whose centroids "
            "align best with the query"
        ),
        paper="LycheeCluster",
        calls="lychee_cluster(budget), cluster_kv(budget), arkvale(budget)",
        gist=(
            "chunks of text (`lychee_cluster`) or tokens (`cluster_kv`) ranked by centroids of "
            "their keys; pages ranked by cuboids around their keys (`arkvale`)"
        ),
        when=(
            "for large batches of long contexts; they may miss single tokens, `cluster_kv` the "
            "fewest, which ranks more and is slower ([figures](results/lychee_cluster.md))"
        ),
    ),
    Method(
        cluster_kv,
        attends=(
            "sinks, the newest tokens, and the tokens in the clusters whose centroids align best "
            "with the query"
        ),
        paper="ClusterKV",
    ),
    Method(
        arkvale,
        attends="the pages with the highest logits that a cuboid around their keys allows",
        paper="ArkVale, NeurIPS 2024",
    ),
    Method(
        all_pages,
        attends="every page, as a list, for `twilight(all_pages())` to prune",
    ),
    Method(
        hard_kv,
        attends=(
            "the tokens left after eviction by head, and one slot per head that merges the dropped "
            "tokens"
        ),
        paper="HARD-KV",
        kind="evicts",
        calls="hard_kv(budget, cap)",
        when=(
            "for long outputs and large batches, if memory is short; defaults lose passkeys "
            "([figures](results/eviction.md)), and later questions cannot find dropped tokens"
        ),
    ),
    Method(
        snapkv,
        attends="the tokens that the prompt's last queries attended to most, and all new tokens",
        paper="SnapKV",
        kind="evicts",
        calls="snapkv(budget), ada_kv(budget), h2o(budget), r_kv(budget), raas(budget)",
        gist=(
            "the tokens left after eviction: by the prompt's last queries (`snapkv`, `ada_kv`), "
            "most used (`h2o`), important or rare (`r_kv`), most recently used (`raas`)"
        ),
        when=(
            "`ada_kv`, `snapkv`: one question at the end of a long prompt; they miss needles in "
            "real text. Others: to compare with `hard_kv` in long outputs"
        ),
    ),
    Method(
        ada_kv,
        attends=(
            "the same as `snapkv`, but a layer's heads compete for its slots, of which a share "
            "`floor` is divided equally"
        ),
        paper="Ada-KV",
        kind="evicts",
    ),
    Method(
        h2o,
        attends=(
            "the newest tokens, and those that the prompt's last `window` queries and all decode "
            "steps attended to most"
        ),
        paper="H2O",
        kind="evicts",
    ),
    Method(
        r_kv,
        attends="the newest tokens, and the important and the rare ones of the others",
        paper="R-KV",
        kind="evicts",
    ),
    Method(
        raas,
        attends="the prompt, and the `budget` most recently used new tokens",
        paper="RaaS",
        kind="evicts",
    ),
    Method(
        oracle_top_k,
        attends=(
            "the tokens or pages with the highest exact attention weights; it reads all keys to "
            "find them"
        ),
        calls="oracle_top_k(budget), oracle_top_p(p)",
        gist="the tokens or pages with the highest exact attention weights",
        when="as a yardstick for quality, never for speed: they read all keys",
    ),
    Method(
        oracle_top_p,
        attends=(
            "the fewest tokens or pages with exact weights that sum to p; it reads all keys to "
            "find them"
        ),
    ),
    Method(
        twilight,
        attends=(
            "the smallest part of another policy's selection with weights that sum to p, estimated "
            "from a 4-bit copy of K"
        ),
        paper="Twilight",
        calls="twilight(base, p)",
        gist="the smallest part of the selection of `base` with a share p of the attention mass",
        when=(
            "around a generous base (`all_pages()` for the best quality), to fit the selection to "
            "each head and step; pays in large batches"
        ),
    ),
    Method(
        verified,
        attends=(
            "the newest pages, and those with the highest weights under dense attention in the "
            "last verification round"
        ),
        calls="verified(budget)",
        when=(
            "as the draft policy for `exact=True`; not alone, because it cannot find tokens that "
            "it has stopped reading"
        ),
    ),
    Method(
        keep,
        attends="another policy's selection, and always the first and the newest tokens",
        kind="wraps",
        calls="keep(policy, sink, recent), dense_layers(policy, n), retrieval_heads(policy, gates)",
        gist=(
            "the selection of `policy`, and always the first and newest tokens (`keep`) or "
            "everything in the first n layers or in retrieval heads"
        ),
        when="around policies that may miss these tokens, such as `quest` and `twilight`",
    ),
    Method(
        dense_layers,
        attends="another policy's selection, but everything in the first n layers",
        kind="wraps",
    ),
    Method(
        retrieval_heads,
        attends="another policy's selection, but everything in the heads that `gates` names",
        kind="wraps",
    ),
    Method(
        offloaded,
        attends="another policy's selection, with K and V in host memory",
        paper="the setting of LFPS",
        kind="wraps",
        calls="offloaded(policy)",
        gist="the selection of `policy`, with K and V in host memory",
        when=(
            "for contexts larger than device memory, around policies with a small index (`lfps`, "
            "`quest`); slower than dense if K and V fit the device"
        ),
    ),
)
POLICIES.update((method.build.__name__, method.build) for method in REGISTRY)
