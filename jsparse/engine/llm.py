"""Defines LLM, which generates completions for many prompts in a continuous batch."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from jsparse.engine.loading import load_engine
from jsparse.engine.outputs import RequestOutput
from jsparse.engine.progress import OnOutput, progress
from jsparse.models.checkpoint import Params
from jsparse.models.tokenizer import Tokenizer
from jsparse.names import ANSWER, CHAT, ENGINE, METHODS, takes
from jsparse.policy import AnyPolicy
from jsparse.runtime.interrupts import interrupts_wait
from jsparse.runtime.request import Request, default_sampling, requests
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.text.prompts import encode, plain, tokenizer_of


class LLM:
    """An engine for offline use: many prompts with one model and one policy.

    Requests join the running batch when there is room and leave when they finish, so that neither
    long prompts nor long completions delay the others. For one prompt, or a few of similar lengths,
    `jsparse.generate` does the same without compiling anything ahead.

        llm = jsparse.LLM("smollm2", policy="quest(budget=1024)", max_model_len=8192)
        outs = llm.generate(prompts, jsparse.SamplingParams(temperature=0.7, max_tokens=256))
        outs[0].outputs[0].text

    Attributes:
        engine: the engine that does the work.
    """

    @takes(ENGINE, more=load_engine)
    def __init__(
        self,
        model: str | os.PathLike[str] | Params,
        policy: AnyPolicy | str = "dense",
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Loads the model and prepares the engine.

        Args:
            model: an argument of `jsparse.load`, or its result.
            policy: the policy or its expression.
            seed: the seed of requests whose SamplingParams have none.
            options: those of `EngineOptions`, and dtype, weights, revision, tokenizer,
                chat_template, tensor_parallel_size and kv_cache_dtype of `jsparse.load`.

        Raises:
            ValueError: an option is refused, the policy cannot be served, or memory is too small.
            TypeError: there is no option of that name.
        """
        self.engine = load_engine(model, policy, **options)
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
        """Generates completions of prompts; calls from other threads wait for their turn.

        Args:
            prompts: text, chat messages, token ids, or a list of any of these; vLLM's {"prompt":
                text} and {"prompt_token_ids": ids} count as text and ids.
            sampling_params: the options of all prompts, or one entry per prompt; None: the model's
                defaults.
            use_tqdm: whether to show a bar on standard error, if that is a terminal, with the
                finished prompts and the tokens per second. A callable such as `tqdm.tqdm` makes the
                bar: it gets total, desc and unit, and returns an object with update(1) and close().
            on_output: a callable that gets each request's output as soon as it is finished.

        Returns:
            The outputs, in the order of the prompts.

        Raises:
            ValueError: an argument is out of its range or is refused; then nothing is generated.
            TypeError: there is no option of that name.
            EngineError: the engine has failed.
            EngineFull: there are more prompts than may wait.
        """
        return self._generate(prompts, sampling_params, use_tqdm, on_output)

    @takes(CHAT)
    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        on_output: Callable[[RequestOutput], Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Replies to a conversation (a list of dicts with role and content), or to a list of them.

        The model starts a message (`add_generation_prompt`) or continues the last one
        (`continue_final_message`). `chat_template_kwargs` are variables of the chat template, such
        as {"enable_thinking": False}. `tools` are functions that the model may call, as OpenAI
        describes them; `split_tool_calls` finds the calls in an output. Other arguments and the
        result are as for `generate`.

        Raises:
            ValueError: as for `generate`, or the template has no such variable, or takes no tools.
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
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs or {},
            "tools": tools,
        }
        prompts = [{"messages": talk} | options for talk in talks]
        return self._generate(prompts, sampling_params, use_tqdm, on_output)

    if not TYPE_CHECKING:  # a type checker would accept every attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raises AttributeError, with the reason for methods of vLLM's LLM that are missing."""
            reason = f": {METHODS[name]}" if name in METHODS else ""
            raise AttributeError(f"LLM has no {name}{reason}", name=name, obj=self)

    def update_weights(self, params: Params) -> None:
        """Generates with the weights of another model of the same shapes from now on.

        As in a training loop: nothing is compiled again, and the prefix cache is emptied; see
        `Engine.update_weights`.

        Raises:
            ValueError: arrays have other names or shapes, or several processes run the model.
            EngineError: the engine has failed.
        """
        with self._alone("update_weights"):
            self.engine.update_weights(params)

    def sleep(self, level: int = 1) -> None:
        """Frees K, V and the prefix cache until `wake_up`, so that others can use the memory.

        Weights stay on the device, unlike in vLLM. `level` must be 1.
        """
        if type(level) is not int or level != 1:
            raise ValueError(f"level={level!r}: must be 1, which frees K and V; weights stay")
        with self._alone("sleep"):
            self.engine.sleep()

    def wake_up(self) -> None:
        """Allocates what `sleep` has freed."""
        with self._alone("wake_up"):
            self.engine.wake_up()

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer; raises ValueError if it has none."""
        return tokenizer_of(self.engine.params, "get_tokenizer()")

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the default options of prompts, with the model's own defaults filled in."""
        return default_sampling(self.engine.params)

    def _generate(
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
        checked = requests(self.engine.params, rows, options, self.engine.policy, seed=self._seed)
        programs = self.engine.programs
        with self._alone("generate"):
            for request in checked:
                self.engine.check(request)
            with progress(
                use_tqdm, len(checked), doing=lambda: "compiling" if programs.compiling else ""
            ) as bar:
                return self._run(checked, texts, on_output, bar)

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Waits until no other thread runs the engine; `name` is the method that is called.

        Raises:
            ValueError: this thread runs it already, so that waiting would never end.
        """
        with self._turn:
            if self._running:
                raise ValueError(
                    f"on_output: must not call {name} of the LLM that calls it; collect the "
                    "outputs, and call it afterwards"
                )
            try:
                self._running = True
                yield
            finally:
                self._running = False

    def _run(
        self,
        checked: Sequence[Request],
        texts: Sequence[str | None],
        on_output: Callable[[RequestOutput], Any] | None,
        bar: OnOutput,
    ) -> list[RequestOutput]:
        engine, names = self.engine, []
        done: dict[str, RequestOutput] = {}
        try:
            for request, text in zip(checked, texts, strict=True):
                names.append(engine.add(request, prompt=text).request_id)
            while len(done) < len(names):
                # an interrupt within a step could come between a plan and its dispatch
                with interrupts_wait():
                    updates = engine.step()
                for state in updates:
                    if state.finished and state.request_id in names:
                        done[state.request_id] = output = state.output()
                        bar(sum(len(completion.token_ids) for completion in output.outputs))
                        if on_output is not None:
                            on_output(output)
        finally:
            # after an interrupt the engine is ready for the next prompts
            for name in names:
                engine.abort(name)
            if engine.error is None:
                engine.settle()
        return [done[name] for name in names]
