"""Runs the operations of a Mosaic GPU function in numpy, for all threads of a warpgroup.

A value is an array with an element per thread. Shared memory is an array of bytes.
"""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

THREADS = 128
DTYPES = {
    **{f"i{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{"index": np.dtype(np.int64), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)},
    **{"bf16": np.dtype(ml_dtypes.bfloat16), "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn)},
}
NAMES = {np.dtype(np.int8): "i8"} | {dtype: name for name, dtype in DTYPES.items()}


def run(build: Callable[..., list[Any]], arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Returns the results of a function of references to arrays in shared memory.

    Args:
        build: builds the function; gets the references by name.
        arrays: their contents.
    """
    with mlir.make_ir_context(), ir.Location.unknown():
        module = ir.Module.create()
        kinds = [ir.MemRefType.get(x.shape, ir.Type.parse(NAMES[x.dtype])) for x in arrays.values()]
        with ir.InsertionPoint(module.body):

            @func.FuncOp.from_py_func(*kinds)
            def _(*refs):
                return build(dict(zip(arrays, refs, strict=True)))

        block: Any = module.body.operations[0].regions[0].blocks[0]
        starts = np.cumsum([0, *(x.nbytes for x in arrays.values())])
        memory = np.concatenate([x.reshape(-1).view(np.uint8) for x in arrays.values()])
        known: Any = {
            arg: (start, x.shape, x.dtype)
            for arg, start, x in zip(block.arguments, starts, arrays.values(), strict=False)
        }
        for op in block.operations:
            given = [known[value] for value in op.operands]
            if op.operation.name == "func.return":
                return given
            known[op.results[0]] = _result(op, given, memory)
    raise AssertionError("no return")


def _result(op: Any, given: list[Any], memory: np.ndarray) -> Any:
    """Returns the result of an operation."""
    name, kind = op.operation.name, str(op.results[0].type)
    dtype = DTYPES.get(kind)
    if name in SAME:
        return given[0]
    if name in ARITHMETIC:
        return ARITHMETIC[name](*given).astype(given[0].dtype)
    if name == "arith.constant":
        return np.full(THREADS, op.attributes["value"].value).astype(dtype)
    if name in ("gpu.thread_id", "gpu.block_dim"):
        along = str(op.attributes["dimension"]).endswith("x>")
        threads = np.arange(THREADS) if along else np.zeros(THREADS)
        return (threads if name == "gpu.thread_id" else np.full(THREADS, THREADS)).astype(np.int64)
    if name == "llvm.extractvalue":
        first = op.attributes["position"][0] == 1
        return np.full(THREADS, given[0][0] if first else 0, np.uint64)
    if name == "llvm.load":
        return _loaded(memory, given[0], dtype)
    if name == "memref.load":
        (start, shape, stored), *place = given
        at = np.ravel_multi_index([np.asarray(n, np.int64) for n in place], shape)
        return _loaded(memory, start + at * stored.itemsize, stored)
    if name in ("arith.bitcast", "llvm.bitcast"):
        return given[0].view(dtype or np.float16).reshape(THREADS, *([-1] if dtype is None else []))
    if name in ("arith.extsi", "arith.sitofp"):
        signed = given[0].view(f"int{8 * given[0].itemsize}")
        return signed.astype(np.int32).view(np.uint32) if dtype == np.uint32 else signed.astype("f")
    if name in ("arith.extui", "arith.trunci", "arith.index_cast", "arith.extf"):
        return given[0].astype(dtype)
    if name == "arith.truncf":
        return given[0].astype(ml_dtypes.bfloat16)
    if name == "vector.from_elements":
        return np.stack(given, -1)
    if name == "vector.extract":
        return given[0][:, op.attributes["static_position"][0]]
    if name == "llvm.inline_asm":
        return PTX[str(op.attributes["asm_string"].value).split()[0]](*given)
    raise NotImplementedError(str(op))


def _loaded(memory: np.ndarray, at: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns each thread's element of shared memory."""
    size = np.dtype(dtype).itemsize
    at = np.asarray(at, np.int64)
    assert (at % size == 0).all()
    return memory[at[:, None] + np.arange(size)].view(dtype)[:, 0]


def _prmt(first: np.ndarray, second: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Returns the bytes of two words that a selector's four digits choose."""
    sources = np.stack([first, second], 1).view(np.uint8)
    digits = selector[:, None] >> np.arange(0, 16, 4, np.uint32) & 7
    return np.take_along_axis(sources, digits.astype(np.int64), 1).copy().view(np.uint32)[:, 0]


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return x.astype(np.longdouble) * y + z


SAME = {"builtin.unrealized_conversion_cast", "llvm.ptrtoint", "llvm.inttoptr"}
ARITHMETIC = {
    **dict.fromkeys(("arith.addi", "arith.addf", "llvm.add"), np.add),
    **dict.fromkeys(("arith.muli", "arith.mulf", "llvm.mul"), np.multiply),
    **{"arith.subi": np.subtract, "arith.divui": np.floor_divide, "arith.remui": np.remainder},
    **{"arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor},
    **{"arith.shli": np.left_shift, "arith.shrui": np.right_shift},
    **{"arith.negf": np.negative, "math.fma": _fma, "llvm.getelementptr": np.add},
}
PTX = {
    "prmt.b32": _prmt,
    "lop3.b32": lambda x, y, z: (x & y) ^ z,
    "cvt.rn.f16x2.e4m3x2": lambda two: (
        two.view(ml_dtypes.float8_e4m3fn).astype(np.float16).view(np.uint32)
    ),
}
