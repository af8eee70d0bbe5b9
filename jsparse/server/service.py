"""Defines Service, the state of a server with an engine."""

import math
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
from starlette.requests import Request as HttpRequest

from jsparse.engine.async_engine import AsyncEngine
from jsparse.models.chat_template import ChatOptions, variables
from jsparse.runtime.admission import settable
from jsparse.runtime.sampling_params import SamplingParams
from jsparse.server.body import RequestBody, parse
from jsparse.server.errors import ApiError, full
from jsparse.server.front import PARSED_AT_ONCE, Front, Options, max_body_bytes
from jsparse.server.metrics import Metrics
from jsparse.server.prompt_stream import PromptStream, Serving, all_of
from jsparse.server.text import Texts
from jsparse.text import prompts
from jsparse.text.prompts import tokenizer_of
from jsparse.text.tool_calls import PARSERS, parser_of

# the most seconds of one step on a GPU, compilation included; a CPU does not hang
MAX_BUSY_SECONDS = 300.0


class Service(Front):
    """The engine, once it is ready, and the requests that it works on."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._serving: Serving | None = None
        self.max_busy_seconds = math.inf
        self._arriving = 0

    def begin(self, engine: AsyncEngine) -> None:
        """Sets the engine: requests are served from now on. Any thread may call it."""
        if jax.default_backend() != "cpu":
            self.max_busy_seconds = MAX_BUSY_SECONDS
        if defaults := self.options.template_kwargs:
            tokenizer = tokenizer_of(engine.engine.params, "chat_template_kwargs")
            variables(ChatOptions(chat_template_kwargs=defaults), tokenizer.chat_template or "")
        metrics = Metrics(engine.engine, self.options.name)
        self._serving = Serving(engine, Texts(engine.engine.params.tokenizer), metrics, live={})

    @property
    def serving(self) -> Serving:
        """The objects that serve requests; raises ApiError if the engine is not loaded."""
        if self._serving is None:
            raise ApiError(503, self.unhealthy or "", code="unavailable")
        return self._serving

    @property
    def engine(self) -> AsyncEngine | None:
        """The engine, or None until it is loaded."""
        return self._serving and self._serving.engine

    @property
    def texts(self) -> Texts:
        """The threads that encode and decode text."""
        return self.serving.texts

    @property
    def metrics(self) -> Metrics:
        """The metrics of /metrics."""
        return self.serving.metrics

    @property
    def live(self) -> dict[str, PromptStream]:
        """The prompts that the engine works on, by name."""
        return self.serving.live

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()
            self.texts.close()

    @property
    def unhealthy(self) -> str | None:
        if self.engine is None:
            return "the model is being loaded"
        if not (self.engine.alive and self.texts.alive):
            return "the engine has failed"
        if self.engine.busy_seconds > self.max_busy_seconds:
            return f"the engine has been running one step for more than {self.max_busy_seconds:g} s"
        return "the server is shutting down" if self.draining else None

    @property
    def ready(self) -> AsyncEngine:
        """The engine, also while the server drains; raises ApiError if it is not ready."""
        engine = self.serving.engine
        if not engine.alive:
            raise ApiError(503, self.unhealthy or "", code="unavailable")
        return engine

    @property
    def has_chat_template(self) -> bool:
        """Whether the model accepts chats."""
        tokenizer = self.ready.engine.params.tokenizer
        return tokenizer is not None and tokenizer.chat_template is not None

    def tool_parser(self) -> str:
        """Returns the name of the parser of tool calls; ValueError: their format is unknown."""
        tokenizer, name = self.ready.engine.params.tokenizer, self.options.tool_call_parser
        name = name or parser_of((tokenizer and tokenizer.chat_template) or "")
        if name is None:
            raise ValueError(
                "tools: the chat template does not show the format of the model's calls; start the "
                f"server with --tool-call-parser {' or '.join(PARSERS)}"
            )
        return name

    @property
    def max_body_bytes(self) -> int:
        return max_body_bytes(self.ready.engine.sizes.max_model_len)

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Counts a request from its body until the engine has it, since its tokens take memory."""
        maximum = max(self.options.max_waiting, self.ready.engine.sizes.num_slots)
        if self._arriving >= maximum:
            raise full(f"{self._arriving} requests are arriving: must be at most {maximum}")
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    async def body[Body: RequestBody](self, kind: type[Body], request: HttpRequest) -> Body:
        """Reads and checks the body of a request."""
        async with self.body_of(request) as data:
            if len(data) > PARSED_AT_ONCE:
                body = await self.texts.encode(parse, kind, data, size=len(data))
            else:
                body = parse(kind, data)
        if (name := getattr(body, "model", None)) is not None:
            self.require_model(name)
        return body

    def require_model(self, name: str) -> None:
        """Refuses names that are not the model's."""
        if name not in self.options.names:
            names = " or ".join(map(repr, self.options.names))
            raise ApiError(
                404,
                f"model={name!r}: must be {names}, the model of this server",
                param="model",
                code="model_not_found",
            )

    async def encode(self, prompt: Any) -> list[list[int]]:
        """Returns the ids of each prompt: a chat's dict, or text, ids, or a list of these."""
        encode = partial(prompts.encode, special_tokens=self.options.special_tokens)
        sizes = _sizes(prompt)
        self._require_short(max(sizes))
        size = sum(sizes)
        rows, _ = await self.texts.encode(encode, self.ready.engine.params, prompt, size=size)
        return rows

    async def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns the ids of one text; raises ValueError as `encode` does."""
        self._require_short(len(text))
        return await self.texts.ids(text, add_special_tokens)

    def _require_short(self, size: int) -> None:
        """Refuses texts that are far too long before tokenising them, which would take seconds."""
        tokenizer, tokens = self.texts.tokenizer, self.ready.engine.sizes.max_model_len
        longest = tokenizer and tokenizer.max_characters_per_token
        if longest and size > tokens * longest:
            rule = f"must be at most {tokens * longest}, since max_model_len={tokens}"
            raise ValueError(f"prompt has {size} characters: {rule}")

    def room(self, ids: Sequence[int]) -> int:
        """Returns the most tokens of a completion for a request that sets no number; at least 1."""
        sizes, pool = self.ready.engine.sizes, self.ready.engine.scheduler.pool
        left = min(sizes.max_model_len, pool.size * sizes.page_size) - len(ids)
        return max(1, min(left, self.options.default_max_tokens or left))

    @property
    def knobs(self) -> dict[str, str]:
        """The field in which requests set each of the policy's hyper-parameters."""
        return dict.fromkeys(("dense", *self.ready.engine.policy.per_row), "policy")

    def _require_settable(self, names: Collection[str]) -> None:
        """Refuses hyper-parameters that requests to this server may not set."""
        engine = self.ready.engine
        for name in sorted((settable(engine.policy) & {*names}) - {*engine.per_request}):
            raise ValueError(
                f"policy={{{name!r}: …}}: must not be set by requests to this server; start the "
                f"server with --per-request {name}"
            )

    @property
    def temperature(self) -> float | None:
        """The temperature of requests that set none; None: the model's own."""
        return None if "temperature" in self.ready.engine.params.generation_defaults else 1.0

    async def ask(
        self, kind: str, rows: Sequence[list[int]], options: Sequence[SamplingParams]
    ) -> list[PromptStream]:
        """Sends prompts to the engine; returns once it has accepted all of them.

        Raises:
            ValueError, EngineFull, EngineError: a prompt was refused; then none is served.
        """
        self._require_settable({name for each in options for name in each.policy})
        num_sequences = sum(each.n for each in options)
        slots = self.ready.engine.sizes.num_slots
        # a single request must not fill the queue
        maximum = max(slots, (self.options.max_waiting + slots) // 2)
        if num_sequences > maximum:
            source = f"n={max(each.n for each in options)} for {len(rows)} prompts"
            raise ValueError(
                f"{source} asks for {num_sequences} completions: must be at most {maximum}"
            )
        name = f"{kind}-{secrets.token_hex(12)}"
        streams = [
            PromptStream(self.serving, f"{name}-{nth}" if nth else name, ids, each)
            for nth, (ids, each) in enumerate(zip(rows, options, strict=True))
        ]
        try:
            await all_of([each.begin() for each in streams])
        except BaseException:
            for each in streams:
                await each.close()
            raise
        return streams


def _sizes(prompt: Any) -> list[int]:
    """Returns the number of characters of each prompt; 0 for ids."""
    if isinstance(prompt, str):
        return [len(prompt)]
    if isinstance(prompt, dict):
        texts = [text for message in prompt["messages"] for text in message.values()]
        others = prompt["chat_template_kwargs"], prompt["tools"] or ""
        return [sum(len(x) if isinstance(x, str) else len(str(x)) for x in (*texts, *others))]
    return [len(each) if isinstance(each, str) else 0 for each in prompt]
