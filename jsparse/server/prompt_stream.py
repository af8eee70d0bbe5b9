"""Defines PromptStream, one prompt in the engine, and the usage of several."""

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, NamedTuple

from jsparse.engine.async_engine import AsyncEngine
from jsparse.engine.outputs import RequestOutput
from jsparse.engine.request_state import RequestState
from jsparse.runtime.collecting import NAN_LOGITS, CompletionOutput
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.server import log
from jsparse.server.errors import ApiError
from jsparse.server.metrics import Metrics
from jsparse.server.text import Texts
from jsparse.text.short_names import short_name


class Serving(NamedTuple):
    """The objects that a server works with once its engine is ready.

    Attributes:
        engine: the engine.
        texts: the threads that encode and decode text.
        metrics: the metrics of /metrics.
        live: the prompts that the engine works on, by name.
    """

    engine: AsyncEngine
    texts: Texts
    metrics: Metrics
    live: "dict[str, PromptStream]"


class PromptStream:
    """One prompt that the engine works on, until it is closed."""

    state: RequestState

    def __init__(
        self, serving: Serving, name: str, ids: list[int], options: SamplingParams
    ) -> None:
        self._serving, self.name = serving, name
        self._states = serving.engine.follow(ids, options, name)
        self._begun = False

    async def begin(self) -> None:
        """Sends the prompt to the engine; returns once it is accepted, else raises the reason."""
        self.state = await anext(self._states)
        self._serving.live[self.name] = self

    async def deltas(self) -> AsyncGenerator[RequestOutput]:
        """Yields new output as it arrives; the last one is `finished`."""
        async for state in self._followed():
            # another completion of the prompt may use a cached prefix, and be ahead
            if state.builders[0].lacks_scores:
                continue
            output = await self._output(new=True)
            if output.finished or any(completion.token_ids for completion in output.outputs):
                yield output
            if output.finished:
                return

    async def whole(self) -> RequestOutput:
        """Returns the output when it is finished."""
        async for state in self._followed():
            if state.finished:
                break
        return await self._output(new=False)

    async def _output(self, *, new: bool) -> RequestOutput:
        """Returns all output or the new part; ApiError: a completion could not be continued."""
        output = await self._serving.texts.output(self.state, new=new)
        for completion in output.outputs:
            if completion.error:
                if completion.error == NAN_LOGITS:
                    raise ApiError(500, completion.error, code="nan_logits")
                raise ApiError(400, completion.error, code="constraint")
        return output

    async def close(self) -> None:
        """Leaves the engine, which aborts unfinished completions."""
        if self._serving.live.pop(self.name, None) is not None:
            self._count_beginning(self.state)
            self._serving.metrics.left(self.state)
            log.logger.info(log.of_request(self.state))
        await self._states.aclose()

    async def _followed(self) -> AsyncGenerator[RequestState]:
        finished = self.state.finished  # read once: the engine continues in the meantime
        if finished or self.state.metrics.token_times:  # tokens that arrived before this call
            self._count_beginning(self.state)
            yield self.state
        if finished:
            return
        async for state in self._states:
            self._count_beginning(state)
            yield state

    def _count_beginning(self, state: RequestState) -> None:
        if state.metrics.token_times and not self._begun:
            self._begun = True
            self._serving.metrics.begun(state)


async def all_of[Result](works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Returns all results; raises the first error once every coroutine has ended."""
    results = await asyncio.gather(*works, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # pyright: ignore[reportReturnType]


def usage(outputs: Sequence[RequestOutput], new_tokens: int) -> dict[str, Any]:
    """Returns the usage of requests, from the last output of each and the number of new tokens."""
    prompt = sum(len(output.prompt_ids) for output in outputs)
    completions = [completion for output in outputs for completion in output.outputs]
    policy, *changed = re.split("(?= with )", outputs[0].policy, maxsplit=1)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new_tokens,
        "total_tokens": prompt + new_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
        "jsparse": {
            "attended": _mean(completions, "attended"),
            "read": _mean(completions, "read"),
            "policy": short_name(policy) + "".join(changed),
        },
    }


def _mean(completions: Sequence[CompletionOutput], share: str) -> float | None:
    known = [getattr(completion, f"{share}_fraction") for completion in completions]
    known = [value for value in known if value is not None]
    return sum(known) / len(known) if known else None
