"""The sets of policies that bench.quality measures together, with their tasks and lengths."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jsparse.policies.sizes import besides_dense

BUDGETS, MASSES = (128, 256, 512, 1024, 2048), (0.8, 0.9, 0.95, 0.99)
YARDSTICKS = (
    *(f"streaming(sink=4, recent={recent})" for recent in (124, 252, 508, 1020)),
    *(f"oracle_top_k(budget={budget})" for budget in BUDGETS),
    *(f"oracle_top_p(p={p})" for p in MASSES),
)
TASKS = (
    "kl",
    "ppl",
    "passkey",
    "niah_single_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "vt",
    "cwe",
    "fwe",
)
ANSWERED_WHEN_LONG = TASKS[:4]
AGAIN = 14  # the layer of SmolLM2 that selects again
TIDAL_DENSE = 4 / 30  # the resulting share of dense layers
PAPERS_QUEST = "slack=1.0, group='max'"
DUO_RETRIEVAL = 11 / 90  # the share of retrieval heads in direct.safetensors
GATE_FILES = "hard_kuma.safetensors", "direct.safetensors"
SHARES = (16, 8, 4)  # of the length
EVICTING = ("snapkv", "ada_kv", "expected_attention", "kvzip", "h2o", "r_kv")
MASSES_OF_TWILIGHT = (0.8, 0.9, 0.95)


def at_budget(budget: int) -> tuple[str, ...]:
    """Returns the policies that keep `budget` slots per head, and those that read that number.

    StreamingLLM and Quest keep everything, however much they read. The questions of the tasks have
    about ten tokens, which filler dominates in the default window of 32 queries; hence the windows
    of 8.
    """
    return (
        f"hard_kv(budget={budget})",
        f"hard_kv(budget={budget}, window=8, metric='snapkv')",
        f"hard_kv(budget={budget}, recent={budget // 2})",
        f"snapkv(budget={budget}, window=32)",
        *(f"{name}(budget={budget})" for name in EVICTING),
        f"streaming(sink=4, recent={budget - 4})",
        f"quest(budget={budget})",
        f"dense_layers(quest(budget={budget}), n=2)",
    )


def at_a_quarter(gates: Path, length: int) -> tuple[str, ...]:
    """Returns the policies at a quarter of the length, with DuoAttention and a yardstick.

    The window of DuoAttention's other heads makes the average over all heads a quarter.
    """
    window = round(besides_dense(0.25 * length, length, DUO_RETRIEVAL))
    return (
        *at_budget(length // 4),
        f"duo_attention({str(gates / 'direct.safetensors')!r}, sink=64, recent={window - 64})",
        "twilight(all_pages(), p=0.95)",
    )


def eviction(gates: Path, length: int) -> tuple[str, ...]:
    """Returns the policies of the set "eviction", given the folder of the gates and the length.

    raas keeps the whole prompt; its budget is a quarter of the new tokens.
    """
    return (
        *at_budget(length // 8),
        *at_a_quarter(gates, length),
        "raas(budget=128)",
    )


def untrained(budget: int, length: int) -> tuple[str, ...]:
    """Returns every method that needs neither training nor calibration, at one budget.

    Twilight reads what p leaves of twice the budget.
    """
    return (
        f"streaming(sink=4, recent={budget - 4})",
        f"oracle_top_k(budget={budget})",
        f"quest(budget={budget})",
        f"quest(budget={budget}, {PAPERS_QUEST})",
        f"quest_chunks(budget={budget}, {PAPERS_QUEST})",
        f"double_sparsity(budget={budget})",
        f"lfps(budget={budget / length:.5f})",
        f"lfps(budget={budget / length:.5f}, exact=True)",
        *(f"lychee_cluster(budget={budget}, rank={rank!r})" for rank in ("centroid", "bound")),
        f"cluster_kv(budget={budget})",
        *(f"arkvale(budget={budget}, volume={volume!r})" for volume in ("cuboid", "ball")),
        *(f"{name}(budget={budget})" for name in EVICTING),
        f"hard_kv(budget={budget})",
        f"hard_kv(budget={budget}, window=8, metric='snapkv')",
        f"twilight(quest(budget={2 * budget}), p=0.95)",
    )


def every_method(gates: Path, length: int) -> tuple[str, ...]:
    """Returns every method, such that heads read a quarter of the length on average.

    `tidal`, `lychee_decode`, `duo_attention` and `razor_attention` read everything in some layers
    or heads, and therefore less in the others. Twilight's reads follow from p.
    """
    in_layers, in_heads = (
        16 * round(besides_dense(0.25 * length, length, dense) / 16)
        for dense in (TIDAL_DENSE, DUO_RETRIEVAL)
    )
    return (
        *untrained(length // 4, length),
        *(
            f"tidal(budget={in_layers}, again={AGAIN}, heads={heads!r})"
            for heads in ("all", "each")
        ),
        *(f"lychee_decode({str(gates / name)!r}, value={in_heads})" for name in GATE_FILES),
        f"duo_attention({str(gates / GATE_FILES[1])!r}, sink=4, recent={in_heads - 4})",
        f"razor_attention({str(gates / GATE_FILES[1])!r}, recent={in_heads - 4}, share=0.0)",
        "twilight(all_pages(), p=0.9)",
        "twilight(all_pages(), p=0.95)",
    )


def at_shares(_gates: Path, length: int) -> tuple[str, ...]:
    """Returns every untrained method at each of SHARES, with Twilight over all pages.

    A method's budgets follow one another, so that groups of a run have one budget each.
    """
    by_method = zip(*(untrained(length // share, length) for share in SHARES), strict=True)
    return (
        *(policy for budgets in by_method for policy in budgets),
        *(f"twilight(all_pages(), p={p})" for p in MASSES_OF_TWILIGHT),
    )


def at_an_eighth(_gates: Path, length: int) -> tuple[str, ...]:
    """Returns every untrained method at an eighth of the length."""
    return (*untrained(length // 8, length), "twilight(all_pages(), p=0.95)")


def sampling(_gates: Path, length: int) -> tuple[str, ...]:
    """Returns MagicPIG with the tables of its paper, and methods without samples.

    A window alone shows what the samples add; exact top-k and Quest read an eighth of the length.
    """
    return (
        "magic_pig()",
        "magic_pig(bits=8, tables=75)",
        "magic_pig(bits=11, tables=300)",
        "dense_layers(magic_pig(), n=1)",
        "streaming(sink=4, recent=64)",
        f"oracle_top_k(budget={length // 8})",
        f"quest(budget={length // 8})",
    )


def low_rank_keys(_gates: Path, length: int) -> tuple[str, ...]:
    """Returns ShadowKV at an eighth of the length, and methods with exact keys at that budget.

    The rank of 32 is a sixth of SmolLM2's 192 channels of K, as the paper's 160 are of 1024.
    """
    budget = length // 8
    return (
        *(f"shadow_kv(budget={budget}, rank={rank})" for rank in (32, 64, 160)),
        f"shadow_kv(budget={budget}, rank=32, outliers=1)",
        f"quest(budget={budget})",
        f"oracle_top_k(budget={budget})",
    )


def prefill_methods(*_: object) -> tuple[str, ...]:
    """Returns the methods of sparse prefill, each before dense decoding."""
    methods = (
        "xattention(threshold=0.9, stride=8)",
        *(f"xattention(threshold={threshold}, stride=16)" for threshold in (0.9, 0.95)),
        "vertical_slash()",
        "streaming()",
    )
    return tuple(f"sparse_prefill(dense(), {method!r})" for method in methods)


class Set(NamedTuple):
    """A set of policies that are measured together.

    Attributes:
        policies: maps the folder of gates and a length to expressions; dense() is always measured
            in addition.
        tasks: the default tasks; SmolLM2 solves few of them at 4K and 8K.
        lengths: the default lengths.
        steps: the default number of decode steps of the tasks that compare with dense.
        tokens: the default number of tokens per batch, all prompts together.
    """

    policies: Callable[[Path, int], Sequence[str]]
    tasks: Sequence[str]
    lengths: Sequence[int]
    steps: int = 64
    tokens: int = 400_000


LONG = (4096, 8192)
OF_A_REAL_MODEL = (8192, 16384, 30720)
SETS = {
    "yardsticks": Set(lambda *_: YARDSTICKS, TASKS, (1024, 2048, *LONG)),
    "eviction": Set(eviction, ANSWERED_WHEN_LONG, LONG, steps=512),
    "every_method": Set(
        every_method,
        ("kl", "passkey", "niah_single_2", "niah_multikey_1"),
        (4096,),
    ),
    "real_model": Set(at_shares, ("kl",), OF_A_REAL_MODEL, tokens=2**18),
    "real_model_tasks": Set(
        at_an_eighth,
        (
            "passkey",
            "niah_single_2",
            "niah_multikey_1",
            "niah_multivalue",
            "vt",
            "longbench_lcc",
            "ppl",
        ),
        OF_A_REAL_MODEL,
        tokens=2**18,
    ),
    "sampling": Set(sampling, ("kl", "passkey", "niah_single_1", "cwe", "fwe"), (2048, *LONG)),
    "low_rank_keys": Set(low_rank_keys, ("kl", "passkey", "niah_single_1"), LONG),
    "sparse_prefill": Set(
        prefill_methods,
        ("ppl", "passkey", "niah_single_1", "niah_multikey_2"),
        OF_A_REAL_MODEL[1:],
        steps=1024,
        tokens=2**18,
    ),
    "second_turn": Set(at_a_quarter, ("passkey_turn2", "niah_single_1_turn2"), LONG),
}
