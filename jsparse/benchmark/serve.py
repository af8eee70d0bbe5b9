"""Drives a server with OpenAI's API and records when the pieces of each answer come.

It knows the server by its address alone: jsparse's, vLLM's and SGLang's are measured alike. The
clock is the event loop's.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

ENDPOINTS = ("/v1/completions", "/v1/chat/completions")
_NO_ANSWER = (httpx.HTTPError, httpx.InvalidURL)
_ERROR_LENGTH = 300


class ServerError(OSError):
    """Reports a fault of a server or of its answer."""


@dataclass(frozen=True)
class BenchRequest:
    """Holds one request: its prompt, as text or token ids, and the most tokens of its answer."""

    prompt: str | list[int]
    tokens: int


@dataclass
class RequestResult:
    """Records the result of one request; times are in seconds of one clock.

    Attributes:
        due: the time at which it should have been sent.
        sent: the time at which it was sent: later if too many others were under way.
        times: the time at which each piece of the answer came.
        ended: the time at which the last part of the answer came.
        prompt_tokens: the length of the prompt as the server counts it.
        output_tokens: the length of the answer, likewise.
        text: the answer.
        error: a description of the failure, or "".
    """

    due: float = 0.0
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str = ""


def client(base_url: str, *, api_key: str | None = None, timeout: float = 600.0) -> Any:
    """Returns an httpx.AsyncClient for a server, with no limit on the number of connections.

    `timeout` is in seconds: a connection that takes longer, or a server that sends nothing for
    longer, fails the request.
    """
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
    )


async def first_model(server: httpx.AsyncClient) -> str:
    """Returns the name of the first model that the server lists.

    Raises:
        ServerError: it cannot be reached, refuses, or lists none.
    """
    try:
        response = await server.get("/v1/models")
    except _NO_ANSWER as error:
        raise ServerError(f"{server.base_url} cannot be reached: {_said(error)}") from None
    if response.status_code != 200:
        raise ServerError(f"{server.base_url} refuses /v1/models: {_refusal(response)}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ServerError(f"{server.base_url} lists no model at /v1/models") from None


async def ask(server: httpx.AsyncClient, endpoint: str, body: Mapping[str, Any]) -> RequestResult:
    """Sends one request and reads its answer; any failure is described in the answer's `error`.

    `body` comes from `body_of`.
    """
    clock = asyncio.get_running_loop().time
    answer = RequestResult(sent=clock())
    try:
        async with server.stream("POST", endpoint, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise ServerError(_refusal(response))
            await _read(_events(response), answer, clock)
    except _NO_ANSWER as error:
        answer.error = _said(error)
    except ServerError as error:
        answer.error = str(error)
    if answer.error:
        answer.ended = clock()
    return answer


def body_of(
    question: BenchRequest,
    endpoint: str,
    model: str,
    *,
    ignore_eos: bool,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the body of a request; `options` are further fields, such as temperature."""
    body: dict[str, Any] = {"model": model, "max_tokens": question.tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    if endpoint == ENDPOINTS[0]:
        body["prompt"] = question.prompt
    else:
        body["messages"] = [{"role": "user", "content": question.prompt}]
    if ignore_eos:
        body["ignore_eos"] = True
    return body | dict(options)


async def drive(
    server: httpx.AsyncClient,
    endpoint: str,
    bodies: Sequence[Mapping[str, Any]],
    arrivals: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_answer: Callable[[RequestResult], None] = lambda answer: None,
) -> list[RequestResult]:
    """Sends each request when it is due, and returns the answers in the order of the requests.

    Args:
        server: a client that `client` returned.
        endpoint: one of ENDPOINTS.
        bodies: the bodies of the requests.
        arrivals: when each is due, in seconds from now, in ascending order.
        max_concurrency: the most requests under way; more wait until one of them has ended.
        on_answer: called with each answer when it is complete.
    """
    loop = asyncio.get_running_loop()
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    began = loop.time()

    async def one(body: Mapping[str, Any], due: float) -> RequestResult:
        await asyncio.sleep(max(due - loop.time(), 0.0))
        async with places:
            answer = await ask(server, endpoint, body)
        answer.due = due
        on_answer(answer)
        return answer

    tasks = [one(body, began + arrival) for body, arrival in zip(bodies, arrivals, strict=True)]
    return list(await asyncio.gather(*tasks))


async def measure(
    server: httpx.AsyncClient,
    endpoint: str,
    bodies: Sequence[Mapping[str, Any]],
    arrivals: Sequence[float],
    *,
    num_warmups: int = 0,
    max_concurrency: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[RequestResult]:
    """Sends the first `num_warmups` requests and waits for their answers, then drives them all.

    `on_progress` is called with the number of answers that are complete, and that of all.

    Raises:
        ServerError: a warm-up failed.
    """
    first = bodies[:num_warmups]
    warm = drive(server, endpoint, first, [0.0] * len(first), max_concurrency=max_concurrency)
    for answer in await warm:
        if answer.error:
            raise ServerError(f"a warm-up request failed: {answer.error}")
    numbers = itertools.count(1)
    return await drive(
        server,
        endpoint,
        bodies,
        arrivals,
        max_concurrency=max_concurrency,
        on_answer=lambda answer: on_progress(next(numbers), len(bodies)),
    )


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Yields the JSON of each server-sent event up to [DONE].

    Raises:
        ServerError: an event is no JSON object, or the stream ends without [DONE].
    """
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ServerError(f"sent an event that is no JSON object: {data[:_ERROR_LENGTH]}")
        yield event
    raise ServerError("the stream ended without [DONE]")


async def _read(
    events: AsyncIterator[dict[str, Any]], answer: RequestResult, clock: Callable[[], float]
) -> None:
    """Reads the events of one answer into it.

    A piece is an event that carries text, or a token whose text is still held back. Those that only
    open a message or only say why it ended are none, unless the answer has no other.

    Raises:
        ServerError: an event reports an error, or none has the number of tokens.
    """
    usage = None
    async for event in events:
        now = clock()
        if event.get("error"):
            raise ServerError(f"while streaming: {_message(event)}")
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or choice
            text = delta.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
            answer.text += text
            answer.ended = now
            if text or not (choice.get("finish_reason") or delta.get("role")):
                answer.times.append(now)
    if usage is None:
        raise ServerError("the stream has no usage, which has the number of tokens")
    answer.prompt_tokens = usage.get("prompt_tokens") or 0
    answer.output_tokens = usage.get("completion_tokens") or 0
    if not answer.ended or not answer.output_tokens:
        raise ServerError("the answer is empty")
    answer.times = answer.times or [answer.ended]


def _refusal(response: httpx.Response) -> str:
    try:
        message = _message(response.json())
    except ValueError:
        message = response.text
    return f"HTTP {response.status_code}: {message[:_ERROR_LENGTH]}".rstrip(": ")


def _message(body: Any) -> str:
    """Returns the message of an error in OpenAI's shape, or the whole of any other."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
