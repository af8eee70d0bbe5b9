"""Defines LLM: prompts in, answers out, as many at a time as there is room for."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from jsparse import prompts as prompt_ids
from jsparse.engine.core import Engine
from jsparse.engine.outputs import RequestOutput
from jsparse.models.checkpoint import Params, load
from jsparse.policy import Policy
from jsparse.request import Request, SamplingParams, requests
from jsparse.runtime.interrupts import interrupts_wait


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

    def __init__(
        self,
        model: str | os.PathLike[str] | Params,
        policy: Policy | str = "dense",
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Loads the model and prepares the engine.

        Args:
            model: what `jsparse.load` takes, or what it returned.
            policy: the policy, or its expression, that chooses what decoding attends to.
            seed: the seed of requests whose SamplingParams names none.
            options: keyword arguments of `jsparse.engine.core.Engine`, such as max_num_seqs and
                max_model_len.

        Raises:
            ValueError: an option is out of its range, the policy cannot be served, or memory does
                not suffice.
        """
        params = model if isinstance(model, Params) else load(model)
        self.engine = Engine(params, policy, **options)
        self._seed = seed

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_output: Callable[[RequestOutput], Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts.

        Args:
            prompts: text, chat messages, token ids, or a list of any of these.
            sampling_params: the options of all prompts, or one entry per prompt; None is the
                model's defaults.
            on_output: a callable that gets each request's output when it is finished, in the order
                in which they finish.

        Returns:
            The outputs, in the order of the prompts.

        Raises:
            ValueError: an argument is out of its range; no prompt has been answered then.
            EngineError: the engine has failed.
            EngineFull: there are more prompts than may wait.
        """
        rows, alone = prompt_ids.encode(self.engine.params, prompts)
        texts = [
            given if isinstance(given, str) else None for given in ([prompts] if alone else prompts)
        ]
        options = SamplingParams() if sampling_params is None else sampling_params
        asked = requests(self.engine.params, rows, options, self.engine.policy, seed=self._seed)
        for request in asked:
            self.engine.check(request)
        return self._run(asked, texts, on_output)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answers a conversation (a list of dicts with role and content), or a list of them.

        Takes and returns otherwise what `generate` does.
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
        return self.generate(list(talks), sampling_params, **options)

    def _run(
        self,
        asked: Sequence[Request],
        texts: Sequence[str | None],
        on_output: Callable[[RequestOutput], Any] | None,
    ) -> list[RequestOutput]:
        engine, names = self.engine, []
        done: dict[str, RequestOutput] = {}
        try:
            for request, text in zip(asked, texts, strict=True):
                names.append(engine.add(request, prompt=text).request_id)
            while len(done) < len(names):
                # an interrupt within a step would part a plan from what it dispatches
                with interrupts_wait():
                    news = engine.step()
                for served in news:
                    if served.finished and served.request_id in names:
                        done[served.request_id] = output = served.output()
                        if on_output is not None:
                            on_output(output)
        finally:
            # whoever interrupts finds the engine ready for the next prompts
            for name in names:
                engine.abort(name)
            if engine.error is None:
                engine.settle()
        return [done[name] for name in names]
