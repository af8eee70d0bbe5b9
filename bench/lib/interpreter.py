"""Runs Triton kernels on a CPU, in Triton's interpreter, instead of jax-triton.

The interpreter runs one program after the other, which would deadlock if programs meet. Each of
those gets a thread, and a Python barrier replaces the counter. Instructions that kernels write in
PTX are emulated in numpy. The process must have started with TRITON_INTERPRET=1.
"""

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from bench.compile_kernels import TYPES, standing_in
from jsparse.pallas_kernels import triton_meeting

AT_ONCE = 64  # threads: more than ever meet
PATIENCE = 300  # timeout in seconds of a program waiting for others, which may have failed
JUNK = 0x7F  # initial bytes of a kernel's outputs


class Argument:
    """An array in the interpreter's form: bytes at an address."""

    def __init__(self, x: Any) -> None:
        self.kind = f"*{TYPES[jnp.dtype(x.dtype).name]}"
        self.shape, self.dtype = x.shape, np.dtype(jnp.dtype(x.dtype))
        self.bytes = np.full(int(np.prod(x.shape)) * self.dtype.itemsize, JUNK, np.uint8)

    def fill(self, x: Any) -> "Argument":
        """Copies an array, and returns itself."""
        self.bytes[:] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        return self

    def array(self) -> jax.Array:
        return jnp.asarray(self.bytes.view(self.dtype).reshape(self.shape))


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
    """Runs the kernel and returns its results."""
    shapes, tree = jax.tree.flatten(out_shape)
    given = [x if isinstance(x, int | float) else Argument(x).fill(np.asarray(x)) for x in arrays]
    made = [Argument(shape) for shape in shapes]
    for nth in zeroed_outputs or ():
        made[nth].bytes[:] = 0
    for source, target in (input_output_aliases or {}).items():
        made[target] = given[source]
    _run(kernel, [*given, *made], constants, (grid,) if isinstance(grid, int) else tuple(grid))
    return jax.tree.unflatten(tree, [each.array() for each in made])


def _run(kernel: Any, given: Sequence[Any], constants: dict[str, Any], grid: tuple) -> None:
    names = kernel.arg_names
    named = dict(zip(names, given, strict=False)) | constants
    scope = interpreter._patch_lang(kernel.fn)
    try:
        run = kernel.rewrite()
        call = {name: x if name in constants else _argument(x) for name, x in named.items()}
        interpreter.interpreter_builder.set_grid_dim(*grid, *[1] * (3 - len(grid)))

        def program(place: tuple[int, ...]) -> None:
            PLACE.at = place[::-1] + (0,) * (3 - len(place))
            run(**call)

        # the first axis varies fastest, as on a GPU
        places = product(*(range(size) for size in grid[::-1]))
        if "meet" in kernel.fn.__globals__:
            _side_by_side(program, list(places))
        else:
            for place in places:
                program(place)
    finally:
        scope.restore()


def _only(x: Any) -> Any:
    """Returns the number in an array of size 1, which numpy does not accept as an index."""
    return x.handle.data.reshape(-1)[0]


def _patch_tensor(tensor: Any, scope: Any) -> None:
    """Patches Triton's tensors as its interpreter does, anew for each called function."""
    PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda x: int(_only(x)))


def _argument(x: Any) -> Any:
    if not isinstance(x, Argument):
        return interpreter._implicit_cvt(x)
    kind, address = tl.str_to_ty(x.kind, None), np.array([x.bytes.ctypes.data], np.uint64)
    return tl.tensor(interpreter.TensorHandle(address, kind), kind)


class _Place(threading.local):
    """The position of a thread's program, which the interpreter stores as a global."""

    at: tuple[int, ...] = (0, 0, 0)


PLACE = _Place()


