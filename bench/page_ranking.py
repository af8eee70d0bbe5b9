"""What should be kept of a page's keys, so that few pages hold most of the attention mass?

Quest keeps the least and the greatest key of every page and ranks pages by the greatest logit that
these allow. The same bytes hold other things too. SmolLM2 reads windows of the text of `jsparse
eval`; the true softmax mass of the chosen pages is averaged over all KV heads, the query heads of
each group and the window's last 32 queries. The page that is being filled is always chosen.

    slack C     q·mid + C·|q|·half, of the middle and half the range of each channel; 1 is the bound
    root C      q·mid + C·|q·half|, the channels' parts added as squares
    trimmed C   slack C without each channel's least and greatest value
    spread C    q·mean + C·|q|·(standard deviation)
    variance    q·mean + half the variance of the page's logits, were its channels independent
    principal C q·mean + C·|q·(first principal direction)|
    halves      the greater of the logits of the mean keys of both halves of the page
    oracle      the true mass

    max         the greatest score of the group's query heads
    softmax     the mean of their softmaxed scores
    mean        the score of their mean query

    python -m bench.page_ranking --json build/page_ranking.json
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.head_replay import PAGE, RecordedHeads
from bench.lib.subprocesses import write_report
from bench.lib.text import text_tokens
from jsparse.builder import builder, dense
from jsparse.cache import CacheSpec
from jsparse.hooks import PrefillView, State
from jsparse.models.checkpoint import Params, load
from jsparse.policy import Policy, at_layer
from jsparse.runtime.capacity import cache_spec
from jsparse.runtime.session import Session

WINDOW = 32
LENGTHS, BUDGETS = (1024, 2048, 4096, 8176), (256, 1024)


class HeadPages(NamedTuple):
    """Describes the pages of one head."""

    mid: Float32[Array, "M H"]
    half: Float32[Array, "M H"]
    trimmed_mid: Float32[Array, "M H"]
    trimmed_half: Float32[Array, "M H"]
    mean: Float32[Array, "M H"]
    deviation: Float32[Array, "M H"]
    principal: Float32[Array, "M H"]
    halves: Float32[Array, "2 M H"]


def described(keys: Float32[Array, "S H"]) -> HeadPages:
    """Returns the description of the pages of a head."""
    k = keys.reshape(-1, PAGE, keys.shape[-1])
    ordered = jnp.sort(k, axis=1)
    mean = jnp.mean(k, axis=1)
    _, reach, directions = jnp.linalg.svd(k - mean[:, None], full_matrices=False)
    return HeadPages(
        (ordered[:, 0] + ordered[:, -1]) / 2,
        (ordered[:, -1] - ordered[:, 0]) / 2,
        (ordered[:, 1] + ordered[:, -2]) / 2,
        (ordered[:, -2] - ordered[:, 1]) / 2,
        mean,
        jnp.std(k, axis=1),
        directions[:, 0] * reach[:, :1] / PAGE**0.5,
        jnp.stack([jnp.mean(k[:, : PAGE // 2], axis=1), jnp.mean(k[:, PAGE // 2 :], axis=1)]),
    )


def slack(c: float, q: Array, pages: HeadPages) -> Array:
    """Returns Quest's scores with the half ranges times c."""
    return q @ pages.mid.T + c * (jnp.abs(q) @ pages.half.T)


def root(c: float, q: Array, pages: HeadPages) -> Array:
    """Returns scores in which the channels' half ranges add up as independent errors do."""
    return q @ pages.mid.T + c * jnp.sqrt(q**2 @ (pages.half**2).T)


def trimmed(c: float, q: Array, pages: HeadPages) -> Array:
    """Returns Quest's scores without the extreme values of each channel."""
    return q @ pages.trimmed_mid.T + c * (jnp.abs(q) @ pages.trimmed_half.T)


def spread(c: float, q: Array, pages: HeadPages) -> Array:
    """Returns scores of the mean key and the channels' standard deviations."""
    return q @ pages.mean.T + c * (jnp.abs(q) @ pages.deviation.T)


