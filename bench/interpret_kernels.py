"""Does every Triton kernel match its reference, in Triton's interpreter on a CPU?

The cases of lib/small_cases run without a GPU and are compared with plain JAX. Numbers may differ
by 1/256 of the largest of their row, which is a rounding of bfloat16, or by a few roundings of
their own type; integers must be equal. Programs that meet use Python barriers. Nothing is compiled,
so a kernel may still fail to compile, which `bench.compile_kernels` checks.

    python -m bench.interpret_kernels [--only threshold_select ...] [--cases top_k_long ...]

Needs the packages triton and jax-triton: uv run --extra cuda13, or without a GPU --with
'triton>=3.6,<3.7' --with jax-triton; later interpreters differ.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from bench.lib.arguments import recording_parser
from jsparse.pallas_kernels import dispatch

INTERPRET = "TRITON_INTERPRET"  # read when kernels are defined
APART, ROUNDINGS = 2.0**-8, 4


def main() -> None:
    """Prints a line for each case; the exit status is 1 if any differs or fails."""
    from bench.lib.small_cases import MOSAIC, OPS

    ops = {name: op for name, op in OPS.items() if name not in MOSAIC}
    parser = recording_parser("interpret_kernels", "Run the Triton kernels in the interpreter.")
    parser.add_argument("--only", nargs="+", choices=ops, default=list(ops))
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="only cases with these names")
    args = parser.parse_args()
    if os.environ.get(INTERPRET) != "1":
        again = [sys.executable, "-m", "bench.interpret_kernels", *sys.argv[1:]]
        sys.exit(subprocess.run(again, env=os.environ | {INTERPRET: "1"}, check=False).returncode)
    failed = 0
    for name in args.only:
        for case_name, case in ops[name].cases.items():
            if args.cases is None or case_name in args.cases:
                began = time.perf_counter()
                wrong = compared(ops[name], case)
                failed += wrong is not None
                took = time.perf_counter() - began
                print(
                    f"{name}, {case_name}: {wrong or 'as the reference'}, {took:.1f} s", flush=True
                )
    sys.exit(failed > 0)


def compared(op: Any, case: Any) -> str | None:
    """Returns the differences of a case's results from its reference's, or None."""
    from bench.lib.interpreter import interpreting

    try:
        with interpreting():
            got = op.call(case, op.build(case))
        with by_reference():
            wanted = op.call(case, op.build(case))
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    for at, (one, other) in enumerate(
        zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    ):
        if (apart := difference(np.asarray(one), np.asarray(other))) is not None:
            return f"result {at} differs: {apart}"
    return None


@contextmanager
def by_reference() -> Iterator[None]:
    """Makes ops that name another backend run their reference."""

    def run(op: str, _: Any, backends: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatch.run(op, "reference", backends, *args, **kwargs)

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("jsparse.pallas_kernels") and hasattr(module, "BACKENDS"):
                stack.enter_context(patch.object(module, "run", run))
        yield


def difference(got: np.ndarray, wanted: np.ndarray) -> str | None:
    """Returns where and how far two arrays differ, or None."""
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
        return f"{got.dtype}{list(got.shape)} for {wanted.dtype}{list(wanted.shape)}"
    if not jnp.issubdtype(wanted.dtype, jnp.floating):
        wrong = got != wanted
    else:
        step = max(APART, ROUNDINGS * float(jnp.finfo(wanted.dtype).eps))
        got, wanted = got.astype(np.float64), wanted.astype(np.float64)
        finite = np.isfinite(wanted)
        size = np.abs(np.where(finite, wanted, 0)).max(axis=-1, keepdims=True, initial=0)
        with np.errstate(invalid="ignore"):
            near = np.abs(got - wanted) <= step * size
        wrong = ~np.where(finite, near, (got == wanted) | (np.isnan(got) & np.isnan(wanted)))
    if not wrong.any():
        return None
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{wrong.sum()} of {wrong.size}, at first {list(first)}: {got[first]} for {wanted[first]}"
    )


if __name__ == "__main__":
    main()
