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
from jsparse.policies.expected_attention import expected_attention
from jsparse.policies.expressions import POLICIES
from jsparse.policies.h2o import h2o
from jsparse.policies.hard_kv import hard_kv
from jsparse.policies.kvzip import kvzip
from jsparse.policies.lfps import lfps
from jsparse.policies.lychee_cluster import lychee_cluster
from jsparse.policies.lychee_decode import lychee_decode
from jsparse.policies.magic_pig import magic_pig
from jsparse.policies.method import Method
from jsparse.policies.offloaded import offloaded
from jsparse.policies.oracle import oracle_top_k, oracle_top_p
from jsparse.policies.quest import quest
from jsparse.policies.quest_chunks import quest_chunks
from jsparse.policies.r_kv import r_kv
from jsparse.policies.raas import raas
from jsparse.policies.razor_attention import razor_attention
from jsparse.policies.seer_attention import seer_attention
from jsparse.policies.shadow_kv import shadow_kv
from jsparse.policies.snapkv import snapkv
from jsparse.policies.sparse_prefill import sparse_prefill
from jsparse.policies.streaming import streaming
from jsparse.policies.tidal import tidal
from jsparse.policies.twilight import twilight
from jsparse.policies.verified import verified

REGISTRY: tuple[Method, ...] = (
    Method(
        dense,
        attends="everything",
        when=(
            "as the baseline; faster than Twilight below about 37,000 tokens per batch on an H100, "
            "or 59,000 on an H200"
        ),
    ),
    Method(
        auto,
        attends=(
            "the selection of the policy that `jsparse recommend` found; without a measurement, "
            "Twilight's for large batches on an H100 or H200, else everything"
        ),
        when="to start with; it stays close to dense attention",
    ),
    Method(
        streaming,
        paper="StreamingLLM",
        calls="streaming(sink, recent)",
        attends="the first and the newest tokens",
        when=(
            "if only the recent text matters; it scores nothing, and finds nothing outside its "
            "window"
        ),
    ),
    Method(
        quest,
        paper="Quest",
        calls="quest(budget), quest_chunks(budget)",
        attends=(
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
        paper="Quest over chunks, LycheeCluster section 3.1",
    ),
    Method(
        double_sparsity,
        paper="Double Sparsity",
        calls="double_sparsity(budget)",
        attends=(
            "the tokens or pages that score highest on a few heavy channels of K, stored in 4 bits"
        ),
        when="with a small budget; slower per step than `quest`, but better once calibrated",
    ),
    Method(
        tidal,
        paper="TidalDecode",
        calls="tidal(budget)",
        attends="the tokens with the highest weights in two selection layers, in all later layers",
        when="to select tokens only twice per step; set the two selection layers for your model",
    ),
    Method(
        lychee_decode,
        paper="LycheeDecode",
        calls="lychee_decode(gates, value)",
        attends="everything in a few retrieval heads; the other heads reuse their picks",
        when="for long contexts, once you have trained gates for your model",
    ),
    Method(
        duo_attention,
        paper="DuoAttention",
        calls="duo_attention(gates)",
        attends="everything in retrieval heads; the first and the newest tokens in the others",
        when=(
            "with the same gates, if sparse heads should select and share nothing; these forget "
            "the middle of the text"
        ),
    ),
    Method(
        razor_attention,
        paper="RazorAttention",
        calls="razor_attention(gates)",
        attends=(
            "everything in retrieval heads; in the others the first tokens, a window, and one mean "
            "token for the rest of the prompt"
        ),
        when="without training, since `jsparse calibrate-heads` finds its heads in one prefill",
    ),
    Method(
        seer_attention,
        paper="SeerAttention-R",
        calls="seer_attention(gates, budget)",
        attends="the blocks of tokens that score highest under small gates trained for the model",
        when="for long outputs, once you have trained gates for your model or the authors have",
    ),
    Method(
        lfps,
        paper="LFPS",
        calls="lfps(budget)",
        attends=(
            "a share `budget` of the tokens, at positions and distances that earlier steps "
            "attended to"
        ),
        when=(
            "with K and V in slow memory, as selecting reads no keys; misses tokens that no "
            "earlier step attended to, as for a later question"
        ),
    ),
    Method(
        lychee_cluster,
        paper="LycheeCluster",
        calls="lychee_cluster(budget), cluster_kv(budget), arkvale(budget)",
        attends=(
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
        paper="ClusterKV",
    ),
    Method(
        arkvale,
        paper="ArkVale, NeurIPS 2024",
    ),
    Method(
        magic_pig,
        paper="MagicPIG",
        calls="magic_pig(bits, tables)",
        attends=(
            "the first and newest tokens, and others sampled by hash collisions with the query, "
            "weighted to estimate attention to all"
        ),
        when=(
            "to study sampling where attention is flat; its hash codes take 300 bytes per token "
            "and KV head, which every step reads"
        ),
    ),
    Method(
        shadow_kv,
        paper="ShadowKV",
        calls="shadow_kv(budget)",
        attends=(
            "the chunks whose mean keys rank highest, with keys restored from a low-rank copy; "
            "outlier chunks and the newest tokens exactly"
        ),
        when="with K and V in host memory: a step fetches only the values of selected chunks",
    ),
    Method(all_pages),
    Method(
        hard_kv,
        paper="HARD-KV",
        kind="evicts",
        calls="hard_kv(budget, cap)",
        attends=(
            "the tokens left after eviction by head, and one slot per head that merges the "
            "dropped tokens"
        ),
        when=(
            "for long outputs and large batches, if memory is short; defaults lose passkeys "
            "([figures](results/eviction.md)), and later questions cannot find dropped tokens"
        ),
    ),
    Method(
        snapkv,
        paper="SnapKV",
        kind="evicts",
        calls="snapkv(budget), ada_kv(budget)",
        attends=(
            "the prompt tokens that its last queries attended to most, and all new tokens; in "
            "`ada_kv`, a layer's heads compete for slots"
        ),
        when="for one question at the end of a long prompt; they miss needles in real text",
    ),
    Method(
        ada_kv,
        paper="Ada-KV",
        kind="evicts",
    ),
    Method(
        expected_attention,
        paper="Expected Attention",
        kind="evicts",
        calls="expected_attention(budget)",
        attends=(
            "the prompt tokens that later queries are expected to attend to, and all new tokens"
        ),
        when=(
            "to compare with `kvzip`, which finds more for later questions and needs a second pass "
            "over the prompt"
        ),
    ),
    Method(
        kvzip,
        paper="KVzip",
        kind="evicts",
        calls="kvzip(budget)",
        attends=(
            "the prompt tokens that the model needs to reproduce its prompt, and all new tokens"
        ),
        when=(
            "for many questions about one text, with `CachedPrompt`; the second pass takes longer "
            "than the prefill"
        ),
    ),
    Method(
        h2o,
        paper="H2O",
        kind="evicts",
        calls="h2o(budget), r_kv(budget), raas(budget)",
        attends=(
            "the newest tokens, and the most used (`h2o`) or important and rare (`r_kv`) others; "
            "in `raas`, the prompt and the most recently used new tokens"
        ),
        when="for long outputs, to compare with `hard_kv`",
    ),
    Method(
        r_kv,
        paper="R-KV",
        kind="evicts",
    ),
    Method(
        raas,
        paper="RaaS",
        kind="evicts",
    ),
    Method(
        oracle_top_k,
        calls="oracle_top_k(budget), oracle_top_p(p)",
        attends="the tokens or pages with the highest exact attention weights",
        when="as a yardstick for quality, never for speed: they read all keys",
    ),
    Method(oracle_top_p),
    Method(
        twilight,
        paper="Twilight",
        calls="twilight(base, p)",
        attends=(
            "the smallest part of the selection of `base` with a share p of the attention mass, "
            "estimated from a 4-bit copy of K"
        ),
        when=(
            "around a generous base (`all_pages()` for the best quality), to fit the selection to "
            "each head and step; pays in large batches"
        ),
    ),
    Method(
        verified,
        calls="verified(budget)",
        attends=(
            "the newest pages, and those with the highest weights under dense attention in the "
            "last verification round"
        ),
        when=(
            "as the draft policy for `exact=True`; not alone, because it cannot find tokens that "
            "it has stopped reading"
        ),
    ),
    Method(
        keep,
        kind="wraps",
        calls="keep(policy, sink, recent), dense_layers(policy, n), retrieval_heads(policy, gates)",
        attends=(
            "the selection of `policy`, and always the first and newest tokens (`keep`) or "
            "everything in the first n layers or in retrieval heads"
        ),
        when="around policies that may miss these tokens, such as `quest` and `twilight`",
    ),
    Method(
        dense_layers,
        kind="wraps",
    ),
    Method(
        retrieval_heads,
        kind="wraps",
    ),
    Method(
        offloaded,
        paper="the setting of LFPS",
        kind="wraps",
        calls="offloaded(policy)",
        attends="the selection of `policy`, with K and V in host memory",
        when=(
            "for contexts larger than device memory, around policies with a small index (`lfps`, "
            "`quest`); slower than dense if K and V fit the device"
        ),
    ),
    Method(
        sparse_prefill,
        kind="wraps",
        calls="sparse_prefill(policy, method)",
        attends="the selection of `policy`; prompts attend to the blocks that `method` chooses",
        when="around any policy, to prefill prompts in part; `prefill=` does the same",
    ),
)
POLICIES.update((method.build.__name__, method.build) for method in REGISTRY)