def variance(q: Array, pages: HeadPages) -> Array:
    """Returns the logarithm of the mean weight of tokens drawn from a normal distribution."""
    return q @ pages.mean.T + q**2 @ (pages.deviation**2).T / 2


def principal(c: float, q: Array, pages: HeadPages) -> Array:
    """Returns scores of the mean key and the one direction in which keys vary most."""
    return q @ pages.mean.T + c * jnp.abs(q @ pages.principal.T)


def halves(q: Array, pages: HeadPages) -> Array:
    """Returns the greater score of the mean keys of both halves."""
    return jnp.maximum(q @ pages.halves[0].T, q @ pages.halves[1].T)


SCORES: Mapping[str, Callable[[Array, HeadPages], Array]] = {
    **{f"slack {c}": partial(slack, c) for c in (0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 1)},
    **{f"root {c}": partial(root, c) for c in (1, 1.5, 2)},
    "trimmed 0.6": partial(trimmed, 0.6),
    "spread 1.5": partial(spread, 1.5),
    "variance": variance,
    "principal 2.5": partial(principal, 2.5),
    "halves": halves,
}


def by_group(score: Callable[[Array, HeadPages], Array], q: Array, pages: HeadPages, held: Array):
    """Returns the scores of a group [W, M] by how its queries [W, G, H] are taken together."""
    each = score(q, pages)
    return {
        "max": jnp.max(each, axis=1),
        "softmax": jnp.mean(jax.nn.softmax(jnp.where(held[:, None], each, -jnp.inf)), axis=1),
        "mean": score(jnp.mean(q, axis=1), pages),
    }


