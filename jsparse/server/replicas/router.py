"""Sends each request to a replica, and to another one if that is lost before it responds."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, closing, suppress
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from jsparse.server.errors import ApiError, json_response
from jsparse.server.front import PARSED_AT_ONCE, Front, Options, max_body_bytes
from jsparse.server.live import INTERVAL
from jsparse.server.replicas import totals
from jsparse.server.replicas.balance import Balance, Work, work_of
from jsparse.server.replicas.pictures import Pictures
from jsparse.server.replicas.replica import SILENT_SECONDS, Replica
from jsparse.server.replicas.response import Lost
from jsparse.server.sse import EventStream, event, unless_gone

# the most attempts per request: one that crashes an engine must not crash all of them
ATTEMPTS = 2
# headers of a replica's response that clients get
PASSED_ON = ("content-type", "retry-after", "connection")
NO_WORK = Work(0, None)
routes = APIRouter(redirect_slashes=False)


class Router(Front):
    """The replicas, and the handler that sends them requests."""

    def __init__(self, options: Options, replicas: Sequence[Replica]) -> None:
        super().__init__(options)
        self.replicas = replicas
        self._balance, self.totals = Balance(len(replicas)), totals.Totals()
        self.pictures = Pictures(replicas)

    async def watch(self, replica: Replica) -> None:

        def forget() -> None:
            self._balance.forget(replica.nth)
            self.totals.began_anew(replica.nth)

        await replica.watch(forget)

    @property
    def ready(self) -> list[Replica]:
        """The replicas that accept requests; raises ApiError if there are none."""
        ready = [replica for replica in self.replicas if replica.ready]
        if not ready:
            raise ApiError(503, "no replica is ready", code="unavailable")
        return ready

    @property
    def unhealthy(self) -> str | None:
        if not any(replica.ready for replica in self.replicas):
            begun = any(replica.about is not None for replica in self.replicas)
            return "no replica is ready" if begun else "the model is being loaded"
        return "the server is shutting down" if self.draining else None

    @property
    def max_body_bytes(self) -> int:
        abouts = (replica.about for replica in self.ready)
        return max_body_bytes(max(about.max_model_len for about in abouts if about is not None))

    async def answer(self, request: Request) -> Response:
        """Returns a replica's response; ApiError: the body was refused, or replicas were lost."""
        if request.method == "GET":
            return await unless_gone(request.receive, self._ask(request, None, NO_WORK))
        async with self.body_of(request) as data:
            large = len(data) > PARSED_AT_ONCE
            work = await asyncio.to_thread(_work, data) if large else _work(data)
        return await unless_gone(request.receive, self._ask(request, data, work))

    async def _ask(self, request: Request, data: bytes | None, work: Work) -> Response:
        tried: list[int] = []
        for attempt in range(ATTEMPTS):
            among = [replica.nth for replica in self.ready if replica.nth not in tried]
            if not among:
                break
            nth = self._balance.choose(work, among)
            tried.append(nth)
            # another replica may have room if this one is full
            last = attempt == ATTEMPTS - 1 or len(among) == 1
            async with AsyncExitStack() as held:
                held.enter_context(self._balance.sent(work, nth))
                with suppress(Lost):
                    replica, path = self.replicas[nth], request.url.path
                    response = await replica.ask(request.method, path, data)
                    held.callback(response.close)
                    if response.status == 429 and not last:
                        continue
                    headers = {
                        name: value for name, value in response.headers.items() if name in PASSED_ON
                    }
                    if headers.get("content-type", "").startswith("text/event-stream"):
                        return EventStream(response.pieces(), held.pop_all().aclose)
                    body = b"".join([piece async for piece in response.pieces()])
                    return Response(body, response.status, headers)
        raise ApiError(503, "the replicas that got this request have failed", code="unavailable")

    async def every(self, path: str) -> dict[int, str]:
        """Returns the response of each ready replica to GET, by its number."""

        async def one(replica: Replica) -> tuple[int, bytes | None]:
            body = None
            with suppress(Lost, TimeoutError):
                async with asyncio.timeout(SILENT_SECONDS):
                    response = await replica.ask("GET", path)
                with closing(response):
                    whole = b"".join([piece async for piece in response.pieces()])
                body = whole if response.status == 200 else None
            return replica.nth, body

        bodies = await asyncio.gather(*map(one, self.ready))
        return {nth: body.decode() for nth, body in bodies if body is not None}


def _work(data: bytes) -> Work:
    """Returns the work of a request; a replica refuses it if its body is malformed."""
    try:
        return work_of(orjson.loads(data))
    except orjson.JSONDecodeError:
        return NO_WORK


async def _router_of(request: Request) -> Router:
    return request.app.state.router


RouterOfApp = Annotated[Router, Depends(_router_of)]


@routes.post("/v1/completions", response_model=None)
@routes.post("/v1/chat/completions", response_model=None)
@routes.post("/tokenize", response_model=None)
@routes.post("/detokenize", response_model=None)
@routes.get("/tokenizer_info", response_model=None)
@routes.get("/v1/models", response_model=None)
@routes.get("/v1/models/{name:path}", response_model=None)
@routes.get("/version", response_model=None)
@routes.get("/openapi.json", response_model=None)
async def _answer(router: RouterOfApp, request: Request) -> Response:
    return await router.answer(request)


@routes.head("/health", response_model=None)
@routes.get("/health", response_model=None)
async def _health(router: RouterOfApp) -> Response:
    reason = router.unhealthy
    ready = [replica.ready for replica in router.replicas]
    return json_response({"status": reason or "ready", "replicas": ready}, 503 if reason else 200)


@routes.get("/metrics", response_model=None)
async def _metrics(router: RouterOfApp) -> Response:
    texts = await router.every("/metrics")
    return Response(router.totals.summed(texts), media_type=totals.MEDIA_TYPE)


@routes.get("/metrics/replicas", response_model=None)
async def _metrics_of_replicas(router: RouterOfApp) -> Response:
    texts = await router.every("/metrics")
    return Response(totals.by_replica(texts), media_type=totals.MEDIA_TYPE)


@routes.get("/live", response_model=None)
async def _live(router: RouterOfApp) -> Response:
    if reason := router.unhealthy:
        raise ApiError(503, reason, code="unavailable")
    return EventStream(_pictures(router))


async def _pictures(router: Router) -> AsyncGenerator[bytes]:
    newest = router.pictures.newest
    async with router.pictures.shown():
        while not router.draining:
            if newest:
                yield event(totals.picture([newest[nth] for nth in sorted(newest)]))
            await asyncio.sleep(INTERVAL)
