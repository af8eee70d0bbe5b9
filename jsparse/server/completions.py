"""Handles /v1/completions and /v1/chat/completions."""

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from jsparse.engine.outputs import RequestOutput
from jsparse.runtime.collecting import CompletionOutput
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.runtime.structured_outputs import StructuredOutputsParams
from jsparse.server.errors import as_api_error, json_response
from jsparse.server.prompt_stream import PromptStream, all_of, usage
from jsparse.server.protocol import SAME, ChatRequest, CompletionRequest, TemplateFields
from jsparse.server.service import Service
from jsparse.server.sse import DONE, ClientGone, EventStream, event, merged, unless_gone
from jsparse.server.text import TokenLogprobs
from jsparse.text.reasoning import ReasoningSplitter, opens_reasoning
from jsparse.text.tool_calls import BEGIN, PARSERS, ToolCall, ToolCallParser, calls_only

# the fields of requests, by their names in the engine's errors
NAMES = {name: name for name in SAME} | {"max_tokens": "max_tokens"}
COMPLETION_NAMES = NAMES | {"prompt": "prompt", "text": "prompt", "logprobs": "logprobs"}
TEMPLATE_NAMES = {name: name for name in TemplateFields.model_fields}
CHAT_NAMES = NAMES | TEMPLATE_NAMES
CHAT_NAMES |= dict.fromkeys(("prompt", "messages", "message", "chat_template", "text"), "messages")


@dataclass
class ResponseWriter(ABC):
    """The completions of a request's prompts, in the format that clients expect.

    Subclasses define the format of a choice.
    """

    service: Service
    request: Any
    prompts: list[PromptStream]
    created: int = field(default_factory=lambda: int(time.time()))

    whole_kind = piece_kind = ""

    @abstractmethod
    def take(self, completion: CompletionOutput) -> None:
        """Prepares a completion, or a new part of one; `choice` or `piece` may follow."""

    @abstractmethod
    def choice(
        self, completion: CompletionOutput, prompt: int, output: RequestOutput
    ) -> dict[str, Any]:
        """Returns a whole completion."""

    @abstractmethod
    def piece(
        self, completion: CompletionOutput, prompt: int, output: RequestOutput, *, first: bool
    ) -> dict[str, Any]:
        """Returns the new part of a completion."""

    async def whole(self) -> Response:
        """Returns all completions when they are finished."""
        outputs = await all_of([each.whole() for each in self.prompts])
        # in another thread: log-probabilities of many tokens would block the event loop
        return await self.service.texts.made(partial(self._whole, outputs))

    def _whole(self, outputs: Sequence[RequestOutput]) -> Response:
        for output in outputs:
            for completion in output.outputs:
                self.take(completion)
        choices = [
            self.choice(completion, nth, output)
            | {"index": self._index(nth, completion), "finish_reason": self.reason(completion)}
            for nth, output in enumerate(outputs)
            for completion in output.outputs
        ]
        new = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        body = self._frame(self.whole_kind, choices) | {"usage": self.usage(outputs, new)}
        return json_response(body | self.of_prompts(outputs))

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the completions piece by piece."""
        last: dict[int, RequestOutput] = {}
        begun: set[int] = set()
        new = 0
        extra = {"usage": None} if self.request.with_usage else {}
        async with aclosing(merged([each.deltas() for each in self.prompts])) as deltas:
            async for nth, output in deltas:
                last[nth] = output
                new += sum(len(completion.token_ids) for completion in output.outputs)
                make = partial(self._pieces, nth, output, begun)
                # as in `whole`, but fast work does not wait for another thread
                slow = self.request.likely is not None
                choices = await self.service.texts.made(make) if slow else make()
                if self.request.with_usage_so_far:
                    extra = {"usage": self.usage([last[nth] for nth in sorted(last)], new)}
                # a chunk has one choice, since many clients read only the first
                frames = [self._frame(self.piece_kind, [choice]) | extra for choice in choices]
                if frames:
                    yield b"".join(map(event, frames))
        if self.request.with_usage:
            total = self.usage([last[nth] for nth in sorted(last)], new)
            yield event(self._frame(self.piece_kind, []) | {"usage": total})
        yield DONE

    def _pieces(self, prompt: int, output: RequestOutput, begun: set[int]) -> list[dict[str, Any]]:
        """Returns the new parts of a prompt's completions, and adds those to the `begun` ones."""
        choices = []
        for completion in output.outputs:
            self.take(completion)
            index = self._index(prompt, completion)
            first = index not in begun
            if not self._has_news(completion, first=first):
                continue
            choices.append(
                self.piece(completion, prompt, output, first=first)
                | {"index": index, "finish_reason": self.reason(completion)}
            )
            begun.add(index)
        return choices

    async def close(self) -> None:
        for each in self.prompts:
            await each.close()

    def _has_news(self, completion: CompletionOutput, *, first: bool) -> bool:
        """Returns whether a piece has anything new."""
        return bool(
            completion.text
            or (
                completion.token_ids
                and (completion.token_logprobs or completion.finish_reason or first)
            )
        )

    def reason(self, completion: CompletionOutput) -> str | None:
        """Returns why a completion ended; None if it has not."""
        return completion.finish_reason

    def usage(self, outputs: Sequence[RequestOutput], new: int) -> dict[str, Any]:
        """Returns the usage, from the last output of each prompt and the number of new tokens."""
        return usage(outputs, new)

    def of_prompts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the fields of a whole response that describe its prompts."""
        return {}

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Returns the log-probabilities of a prompt in vLLM's format, if they are requested."""
        if self.request.prompt_logprobs is None:
            return {}
        named = [
            None if each is None else {f"{token}": asdict(found) for token, found in each.items()}
            for each in output.prompt_logprobs or ()
        ]
        return {"prompt_logprobs": named}

    def _index(self, prompt: int, completion: CompletionOutput) -> int:
        return prompt * self.request.n + completion.index

    def _frame(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.prompts[0].name,
            "object": kind,
            "created": self.created,
            "model": self.service.options.name,
            "choices": choices,
        }


