"""Does every Triton kernel compile for absent GPUs, and with which resources?

The cases of lib/small_cases are traced as on a GPU, and each kernel that they would launch is
compiled to machine code for these architectures: sm_80 (A100), sm_89 (L40S, RTX 4090), sm_90 (H100,
H200), sm_100 (B200), sm_120 (RTX 5090). No GPU is needed, and nothing runs. Mosaic GPU kernels are
not included.

    registers   per thread; at most 255
    stack       bytes per thread that do not fit in registers, or are indexed at run time
    shared      bytes of shared memory per program; more than the architecture has is a failure

    python -m bench.compile_kernels [--arch 80 90] [--only int4_scores ...] [--json PATH]

Needs the package triton: uv run --extra cuda13 (or --with triton).
"""

import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from bench.lib.arguments import report_parser
from bench.lib.environment import describe
from bench.lib.subprocesses import write_report

# per program, by architecture
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
TYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "bool": "i1"} | {
    f"{sign}int{bits}": f"{sign[:1] or ''}i{bits}".replace("ui", "u")
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
CALL = "jsparse.pallas_kernels.triton_call"
MOSAIC = (
    "block_sparse",
    "quantized_product",
    "many_rows_product",
)  # sanitizer ops that run on Mosaic GPU


class Launch(NamedTuple):
    """The inputs of a kernel's compilation.

    Attributes:
        kernel: the function from triton.jit.
        signature: the type of each argument, "constexpr" for constants.
        constants: the constants' values.
        num_warps, num_stages: as for triton_call.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


class Device(NamedTuple):
    """A fake GPU of an architecture, for kernels' Python code that queries the device."""

    compute_capability: str
    platform: str = "gpu"
    core_count: int = 132
    device_kind: str = "none"


@contextmanager
def collecting(launches: list[Launch], arch: int) -> Iterator[None]:
    """Collects launches instead of running them, with a GPU of that architecture emulated."""

    def triton_call(
        *arrays: Any,
        kernel: Any,
        out_shape: Any,
        grid: Any,
        num_warps: int = 4,
        num_stages: int = 3,
        input_output_aliases: Any = None,
        zeroed_outputs: Any = None,
        **constants: Any,
    ) -> Any:
        given = [*arrays, *jax.tree.leaves(out_shape)]
        signature = dict.fromkeys(kernel.arg_names, "constexpr")
        for name, x in zip(kernel.arg_names, given, strict=False):
            kind = "i32" if isinstance(x, int) else f"*{TYPES[jnp.dtype(x.dtype).name]}"
            signature[name] = kind
        launches.append(Launch(kernel, signature, constants, num_warps, num_stages))
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), out_shape)

    with standing_in(triton_call, arch):
        yield


@contextmanager
def standing_in(triton_call: Callable[..., Any], arch: int) -> Iterator[None]:
    """Replaces jax-triton's call, and emulates a GPU of that architecture."""
    stand_in: Any = types.ModuleType(CALL)
    stand_in.triton_call = triton_call
    asked = [
        module
        for name, module in sys.modules.items()
        if name.startswith("jsparse.pallas_kernels") and hasattr(module, "no_triton")
    ]
    device, before = Device(f"{arch // 10}.{arch % 10}"), sys.modules.get(CALL)
    with ExitStack() as stack:
        stack.enter_context(patch.object(jax, "local_devices", lambda: [device]))
        for module in asked:
            stack.enter_context(patch.object(module, "no_triton", lambda: None))
        sys.modules[CALL] = stand_in
        try:
            yield
        finally:
            del sys.modules[CALL]
            if before is not None:
                sys.modules[CALL] = before


def launched(call: Callable[[Any, Any], Any], case: Any, inputs: Any, arch: int) -> list[Launch]:
    """Traces one case of an op without running it, and returns its Triton launches."""
    launches: list[Launch] = []
    with collecting(launches, arch):
        jax.eval_shape(lambda: call(case, inputs))
    return launches


def compiled(launch: Launch, arch: int) -> dict[str, Any]:
    """Compiles a kernel; returns its resources, or its error."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = (i for i, kind in enumerate(launch.signature.values()) if kind.startswith("*"))
    source = ASTSource(
        fn=launch.kernel,
        signature=launch.signature,
        constexprs=launch.constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},  # as in jax-triton
    )
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    try:
        made: Any = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    except Exception as error:  # from Triton, its passes or ptxas: a row of the report
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    tools = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        ran = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    taken = {
        name: int(found[1])
        for name, key in (("registers", "REG"), ("stack", "STACK"))
        if (found := re.search(rf"{key}:(\d+)", ran.stdout + ran.stderr))
    }
    row = taken | {"shared": made.metadata.shared}
    if row["shared"] > SHARED.get(arch, row["shared"]):
        row["error"] = f"takes more shared memory than the {SHARED[arch]} bytes of sm_{arch}"
    return row


def rows_of(ops: dict[str, Any], arches: list[int]) -> Iterator[dict[str, Any]]:
    """Yields a row per op, kernel, set of constants and architecture."""
    for name, op in ops.items():
        for arch in arches:
            known: set[str] = set()
            for case_name, case in op.cases.items():
                for launch in launched(op.call, case, op.build(case), arch):
                    key = repr((launch.kernel.__name__, *launch[1:]))
                    if key in known:
                        continue
                    known.add(key)
                    row = {"op": name, "kernel": launch.kernel.__name__, "case": case_name}
                    yield row | {"arch": arch} | compiled(launch, arch)


def main() -> None:
    """Compiles all kernels and prints a line for each."""
    from bench.lib.small_cases import MOSAIC, OPS

    triton_ops = {name: op for name, op in OPS.items() if name not in MOSAIC}
    parser = report_parser("compile_kernels", "Compile all Triton kernels without a GPU.")
    parser.add_argument("--arch", nargs="+", type=int, choices=SHARED, default=[90])
    parser.add_argument("--only", nargs="+", choices=triton_ops, default=list(triton_ops))
    args = parser.parse_args()
    environment = describe(allow_modified=args.allow_modified)
    table = Table("op", "kernel", "case", "sm", "registers", "stack", "shared", "")
    rows = []
    for row in rows_of({name: triton_ops[name] for name in args.only}, args.arch):
        rows.append(row)
        numbers = (str(row.get(name, "")) for name in ("registers", "stack", "shared"))
        cells = row["op"], row["kernel"], row["case"], str(row["arch"])
        table.add_row(*cells, *numbers, row.get("error", "")[:60])
    settings = {"arch": args.arch, "only": args.only}
    report = {"benchmark": "compile_kernels", "environment": environment, "settings": settings}
    write_report(args.json, report | {"results": rows})
    Console(width=140).print(table)
    failed = sum("error" in row for row in rows)
    print(f"{len(rows)} compiled, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
