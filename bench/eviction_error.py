"""What does eviction cost attention, and how much of it does merging give back?

SmolLM2 reads a prompt and takes in the text that follows, densely; its queries, keys and values are
recorded. Each policy then drops and merges slots of every layer as it would have, on those. For
each, next to attention to everything:

    error         relative error of attention's output, by layer and query head, and by step
    drift         difference of attention's logsumexp in nats, by step
    kept, slots   what the heads hold: after the prompt's compression and every later one, by layer
                  and KV head; and on average, by step
    catch_up      steps until a compression, which reads the keys of what competes, and reads and
                  writes what stays, is worth the reading that it saves, next to a cache that drops
                  nothing
    temperatures  of budgets="calibrated", if they were solved anew at every compression; the policy
                  goes on with the first

    python -m bench.eviction_error --json build/eviction_error.json
    python -m bench.plot_eviction build/eviction_error.json
"""

import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import write_report
from bench.lib.text import text_tokens
from jsparse.builder import dense
from jsparse.cache import CacheSpec, KVCache, LayerCache, StepView, fill, grow, read_heads
from jsparse.hooks import PrefillView
from jsparse.models.checkpoint import Params, load
from jsparse.partials import softmax_partial
from jsparse.policies.combinators import WrappedState, with_state
from jsparse.policies.eviction.settings import EvictionState
from jsparse.policies.expressions import parse
from jsparse.policies.oracle import attention_logits
from jsparse.policy import Policy, at_layer
from jsparse.runtime import capacity
from jsparse.runtime.sampling import forced
from jsparse.runtime.session import Session

WINDOW, PERIOD, STEPS_PER_MEAN = 32, 128, 8
SCORED = ("attention", "snapkv", "r_kv")  # h2o needs the attention of every step of a real run
RULES = {  # whether slots may be merged
    "joint": (True, False),
    "uniform": (True, False),
    "n_star": (True,),
    "calibrated": (True,),
    "union": (True, False),
}


def expressions(budget: int, metrics: Sequence[str], rules: Sequence[str]) -> list[str]:
    """Returns hard_kv by metric and budget rule, with and without merging where both can be.

    Every metric runs under the first rule and, where it is one of them, under "calibrated"; the
    first metric runs under all.
    """
    bounds = f"budget={budget}, floor={budget // 2}, cap={2 * budget}"
    pairs = [
        (metric, rule)
        for metric in metrics
        for rule in rules
        if metric == metrics[0] or rule in (rules[0], "calibrated")
    ]
    return [
        f"hard_kv({bounds}, metric={metric!r}, budgets={rule!r}, merge={merge})"
        for metric, rule in pairs
        for merge in RULES[rule]
    ]


class DenseRecord(NamedTuple):
    """Holds what every layer of a dense run asked and held, for B rows of one length.

    Attributes:
        spec: the sizes of its cache.
        layers: K and V of prompt and steps.
        windows: the prompt's last queries, per layer.
        queries: those of the steps, per layer.
        prompt: the number of tokens of a prompt.
    """

    spec: CacheSpec
    layers: tuple[LayerCache, ...]
    windows: tuple[Float[Array, "B W N H"], ...]
    queries: tuple[Float[Array, "steps B N H"], ...]
    prompt: int


def recording(steps: int, prompt: int) -> Policy:
    """Returns dense attention that keeps the queries of `steps` steps and of the prompt's end."""

    def init(spec: CacheSpec) -> tuple[tuple[Array, Array], ...]:
        query = spec.num_heads, spec.head_dim
        window = jnp.zeros((spec.batch, WINDOW, *query), spec.dtype)
        asked = jnp.zeros((steps, spec.batch, *query), spec.dtype)
        return ((window, asked),) * spec.num_layers

    def prefill(own, layer: int, view: PrefillView):
        return at_layer(own, layer, (view.q_window.astype(own[layer][0].dtype), own[layer][1]))

    def select(state: WrappedState, layer: int, q: Array, view: StepView):
        chosen, summary, base = dense().select(state.base, layer, q, view)
        window, asked = state.own[layer]
        asked = asked.at[view.positions[0] - prompt].set(q.astype(asked.dtype))
        return chosen, summary, WrappedState(base, at_layer(state.own, layer, (window, asked)))

    made = with_state(dense(), init, prefill=prefill, select=select)
    return made._replace(window=WINDOW, name="recording")


