"""Compiles programs, stores them on disk so that the next process starts fast, and counts them."""

import hashlib
import inspect
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from io import BytesIO
from threading import Event, Lock, Thread, get_native_id, local
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from jsparse.machine.folders import cache_folder, distrust
from jsparse.machine.jax_settings import own_settings
from jsparse.runtime.spread_programs import SHARDED, on_ranks
from jsparse.runtime.stored import ProgramStore, Stored, packed, settings, unpacked

# The commands that a GPU runs as a graph: XLA's default, plus loops and branches. Otherwise the
# host waits in the middle of a program for each trip count or condition computed on the device, and
# cannot dispatch the next program. These options cannot add to the default;
# XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE --xla_dump_to=… writes it to a file.
COMPILER_OPTIONS = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL"
    )
}
# for programs of several processes, which one process compiles without waiting for the others
COMPILES_ALONE = {"xla_gpu_shard_autotuning": False}
# nice value of compile threads, so that the tracing thread is not starved
YIELDING = 10

logger = logging.getLogger("jsparse.programs")
_traced = 0
_store: ProgramStore | None = None
# jax's settings in other threads, last seen value; see `_as_elsewhere`
_elsewhere: tuple[Any, ...] = ()


def _yield_to_others() -> None:
    """Lowers the priority of this thread and of the threads that it starts."""
    if sys.platform == "linux":  # on other systems the priority is the process's
        thread = get_native_id()
        with suppress(OSError):
            lower = max(YIELDING, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, lower)


