"""Encodes and decodes text in threads outside the event loop."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from itertools import accumulate
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from jsparse.engine.outputs import RequestOutput
from jsparse.engine.request_state import RequestState
from jsparse.models.tokenizer import Tokenizer
from jsparse.runtime.collecting import CompletionOutput
from jsparse.text.reasoning import END, TAIL, ReasoningSplitter, opens_reasoning

# a long prompt keeps a thread busy for a second; the tokenizer does not block other threads
ENCODERS = 2
# the most characters of texts that do not wait for longer ones
SHORT = 2**14


class TokenLogprobs(NamedTuple):
    """The log-probabilities of consecutive tokens.

    Attributes:
        ids: the tokens.
        logprobs: their log-probabilities; None for the first of a prompt.
        tops: the most likely tokens instead of each, with theirs; None unless requested.
    """

    ids: list[int]
    logprobs: list[float | None]
    tops: list[dict[int, float]] | None

    @classmethod
    def of_completion(cls, completion: CompletionOutput) -> "TokenLogprobs":
        """Returns those of a completion."""
        logprobs = completion.token_logprobs or []
        return cls(completion.token_ids, [*logprobs], completion.top_logprobs)

    @classmethod
    def of_prompt(cls, output: RequestOutput, count: int) -> "TokenLogprobs":
        """Returns those of a prompt, with the `count` most likely tokens."""
        scores = output.prompt_scores
        if scores is None:  # aborted before the first ones arrived
            return cls([], [], [] if count else None)
        known = len(scores.logprobs)
        logprobs = [None, *scores.logprobs[1:].tolist()]
        return cls(output.prompt_token_ids[:known], logprobs, scores.tops(count) if count else None)

    def then(self, other: "TokenLogprobs") -> "TokenLogprobs":
        """Returns these tokens followed by others."""
        tops = None if self.tops is None or other.tops is None else self.tops + other.tops
        return TokenLogprobs(self.ids + other.ids, self.logprobs + other.logprobs, tops)


class Texts:
    """The threads that run tokenizers.

    One thread builds all outputs that have arrived since its last pass: under load it wakes the
    event loop once for many.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Starts the threads; takes a while, since it computes the bytes of all tokens."""
        self.tokenizer = tokenizer
        _ = self._token_bytes
        self._encoders, self._of_short = (
            ThreadPoolExecutor(ENCODERS, thread_name_prefix=f"jsparse-tokenise-{kind}")
            for kind in ("long", "short")
        )
        self._asked: SimpleQueue[tuple[asyncio.Future, Callable[[], Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="jsparse-text", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def encode[Result](
        self, function: Callable[..., Result], *given: Any, size: int
    ) -> Result:
        """Runs a function that tokenises `size` characters, and returns its result."""
        pool = self._of_short if size <= SHORT else self._encoders
        return await asyncio.get_running_loop().run_in_executor(pool, function, *given)

    async def output(self, state: RequestState, *, new: bool) -> RequestOutput:
        """Returns a request's output, or the `new` part of it."""
        return await self.made(partial(state.output, new=new))

    async def made[Result](self, make: Callable[[], Result]) -> Result:
        """Runs a function in the thread that builds outputs, and returns its result."""
        future = asyncio.get_running_loop().create_future()
        self._asked.put((future, make))
        return await future

    async def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Returns a text's ids."""
        encode = partial(self._known("prompt").encode, add_special_tokens=add_special_tokens)
        return await self.encode(encode, text, size=len(text))

    async def text(self, ids: list[int]) -> str:
        """Returns the text of ids, special tokens included."""
        decode = partial(self._known("tokens").decode, skip_special_tokens=False)
        return await self.encode(decode, ids, size=len(ids))

    def splitters(
        self, prompt: Sequence[int], continued: str | None, number: int
    ) -> list[ReasoningSplitter]:
        """Returns splitters of the `number` completions of a chat into reasoning and answer.

        `continued`: the message that they continue; None: they start one.
        """
        tokenizer = self._known("reasoning")
        tail = tokenizer.decode(prompt[-TAIL:], skip_special_tokens=False)
        end = tokenizer.encode(END, add_special_tokens=False)
        opened = opens_reasoning(tail, continued)
        end_token = end[0] if len(end) == 1 else None
        return [ReasoningSplitter(opened=opened, end_token=end_token) for _ in range(number)]

    def skips(self, text: str) -> bool:
        """Returns whether a text consists of special tokens, which outputs usually omit."""
        tokenizer = self._known("tools")
        return not tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).strip()

    def close(self) -> None:
        self._asked.put(None)
        for pool in (self._encoders, self._of_short):
            pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join()

    def completion_logprobs(self, tokens: TokenLogprobs, offset: int) -> tuple[dict[str, Any], int]:
        """Returns log-probabilities for /v1/completions, and the end of the tokens' text.

        `offset` is where it starts. Offsets count the characters of tokens that are decoded one by
        one.
        """
        widths = (len(self._bytes(token).decode(errors="replace")) for token in tokens.ids)
        *offsets, end = accumulate(widths, initial=offset)
        top = None
        if tokens.tops is not None:
            pairs = zip(tokens.ids, tokens.logprobs, tokens.tops, strict=True)
            top = [
                None
                if logprob is None
                else {self._name(own): value for own, value in ({token: logprob} | likely).items()}
                for token, logprob, likely in pairs
            ]
        return {
            "tokens": [self._name(token) for token in tokens.ids],
            "token_logprobs": tokens.logprobs,
            "top_logprobs": top,
            "text_offset": offsets,
        }, end

    def chat_logprobs(self, completion: CompletionOutput) -> dict[str, Any]:
        """Returns log-probabilities in the format of /v1/chat/completions."""
        assert completion.token_logprobs is not None
        tops = completion.top_logprobs or [{} for _ in completion.token_ids]
        return {
            "content": [
                self._token(token, logprob)
                | {"top_logprobs": [self._token(*likely) for likely in top.items()]}
                for token, logprob, top in zip(
                    completion.token_ids, completion.token_logprobs, tops, strict=True
                )
            ]
        }

    def _known(self, purpose: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{purpose}: needs a tokenizer, and the model has none")
        return self.tokenizer

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._bytes(token)
        return {
            "token": data.decode(errors="replace"),
            "bytes": list(data),
            "logprob": logprob,
        }

    def _name(self, token: int) -> str:
        """Returns a token's text, or its bytes in OpenAI's format if they are not text."""
        data = self._bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bytes(self, token: int) -> bytes:
        known = self._token_bytes
        if known is not None:
            return known[token] if token < len(known) else b""
        if self.tokenizer is None:
            return f"token_id:{token}".encode()
        return self.tokenizer.token_text(token).encode()

    @cached_property
    def _token_bytes(self) -> list[bytes] | None:
        """The bytes of all tokens, if the tokenizer's spelling of them is known."""
        with suppress(ValueError):
            return self.tokenizer.token_bytes() if self.tokenizer else None
        return None

    def _work(self) -> None:
        """Runs the thread that builds outputs."""
        while (first := self._asked.get()) is not None:
            batch = [first]
            with suppress(Empty):
                while (more := self._asked.get_nowait()) is not None:
                    batch.append(more)
                self._asked.put(None)
            by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
            for future, make in batch:
                by_loop.setdefault(future.get_loop(), []).append(_settled(future, make))
            for loop, settled in by_loop.items():
                with suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(_call_all, settled)


def _settled(future: asyncio.Future, make: Callable[[], Any]) -> Callable[[], None]:
    """Returns a function that sets the future's result, in the event loop."""
    try:
        output = make()
    except Exception as error:
        failed = error
        return lambda: None if future.done() else future.set_exception(failed)
    return lambda: None if future.done() else future.set_result(output)


def _call_all(functions: list[Callable[[], None]]) -> None:
    for function in functions:
        function()
