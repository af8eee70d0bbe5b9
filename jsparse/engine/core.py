"""Defines Engine: requests are added and aborted at any time, and `step` works on all of them."""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import jax

from jsparse.engine import setup
from jsparse.engine.errors import EngineError, EngineFull
from jsparse.engine.follower import LeaderPrograms, agree, follow_and_exit
from jsparse.engine.latency_model import LatencyModel
from jsparse.engine.new_weights import converted_to
from jsparse.engine.options import EngineOptions
from jsparse.engine.outputs import RequestMetrics
from jsparse.engine.programs import Programs
from jsparse.engine.request_state import Counters, RequestState, policy_of
from jsparse.engine.runner import PendingResults, Runner
from jsparse.engine.scheduler import Scheduler
from jsparse.engine.sizes import SamplingMode
from jsparse.engine.step_plan import DecodePlan, SequenceState
from jsparse.machine import processes
from jsparse.machine.jax_settings import own_settings
from jsparse.models.checkpoint import Params, require_params
from jsparse.policies.sparse_prefill import with_prefill
from jsparse.policy import AnyPolicy
from jsparse.runtime.collecting import OutputBuilder
from jsparse.runtime.compilation import keep_compilations
from jsparse.runtime.program_set import ProgramKey
from jsparse.runtime.request import Request

# the number of steps and chunks that may stay in flight after a call of `step`
LAG = 2
# `step` does not wait for in-flight work of fewer milliseconds: the device would run idle
AHEAD_MS = 50

logger = logging.getLogger("jsparse.engine")