# half the CPUs, from 4 to 8
_compilers = ThreadPoolExecutor(
    min(8, max(4, (os.cpu_count() or 1) // 2)),
    thread_name_prefix="jsparse-compile",
    initializer=_yield_to_others,
)


@cache
def _tracers() -> ThreadPoolExecutor:
    """Returns the threads that trace and lower programs.

    That is Python, which threads do not speed up, except on a GPU, where half of it is Triton
    compiling kernels in C++.
    """
    return ThreadPoolExecutor(
        2 if jax.default_backend() == "gpu" else 1, thread_name_prefix="jsparse-trace"
    )


# programs to trace, in order; those that a caller waits for come first
_to_trace: deque[Callable[[], None]] = deque()


# set at exit: queued programs are not compiled, finished ones are still stored
_ending = Event()
# runs before the function of concurrent.futures that waits for queued work
threading._register_atexit(_ending.set)  # pyright: ignore[reportAttributeAccessIssue]
# programs being compiled, by all inputs that determine the result
_compiling: "dict[Any, Future[_Compiled]]" = {}
# compiled programs in use, by the same key
_in_use: "WeakValueDictionary[Any, Any]" = WeakValueDictionary()
_changing = Lock()
# whether the thread's last program came from jax's cache
_cached = local()
# the seconds that the thread has waited for programs
_waits = local()


class _Call(NamedTuple):
    """The arguments of a program.

    Attributes:
        given: all arguments.
        static: the static ones, by name.
        args, kwargs: the others.
        key: the key of the program for these arguments.
        plain: whether jax's settings are the same in other threads, so that these may compile it.
        storable: whether, in addition, the arguments are on the devices that a stored program
            expects.
    """

    given: inspect.BoundArguments
    static: dict[str, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    key: Any
    plain: bool
    storable: bool


class Sendable(NamedTuple):
    """A program for devices of several processes, with its packed form for `Program.unpacked`."""

    program: Callable[..., Any]
    data: bytes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program."""
        return self.program(*args, **kwargs)


class _Compiled(NamedTuple):
    """A compiled program, and whether it may be stored."""

    program: Callable[..., Any]
    storable: bool


class Program:
    """A jitted function that can be compiled ahead and stored on disk.

    It is compiled with COMPILER_OPTIONS, so that a GPU runs it without the host. Another program
    cannot call it, but can call its function: `inlined(it)`. With `keep_compilations`, a program
    that an earlier process has stored is neither traced nor compiled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        sharded: Collection[str] = (),
        out: Any = SHARDED,
        mesh: Mesh | None = None,
        **options: Any,
    ) -> None:
        """Creates a program; nothing is compiled yet.

        Args:
            function: the function to compile.
            sharded: the names of the arguments that are sharded if the model is spread over ranks;
                `on` returns the program for these.
            out: SHARDED or REPLICATED, for each of that program's results.
            mesh: the devices that it runs on; None: the default device. It is stored only if these
                are the first devices of their processes.
            options: jax.jit's; those that take argument numbers must be given by name.
        """
        self.__wrapped__, self.__doc__ = function, function.__doc__
        self._of_several = mesh is not None and mesh.is_multi_process
        compiler_options = COMPILER_OPTIONS | (COMPILES_ALONE if self._of_several else {})
        self._jitted = jax.jit(function, compiler_options=compiler_options, **options)
        self._options, self._signature = options, inspect.signature(function)
        names = options.get("static_argnames", ())
        self._static = {names} if isinstance(names, str) else set(names)
        self._made: dict[Any, Future[Callable[..., Any]]] = {}
        self._mesh, self._sharded, self._out = mesh, sharded, out
        self._first = mesh is None or _are_first(mesh)
        self._spread: dict[Mesh, Program] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program."""
        call = None if _store is None else self._call(args, kwargs)
        if call is not None and call.storable:
            return when_made(self._begin(call, urgent=True))(*call.args, **call.kwargs)
        known, began = self._cache_size(), time.perf_counter()
        results = self._jitted(*args, **kwargs)
        if self._cache_size() != known:
            _add_wait(time.perf_counter() - began)
        return results

    def on(self, mesh: Mesh | None) -> "Program":
        """Returns the program for a model that is spread over these devices; None: one device."""
        if mesh is None:
            return self
        if mesh not in self._spread:
            body = on_ranks(self.__wrapped__, mesh, self._sharded, self._static, self._out)
            self._spread[mesh] = Program(body, mesh=mesh, **self._options)
        return self._spread[mesh]

    def ahead(self, *args: Any, **kwargs: Any) -> Future[Callable[..., Any]]:
        """Starts compiling for these arguments, or shapes, and returns at once.

        The result is called with the non-static arguments. Calling the program itself with the same
        arguments then does not compile again. Several programs compile concurrently, identical ones
        only once.
        """
        return self._begin(self._call(args, kwargs))

    def unpacked(self, data: bytes, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Returns a program that another process has compiled for these arguments, or shapes."""
        call = self._call(args, kwargs)
        return unpacked(data, (call.args, call.kwargs), self._devices)

    def among(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of these arguments that the function has, by name."""
        taken = self._signature.parameters
        return {name: value for name, value in arguments.items() if name in taken}

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the program; see `lower` of a jitted function."""
        return self._jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the shapes of the results; see `eval_shape` of a jitted function."""
        return self._jitted.eval_shape(*args, **kwargs)

    def _cache_size(self) -> int:
        return self._jitted._cache_size()  # pyright: ignore[reportAttributeAccessIssue]

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        bound = self._signature.bind(*args, **kwargs)
        static = {name: bound.arguments[name] for name in self._static & bound.arguments.keys()}
        names = list(bound.arguments)[: len(bound.args)]
        args = tuple(
            x for name, x in zip(names, bound.args, strict=True) if name not in self._static
        )
        kwargs = {name: x for name, x in bound.kwargs.items() if name not in self._static}
        leaves, structure = jax.tree.flatten((args, kwargs))
        shapes = tuple(map(_shape, leaves))
        plain = _as_elsewhere()
        key = tuple(sorted(static.items())), structure, shapes, _elsewhere
        storable = plain and self._in_place({shape[-1] for shape in shapes})
        return _Call(bound, static, args, kwargs, key, plain, storable)

    @property
    def _devices(self) -> list[Any]:
        """The devices that it runs on; without a mesh, those of a stored program."""
        return jax.local_devices()[:1] if self._mesh is None else [*self._mesh.devices.flat]

    def _in_place(self, places: Collection[jax.sharding.Sharding | None]) -> bool:
        """Returns whether arguments with these shardings are where a stored program expects them.

        None stands for the default device, and for arrays on the host, which are copied to it.
        """
        if self._mesh is None:
            return all(place is None for place in places)
        meshes = (getattr(place, "mesh", None) for place in places if place is not None)
        return self._first and all(mesh == self._mesh for mesh in meshes)

    def _begin(self, call: _Call, *, urgent: bool = False) -> Future[Callable[..., Any]]:
        made = self._made.get(call.key) if call.plain else None
        if made is not None and not made.cancelled():
            return made
        made = Future()
        if not call.plain:
            self._make(call, made, urgent)
            return made
        _compilers.submit(self._make, call, made, urgent)
        if _store is not None:
            self._made[call.key] = made
        return made

    @own_settings()
    def _make(self, call: _Call, made: Future[Callable[..., Any]], urgent: bool) -> None:
        """Loads a program from disk, or queues it for tracing, before others if it is urgent."""
        if _ending.is_set():
            made.cancel()
        if made.cancelled():
            return
        try:
            name, stored = self._stored(call)
            if stored is not None:
                note_trace()
                if made.set_running_or_notify_cancel():
                    made.set_result(Sendable(*stored) if self._of_several else stored.program)
            elif call.plain:
                trace = partial(self._trace, call, made, name)
                _to_trace.appendleft(trace) if urgent else _to_trace.append(trace)
                _tracers().submit(lambda: _to_trace.popleft()())
            else:
                self._trace(call, made, name)
        except BaseException as error:
            made.set_exception(CancelledError() if _ending.is_set() else error)

    @own_settings()
    def _trace(self, call: _Call, made: Future[Callable[..., Any]], name: str | None) -> None:
        """Traces a program and queues it for compilation, unless it was cancelled."""
        if _ending.is_set():
            made.cancel()
        if not made.set_running_or_notify_cancel():
            return
        try:
            lowered = self.lower(*call.given.args, **call.given.kwargs)
            # the program's text does not contain the devices
            of = self, settings(), tuple(shape[-1] for shape in call.key[2])
            finish = partial(_finish, made, name, self._of_several)
            if call.plain:
                _compilers.submit(_compile, lowered, of, finish)
            else:
                _compile(lowered, of, finish)
        except BaseException as error:
            made.set_exception(CancelledError() if _ending.is_set() else error)

    def _stored(self, call: _Call) -> tuple[str | None, Stored | None]:
        """Returns the name of a program on disk, if it may be stored, and the stored program."""
        if _store is None or not call.storable:
            return None, None
        processes = [device.process_index for device in self._devices]
        form = (self._options, COMPILER_OPTIONS, str(self._mesh), processes)
        name = _store.key(self.__wrapped__, (call.static, form), call.key[1:3])
        if name is None:
            return None, None
        return name, _store.get(name, (call.args, call.kwargs), self._devices)


@own_settings()
def _compile(lowered: Any, of: Any, finish: "Callable[[Future[_Compiled]], None]") -> None:
    """Compiles a program, or waits for an identical one, and calls `finish` with the result."""
    if _ending.is_set():
        return
    _compiled(lowered, of).add_done_callback(finish)


def _compiled(lowered: Any, of: Any = None) -> "Future[_Compiled]":
    """Compiles a program, or returns the future of an identical one that has been compiled.

    `of`: the other parts of their key. Different static arguments often give the same program, for
    example policies in a program that ignores the policy.
    """
    # as bytecode, which has equal kernels once: text of 10 MB takes a second
    lowered.compiler_ir().operation.write_bytecode(module := BytesIO())
    digest = hashlib.sha256(module.getbuffer()).digest()
    # the text lacks unused arguments, whose shapes a call is checked against as well
    shapes = tuple(jax.tree.leaves(lowered.in_avals))
    form = of, digest, shapes, lowered.in_tree, lowered.out_tree
    with _changing:
        job = _compiling.get(form)
        if job is not None:
            return job
        job = Future()
        if (compiled := _in_use.get(form)) is not None:
            job.set_result(_Compiled(compiled, storable=True))
            return job
        _compiling[form] = job
    _cached.hit = False
    try:
        compiled = lowered.compile()
    except BaseException as error:
        job.set_exception(error)
    else:
        # on a CPU, a program from jax's cache cannot be stored: it lacks its functions' code
        lost = _cached.hit and jax.default_backend() == "cpu"
        if not lost:
            _in_use[form] = compiled
        job.set_result(_Compiled(compiled, storable=not lost))
    finally:
        with _changing:
            del _compiling[form]
    return job


def _finish(
    made: Future[Callable[..., Any]],
    name: str | None,
    of_several: bool,
    job: "Future[_Compiled]",
) -> None:
    """Publishes a compiled program, packed for other processes if there are any, and stores it."""
    error = job.exception()
    if error is not None:
        made.set_exception(error)
        return
    compiled, storable = job.result()
    if of_several:
        try:
            compiled = Sendable(compiled, packed(compiled))
        except Exception as error:
            failure = ValueError(f"a program cannot be sent to other processes: {error!r}")
            failure.__cause__ = error
            made.set_exception(failure)
            return
    made.set_result(compiled)
    if _store is not None and name is not None and storable:
        with suppress(RuntimeError):  # the process is exiting
            _compilers.submit(_store.put, name, compiled)


def program(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Turns a function into a Program; used as a decorator, with jax.jit's options."""
    return partial(Program, **options) if function is None else Program(function, **options)


def _shape(x: Any) -> tuple[Any, ...]:
    """Returns the key of an argument: shape, type, and its sharding unless it is the default."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return x.shape, x.dtype, False, None if x.sharding == _default_place() else x.sharding
    known = jax.typeof(x)
    place = x.sharding if isinstance(x, jax.Array) and x.sharding != _default_place() else None
    return known.shape, known.dtype, known.weak_type, place


def _are_first(mesh: Mesh) -> bool:
    """Returns whether a mesh has the first devices of its processes, in their order."""
    devices = [*mesh.devices.flat]
    counts = Counter(device.process_index for device in devices)
    by_process = {nth: [x for x in jax.devices() if x.process_index == nth] for nth in counts}
    return devices == [x for nth in sorted(counts) for x in by_process[nth][: counts[nth]]]


def _note_hit(event: str, **_: Any) -> None:
    _cached.hit = event == "/jax/compilation_cache/cache_hits" or getattr(_cached, "hit", False)


jax.monitoring.register_event_listener(_note_hit)


def _as_elsewhere() -> bool:
    """Returns whether jax's settings, some of which are per thread, are the same in other threads.

    They differ within `with jax.default_matmul_precision(…)` and similar contexts. Other threads
    compile under `own_settings`.
    """
    global _elsewhere
    here = settings()
    if here != _elsewhere:
        found = []
        thread = Thread(target=own_settings()(lambda: found.append(settings())))
        thread.start()
        thread.join()
        (_elsewhere,) = found
    return here == _elsewhere


@cache
def _default_place() -> jax.sharding.Sharding:
    return SingleDeviceSharding(jax.local_devices()[0])


def inlined(made: Any) -> Callable[..., Any]:
    """Returns the function of a `program`, for use in another program."""
    return made.__wrapped__


def when_made[Made](program: Future[Made]) -> Made:
    """Returns a program once it is compiled or loaded from disk; `waited` counts the time."""
    if program.done():
        return program.result()
    began = time.perf_counter()
    try:
        return program.result()
    finally:
        _add_wait(time.perf_counter() - began)


def waited() -> float:
    """Returns the seconds that this thread has waited for programs so far."""
    return getattr(_waits, "seconds", 0.0)


def clock() -> float:
    """Returns a time in seconds that excludes this thread's waits for programs."""
    return time.perf_counter() - waited()


def _add_wait(seconds: float) -> None:
    _waits.seconds = waited() + seconds


def note_trace() -> None:
    """Counts a program; call it in the program's body, which runs only when it is traced.

    A program that is loaded from disk also counts.
    """
    global _traced
    _traced += 1


def traces() -> int:
    """Returns the number of programs traced, or loaded from disk, so far."""
    return _traced


def keep_compilations() -> None:
    """Stores programs for later processes, if a cache folder exists.

    They are not stored if the user has set up jax's own cache already.

    Programs are stored in `cache_folder`, under programs; jax's compilation cache, for everything
    else, is next to them, under jax.
    """
    global _store
    if _store is not None or jax.config.jax_compilation_cache_dir is not None:
        return
    if jax.config.jax_disable_jit:
        return
    try:
        folder = cache_folder()
    except FileNotFoundError:
        return
    _store = ProgramStore(folder / "programs")
    folder /= "jax"
    with suppress(OSError):  # jax warns if it cannot write
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := distrust(folder):
        logger.warning("jax's programs in %s are not used: %s", folder, reason)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