@dataclass
class Completions(ResponseWriter):
    """Completions in the format of /v1/completions.

    `texts` are the prompts' texts, to be echoed.
    """

    texts: Sequence[str] = ()
    _offsets: Counter[int] = field(default_factory=Counter)  # the characters of each choice so far

    whole_kind = piece_kind = "text_completion"

    def take(self, completion: CompletionOutput) -> None:
        if self.request.max_tokens == 0:
            completion.text, completion.token_ids, completion.cumulative_logprob = "", [], None
            if completion.token_logprobs is not None:
                completion.token_logprobs, completion.top_logprobs = [], []

    def choice(
        self, completion: CompletionOutput, prompt: int, output: RequestOutput
    ) -> dict[str, Any]:
        made = self.piece(completion, prompt, output, first=True)
        return made | self._of_prompt(output)

    def piece(
        self, completion: CompletionOutput, prompt: int, output: RequestOutput, *, first: bool
    ) -> dict[str, Any]:
        echoed = self.request.echo and first
        made: dict[str, Any] = {"text": completion.text, "logprobs": None}
        if echoed:
            made["text"] = self.texts[prompt] + completion.text
        if completion.token_logprobs is not None:
            tokens = TokenLogprobs.of_completion(completion)
            if echoed:
                tokens = TokenLogprobs.of_prompt(output, self.request.logprobs).then(tokens)
            index = self._index(prompt, completion)
            made["logprobs"], self._offsets[index] = self.service.texts.completion_logprobs(
                tokens, self._offsets[index]
            )
        return made

    def usage(self, outputs: Sequence[RequestOutput], new: int) -> dict[str, Any]:
        return super().usage(outputs, new if self.request.max_tokens != 0 else 0)

    def _has_news(self, completion: CompletionOutput, *, first: bool) -> bool:
        return (self.request.max_tokens == 0 and first) or super()._has_news(
            completion, first=first
        )


