"""Gates that nobody trained, to compare trained ones with. Retrieval heads are all of layer 0, and of the others

    random_N   those that the seed N draws
    mass       those whose mean query puts most of its attention mass far away: on pages behind the first 64 tokens and
               before the newest 256

The mass is that of dense attention while the text of `jsparse eval` goes on token by token.

    python -m bench.head_baselines --out bench/gates
"""

import argparse
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from bench.lib.environment import describe
from bench.lib.recording import text_tokens
from jsparse.cache import KVCache
from jsparse.evaluation.closeness import windows
from jsparse.evaluation.forcing import force
from jsparse.models.checkpoint import Params, load
from jsparse.partials import Stats
from jsparse.policies.head_gates import SUFFIX, HeadGates, save
from jsparse.policy import Policy, State, builder, dense
from jsparse.train.families import hardened, one_in_eight

SINK, RECENT = 64, 256


@builder
def summing() -> Policy:
    """dense(), and in its state the shares of the mass that lie far away, summed over the steps, float32[L, B, K]."""

    def init(spec):
        return jnp.zeros((spec.num_layers, spec.batch, spec.num_kv_heads))

    def update(state: State, layer: int, stats: Stats, cache: KVCache):
        held = cache.layers[layer]
        first = jnp.arange(held.num_pages) * held.page_size
        far = (first >= SINK) & (first + held.page_size <= held.lengths[..., None] - RECENT)
        shares = jnp.exp(stats.scores - stats.lse[..., None])
        return state.at[layer].add(jnp.sum(jnp.where(far, shares, 0.0), -1))

    return dense()._replace(init=init, update=update, stats=lambda layer: "page_mass")


def far_mass(
    params: Params, tokens: Sequence[int], *, prompts: int, length: int, steps: int
) -> Float32[np.ndarray, "L K"]:
    """The share of its attention mass that a head's mean query puts far away, mean over prompts and steps.

    Args:
        params: the model.
        tokens: a text's, cut into windows of `length`.
        prompts: how many windows.
        length: of a window; its last `steps` + 1 tokens are fed.
        steps: decode steps a window.

    Raises:
        ValueError: the tokens do not fill the windows, or the windows have nothing that is far away.
    """
    if prompts < 1 or len(tokens) < prompts * length:
        raise ValueError(
            f"prompts={prompts} of length={length}: must be at least 1, within {len(tokens)} tokens of text"
        )
    texts, continuation = windows(tokens[: prompts * length], length, steps)
    forcing = force(params, [summing()], texts, max_new_tokens=steps, continuation=continuation)
    mass = np.asarray(deque(forcing.steps(1), maxlen=1)[0].state).mean(axis=1) / steps
    if not mass.any():
        raise ValueError(f"length={length}: must have pages between the first {SINK} tokens and the newest {RECENT}")
    return mass


def drawn(shape: tuple[int, int], count: int, seed: int) -> HeadGates:
    """Layer 0's heads and others at random, `count` in all."""
    lots = np.random.default_rng(seed).random(shape, np.float32)
    return HeadGates(np.asarray(hardened(jnp.asarray(lots), count)), record={"ranking": "random", "seed": seed})


def ranked(mass: Float32[np.ndarray, "L K"], count: int, **settings: int) -> HeadGates:
    """Layer 0's heads and the others that put most mass far away, `count` in all."""
    record = {"ranking": "mass", "sink": SINK, "recent": RECENT, **settings}
    return HeadGates(np.asarray(hardened(jnp.asarray(mass), count)), mass, record)


def baselines(params: Params, args: argparse.Namespace) -> Iterator[tuple[str, HeadGates]]:
    """The gates by the names of their files."""
    shape = params.config.num_layers, params.config.num_kv_heads
    count = one_in_eight(*shape) if args.count is None else args.count
    for seed in range(args.random_seeds):
        yield f"random_{seed}", drawn(shape, count, seed)
    sizes = {"prompts": args.prompts, "length": args.length, "steps": args.steps}
    yield "mass", ranked(far_mass(params, text_tokens(params), **sizes), count, **sizes)


def write(args: argparse.Namespace) -> None:
    """Writes the files, prints which heads they name."""
    params = load(args.model)
    shared: dict[str, Any] = {"benchmark": "head_baselines", "environment": describe()}
    shared |= {"model": args.model, "dtype": str(params.dtype)}
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"{'gates':10}  retrieval heads behind layer 0, as layer.head")
    for name, gates in baselines(params, args):
        save(gates._replace(record=shared | dict(gates.record)), args.out / f"{name}{SUFFIX}")
        heads = np.argwhere(gates.retrieval)[gates.retrieval.shape[1] :]
        print(f"{name:10}  {' '.join(f'{layer}.{head}' for layer, head in heads)}", flush=True)


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(prog="python -m bench.head_baselines", description="Write gates nobody trained.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--count", type=int, help="retrieval heads, layer 0's counted (default one in eight)")
    parser.add_argument("--random-seeds", type=int, default=3, help="how many are drawn at random (default 3)")
    parser.add_argument("--prompts", type=int, default=4, help="windows of the text (default 4)")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a window (default 2048)")
    parser.add_argument("--steps", type=int, default=32, help="decode steps at a window's end (default 32)")
    args = parser.parse_args()
    try:
        write(args)
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