def record(params: Params, prompts: Sequence[Sequence[int]], follow: np.ndarray) -> DenseRecord:
    """Reads prompts of one length, then takes in the tokens [B, steps] that follow each."""
    steps, prompt = follow.shape[1], len(prompts[0])
    spec = capacity.cache_spec(params, prompts, steps, None, 16)
    session = Session(params, recording(steps, prompt), spec)
    session.read(prompts)
    # the token after the last step is never taken in
    table = jnp.asarray(np.pad(follow.T, ((0, 1), (0, 0))), jnp.int32)
    for _ in session.steps(forced, table, limits=[steps + 1] * len(prompts)):
        pass
    cache, state = session.held.cache, session.held.state
    windows, queries = zip(*state.own, strict=True)
    return DenseRecord(session.spec, cache.layers, windows, queries, prompt)


class Replay(NamedTuple):
    """Holds what became of one layer under a policy.

    Attributes:
        error: the relative error of the output.
        drift: the logsumexp less that of attention to everything.
        slots: what each head held in each step.
        kept: what each head held after the prompt's compression and after each later one.
        temperatures: those of each compression, solved anew; 0 where the policy has none.
    """

    error: Float32[Array, "steps B N"]
    drift: Float32[Array, "steps B N"]
    slots: Int32[Array, "steps B K"]
    kept: Int32[Array, "periods+1 B K"]
    temperatures: Float32[Array, "periods+1 B K"]


@partial(jax.jit, static_argnames=("policy", "spec", "prompt"))
def replay(
    policy: Policy,
    spec: CacheSpec,
    prompt: int,
    whole: LayerCache,
    window: Float[Array, "B W N H"],
    queries: Float[Array, "steps B N H"],
) -> Replay:
    """Runs a policy on one layer of a recorded run, and compares each step with all that was held.

    The number of steps must be a multiple of the policy's period.
    """
    spec = spec._replace(num_layers=1)
    at = jnp.full(spec.batch, prompt, jnp.int32)
    ones = jnp.ones_like(at)
    keys, values = (read_heads(pool, whole) for pool in (whole.k, whole.v))
    bias = jnp.zeros(whole.k.shape[:2], jnp.float32) if "bias" in policy.needs else None
    held = whole._replace(lengths=jnp.full_like(whole.lengths, prompt), bias=bias)
    cache = KVCache((held,), at, jnp.zeros(spec.batch, jnp.bool_))
    row = at[:, None]
    chunk, seen = (row, row, keys, values, at), ones * window.shape[1]
    view = PrefillView(*chunk, StepView(cache), window, seen, True)
    state = policy.prefill(policy.init(spec), 0, view)
    assert policy.eviction is not None
    after_prompt, max_length = policy.eviction
    assert after_prompt is not None and max_length is not None
    slots = capacity.bucket(max_length(prompt, len(queries) + 1), spec.page_size)
    state, cache = after_prompt(state, StepView(cache), min(slots, spec.capacity))

    def step(carry: tuple, q: Array):
        state, cache = carry
        token = cache.positions[0]
        k, v = (jax.lax.dynamic_slice_in_dim(x, token, 1, 2).swapaxes(1, 2) for x in (keys, values))
        cache = fill(grow(cache, ones, 1), 0, k, v, cache.positions[:, None], ones)
        _, _, state = policy.select(state, 0, q, StepView(cache))
        exact, exact_lse = attend(
            q, whole._replace(lengths=jnp.full_like(whole.lengths, token + 1))
        )
        o, lse = attend(q, cache.layers[0])
        error = jnp.linalg.norm(o - exact, axis=-1) / jnp.linalg.norm(exact, axis=-1)
        cache = cache._replace(positions=cache.positions + 1)
        return (state, cache), (error, lse - exact_lse, cache.layers[0].lengths)

    def period(carry: tuple, asked: Array):
        (state, cache), seen = jax.lax.scan(step, carry, asked)
        anew, _ = policy.services.maintain(unsolved(state), StepView(cache))
        state, cache = policy.services.maintain(state, StepView(cache))
        return (state, cache), (seen, (cache.layers[0].lengths, solved(anew)))

    first = cache.layers[0].lengths, solved(state)
    asked = queries.reshape(-1, policy.services.period, *queries.shape[1:])
    _, (seen, later) = jax.lax.scan(period, (state, cache), asked)
    seen = (x.reshape(-1, *x.shape[2:]) for x in seen)
    later = (jnp.concatenate([x[None], y]) for x, y in zip(first, later, strict=True))
    return Replay(*seen, *later)