class Part(NamedTuple):
    """A new part of a chat's completion.

    Attributes:
        answer: what it says.
        reasoning: what precedes the answer.
        calls: tools that it calls.
    """

    answer: str
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()


@dataclass
class Chats(ResponseWriter):
    """Completions in the format of /v1/chat/completions.

    `splitters` split the completions' texts into reasoning and answer, by index, and `parsers` the
    answers into text and calls; None: texts are not split.
    """

    splitters: Sequence[ReasoningSplitter] | None = None
    parsers: Sequence[ToolCallParser] | None = None
    _parts: dict[int, Part] = field(default_factory=dict)  # the newest of each completion
    _called: Counter[int] = field(default_factory=Counter)  # the calls of each completion

    whole_kind, piece_kind = "chat.completion", "chat.completion.chunk"

    def take(self, completion: CompletionOutput) -> None:
        nth, ended = completion.index, completion.finish_reason is not None
        part = Part(completion.text)
        if self.splitters is not None:
            split = self.splitters[nth].push(part.answer, completion.token_ids, ended=ended)
            part = Part(split.answer, split.reasoning)
        if self.parsers is not None:
            said, found = self.parsers[nth].push(part.answer, ended=ended)
            if self.request.parallel_tool_calls is False:
                found = found[: 1 - self._called[nth]]
            calls = tuple(_call(call, n) for n, call in enumerate(found, self._called[nth]))
            self._called[nth] += len(calls)
            part = Part(said, part.reasoning, calls)
        self._parts[nth] = part

    def choice(
        self, completion: CompletionOutput, prompt: int, output: RequestOutput
    ) -> dict[str, Any]:
        answer, reasoning, calls = self._parts[completion.index]
        message: dict[str, Any] = {"role": "assistant", "refusal": None, "content": answer}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["content"] = answer or None
            # their order is the index
            message["tool_calls"] = [
                {name: x for name, x in call.items() if name != "index"} for call in calls
            ]
        return {"message": message, "logprobs": self._logprobs(completion)}

    def piece(
        self, completion: CompletionOutput, prompt: int, output: RequestOutput, *, first: bool
    ) -> dict[str, Any]:
        answer, reasoning, calls = self._parts[completion.index]
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if answer or not calls:
            delta["content"] = answer
        if reasoning:
            delta["reasoning_content"] = reasoning
        if calls:
            delta["tool_calls"] = [*calls]
        return {"delta": delta, "logprobs": self._logprobs(completion)}

    def reason(self, completion: CompletionOutput) -> str | None:
        if completion.finish_reason == "stop" and self._called[completion.index]:
            return "tool_calls"
        return completion.finish_reason

    def _has_news(self, completion: CompletionOutput, *, first: bool) -> bool:
        answer, reasoning, calls = self._parts[completion.index]
        text = answer + reasoning
        return bool(calls) or super()._has_news(replace(completion, text=text), first=first)

    def usage(self, outputs: Sequence[RequestOutput], new: int) -> dict[str, Any]:
        made = super().usage(outputs, new)
        if self.splitters is not None:
            tokens = sum(splitter.tokens for splitter in self.splitters)
            made["completion_tokens_details"] = {"reasoning_tokens": tokens}
        return made

    def of_prompts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return self._of_prompt(*outputs)

    def _logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        if completion.token_logprobs is None:
            return None
        return self.service.texts.chat_logprobs(completion)


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    """Returns a call in OpenAI's format."""
    return {
        "index": index,
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": call._asdict(),
    }


async def complete(service: Service, http: HttpRequest) -> Response:
    """Handles POST /v1/completions."""
    request = await service.body(CompletionRequest, http)
    with service.arriving():
        writer = await unless_gone(http.receive, _complete(service, request))
    return await _response(writer, http)


