"""Names the policies that bench.quality measures together, with their tasks and lengths."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.lib.equal_reads import BY_SHARE

BUDGETS, MASSES = (128, 256, 512, 1024, 2048), (0.8, 0.9, 0.95, 0.99)
# jsparse calibrate-channels --text bench/README.md --tokens 4096, at revision 5ba8027
CHANNELS = "bench/smollm2_channels.safetensors"
SELECTORS = ("quest(", f"double_sparsity(calibration={CHANNELS!r}, ", "tidal(")


def _behind_two(policy: str) -> str:
    """Makes the first two layers dense, which TidalDecode does by itself."""
    return policy if policy.startswith("tidal") else f"dense_layers({policy}, n=2)"


YARDSTICKS = (
    *(f"streaming(sink=4, recent={recent})" for recent in (124, 252, 508, 1020)),
    *(f"oracle_top_k(budget={budget})" for budget in BUDGETS),
    *(f"oracle_top_p(p={p})" for p in MASSES),
)
TWILIGHT = (
    *(_behind_two(f"{name}budget={budget})") for name in SELECTORS for budget in BUDGETS),
    _behind_two("double_sparsity(budget=512)"),
    *(_behind_two(f"twilight({name}budget=2048), p={p})") for name in SELECTORS for p in MASSES),
    *(
        _behind_two(f"twilight(all_pages(), p={p}, prune={way!r})")
        for p in MASSES
        for way in ("page_mass", "token")
    ),
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
AGAIN = 14  # the layer of SmolLM2 that picks again, by bench.layer_overlap
TIDAL_DENSE = 4 / 30  # the share of layers that are dense then
PAGE = 16
PAPERS_QUEST = "slack=1.0, group='max'"
RULE = "candidates='threshold', exact=True"  # the paper's, of LFPS
AT_BUDGET = "joint", "uniform"  # rules of hard_kv
METRICS = "attention", "snapkv", "r_kv"
SHARES = (0.95, 0.96, 0.97, 0.98, 0.99)
UNION_SHARES = (0.5, 0.7, 0.8, 0.9, 0.95)  # of each query of the window
DUO_RETRIEVAL = 11 / 90  # the share of retrieval heads in direct.safetensors
GATE_FILES = "hard_kuma.safetensors", "direct.safetensors"
DENSITIES = "hard_kuma", "hard_kuma_quarter", "hard_kuma_half"  # of retrieval heads: 12.5 % first
GATES = (
    "hard_kuma",
    "hard_concrete",
    "direct",
    "hard_kuma_refreshed",
    "hard_concrete_fast",
    "equation_7",
    "random_0",
    "random_1",
    "mass",
)


def lychee(gates: Path) -> tuple[str, ...]:
    """Returns the policies of the set "lychee", given the folder of the gates."""
    files = [str(gates / f"{name}.safetensors") for name in GATES]
    ways = (
        *(f"value={value}" for value in (256, 1024, 2048)),
        *(f"value={value}, granularity='token'" for value in (256, 512, 1024)),
        *(f"value={value}, rule='ratio'" for value in (0.95, 0.9, 0.75)),
        *(f"value={value}, rule='top_p'" for value in (0.8, 0.9, 0.95)),
        *(f"value={value}, rule='threshold'" for value in (0.01, 0.003, 0.001)),
        "value=512, correct_every=32",
        "value=512, sink=0, recent=0",
    )
    return (
        *(f"lychee_decode({file!r}, value=512)" for file in files),
        *(f"lychee_decode({files[0]!r}, {way})" for way in ways),
        *(f"duo_attention({file!r}, sink=64, recent=448)" for file in (files[0], files[2])),
        *(f"tidal(budget=512{more})" for more in ("", ", sink=0, recent=0")),
        *(f"tidal(budget=512, again={AGAIN}{more})" for more in ("", ", correct_every=32")),
        _behind_two("quest(budget=1024)"),
    )


def densities(gates: Path) -> tuple[str, ...]:
    """Returns LycheeDecode by share of retrieval heads and budget (Figure 9 of its paper)."""
    files = [str(gates / f"{name}.safetensors") for name in DENSITIES]
    return tuple(
        f"lychee_decode({file!r}, value={value})" for file in files for value in BUDGETS[1:]
    )


def defaults(gates: Path) -> tuple[str, ...]:
    """Returns the policies of the set "defaults", given the folder of the gates."""
    labels = f"double_sparsity(calibration={CHANNELS!r}, "
    picked = f"lychee_decode({str(gates / 'hard_kuma.safetensors')!r}, value=512"
    behind_two = (
        "quest(budget=1024)",
        *(
            f"quest(budget=2048{more})"
            for more in ("", f", {PAPERS_QUEST}", ", bounds_dtype='uint8'")
        ),
        *(f"{labels}budget={budget})" for budget in (256, 2048)),
        *(f"double_sparsity(budget={budget})" for budget in (512, 1024)),
        "twilight(quest(budget=2048), p=0.95)",
        f"twilight({labels}budget=2048), p=0.95)",
        "twilight(all_pages(), p=0.95)",
        "twilight(all_pages(), p=0.95, prune='token')",
    )
    return (
        *map(_behind_two, behind_two),
        *(f"tidal(budget=2048{more})" for more in ("", f", again={AGAIN}", ", sink=0, recent=0")),
        *(f"{picked}{more})" for more in ("", ", sink=0, recent=0")),
        "oracle_top_k(budget=1024)",
        "oracle_top_p(p=0.95)",
        "twilight(all_pages(), p=0.95)",
        "twilight(all_pages(), p=0.95, prune='token')",
        "twilight(all_pages(), p=0.9)",
        *(f"twilight(quest(budget={budget}), p=0.95)" for budget in (2048, 4096)),
        "twilight(double_sparsity(budget=2048), p=0.95)",
    )


def hard_kv(budget: int, more: str = "") -> str:
    """Returns hard_kv whose heads may hold from half to twice the budget."""
    return f"hard_kv(budget={budget}, floor={budget // 2}, cap={2 * budget}{more})"


def at_budget(budget: int) -> tuple[str, ...]:
    """Returns the policies that keep `budget` slots per head, and those that read as many.

    StreamingLLM and Quest keep everything, whatever they read. The questions of the tasks have
    about ten tokens, which the default window of 32 queries drowns in filler: hence those of 8.
    """
    return (
        hard_kv(budget),
        hard_kv(budget, ", window=8, metric='snapkv'"),
        hard_kv(budget, f", recent={budget // 2}"),
        f"snapkv(budget={budget}, window=32)",
        *(f"{name}(budget={budget})" for name in ("snapkv", "ada_kv", "h2o", "r_kv")),
        f"streaming(sink=4, recent={budget - 4})",
        f"quest(budget={budget})",
        _behind_two(f"quest(budget={budget})"),
    )


def at_a_quarter(gates: Path, length: int) -> tuple[str, ...]:
    """Returns the policies at a quarter of the length, with DuoAttention and a yardstick.

    The window of DuoAttention's other heads is such that all heads hold a quarter on average.
    """
    window = round((0.25 - DUO_RETRIEVAL) / (1 - DUO_RETRIEVAL) * length)
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


def ablation(gates: Path, length: int) -> tuple[str, ...]:
    """Returns hard_kv by metric, budget rule and merging, for heads of any size up to a quarter.

    With a fixed p a rule would be measured by how much it happens to keep; hence SHARES.
    """

    def made(metric: str, rule: str, *, merge: bool = True, p: float = 0.9) -> str:
        return (
            f"hard_kv(budget={length // 8}, floor=1, cap={length // 4}, p={p}, metric={metric!r}, "
            f"budgets={rule!r}, merge={merge})"
        )

    return tuple(
        policy
        for metric in METRICS
        for policy in (
            *(made(metric, rule, merge=merge) for rule in AT_BUDGET for merge in (True, False)),
            *(
                made(metric, rule, p=p)
                for rule in BY_SHARE
                if rule != "union" or metric == "attention"
                for p in (UNION_SHARES if rule == "union" else SHARES)
            ),
        )
    )


def lfps(length: int) -> tuple[str, ...]:
    """Returns LFPS at 2 % and 4 % of the length, next to those that read as many tokens.

    From exact weights to the paper's form, one thing changes at a time. The rule's candidates are
    not cut off, as in the paper. Quest's tokens are rounded up to whole pages.
    """
    rule = f"{RULE}, wider=50"  # all tokens from 2 % on
    return tuple(
        policy
        for share in (0.02, 0.04)
        for tokens in [round(share * length)]
        for policy in (
            f"lfps(budget={share})",
            f"lfps(budget={share}, exact=True)",
            f"lfps(budget={share}, exact=True, penalty=0.5)",
            f"lfps(budget={share}, {rule})",
            f"lfps(budget={share}, {rule}, penalty=0.5)",
            f"lfps(budget={share}, {rule}, penalty=0.5, aligned=False)",
            f"oracle_top_k(budget={tokens})",
            f"quest(budget={-(-tokens // PAGE) * PAGE})",
            f"streaming(sink=4, recent={tokens - 4})",
        )
    )


def at_the_rules_share(report: Mapping[str, Any]) -> dict[int, tuple[str, ...]]:
    """Returns LFPS with exact weights alone, at each share that the paper's rule attended to.

    The rule marks fewer tokens than the budget allows in some heads, so that it attends to fewer.
    """
    found: dict[int, dict[str, None]] = {}
    for cell in report["cells"]:
        if RULE.partition(",")[0] in cell["policy"] and "attended" in cell["metrics"]:
            share = cell["metrics"]["attended"]["mean"]
            found.setdefault(cell["length"], {})[f"lfps(budget={share:.4f}, exact=True)"] = None
    return {length: tuple(policies) for length, policies in found.items()}


def lychee_cluster(length: int) -> tuple[str, ...]:
    """Returns LycheeCluster and those that attend to as many tokens, the first two layers dense.

    Its arguments are changed one at a time at the middle budget; chunks of fixed size are at all.
    """
    changed = (
        "rank='bound'",
        *(f"cluster_size={size}" for size in (1, 4, 8)),
        "pooling='max'",
        "normalise=False",
        "levels=2",
    )
    at_budgets = tuple(
        policy
        for budget in (256, 512, 1024)
        for policy in (
            f"lychee_cluster(budget={budget})",
            f"lychee_cluster(budget={budget}, chunks='fixed')",
            f"cluster_kv(budget={budget})",
            f"arkvale(budget={budget})",
            f"quest(budget={budget})",
            f"quest(budget={budget}, {PAPERS_QUEST})",
            f"quest_chunks(budget={budget}, {PAPERS_QUEST})",
            f"lfps(budget={budget / length:.5f})",
            f"streaming(sink=16, recent={budget - 16})",
            f"oracle_top_k(budget={budget}, granularity='page')",
            f"oracle_top_k(budget={budget})",
        )
    )
    ablations = (f"lychee_cluster(budget=512, {way})" for way in changed)
    return tuple(map(_behind_two, (*at_budgets, *ablations)))


def every_method(gates: Path, length: int) -> tuple[str, ...]:
    """Returns every method such that heads read a quarter of the length on average.

    `tidal`, `lychee_decode` and `duo_attention` read everything in some layers or heads, and so
    have less in the others. What Twilight reads follows from p.
    """
    budget = length // 4
    in_layers, in_heads = (
        16 * round(length * (0.25 - dense) / (1 - dense) / 16)
        for dense in (TIDAL_DENSE, DUO_RETRIEVAL)
    )
    return (
        f"streaming(sink=4, recent={budget - 4})",
        f"oracle_top_k(budget={budget})",
        f"quest(budget={budget})",
        f"quest(budget={budget}, {PAPERS_QUEST})",
        f"quest_chunks(budget={budget}, {PAPERS_QUEST})",
        f"double_sparsity(budget={budget})",
        *(
            f"tidal(budget={in_layers}, again={AGAIN}, heads={heads!r})"
            for heads in ("all", "each")
        ),
        *(f"lychee_decode({str(gates / name)!r}, value={in_heads})" for name in GATE_FILES),
        f"duo_attention({str(gates / GATE_FILES[1])!r}, sink=4, recent={in_heads - 4})",
        f"lfps(budget={budget / length:.5f})",
        f"lfps(budget={budget / length:.5f}, exact=True)",
        *(f"lychee_cluster(budget={budget}, rank={rank!r})" for rank in ("centroid", "bound")),
        f"cluster_kv(budget={budget})",
        *(f"arkvale(budget={budget}, volume={volume!r})" for volume in ("cuboid", "ball")),
        *(f"{name}(budget={budget})" for name in ("snapkv", "ada_kv", "h2o", "r_kv")),
        hard_kv(budget),
        hard_kv(budget, ", window=8, metric='snapkv'"),
        f"twilight(quest(budget={length // 2}), p=0.95)",
        "twilight(all_pages(), p=0.9)",
        "twilight(all_pages(), p=0.95)",
    )


class Set(NamedTuple):
    """A set of policies that are measured together.

    Attributes:
        policies: maps the folder of gates and a length to expressions; dense() is always measured
            too.
        tasks: the default tasks; SmolLM2 answers few of them at 4K and 8K.
        lengths: the default lengths.
        steps: the default number of decode steps of the tasks that compare with dense.
        afterwards: maps the report of all these to further policies of each length, measured next.
    """

    policies: Callable[[Path, int], Sequence[str]]
    tasks: Sequence[str]
    lengths: Sequence[int]
    steps: int = 64
    afterwards: Callable[[Mapping[str, Any]], Mapping[int, Sequence[str]]] = lambda report: {}


LONG = (4096, 8192)
SETS = {
    "yardsticks": Set(lambda *_: YARDSTICKS, TASKS, (1024, 2048, *LONG)),
    "twilight": Set(lambda *_: TWILIGHT, ANSWERED_WHEN_LONG, LONG),
    "lychee": Set(lambda gates, _: lychee(gates), ANSWERED_WHEN_LONG, LONG),
    "densities": Set(lambda gates, _: densities(gates), ("kl", "passkey"), LONG),
    "defaults": Set(lambda gates, _: defaults(gates), ("kl", "passkey"), LONG),
    "eviction": Set(eviction, ANSWERED_WHEN_LONG, LONG, steps=512),
    "eviction_ablation": Set(ablation, ("kl", "ppl"), (4096,), steps=512),
    "lfps": Set(
        lambda _, length: lfps(length),
        ("kl", "attention", "passkey"),
        LONG,
        steps=128,
        afterwards=at_the_rules_share,
    ),
    "lychee_cluster": Set(
        lambda _, length: lychee_cluster(length),
        ("kl", "ppl", "passkey", "niah_single_1", "json_retrieval"),
        LONG,
    ),
    "every_method": Set(
        every_method,
        ("kl", "passkey", "niah_single_2", "niah_multikey_1"),
        (4096,),
    ),
    "second_turn": Set(at_a_quarter, ("passkey_turn2", "niah_single_1_turn2"), LONG),
}
