"""Defines AsyncEngine, an Engine in a separate thread, for asyncio."""

import asyncio
import atexit
import itertools
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from jsparse.engine.errors import EngineError, EngineFull
from jsparse.engine.loading import load_engine
from jsparse.engine.outputs import RequestOutput
from jsparse.engine.request_state import RequestState
from jsparse.engine.runner import choice_of
from jsparse.models.checkpoint import Params
from jsparse.names import ENGINE, takes
from jsparse.policy import AnyPolicy
from jsparse.runtime.request import Request, requests
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.text import prompts

MAX_WAITING = 1024
MAX_STALL_MS = 200.0
STREAMS = 2**20
# seconds between two checks of programs in compilation
POLL_SECONDS = 0.25
CLOSED = "the engine has been closed"


def drawn_seed() -> int:
    """Returns an unpredictable seed."""
    return secrets.randbits(63)


class _Listener:
    """The link between a request and its coroutine; a slow coroutine skips outdated outputs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.ready = asyncio.Event()
        self.state: RequestState | None = None
        self.error: BaseException | None = None
        self.aborted = False


class AsyncEngine:
    """An engine for asyncio: requests can arrive at any time, and their tokens are streamed.

        async with jsparse.AsyncEngine("smollm2", "quest(budget=1024)") as engine:
            async for out in engine.generate("Gravity is", jsparse.SamplingParams(max_tokens=64)):
                print(out.outputs[0].text)

    The engine's thread sleeps while there is no work. Other threads encode prompts, and decode ids
    unless their text must be searched for stop strings.

    Attributes:
        engine: the engine; only its thread may use it.
    """

    @takes(ENGINE, more=load_engine)
    def __init__(
        self,
        model: str | os.PathLike[str] | Params,
        policy: AnyPolicy | str = "dense",
        *,
        max_waiting: int = MAX_WAITING,
        max_stall_ms: float | None = MAX_STALL_MS,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """Loads the model, prepares the engine and starts its thread; arguments are those of LLM.

        Without `seed`, requests without a seed draw differently in every process.

        Raises:
            ValueError: an option is out of its range or is refused, the policy cannot be served, or
                memory does not suffice.
            TypeError: there is no option of that name.
        """
        self.engine = load_engine(
            model, policy, max_waiting=max_waiting, max_stall_ms=max_stall_ms, **options
        )
        self._seed = drawn_seed() if seed is None else seed
        self._streams, self._names = itertools.count(), itertools.count()
        self._inbox: deque[Callable[[], None]] = deque()
        self._listeners: dict[str, _Listener] = {}
        # checks of requests with grammars, which may wait for those of others
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="jsparse-checks")
        self._awake = threading.Condition()
        self._closing = False
        # unfinished calls of `_on_thread`
        self._calls: set[Future[Any]] = set()
        self._paused = False
        # requests that wait for programs in compilation, or for `resume`
        self._waiting, self._max_waiting = 0, max_waiting
        # when the thread started its step; None while it sleeps
        self._began: float | None = None
        self._thread = threading.Thread(target=self._work, name="jsparse-engine", daemon=True)
        self._thread.start()
        # a process that exits while a program runs is aborted
        this = weakref.ref(self)
        atexit.register(lambda: (engine := this()) and engine.close())

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Yields the request's output whenever it has new tokens; the last is `finished`.

        Each output holds everything so far. If you stop iterating early, close the generator
        (`aclose`): that aborts the request.

        Args:
            prompt: text, chat messages or token ids.
            sampling_params: the options; None: the model's defaults.
            request_id: the request's name, for `abort`; None: a new name.

        Raises:
            ValueError: an argument is out of its range.
            EngineFull: too many requests are waiting.
            EngineError: the engine has failed.
        """
        async with aclosing(self.follow(prompt, sampling_params, request_id)) as updates:
            async for state in updates:
                output = state.output()
                if state.metrics.token_times or output.finished:
                    yield output
                if output.finished:
                    return

    async def follow(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[RequestState]:
        """Yields the request's state, from which the caller makes outputs; else like `generate`.

        The state is yielded as soon as the request is accepted, and whenever it has new tokens.
        """
        params, options = self.engine.params, sampling_params or SamplingParams()
        prompt = prompts.plain(prompt)
        name = f"request-{next(self._names)}" if request_id is None else request_id
        listener = _Listener(asyncio.get_running_loop())
        if self._listeners.setdefault(name, listener) is not listener:
            raise ValueError(f"request_id={name!r}: must not be that of a live request")
        try:
            rows, alone = await asyncio.to_thread(prompts.encode, params, prompt)
            if not alone:
                raise ValueError(f"prompt holds {len(rows)} prompts: must be one")
            nth = next(self._streams) if options.seed is None else 0
            # each request has its own random stream; a seed has STREAMS of them
            seed = (self._seed + nth // STREAMS) % 2**63
            check = partial(requests, params, rows, options, self.engine.policy, seed=seed)
            if options.structured_outputs is None and not options.bad_words:
                (request,) = check()
            elif self._closing:
                raise EngineError(CLOSED)
            else:  # a grammar may take seconds to compile
                loop = asyncio.get_running_loop()
                (request,) = await loop.run_in_executor(self._grammars, check)
            request = replace(request, stream=request.stream + nth % STREAMS)
            text = prompt if isinstance(prompt, str) else None
            del prompt, rows  # the request has them as an array
            await self._admitted(request, listener)
            self._call_on_thread(lambda: self._add(request, name, text, listener))
            finished = False
            while not finished:
                await listener.ready.wait()
                listener.ready.clear()
                if listener.error is not None:
                    raise listener.error
                assert listener.state is not None
                finished = listener.state.finished
                yield listener.state
        finally:
            with suppress(EngineError):
                self._call_on_thread(lambda: self._leave(name, listener))

    async def _admitted(self, request: Request, listener: _Listener) -> None:
        """Waits while the engine is paused or asleep, or a request's programs are in compilation.

        Otherwise the request would stall all others until its programs are ready.

        Raises:
            EngineFull: too many requests are waiting.
            ValueError: the programs for log-probabilities of prompts cannot be compiled.
        """
        programs = self.engine.programs
        scored = request.sampling.prompt_logprobs is not None

        def must_wait() -> bool:
            held = self._paused or self.engine.asleep
            return held or programs.coming(choice_of(request), scored=scored)

        if not must_wait():
            return
        if scored:
            self._call_on_thread(programs.expect_scored)
        if self._waiting >= self._max_waiting:
            raise EngineFull(
                f"{self._waiting} requests wait: must be at most max_waiting={self._max_waiting}"
            )
        self._waiting += 1
        try:
            while self.alive and not listener.aborted and must_wait():
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self._waiting -= 1

    async def abort(self, request_id: str) -> None:
        """Aborts a request in any phase; its generator yields the output so far and ends."""
        self._call_on_thread(lambda: self._abort(request_id))

    async def pause(self, *, abort: bool = False) -> None:
        """Holds new requests back until `resume`, and returns once running ones are finished.

        With `abort`, running requests are aborted instead. If it is cancelled, requests begin
        again.
        """
        self._paused = True
        try:
            if abort:
                await self._on_thread(self._abort_running)
            while await self._on_thread(lambda: self.engine.unfinished):
                await asyncio.sleep(POLL_SECONDS / 10)
        except BaseException:  # a pause that is cancelled must not hold requests for ever
            self._paused = False
            raise

    def _abort_running(self) -> None:
        for name, each in [*self._listeners.items()]:
            if each.state is not None:
                self._abort(name)

    async def resume(self) -> None:
        """Lets requests begin again."""
        self._paused = False

    async def update_weights(self, params: Params) -> None:
        """Continues with other weights; see `Engine.update_weights`.

        Raises ValueError while requests are unfinished: `pause` first.
        """
        await self._on_thread(lambda: self.engine.update_weights(params))

    async def sleep(self) -> None:
        """Frees K and V until `wake_up`; see `Engine.sleep`. New requests wait until then.

        Raises ValueError while requests are unfinished: `pause` first.
        """
        await self._on_thread(self.engine.sleep)

    async def wake_up(self) -> None:
        """Allocates what `sleep` has freed."""
        await self._on_thread(self.engine.wake_up)

    @property
    def alive(self) -> bool:
        """Whether requests are accepted: the engine has neither failed nor been closed."""
        return self.engine.error is None and not self._closing

    @property
    def busy_seconds(self) -> float:
        """The seconds for which the thread has been running one step, compilation included.

        It is 0 while there is no work. Only this shows that a device hangs.
        """
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def fail(self, why: str) -> None:
        """Ends all requests with an EngineError at once; any thread may call it.

        It does not wait for programs: they never end if another process of the model is lost.
        """
        with self._awake:
            self._closing = True
            self._awake.notify()
        self._fail(EngineError(why))

    def close(self) -> None:
        """Ends all requests and the thread; later calls get an EngineError."""
        with self._awake:
            self._closing = True
            self._awake.notify()
        self._grammars.shutdown(wait=False)
        self._thread.join()

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    async def _on_thread[Result](self, call: Callable[[], Result]) -> Result:
        """Calls a function in the engine's thread between two steps, and returns its result."""
        future = Future[Any]()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.add(future)
        try:
            self._call_on_thread(run)
            return await asyncio.wrap_future(future)
        finally:
            self._calls.discard(future)

    def _call_on_thread(self, call: Callable[[], None]) -> None:
        with self._awake:
            if self._closing:
                raise EngineError(CLOSED)
            self._inbox.append(call)
            self._awake.notify()

    def _work(self) -> None:
        """Runs in the engine's thread."""
        error: BaseException = EngineError(CLOSED)
        try:
            while self._turn():
                pass
        except BaseException as unforeseen:
            error = EngineError(f"the engine's thread has failed: {unforeseen!r}")
            raise
        finally:
            with self._awake:
                self._closing = True
            self._fail(error)
            if self.engine.error is None:
                self.engine.settle()

    def _turn(self) -> bool:
        """Handles queued calls, then runs one engine step; returns whether work is left."""
        with self._awake:
            self._began = None
            while not (self._inbox or self._closing or self._busy):
                self._awake.wait()
            calls = list(self._inbox)
            self._inbox.clear()
            if self._closing:
                return False
            self._began = time.monotonic()
        for call in calls:
            call()
        if self._busy:
            try:
                self._spread(self.engine.step())
            except EngineError as error:
                self._fail(error)
        return True

    @property
    def _busy(self) -> bool:
        return self.engine.error is None and not self.engine.idle

    def _add(self, request: Request, name: str, text: str | None, listener: _Listener) -> None:
        try:
            listener.state = self.engine.add(request, request_id=name, prompt=text)
        except Exception as error:
            listener.error = error
        self._wake([listener])
        if listener.aborted:
            self._abort(name)

    def _abort(self, name: str) -> None:
        listener = self._listeners.get(name)
        if listener is None:
            return
        listener.aborted = True
        state = self.engine.abort(name)
        if state is not None:
            listener.state = state
            self._wake([listener])

    def _leave(self, name: str, listener: _Listener) -> None:
        """Forgets a request whose coroutine has ended, and aborts it if it is unfinished."""
        if self._listeners.get(name) is listener:
            self.engine.abort(name)
            del self._listeners[name]

    def _spread(self, updates: list[RequestState]) -> None:
        """Wakes the coroutines whose requests have new tokens."""
        group = []
        for state in updates:
            listener = self._listeners.get(state.request_id)
            if listener is not None:
                listener.state = state
                group.append(listener)
        self._wake(group)

    def _fail(self, error: BaseException) -> None:
        listeners = list(self._listeners.values())
        for listener in listeners:
            listener.error = error
        self._wake(listeners)
        for future in [*self._calls]:
            with suppress(InvalidStateError):  # it has a result, or was cancelled
                future.set_exception(error)

    def _wake(self, listeners: list[_Listener]) -> None:
        """Wakes coroutines with one call per event loop, not one per token."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Listener]] = {}
        for listener in listeners:
            by_loop.setdefault(listener.loop, []).append(listener)
        for loop, group in by_loop.items():
            with suppress(RuntimeError):  # the loop and its coroutines have been closed
                loop.call_soon_threadsafe(lambda group=group: [each.ready.set() for each in group])
