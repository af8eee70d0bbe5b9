"""Which heads become retrieval heads by chance, and which by plain attention mass?

The files of gates are baselines for trained ones. Retrieval heads are all of layer 0, and of the
others

    random_N   those that the seed N draws
    mass       those whose mean query puts most of its attention mass far away: on pages behind the
               first 64 tokens and before the newest 256

The mass is that of dense attention while the text of `jsparse eval` continues token by token.

    python -m bench.head_baselines --out bench/gates
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from bench.lib.arguments import recording_parser
from bench.lib.environment import describe
from bench.lib.text import text_tokens
from jsparse.builder import builder, dense
from jsparse.cache import StepView
from jsparse.evaluation.closeness import windows
from jsparse.evaluation.teacher_forcing import force
from jsparse.hooks import State
from jsparse.models.checkpoint import Params, load
from jsparse.partials import Stats
from jsparse.policies.head_gates import SUFFIX, HeadGates, save
from jsparse.policy import Policy
from jsparse.train.families import hardened, one_in_eight

SINK, RECENT = 64, 256


@builder
def summing() -> Policy:
    """Returns dense() with a state that sums far mass over the steps, float32[L, B, K]."""

    def init(spec):
        return jnp.zeros((spec.num_layers, spec.batch, spec.num_kv_heads))

    def update(state: State, layer: int, stats: Stats, view: StepView):
        held = view.layers[layer]
        first = jnp.arange(held.num_pages) * held.page_size
        far = (first >= SINK) & (first + held.page_size <= held.lengths[..., None] - RECENT)
        shares = jnp.exp(stats.scores - stats.lse[..., None])
        return state.at[layer].add(jnp.sum(jnp.where(far, shares, 0.0), -1))

    return dense()._replace(init=init, update=update, stats=lambda layer: "page_mass")


def far_mass(
    params: Params, tokens: Sequence[int], *, prompts: int, length: int, steps: int
) -> Float32[np.ndarray, "L K"]:
    """Returns the share of attention mass that a head's mean query puts far away.

    It is the mean over prompts and steps.

    Args:
        params: the model.
        tokens: those of a text, cut into windows of `length`.
        prompts: the number of windows.
        length: the tokens per window; its last `steps` + 1 are fed one by one.
        steps: decode steps per window.

    Raises:
        ValueError: the tokens do not fill the windows, or no page of a window is far away.
    """
    if prompts < 1 or len(tokens) < prompts * length:
        raise ValueError(
            f"prompts={prompts} of length={length}: "
            f"must be at least 1, within {len(tokens)} tokens of text"
        )
    texts, continuation = windows(tokens[: prompts * length], length, steps)
    forcing = force(params, [summing()], texts, max_new_tokens=steps, continuation=continuation)
    mass = np.asarray(forcing.last_state(1)).mean(axis=1) / steps
    if not mass.any():
        raise ValueError(
            f"length={length}: "
            f"must have pages between the first {SINK} tokens and the newest {RECENT}"
        )
    return mass


def drawn(shape: tuple[int, int], count: int, seed: int) -> HeadGates:
    """Returns gates of layer 0's heads and random others, `count` in all."""
    lots = np.random.default_rng(seed).random(shape, np.float32)
    return HeadGates(
        np.asarray(hardened(jnp.asarray(lots), count)), record={"ranking": "random", "seed": seed}
    )


def ranked(mass: Float32[np.ndarray, "L K"], count: int, **settings: int) -> HeadGates:
    """Returns gates of layer 0's heads and those with most mass far away, `count` in all."""
    record = {"ranking": "mass", "sink": SINK, "recent": RECENT, **settings}
    return HeadGates(np.asarray(hardened(jnp.asarray(mass), count)), mass, record)


def baselines(params: Params, args: argparse.Namespace) -> Iterator[tuple[str, HeadGates]]:
    """Yields the names of the files and their gates."""
    shape = params.config.num_layers, params.config.num_kv_heads
    count = one_in_eight(*shape) if args.count is None else args.count
    for seed in range(args.random_seeds):
        yield f"random_{seed}", drawn(shape, count, seed)
    sizes = {"prompts": args.prompts, "length": args.length, "steps": args.steps}
    yield "mass", ranked(far_mass(params, text_tokens(params), **sizes), count, **sizes)


def write(args: argparse.Namespace) -> None:
    """Writes the files and prints the heads that they name."""
    environment = describe(allow_modified=args.allow_modified)
    params = load(args.model)
    shared: dict[str, Any] = {"benchmark": "head_baselines", "environment": environment}
    shared |= {"model": args.model, "dtype": str(params.dtype)}
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{'gates':10}  retrieval heads behind layer 0, as layer.head")
    for name, gates in baselines(params, args):
        save(gates._replace(record=shared | dict(gates.record)), args.out / f"{name}{SUFFIX}")
        heads = np.argwhere(gates.retrieval)[gates.retrieval.shape[1] :]
        print(f"{name:10}  {' '.join(f'{layer}.{head}' for layer, head in heads)}", flush=True)


def main() -> None:
    """Parses the arguments and writes the files."""
    parser = recording_parser(
        "head_baselines", "Write untrained gates, to compare trained ones with."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the files")
    parser.add_argument(
        "--model", default="smollm2", help="as jsparse.load takes it (default smollm2)"
    )
    parser.add_argument(
        "--count", type=int, help="retrieval heads, layer 0's counted (default one in eight)"
    )
    parser.add_argument(
        "--random-seeds", type=int, default=3, help="number of random draws (default 3)"
    )
    parser.add_argument("--prompts", type=int, default=4, help="windows of the text (default 4)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per window (default 2048)")
    parser.add_argument(
        "--steps", type=int, default=32, help="decode steps at the end of a window (default 32)"
    )
    args = parser.parse_args()
    try:
        write(args)
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
