"""Sends server-sent events, and detects clients that disconnect."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jsparse.engine.errors import EngineError
from jsparse.server.errors import ApiError, as_api_error

DONE = b"data: [DONE]\n\n"
log = logging.getLogger("jsparse.server")


class ClientGone(Exception):
    """The client has disconnected."""


def event(body: Any) -> bytes:
    """Returns a JSON event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def unless_gone[Result](receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`; cancels it and raises ClientGone if the client disconnects."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response that sends events as they are produced, no faster than the client reads."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Closes `events` at the end; `close` frees their source, whether or not any was sent."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            if self._close is not None:
                await self._close()

    async def _send(self, send: Send) -> None:
        start: Message = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        async with aclosing(self._events) as events:
            try:
                async for piece in events:
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            except Exception as error:
                # the status has been sent, so the error is sent as an event
                if not isinstance(error, ApiError):
                    trace = None if isinstance(error, EngineError) else error
                    log.error("a stream has failed: %r", error, exc_info=trace)
                data = event(as_api_error(error, {}).body)
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def merged[Item](streams: list[AsyncGenerator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """Yields the items of all streams as they arrive, with the number of their stream."""
    queue: asyncio.Queue[tuple[int, Item | None, BaseException | None]] = asyncio.Queue(1)

    async def pump(nth: int, stream: AsyncGenerator[Item]) -> None:
        error = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((nth, item, None))
        except Exception as failed:
            error = failed
        await queue.put((nth, None, error))

    tasks = [asyncio.create_task(pump(nth, stream)) for nth, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            nth, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                left -= 1
            else:
                yield nth, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