async def chat(service: Service, http: HttpRequest) -> Response:
    """Handles POST /v1/chat/completions."""
    request = await service.body(ChatRequest, http)
    with service.arriving():
        writer = await unless_gone(http.receive, _chat(service, request))
    return await _response(writer, http)


async def _complete(service: Service, request: CompletionRequest) -> ResponseWriter:
    names = service.knobs | COMPLETION_NAMES
    request.check_likely(service.options.max_logprobs)
    try:
        rows = await service.encode(request.prompt)
        one = isinstance(request.prompt, str) or isinstance(request.prompt[0], int)
        prompts = [request.prompt] if one else request.prompt
        texts = []
        if request.echo:
            size = sum(map(len, prompts))
            texts = await service.texts.encode(_echoed, service, prompts, size=size)
        options = request.sampling(request.max_new_tokens, service.temperature)
        streams = await service.ask("cmpl", rows, [options] * len(rows))
    except Exception as error:
        raise as_api_error(error, names) from error
    return Completions(service, request, streams, texts=texts)


async def _chat(service: Service, request: ChatRequest) -> ResponseWriter:
    names = service.knobs | CHAT_NAMES
    request.check_likely(service.options.max_logprobs)
    try:
        rows = await service.encode(request.chat(request.messages, service.options.template_kwargs))
        parser = service.tool_parser() if request.offered else None
        max_new_tokens = request.max_new_tokens or service.room(rows[0])
        options = request.sampling(max_new_tokens, service.temperature)
        if parser is not None and request.required_tools:
            options = replace(options, structured_outputs=_calls_only(service, request, parser))
        splitters = None
        if service.options.splits_reasoning:
            begun = request.messages[-1].content if request.continue_final_message else None
            options = _after_reasoning(options, begun=bool(begun and opens_reasoning("", begun)))
            splitters = service.texts.splitters(rows[0], begun, options.n)
        parsers = None
        if parser is not None:
            parsers = [PARSERS[parser]() for _ in range(options.n)]
            if service.texts.skips(BEGIN):
                options = replace(options, skip_special_tokens=False)
        streams = await service.ask("chatcmpl", rows, [options])
    except Exception as error:
        if type(error) is ValueError and request.required_tools:
            error = ValueError(f"{error}".replace("structured_outputs.grammar", "tools: calls", 1))
        raise as_api_error(error, names) from error
    return Chats(service, request, streams, splitters=splitters, parsers=parsers)


def _calls_only(service: Service, request: ChatRequest, parser: str) -> StructuredOutputsParams:
    """Returns what an output consists of that must call tools."""
    if request.structured_outputs or request.response_format:
        raise ValueError(
            f"tool_choice={request.model_dump()['tool_choice']!r}: must be 'auto' or 'none' if the "
            "output has another format"
        )
    grammar = calls_only(
        parser,
        request.required_tools,
        several=request.tool_choice == "required" and request.parallel_tool_calls is not False,
        special_tags=service.texts.skips(BEGIN),
    )
    return StructuredOutputsParams(grammar=grammar)


def _after_reasoning(options: SamplingParams, *, begun: bool) -> SamplingParams:
    """Returns options with which a model may think, or go on thinking, before its output."""
    wanted = options.structured_outputs
    if not isinstance(wanted, StructuredOutputsParams):
        return options
    after: Any = "begun" if begun else True
    return replace(options, structured_outputs=replace(wanted, after_reasoning=after))


async def _response(writer: ResponseWriter, http: HttpRequest) -> Response:
    if writer.request.stream:
        return EventStream(writer.events(), writer.close)
    try:
        return await unless_gone(http.receive, writer.whole())
    except ClientGone:
        raise
    except Exception as error:
        raise as_api_error(error, {}) from error
    finally:
        await writer.close()


def _echoed(service: Service, prompts: Sequence[Any]) -> list[str]:
    tokenizer = service.texts.tokenizer
    return [
        prompt if isinstance(prompt, str) else tokenizer.decode(prompt) if tokenizer else ""
        for prompt in prompts
    ]