@partial(jax.jit, static_argnames="budgets")
def masses(heads: RecordedHeads, budgets: tuple[int, ...]) -> dict[str, dict[str, Array]]:
    """Returns the mean mass of each budget's pages by score and group."""

    def one(head: RecordedHeads):
        keys, q = head.keys, head.queries * head.keys.shape[-1] ** -0.5
        now = keys.shape[0] - q.shape[0] + jnp.arange(q.shape[0])[:, None]
        seen = jnp.arange(keys.shape[0]) <= now
        weights = jax.nn.softmax(jnp.where(seen[:, None], q @ keys.T, -jnp.inf))
        true = jnp.mean(weights, axis=1).reshape(q.shape[0], -1, PAGE).sum(-1)
        pages, nth = described(keys), jnp.arange(keys.shape[0] // PAGE)

        def mass(score: Array) -> Array:
            score = jnp.where(nth <= now // PAGE, score, -jnp.inf)
            order = jnp.argsort(-jnp.where(nth == now // PAGE, jnp.inf, score), axis=-1)
            covered = jnp.cumsum(jnp.take_along_axis(true, order, axis=-1), axis=-1)
            return jnp.mean(covered, axis=0)[jnp.array(budgets) // PAGE - 1]

        scores = {
            name: by_group(score, q, pages, nth <= now // PAGE) for name, score in SCORES.items()
        }
        return jax.tree.map(mass, scores | {"oracle": {"": true}})

    return jax.tree.map(lambda x: jnp.mean(x, axis=0), jax.lax.map(one, heads))


@builder
def recording(window: int) -> Policy:
    """Attends densely, with the last queries of every layer as its state."""

    def init(spec: CacheSpec) -> State:
        shape = (spec.batch, window, spec.num_heads, spec.head_dim)
        return tuple(jnp.zeros(shape, spec.dtype) for _ in range(spec.num_layers))

    def prefill(state: State, layer: int, view: PrefillView) -> State:
        return at_layer(state, layer, view.q_window)

    return dense()._replace(init=init, prefill=prefill, window=window)


def recorded(params: Params, ids: Sequence[int], window: int = WINDOW) -> RecordedHeads:
    """Returns the keys and last queries of all layers' heads for one prompt of whole pages."""
    spec = cache_spec(params, [ids], 1, None, PAGE)
    session = Session(params, recording(window), spec)
    session.read([ids])
    pools = jnp.stack([layer.arrays[0] for layer in session.held.cache.layers])
    keys = pools.reshape(-1, spec.capacity, spec.head_dim)[:, : len(ids)]
    q = jnp.stack(session.held.state)[:, 0]
    q = q.reshape(spec.num_layers, window, spec.num_kv_heads, -1, spec.head_dim).swapaxes(1, 2)
    return RecordedHeads(keys, q.reshape(-1, *q.shape[2:]))


def from_file(path: Path) -> RecordedHeads:
    """Returns the heads of a file of NumPy arrays, `keys` and `queries`."""
    with np.load(path) as arrays:
        return RecordedHeads(jnp.asarray(arrays["keys"]), jnp.asarray(arrays["queries"]))


def measure(sources: Sequence[RecordedHeads], budgets: Sequence[int]) -> list[dict]:
    """Returns a row per score, group and budget, its mass the mean over equally long sources."""
    tokens = sources[0].keys.shape[1]
    below = tuple(budget for budget in budgets if budget < tokens)
    found = [masses(heads, below) for heads in sources]
    mean = jax.tree.map(lambda *each: np.mean(each, axis=0), *found)
    return [
        {"tokens": tokens, "score": score, "group": group, "budget": budget, "mass": float(mass)}
        for score in (*SCORES, "oracle")
        for group, each in mean[score].items()
        for budget, mass in zip(below, each, strict=True)
    ]


def table_of(rows: Sequence[Mapping]) -> Table:
    """Returns the table, with a column per source, length and budget."""
    columns = list(dict.fromkeys((r["model"], r["tokens"], r["budget"]) for r in rows))
    table = Table("score", "group", *(f"{m}\n{budget} of {n}" for m, n, budget in columns))
    kept = {(r["score"], r["group"], r["model"], r["tokens"], r["budget"]): r["mass"] for r in rows}
    for score, group in dict.fromkeys((r["score"], r["group"]) for r in rows):
        table.add_row(score, group, *(f"{kept[score, group, *column]:.3f}" for column in columns))
    return table


def main() -> None:
    """Measures the mass and prints a table."""
    parser = report_parser("page_ranking", "Measure the attention mass of pages, ranked by score.")
    parser.add_argument(
        "--length", nargs="+", type=int, default=LENGTHS, help="tokens per prompt, in whole pages"
    )
    parser.add_argument("--prompts", type=int, default=2, help="prompts per length (default 2)")
    parser.add_argument(
        "--budget", nargs="+", type=int, default=BUDGETS, help="tokens of the chosen pages"
    )
    parser.add_argument(
        "--keys", type=Path, metavar="FILE", help="heads of another model, recorded in a .npz file"
    )
    args = parser.parse_args()
    if any(length % PAGE or length <= WINDOW for length in args.length):
        parser.error(f"--length {args.length}: must be multiples of {PAGE} above {WINDOW}")
    if any(budget % PAGE or budget < PAGE for budget in args.budget):
        parser.error(f"--budget {args.budget}: must be multiples of {PAGE}")
    environment = describe(allow_modified=args.allow_modified)
    params = load("smollm2")
    tokens = text_tokens(params)
    if len(tokens) < args.prompts * max(args.length):
        parser.error(f"--prompts {args.prompts}: the text has {len(tokens)} tokens")
    settings = vars(args) | {"json": None, "keys": args.keys and args.keys.name}
    report = {"benchmark": "page_ranking", "environment": environment, "settings": settings}
    report["results"] = rows = []
    for length in args.length:
        prompts = [tokens[i * length : (i + 1) * length] for i in range(args.prompts)]
        found = measure([recorded(params, ids) for ids in prompts], args.budget)
        rows += [{"model": "smollm2", **row} for row in found]
        write_report(args.json, report)
    if args.keys:
        found = measure([from_file(args.keys)], args.budget)
        rows += [{"model": args.keys.stem, **row} for row in found]
        write_report(args.json, report)
    Console(width=200).print(table_of(rows))


if __name__ == "__main__":
    main()
