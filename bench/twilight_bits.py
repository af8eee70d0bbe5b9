"""How many bits per channel does Twilight's copy of K need?

Keys of whole heads are quantised token by token, asymmetrically, in 2, 4 or 8 bits; the last 32
queries take the fewest tokens that carry p of the estimated mass. SmolLM2 reads windows of the text
of `jsparse eval`; the seven heads of Qwen2.5-0.5B are those that the tests rank tokens with. This
is Figure 6 of Twilight (arXiv:2502.02770), in kind.

    frame       whether keys are kept in the frame of key constants, of these keys themselves
    mass        true share of the attention mass of the tokens taken, mean over query heads and
                queries, and its least hundredth
    tokens      share of the tokens taken, by query head
    bytes       the copy, scale and zero included, relative to K and V in 16 bits

    python -m bench.twilight_bits --json build/twilight_bits.json
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import REPOSITORY, describe
from bench.lib.head_replay import RecordedHeads
from bench.lib.subprocesses import write_report
from bench.lib.text import text_tokens
from bench.page_ranking import PAGE, WINDOW, from_file, recorded
from jsparse.model_facts.constants import mid_and_scale
from jsparse.model_facts.key_constants import (
    SPAN,
    KeyFrame,
    angles_at,
    into_frame,
    scaled_queries,
    span_terms,
)
from jsparse.models.checkpoint import load
from jsparse.models.layers import rope_frequencies
from jsparse.threshold import top_p_mask

LENGTH, PROMPTS = 2048, 4
BITS, THRESHOLDS = (2, 4, 8), (0.85, 0.95)
QWEN, QWEN_THETA = REPOSITORY / "tests/fixtures/keys/qwen2_5_0_5b.npz", 1e6


def rounded(k: Float[Array, "S H"], bits: int) -> Float32[Array, "S H"]:
    """Returns what `bits` bits per channel leave of each token, its least channel being 0."""
    zero = jnp.min(k, axis=-1, keepdims=True)
    step = (jnp.max(k, axis=-1, keepdims=True) - zero) / (2**bits - 1)
    step = jnp.where(step == 0, 1, step)
    return zero + step * jnp.round((k - zero) / step)


@partial(jax.jit, static_argnames=("bits", "framed"))
def shares(
    heads: RecordedHeads, frequencies: Float32[Array, "half"], *, bits: int, framed: bool
) -> dict[str, Float32[Array, "p heads W G"]]:
    """Returns the mass and the share of tokens by p, head, query and query head of the group."""
    positions = jnp.arange(heads.keys.shape[1], dtype=jnp.int32)

    def one(head: RecordedHeads) -> dict[str, Array]:
        (slots, dim), (window, group) = head.keys.shape, head.queries.shape[:2]
        q = head.queries.astype(jnp.float32)
        seen = positions <= (slots - window + jnp.arange(window))[:, None, None]
        true = jnp.where(seen, q @ head.keys.T * dim**-0.5, -jnp.inf)
        if framed:
            asked = q.reshape(1, -1, dim).swapaxes(0, 1)  # each query as a row of its own
            mid, scale = mid_and_scale(head.keys[None], asked, positions, frequencies)
            frame = KeyFrame(mid, scale, angles_at(positions[::SPAN], frequencies))
            k = rounded(into_frame(head.keys[None, None], frame, positions[None, None])[0, 0], bits)
            of_spans = jnp.repeat(span_terms(asked, frame)[:, 0], SPAN, axis=-1)[:, :slots]
            estimate = scaled_queries(asked, frame)[:, 0] @ k.T + of_spans
            estimate = estimate.reshape(window, group, slots)
        else:
            estimate = q @ rounded(head.keys, bits).T
        estimate = jnp.where(seen, estimate * dim**-0.5, -jnp.inf)
        taken = jnp.stack([top_p_mask(jax.nn.softmax(estimate), p) for p in THRESHOLDS])
        mass = jnp.sum(jnp.where(taken, jax.nn.softmax(true), 0.0), axis=-1)
        return {"mass": mass, "tokens": jnp.sum(taken, -1) / jnp.sum(seen, -1)}

    found = jax.lax.map(one, RecordedHeads(heads.keys.astype(jnp.float32), heads.queries))
    return jax.tree.map(lambda x: x.swapaxes(0, 1), found)


def measure(sources: Sequence[RecordedHeads], frequencies: np.ndarray) -> list[dict[str, Any]]:
    """Returns a row per number of bits, frame and p, over equally long sources."""
    rows, dim = [], sources[0].keys.shape[-1]
    for bits in BITS:
        for framed in (False, True):
            found = [shares(heads, frequencies, bits=bits, framed=framed) for heads in sources]
            for nth, p in enumerate(THRESHOLDS):
                mass, tokens = (
                    np.concatenate([np.asarray(of[name][nth]).ravel() for of in found])
                    for name in ("mass", "tokens")
                )
                rows.append(
                    {
                        "bits": bits,
                        "frame": framed,
                        "p": p,
                        "mass": float(mass.mean()),
                        "least_hundredth": float(np.quantile(mass, 0.01)),
                        "tokens": float(tokens.mean()),
                        "bytes": (bits / 8 * dim + 4) / (4 * dim),
                    }
                )
    return rows


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the table."""
    table = Table("model", "p", "bits", "frame", "mass", "least hundredth", "tokens", "bytes")
    for r in rows:
        told = (f"{r['mass']:.4f}", f"{r['least_hundredth']:.3f}")
        cells = f"{r['tokens']:.1%}", f"{r['bytes']:.1%}"
        table.add_row(r["model"], str(r["p"]), str(r["bits"]), str(r["frame"]), *told, *cells)
    return table


def main() -> None:
    """Measures the mass and prints a table."""
    parser = report_parser("twilight_bits", "Measure what bits of the copy of K cost Twilight.")
    parser.add_argument(
        "--length", type=int, default=LENGTH, help=f"tokens per window (default {LENGTH})"
    )
    parser.add_argument(
        "--prompts", type=int, default=PROMPTS, help=f"number of windows (default {PROMPTS})"
    )
    args = parser.parse_args()
    if args.length % PAGE or args.length <= WINDOW or args.prompts < 1:
        parser.error(
            f"--length {args.length}: must be a multiple of {PAGE} above {WINDOW}; --prompts must "
            "be at least 1"
        )
    environment, params = describe(allow_modified=args.allow_modified), load("smollm2")
    tokens = text_tokens(params)
    if args.prompts * args.length > len(tokens):
        parser.error(f"--prompts {args.prompts}: the text has {len(tokens)} tokens")
    starts = range(0, args.prompts * args.length, args.length)
    own = [recorded(params, tokens[start : start + args.length]) for start in starts]
    foreign = from_file(QWEN)
    half = foreign.keys.shape[-1] // 2
    of_foreign = (QWEN_THETA ** -(np.arange(half) / half)).astype(np.float32)
    rows = [
        {"model": model} | row
        for model, sources, frequencies in (
            ("smollm2", own, rope_frequencies(params.config)),
            ("qwen2.5-0.5b", [foreign], of_foreign),
        )
        for row in measure(sources, frequencies)
    ]
    settings = vars(args) | {"json": None, "dtype": str(params.dtype)}
    report = {"benchmark": "twilight_bits", "environment": environment, "settings": settings}
    write_report(args.json, report | {"results": rows})
    Console(width=100).print(table_of(rows))


if __name__ == "__main__":
    main()