def attend(q: Array, held: LayerCache) -> tuple[Float32[Array, "B N H"], Float32[Array, "B N"]]:
    """Attends to everything that is held, in float32."""
    weights, total, lse = softmax_partial(attention_logits(q.astype(jnp.float32), held))
    values = read_heads(held.v, held).astype(jnp.float32)
    o = jnp.einsum("bkgs,bksh->bkgh", weights, values, precision="highest") / total[..., None]
    return o.reshape(q.shape), lse.reshape(q.shape[:2])


def unsolved(state: tuple[EvictionState, ...]) -> tuple[EvictionState, ...]:
    """Forgets the temperatures, so that the next compression solves for them anew."""
    return tuple(entry._replace(temperatures=_zeros(entry.temperatures)) for entry in state)


def _zeros(array: Array | None) -> Array | None:
    return None if array is None else jnp.zeros_like(array)


def solved(state: tuple[EvictionState, ...]) -> Float32[Array, "B K"]:
    """Returns the temperatures of a layer, 0 where there are none."""
    (entry,) = state
    if entry.temperatures is not None:
        return entry.temperatures
    shape = entry.ring.shape[0], 1
    return jnp.zeros(shape, jnp.float32)


def measure(recorded: DenseRecord, expression: str) -> dict[str, Any]:
    """Returns a policy's row of the report: means over all that a list has no axis of."""
    policy = parse(expression)
    per_layer = zip(recorded.layers, recorded.windows, recorded.queries, strict=True)
    with jax.default_matmul_precision("highest"):
        layers = [
            jax.device_get(replay(policy, recorded.spec, recorded.prompt, *layer))
            for layer in per_layer
        ]
    found = {name: np.stack([getattr(x, name) for x in layers]) for name in Replay._fields}
    error, drift = found["error"], found["drift"]
    slots, kept = (found[name].mean(2) for name in ("slots", "kept"))
    row = {
        "policy": expression,
        "error": float(error.mean()),
        "error_by_head": _rounded(error.mean((1, 2))),
        "error_by_step": _by_step(error.mean((0, 2, 3))),
        "drift_by_step": _by_step(drift.mean((0, 2, 3))),
        "absolute_drift_by_step": _by_step(np.abs(drift).mean((0, 2, 3))),
        "slots_by_step": _by_step(slots.mean((0, 2))),
        "kept_by_head": _rounded(kept.swapaxes(0, 1)),
        "catch_up": catch_up(
            policy.services.period, recorded.prompt, slots.mean((0, 2)), kept.mean((0, 2))
        ),
    }
    if "'calibrated'" in expression:
        row["temperatures_by_head"] = _rounded(found["temperatures"].mean(2).swapaxes(0, 1))
    return row