def _side_by_side(program: Callable[[Any], None], places: Sequence[Any]) -> None:
    """Runs programs in threads, started in order, with a limited number at a time."""
    room, failed = threading.Semaphore(AT_ONCE), []

    def run(place: Any) -> None:
        try:
            program(place)
        except BaseException as error:  # programs that wait for it must not do so forever
            failed.append(error)
            for barrier in BARRIERS.values():
                barrier.abort()
        finally:
            room.release()

    BARRIERS.clear()
    threads = []
    for place in places:
        room.acquire()
        threads.append(threading.Thread(target=run, args=(place,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


BARRIERS: dict[int, threading.Barrier] = {}  # by the address of the programs' counter


def _meet(arrived: Any, meetings: Any, programs: Any) -> Any:
    """Emulates `triton_meeting.meet`, without counting."""
    count = int(getattr(programs, "value", programs))
    if count > 1:
        at = int(_only(arrived))
        BARRIERS.setdefault(at, threading.Barrier(count)).wait(PATIENCE)
    return meetings + 1


class _Results:
    """Results of instructions, in the interpreter's form."""

    def __init__(self, *results: Any) -> None:
        self.get_result = results.__getitem__


def _instructions(_: Any, text: str, __: str, values: Any, kinds: Any, *___: Any) -> _Results:
    given = np.broadcast_arrays(*(value.data for value in values))
    for key, compute in INSTRUCTIONS.items():
        if key in text:
            with np.errstate(all="ignore"):
                made = compute(*given)
            pairs = zip(made if isinstance(made, tuple) else (made,), kinds, strict=True)
            return _Results(*(interpreter.TensorHandle(x, kind.scalar) for x, kind in pairs))
    raise NotImplementedError(f"the interpreter has no emulation of {text}")


def _list_bits(word: Any, first: Any, ids: Any, room: Any, names: Any, shift: Any) -> np.ndarray:
    """Emulates `threshold_select.triton_bits.list_bits`."""
    flat = (x.reshape(-1).tolist() for x in (word, first, ids, room, names, shift))
    for bits, entry, target, left, table, by in zip(*flat, strict=True):
        while bits and left > 0:
            found = entry + (bits & -bits).bit_length() - 1
            if by >= 0:
                run = found >> by
                found += (ctypes.c_int32.from_address(table + 4 * run).value - run) << by
            ctypes.c_int32.from_address(target).value = found
            bits, target, left = bits & (bits - 1), target + 4, left - 1
    return np.zeros(word.shape, np.int32)


def _half(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint16) | 0x6400).view(np.float16)


def _bfloat16s(words: np.ndarray) -> tuple[np.ndarray, ...]:
    numbers = ((words << by) >> 24 for by in (24, 16, 8, 0))
    return tuple(x.astype(jnp.bfloat16).view(np.uint16) for x in numbers)


def _dp4a(words: np.ndarray, others: np.ndarray, kind: str) -> np.ndarray:
    signed, other = (
        np.ascontiguousarray(x)[..., None].view(of).astype(np.int32)
        for x, of in ((words, "i1"), (others, kind))
    )
    return (signed * other).sum(-1, dtype=np.int32)


def _log2(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 2.0**-126, -np.inf, np.log2(x)).astype(np.float32)


# text that identifies an instruction: its emulation in numpy
INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "set.ge.f32.f32": lambda x, t: (x >= t).astype(np.float32),
    "ex2.approx.ftz": lambda x: np.where(x < -126, 0, np.exp2(x)).astype(np.float32),
    "lg2.approx.ftz": _log2,
    "mad.lo.s32": lambda x, by, plus: (x.astype(np.int64) * by + plus).astype(np.int32),
    "brev.b32": _list_bits,
    "fma.rn.bf16x2": _bfloat16s,  # precedes lop3.b32 and prmt.b32, which it also contains
    "lop3.b32": lambda w: tuple(_half(w >> at & m) for at in (0, 8) for m in (0xF, 0xF0)),
    # precedes the one for unsigned bytes, which also contains this one's second instruction
    "dp4a.s32.s32": lambda w, high, low: 256 * _dp4a(w, high, "i1") + _dp4a(w, low, "u1"),
    "dp4a.s32.u32": lambda w, low: _dp4a(w, low, "u1"),
    "prmt.b32": lambda w: (_half(w & 0xFF), _half(w >> 8 & 0xFF)),
}


def _program_id(_: Any, axis: int) -> Any:
    return interpreter.TensorHandle(np.array([PLACE.at[axis]], np.int32), tl.int32)


def _dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Multiplies matrices; the plain interpreter would treat bits of bfloat16 as numbers."""
    wide = (_cast(builder, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
    return DOT(builder, *wide, *rest)


def _cast(builder: Any, x: Any, kind: Any) -> Any:
    """Casts numbers; the plain interpreter truncates to bfloat16, or treats integers as bits."""
    if tl.bfloat16 not in (x.dtype.scalar, kind.scalar):
        return CAST(builder, x, kind)
    given = x.data.view(jnp.bfloat16) if x.dtype.scalar == tl.bfloat16 else x.data
    made = given.astype(np.float32)
    if kind.scalar == tl.bfloat16:
        made = made.astype(jnp.bfloat16).view(np.uint16)
    elif kind.scalar != tl.float32:
        return CAST(builder, interpreter.TensorHandle(made, tl.float32), kind)
    return interpreter.TensorHandle(made, kind.scalar)


CAST, DOT = interpreter.InterpreterBuilder.cast_impl, interpreter.InterpreterBuilder.create_dot
PATCH_TENSOR = interpreter._patch_lang_tensor


@contextmanager
def interpreting() -> Iterator[None]:
    """Makes ops find a GPU that runs kernels in the interpreter."""
    builder = interpreter.InterpreterBuilder
    with standing_in(triton_call, 90), ExitStack() as stack:
        stack.enter_context(jax.disable_jit())
        # modules import it from there on first use
        stack.enter_context(patch.object(triton_meeting, "meet", _meet))
        stack.enter_context(patch.object(interpreter, "_patch_lang_tensor", _patch_tensor))
        stack.enter_context(patch.object(builder, "create_inline_asm", _instructions))
        stack.enter_context(patch.object(builder, "create_get_program_id", _program_id))
        stack.enter_context(patch.object(builder, "create_dot", _dot))
        stack.enter_context(patch.object(builder, "cast_impl", _cast))
        yield
