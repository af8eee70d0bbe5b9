"""Defines LLM: prompts in, answers out, as many at a time as there is room for."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from jsparse.engine.core import Engine
from jsparse.engine.outputs import RequestOutput
from jsparse.engine.progress import OnAnswer, progress
from jsparse.models.checkpoint import Params, given_params
from jsparse.models.tokenizer import Tokenizer
from jsparse.names import ANSWER, CHAT, ENGINE, METHODS, takes
from jsparse.policy import AnyPolicy
from jsparse.runtime.interrupts import interrupts_wait
from jsparse.runtime.request import Request, default_sampling, requests
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.text.prompts import encode, plain, tokenizer_of


class LLM:
    """Answers many prompts with one model and one policy.

    Requests join the running batch when there is room and leave it when they are done, so that
    neither long prompts nor long answers keep the others waiting. For one prompt, or a few of
    similar lengths, `jsparse.generate` does the same without compiling anything ahead.

        llm = jsparse.LLM("smollm2", policy="quest(budget=1024)", max_model_len=8192)
        outs = llm.generate(prompts, jsparse.SamplingParams(temperature=0.7, max_tokens=256))
        outs[0].outputs[0].text

    Attributes:
        engine: the engine that does the work.
    """

    @takes(ENGINE)
    def __init__(
        self,
        model: str | os.PathLike[str] | Params,
        policy: AnyPolicy | str = "dense",
        *,
        seed: int = 0,
        dtype: Any = None,
        weights: str | None = None,
        revision: str | None = None,
        tokenizer: Any = None,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space: float = 0.0,
        kv_cache_tokens: int | None = None,
        max_waiting: int | None = None,
        enable_prefix_caching: bool = True,
        per_request: Sequence[str] = (),
        layer_stats: bool | Literal["newest"] = False,
        page_size: int = 16,
        steps_per_program: int | None = None,
        decode_rows: Sequence[int] | None = None,
        prefill_rows: Sequence[int] | None = None,
        ladder: Sequence[tuple[int, int]] | None = None,
        max_stall_ms: float | None = None,
        batch_invariant: bool = False,
        cascade_attention: bool | None = None,
        exact: bool = False,
        num_speculative_tokens: int | None = None,
        prepare: bool | Literal["logprobs"] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tensor_parallel_size: int | None = None,
        check_ranks: bool = False,
        enforce_eager: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Loads the model and prepares the engine.

        Args:
            model: an argument of `jsparse.load`, or its result.
            policy: the policy or its expression.
            seed: the seed of requests whose SamplingParams names none.
            dtype: "float32", "bfloat16" or "float16"; None is bfloat16 on a GPU and float32
                elsewhere. It and the next three are for `jsparse.load`.
            weights: "q8_0" keeps matrices in blocks of 8 bits; None is numbers of `dtype`.
            revision: a branch, tag or commit, for Hub ids.
            tokenizer: a fast transformers tokenizer, or a jsparse one, instead of the model's.
            max_num_seqs: the most requests that decode together; None is 64 on a GPU, 8 where the
                policy is offloaded, and 8 on a CPU. A step computes this many rows whether or not
                they hold requests.
            max_model_len: the most tokens of prompt and answer together; None is the model's
                maximum on a GPU and at most 2048 on a CPU, where attention walks through all of it.
            max_waiting: the most requests that may wait for a slot; None is any number.
            kv_cache_tokens: the tokens whose K and V the engine holds; None is as many as
                `gpu_memory_utilization` allows, on a CPU, or in host memory, no more than all slots
                and a prompt can use.
            gpu_memory_utilization: the share of the device's memory, on a CPU of its free memory,
                that model, K and V and the policy's state may take; programs need the rest.
            swap_space: the GiB of host memory for K and V of answers that have to leave the device
                for a while, since those of others need theirs; 0 is that these wait instead. It is
                of use where it and the device's memory hold all that answers can come to need.
            page_size: the number of tokens per page.
            enable_prefix_caching: whether prompts that begin alike, or as a prompt and its answer,
                are read once, if `policy` can.
            per_request: the names of the hyper-parameters that requests may set, among those that
                the policy lists in `per_row`, and "dense". Each makes the step a little slower.
            layer_stats: whether outputs hold the shares attended and read of each layer and step;
                "newest" keeps those of the newest step alone, for live views.
            steps_per_program: the most decode steps per program; None is 32 on a GPU, 1 on a CPU.
                A program has fewer where they take more than 100 ms, or half of `max_stall_ms`, and
                8 at most while requests wait.
            decode_rows: the numbers of rows of decode programs, ascending to `max_num_seqs`; a step
                runs the smallest that fits. None is 8, 16, … and all on a GPU, 1 and all on a CPU.
            prefill_rows: the numbers of prompts that programs read short chunks of, ascending from
                1; None is 1 and 8 on a GPU, 1 on a CPU.
            ladder: the sizes of prompt chunks, as (position, size) pairs, from position 0 on;
                None: 512 and more on a GPU, by the model, and 64 on a CPU.
            max_stall_ms: the milliseconds for which an answer may wait for its next tokens while
                prompts are read, as far as chunks of the ladder's sizes allow, and twice those that
                a decode program takes; 0 is one step at a time, after each chunk. None, the fastest
                where nobody waits for single tokens, reads all prompts first for which there is
                room. AsyncEngine and servers have 200.
            batch_invariant: whether a request gets the same bits in any company, and whether or not
                others have read the beginning of its prompt. Programs then have one step, read one
                prompt and decode all rows, and chunks begin where position alone says.
            cascade_attention: whether dense layers read what prompts have in common once for all
                rows that share it, where that is much. Such programs are compiled when there is use
                for them. None is true on a GPU if half of the policy's layers are dense.
            exact: whether the policy only drafts, and dense attention checks what it drafts, so
                that answers are dense attention's own; not with `batch_invariant` or
                `cascade_attention`. SamplingParams may say otherwise for a request. A token's
                shares are the means of the drafts that were made with it, 1 where none was.
            num_speculative_tokens: with `exact`, the tokens drafted between two checks, up to
                32; None lets that be chosen, from the drafts accepted and the time rounds took.
            prepare: whether all programs, but those that return likely tokens, are compiled now
                and not on first use; "logprobs": also these. On a CPU this waits only for the
                programs that any request needs; the rest are compiled in the background. None is
                true on a GPU, which then also runs each once, since a first run takes longer.
            clock: returns the time in seconds.
            tensor_parallel_size: the number of devices that the model is spread over, each with
                some of its heads; None is one, or those that `jsparse.load` has spread it over. The
                devices may be those of several processes (jax.distributed), which all make the same
                LLM: all but process 0 then work for it, and exit when it does.
            check_ranks: whether the devices of such a model are compared after each program: they
                must have chosen the same tokens, or the engine fails. It is slower.
            enforce_eager: false; programs are always compiled.
            trust_remote_code: false; no code that comes with a checkpoint is ever run.

        Raises:
            ValueError: an option is refused, the policy cannot be served, or memory is too small.
            TypeError: there is no option of that name.
        """
        self.engine = Engine(
            given_params(
                model,
                dtype=dtype,
                weights=weights,
                revision=revision,
                tokenizer=tokenizer,
                tensor_parallel_size=tensor_parallel_size,
            ),
            policy,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
            kv_cache_tokens=kv_cache_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            swap_space=swap_space,
            page_size=page_size,
            enable_prefix_caching=enable_prefix_caching,
            per_request=per_request,
            layer_stats=layer_stats,
            steps_per_program=steps_per_program,
            decode_rows=decode_rows,
            prefill_rows=prefill_rows,
            ladder=ladder,
            max_stall_ms=max_stall_ms,
            batch_invariant=batch_invariant,
            cascade_attention=cascade_attention,
            exact=exact,
            num_speculative_tokens=num_speculative_tokens,
            check_ranks=check_ranks,
            prepare=prepare,
            clock=clock,
        )
        self._seed = seed
        self._turn, self._running = threading.RLock(), False

    @takes(ANSWER)
    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        on_output: Callable[[RequestOutput], Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts; calls from other threads wait for their turn.

        Args:
            prompts: text, chat messages, token ids, or a list of any of these; vLLM's
                {"prompt": text} and {"prompt_token_ids": ids} count as text and ids.
            sampling_params: the options of all prompts, or one entry per prompt; None is the
                model's defaults.
            use_tqdm: whether a bar on standard error, if that is a terminal, shows the prompts done
                and the tokens per second. A callable such as `tqdm.tqdm` makes the bar: it gets
                total, desc and unit, and returns an object with update(1) and close().
            on_output: a callable that gets each request's output when it is finished, in the order
                in which they finish.

        Returns:
            The outputs, in the order of the prompts.

        Raises:
            ValueError: an argument is out of its range or is refused; no prompt has been answered
                then.
            TypeError: there is no option of that name.
            EngineError: the engine has failed.
            EngineFull: there are more prompts than may wait.
        """
        return self._answer(prompts, sampling_params, use_tqdm, on_output)

    @takes(CHAT)
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        on_output: Callable[[RequestOutput], Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation (a list of dicts with role and content), or a list of them.

        Other arguments and the result are as for `generate`. A conversation is always answered:
        `add_generation_prompt` may only be True.
        """
        first = messages[0] if isinstance(messages, Sequence) and messages else None
        talks = [messages] if isinstance(first, dict) else messages
        if not isinstance(talks, Sequence) or not all(
            isinstance(talk, Sequence) and talk and all(isinstance(each, dict) for each in talk)
            for talk in talks
        ):
            raise ValueError(
                f"messages={messages!r}: must be chat messages, dicts with role and content, or a "
                "list of conversations"
            )
        return self._answer(list(talks), sampling_params, use_tqdm, on_output)

    if not TYPE_CHECKING:  # which would take every name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raises AttributeError, with the reason for methods of vLLM's LLM that are missing."""
            reason = f": {METHODS[name]}" if name in METHODS else ""
            raise AttributeError(f"LLM has no {name}{reason}", name=name, obj=self)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; raises ValueError if it has none."""
        return tokenizer_of(self.engine.params, "get_tokenizer()")

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the options of prompts without any, with the model's own defaults filled in."""
        return default_sampling(self.engine.params)

    def _answer(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        on_output: Callable[[RequestOutput], Any] | None,
    ) -> list[RequestOutput]:
        given = plain(prompts)
        rows, alone = encode(self.engine.params, given)
        texts = [each if isinstance(each, str) else None for each in ([given] if alone else given)]
        options = SamplingParams() if sampling_params is None else sampling_params
        asked = requests(self.engine.params, rows, options, self.engine.policy, seed=self._seed)
        programs = self.engine.programs
        with self._alone():
            for request in asked:
                self.engine.check(request)
            with progress(
                use_tqdm, len(asked), doing=lambda: "compiling" if programs.compiling else ""
            ) as bar:
                return self._run(asked, texts, on_output, bar)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Waits until no other thread runs the engine.

        Raises:
            ValueError: this thread runs it already, so that waiting would never end.
        """
        with self._turn:
            if self._running:
                raise ValueError(
                    "on_output: must not call the LLM that calls it; collect the outputs, and call "
                    "it afterwards"
                )
            try:
                self._running = True
                yield
            finally:
                self._running = False

    def _run(
        self,
        asked: Sequence[Request],
        texts: Sequence[str | None],
        on_output: Callable[[RequestOutput], Any] | None,
        bar: OnAnswer,
    ) -> list[RequestOutput]:
        engine, names = self.engine, []
        done: dict[str, RequestOutput] = {}
        try:
            for request, text in zip(asked, texts, strict=True):
                names.append(engine.add(request, prompt=text).request_id)
            while len(done) < len(names):
                # an interrupt within a step could come between a plan and its dispatch
                with interrupts_wait():
                    updates = engine.step()
                for state in updates:
                    if state.finished and state.request_id in names:
                        done[state.request_id] = output = state.output()
                        bar(sum(len(answer.token_ids) for answer in output.outputs))
                        if on_output is not None:
                            on_output(output)
        finally:
            # after an interrupt the engine is ready for the next prompts
            for name in names:
                engine.abort(name)
            if engine.error is None:
                engine.settle()
        return [done[name] for name in names]