def _by_step(values: np.ndarray) -> list[float]:
    """Returns means over blocks of STEPS_PER_MEAN steps, of which a period has a whole number."""
    return _rounded(values.reshape(-1, STEPS_PER_MEAN).mean(1))


def _rounded(values: np.ndarray) -> Any:
    """Returns nested lists of five digits."""
    return np.vectorize(lambda x: float(f"{x:.5g}"))(values).tolist()


def catch_up(period: int, prompt: int, slots: np.ndarray, kept: np.ndarray) -> list[float]:
    """Returns the steps that each compression needs to be worth it.

    A slot is its key and its value: a compression reads the keys of what is there, and reads and
    writes what it keeps; a step then reads what is kept rather than every token so far.
    """
    before = np.array([prompt, *slots[period - 1 :: period]])
    tokens = prompt + period * np.arange(len(before))
    return ((before / 2 + 2 * kept) / (tokens - kept)).round(3).tolist()


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns what merging takes off the error, for each pair of policies with and without it.

    `lower_in_heads` is the share of the query heads whose error is lower with merging.
    """
    by_policy = {row["policy"]: row for row in rows}
    pairs = []
    for expression, merged in by_policy.items():
        bare = by_policy.get(re.sub(r"merge=True", "merge=False", expression))
        if bare is None or bare is merged:
            continue
        less = np.array(merged["error_by_head"]) < np.array(bare["error_by_head"])
        pairs.append(
            {
                "policy": expression,
                "error": merged["error"],
                "without_merging": bare["error"],
                "reduction": 1 - merged["error"] / bare["error"],
                "lower_in_heads": float(less.mean()),
            }
        )
    return pairs


def main() -> None:
    """Records, replays every policy, and prints what merging gives back."""
    parser = report_parser("eviction_error", "Measure attention's error under eviction.")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens per prompt (default 4096)")
    parser.add_argument("--prompts", type=int, default=4, help="number of prompts (default 4)")
    parser.add_argument("--steps", type=int, default=512, help="decode steps (default 512)")
    parser.add_argument("--budget", type=int, help="slots per head (default an eighth of --prompt)")
    parser.add_argument("--metrics", nargs="+", choices=SCORED, default=SCORED)
    parser.add_argument("--budgets", nargs="+", choices=RULES, default=list(RULES))
    args = parser.parse_args()
    environment, params = describe(allow_modified=args.allow_modified), load("smollm2")
    tokens, length = text_tokens(params), args.prompt + args.steps
    if args.steps < 1 or args.steps % PERIOD:
        parser.error(f"--steps {args.steps}: must be a multiple of the period of {PERIOD}")
    if args.prompts < 1 or args.prompts * length > len(tokens):
        parser.error(
            f"--prompts {args.prompts} of {length} tokens: must be from 1 to "
            f"{len(tokens) // length}, as many as the text has"
        )
    text = np.array(tokens[: args.prompts * length]).reshape(args.prompts, length)
    prompts, follow = text[:, : args.prompt].tolist(), text[:, args.prompt :]
    recorded = record(params, prompts, follow)
    chosen = expressions(args.budget or args.prompt // 8, args.metrics, args.budgets)
    report: dict[str, Any] = {
        "benchmark": "eviction_error",
        "environment": environment,
        "settings": vars(args)
        | {"json": None, "dtype": str(params.dtype), "steps_per_mean": STEPS_PER_MEAN},
        "results": [],
    }
    for expression in chosen:
        report["results"].append(measure(recorded, expression))
        report["merging"] = compared(report["results"])
        write_report(args.json, report)
    table = Table("policy", "error", "without merging", "reduction", "heads with less error")
    for pair in report["merging"]:
        numbers = (f"{pair[name]:.3f}" for name in ("error", "without_merging"))
        shares = (f"{pair[name]:.1%}" for name in ("reduction", "lower_in_heads"))
        table.add_row(pair["policy"], *numbers, *shares)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