class Engine:
    """A continuous-batching engine: requests join when there is room and leave when they finish.

    With `batch_invariant`, a request gets the same bits in any batch and any slot, and whether or
    not its prefix is cached. Only one thread may use an engine; see AsyncEngine and LLM.

    Attributes:
        policy: the policy that decodes.
        sizes: the static sizes.
        scheduler: the scheduler, with all unfinished sequences.
        programs: the compiled programs.
        counters: counts and times of the work so far.
        per_request: the names of the hyper-parameters that requests may set.
        error: the error that made the engine fail, or None.
        asleep: whether its K and V are freed, until `wake_up`.
    """

    @own_settings()
    def __init__(
        self,
        params: Params,
        policy: AnyPolicy | str = "dense",
        options: EngineOptions | None = None,
    ) -> None:
        """Allocates the memory and compiles the programs.

        If several processes run the model, all but process 0 work for its engine here, and exit
        when it does.

        Args:
            params: a model that `jsparse.load` returned.
            policy: the policy or its expression.
            options: None: the defaults.

        Raises:
            ValueError: the policy cannot be served, or memory does not suffice.
        """
        options = options or EngineOptions()
        keep_compilations()
        require_params(params)
        link = None if params.mesh is None else processes.link()
        if link is not None and link.works:
            raise ValueError(
                f"params={params!r} has an engine: must have only one if several processes run "
                "the model"
            )
        spec = setup.engine_spec(params, with_prefill(policy, options.prefill), options)
        self._link, self._options = link, options
        self.params, self.policy = params, spec.policy
        self.spec, self.sizes = spec.cache, spec.sizes
        self._latency = LatencyModel(params.config, spec.sizes)
        rules = setup.rules(spec, share=options.enable_prefix_caching)
        self.programs = self._programs_of(spec, link, check_ranks=options.check_ranks)
        usable = self.programs.usable_rows, self._can_run
        self.scheduler = Scheduler(self.sizes, rules, self._latency, *usable)
        self.per_request, self._clock = spec.knobs, time.perf_counter
        new, prepare = [], options.prepare
        if prepare or (prepare is None and jax.default_backend() == "gpu"):
            choices: list[SamplingMode] = ["sampled"]
            if prepare == "logprobs":
                choices.append("top")
            # compiling all takes a minute on a CPU; requests need only the first of them
            new = self.programs.prepare(choices, wait=jax.default_backend() == "gpu")
        else:
            self.programs.require_evictable()
        self._live: dict[int, tuple[RequestState, SequenceState, OutputBuilder]] = {}
        self._requests: dict[str, RequestState] = {}
        self._numbers, self._names = itertools.count(), itertools.count()
        self._in_flight: deque[PendingResults] = deque()
        self._taken = -math.inf  # when the last results arrived
        self.counters = Counters()
        self.error: BaseException | None = None
        self.asleep = False
        self._runner = Runner(spec, self.programs, lambda number: self._live[number][2])
        self._warm_up(new)

    def _programs_of(
        self, spec: setup.EngineSpec, link: processes.Link | None, *, check_ranks: bool
    ) -> Programs:
        """Returns the programs; a follower process runs the leader's commands and never returns."""
        if link is None and not check_ranks:
            return Programs(spec, self.params)
        link = link or processes.Link(0, ())
        agree(spec, self.params, link, check_ranks=check_ranks)
        link.works = True
        if link.index:
            follow_and_exit(spec, self.params, link, check_ranks=check_ranks)
        return LeaderPrograms(spec, self.params, link, check_ranks=check_ranks)

    @own_settings()
    def prepare(self, choices: Sequence[SamplingMode], *, all_rows: bool = False) -> None:
        """Compiles programs as `Programs.prepare` does, and runs each of them once on a GPU."""
        self._require_awake()
        self._warm_up(self.programs.prepare(choices, all_rows=all_rows))

    def _can_run(self, rows: int, seqs: list[int], drafts: int | None = None) -> bool:
        return self.programs.can_run(rows, self._runner.sampling_mode(seqs), drafts=drafts)

    def _warm_up(self, programs: Sequence[ProgramKey]) -> None:
        if jax.default_backend() == "gpu":
            self._runner.warm_up(programs)

    @property
    def idle(self) -> bool:
        """Whether no work is left."""
        return self.scheduler.idle and not self._in_flight

    @property
    def kv_host_bytes(self) -> int:
        """The bytes of K and V in host memory: those of all sequences, or of blocks."""
        if self.sizes.tail_tokens:
            return self.spec.nbytes
        return self.scheduler.pool.used_places * self.block_bytes

    @property
    def block_bytes(self) -> int:
        """The bytes of K and V of a block."""
        pages = self.sizes.block_groups * self.spec.num_kv_heads
        return self.spec._replace(pool_pages=pages).nbytes

    def check(self, request: Request) -> None:
        """Raises the errors that `add` would raise.

        Raises:
            EngineError: the engine has failed.
            EngineFull: too many requests are waiting.
            ValueError: the request cannot be served, or the engine is asleep.
        """
        if self.error is not None:
            raise EngineError(f"the engine has failed: {self.error}") from self.error
        self._require_awake()
        for name in request.sampling.policy:
            if name not in self.per_request:
                raise ValueError(
                    f"policy={{{name!r}: …}}: must be among per_request={self.per_request} of the "
                    "engine"
                )
        setup.require_exact(self.policy, self.spec, self.sizes, request.sampling.exact)
        self.scheduler.memory.require_room(len(request.ids), request.sampling.max_tokens)
        n, limit = request.sampling.n, self._options.max_waiting
        if limit is not None and n > limit + self.sizes.num_slots:
            raise ValueError(
                f"n={n}: must be at most {limit + self.sizes.num_slots}, max_waiting plus the slots"
            )
        if limit is not None and len(self.scheduler.waiting) + n > limit + self._free_slots:
            raise EngineFull(
                f"{len(self.scheduler.waiting)} requests wait: must be at most max_waiting={limit}"
            )

    def add(
        self,
        request: Request,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        arrived: float | None = None,
    ) -> RequestState:
        """Adds a request and returns it.

        Args:
            request: the request, checked by `jsparse.runtime.request.requests`.
            request_id: a name that no live request has; None: a new name.
            prompt: the prompt's text, for the output.
            arrived: the arrival time, by the engine's clock; None: now.

        Raises:
            EngineError, EngineFull, ValueError: as for `check`.
        """
        self.check(request)
        if request_id is None:
            free = (name for nth in self._names if (name := f"{nth}") not in self._requests)
            request_id = next(free)
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r}: must not be that of a live request")
        now = self._clock() if arrived is None else arrived
        ran = policy_of(self.policy, request.sampling.policy)
        state = RequestState(request_id, prompt, request.ids, [], [], RequestMetrics(now), ran)
        for index in range(request.sampling.n):
            # each sequence has its own random stream
            single = replace(request, stream=request.stream + (index << 20))
            seq = SequenceState(
                next(self._numbers),
                single.ids,
                max_tokens=single.sampling.max_tokens,
                arrival=now,
                cache_salt=single.sampling.cache_salt,
                priority=single.sampling.priority,
                scored=index == 0 and single.sampling.prompt_logprobs is not None,
                stepwise=single.constraint is not None,
            )
            state.seqs.append(seq)
            keep = self._options.layer_stats is True
            state.builders.append(
                OutputBuilder(single, index, self.params.tokenizer, keep_layers=keep)
            )
        self._requests[request_id] = state
        for seq, builder in zip(state.seqs, state.builders, strict=True):
            self._live[seq.number] = state, seq, builder
            self.scheduler.add(seq)
        return state

    def abort(self, request_id: str) -> RequestState | None:
        """Aborts a request in any phase; returns it, or None if it has already ended."""
        state = self._requests.get(request_id)
        if state is None:
            return None
        for seq, builder in zip(state.seqs, state.builders, strict=True):
            builder.end("abort")
            self.scheduler.stop(seq)
        self._forget(state)
        return state

    @own_settings()
    def step(self) -> list[RequestState]:
        """Dispatches the next plan, and collects the results of earlier ones.

        Returns:
            The requests that got tokens; `finished` ones have left the engine.

        Raises:
            EngineError: the device or a program failed; all requests and the engine are lost.
        """
        if self.error is not None:
            raise EngineError(f"the engine has failed: {self.error}") from self.error
        try:
            return self._step()
        except Exception as error:
            self._fail(error)
            raise EngineError(f"the engine has failed: {error}") from error
        except BaseException as error:
            # the plan may not have been dispatched
            self._fail(error)
            raise

    @property
    def unfinished(self) -> int:
        """The number of unfinished requests."""
        return len(self._requests)

    @own_settings()
    def update_weights(self, params: Params) -> None:
        """Continues with the weights of another model of the same shapes; nothing is compiled.

        The weights are converted to the engine's dtype and placed on its devices; those that need
        neither are not copied, so the caller must not donate them while the engine runs. The prefix
        cache is emptied. Constants that policies derive from the weights, such as mean keys, are
        computed again; arrays that came with the model, such as trained gates, are kept.

        Raises:
            ValueError: arrays have other names or shapes, requests are unfinished, or several
                processes run the model.
            EngineError: the engine has failed.
        """
        if self._link is not None:
            raise ValueError("update_weights: must be called for a model in one process")
        self._require_no_requests("update_weights")
        new = converted_to(self.params, params)
        self.scheduler.pool.clear()
        self.programs.replace_weights(new)
        self.params = new

    def sleep(self) -> None:
        """Frees K and V, the policy's state and the prefix cache until `wake_up`.

        Programs and weights stay. Raises ValueError and EngineError as `update_weights` does.
        """
        self._require_no_requests("sleep")
        self.scheduler.pool.clear()
        self._runner.free()
        self.asleep = True

    @own_settings()
    def wake_up(self) -> None:
        """Allocates what `sleep` has freed; without effect on an engine that is awake."""
        if self.asleep:
            self._runner.allocate()
            self.asleep = False

    def _require_awake(self) -> None:
        if self.asleep:
            raise ValueError("the engine is asleep: must be woken by wake_up() first")

    def _require_no_requests(self, name: str) -> None:
        """Raises the errors of `update_weights`; waits for programs that still run."""
        if self.error is not None:
            raise EngineError(f"the engine has failed: {self.error}") from self.error
        if self._requests:
            raise ValueError(
                f"{name}: must be called while no request is unfinished; {len(self._requests)} are"
            )
        while not self.idle:
            self.step()
        self.settle()

    def settle(self) -> None:
        """Waits for running programs: a process that exits during one is aborted."""
        self._runner.settle()

    def _step(self) -> list[RequestState]:
        begun, plan, planned = self._clock(), self.scheduler.plan(), self._clock()
        if not plan.empty:
            self.counters.count(plan, self.policy)
            for chunk in plan.prefill.chunks if plan.prefill else ():
                metrics = self._live[chunk.seq][0].metrics
                metrics.scheduled = metrics.scheduled or self._clock()
            if plan.prefill is not None and not self._in_flight:
                self._runner.expect(plan.prefill, len(self._live))
            compiling = self.programs.seconds
            pending = self._runner.run(plan)
            # a program may block the host, which is part of its time; compilation is not
            began = planned + self.programs.seconds - compiling
            self._in_flight += (
                each._replace(dispatched=began, milliseconds=self._latency.expected(each.work))
                for each in pending
            )
        dispatched = self._clock()
        updates: dict[int, RequestState] = {}
        lag = 0
        if not plan.empty and self._in_flight:
            # while one program runs, the results of the one before it are handled
            lag = 1 if self.scheduler.stepwise else max(LAG, self._in_flight[-1].steps)
        first = True
        while self._in_flight and (
            (ready := self._in_flight[0].ready)
            or sum(pending.steps for pending in self._in_flight) > lag
            or self._far_ahead
        ):
            # if two finished since the last poll, the first one's finish time is unknown
            for state in self._take(self._in_flight.popleft(), timed=first or not ready):
                updates[id(state)] = state
            first = False
        self.counters.plan_seconds += planned - begun
        self.counters.dispatch_seconds += dispatched - planned
        self.counters.results_seconds += self._clock() - dispatched
        return list(updates.values())

    def _take(self, pending: PendingResults, *, timed: bool) -> list[RequestState]:
        """Records one program's results; returns the requests that got tokens."""
        results, now, updates = self._runner.results(pending), self._clock(), []
        for number, scores in self._runner.prompt_scores(pending):
            if number in self._live:
                self._live[number][2].take_prompt(scores)
        # programs run one after another
        took = 1e3 * (now - max(self._taken, pending.dispatched))
        took = took if timed and not pending.delayed else None
        if took is not None:
            self._latency.observe(pending.work, took)
        self._taken, drafted, accepted = now, [], []
        for number, tokens, planned in results:
            state, seq, builder = self._live.get(number, (None, None, None))
            if state is None or seq is None or builder is None or builder.finish is not None:
                continue  # it ended while the program was in flight
            self.scheduler.record_tokens(seq, planned, len(tokens.ids))
            count = builder.take(tokens)
            if isinstance(pending.work, DecodePlan) and pending.work.drafts is not None:
                some = tokens.drafted if pending.work.drafts else 0
                self.counters.count_drafts(some, len(tokens.ids))
                seq.acceptance.observe([some], [len(tokens.ids) - 1])
                drafted.append(some)
                accepted.append(len(tokens.ids) - 1)
            state.metrics.token_times += [now] * count
            self.counters.new_tokens += count
            updates.append(state)
            if builder.finish == "error":
                logger.error("request %s: %s", state.request_id, builder.error)
                self.scheduler.memory.pool.uncache(seq.blocks)
            if builder.finish is not None:
                made = builder.token_ids if builder.finish != "error" else ()
                self.scheduler.stop(seq, made)
                if state.finished:
                    self._forget(state)
        if drafted and isinstance(pending.work, DecodePlan):
            self._latency.observe_round(pending.work, drafted, accepted, took)
        return updates

    @property
    def _far_ahead(self) -> bool:
        """Whether in-flight programs take so long that the next plan should wait for them.

        A new request waits for all in-flight programs and the next one.
        """
        maximum, ahead = self.sizes.max_stall_ms, sum(x.milliseconds for x in self._in_flight)
        return maximum is not None and ahead > max(AHEAD_MS, maximum / 2)

    def _forget(self, state: RequestState) -> None:
        self._requests.pop(state.request_id, None)
        for seq in state.seqs:
            self._live.pop(seq.number, None)

    @property
    def _free_slots(self) -> int:
        return self.sizes.num_slots - len(self.scheduler.begun)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._live.clear()
        self._requests.clear()
        self._in_flight.clear()
        self._runner.forget()
        if self._link is not None:
            self._link.end(error)
