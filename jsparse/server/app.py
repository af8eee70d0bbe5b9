"""Defines the application: its routes, who may use them, and what they answer."""

import asyncio
import hmac
import logging
import mimetypes
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from jsparse import __version__
from jsparse.engine.errors import EngineError
from jsparse.server import completions
from jsparse.server.errors import ApiError, as_api_error, json_response
from jsparse.server.live import INTERVAL, Live
from jsparse.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    chat_of,
)
from jsparse.server.service import Service
from jsparse.server.sse import ClientGone, EventStream, event
from jsparse.text.signatures import short_name

PAGE = Path(__file__).parent / "page"
# the page loads what lies beside it, talks to this server alone, and is shown in no other page
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
# what needs no key, beside the page
OPEN = ("/health", "/version")
SCHEMA = "#/components/schemas/{model}"
log = logging.getLogger("jsparse.server")


def make_app(service: Service, page: Path = PAGE) -> FastAPI:
    """Returns the application of a service, which may get its engine later."""
    app = FastAPI(
        title="jsparse",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # the address would be of the client's choosing
    )
    files = {file.name: file.read_bytes() for file in page.glob("*.*")} if page.is_dir() else {}
    app.add_middleware(
        Gate, service=service, open_paths={*OPEN, "/", *(f"/{name}" for name in files)}
    )
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_exception_handler(ClientGone, _nobody)
    app.add_exception_handler(ClientDisconnect, _nobody)
    app.add_exception_handler(Exception, _unforeseen)
    _add_answers(app, service)
    _add_state(app, service)
    for name, data in files.items():
        _add_file(app, f"/{name}", name, data)
    if "index.html" in files:
        _add_file(app, "/", "index.html", files["index.html"])
    return app


class Gate:
    """Lets in those who have the key, while requests are taken; counts who is inside."""

    def __init__(self, app: ASGIApp, service: Service, open_paths: set[str]) -> None:
        """Stands before an application."""
        self._app, self._service, self._open = app, service, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or lets it pass."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return await refusal.response(scope, receive, send)
        self._service.inside += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._service.inside -= 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, key = Headers(scope=scope), self._service.options.api_key
        if foreign := self._service.options.foreign(headers):
            return ApiError(403, foreign, code="foreign_host")
        if key is not None and scope["path"] not in self._open:
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, b"Bearer " + key.encode()):
                return ApiError(
                    401,
                    "Authorization: must be 'Bearer ' and the server's API key",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if self._service.draining and scope["method"] == "POST":
            wait = {"Connection": "close"}
            return ApiError(503, "the server is shutting down", code="unavailable", headers=wait)
        return None


def _add_answers(app: FastAPI, service: Service) -> None:
    bodies = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
    _, definitions = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=SCHEMA
    )

    def post(path: str, body: type[BaseModel], answer: Callable[[Request], Awaitable[Any]]) -> None:
        schema = {"$ref": SCHEMA.format(model=body.__name__)}
        extra = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}
        }
        app.post(path, response_model=None, openapi_extra=extra, name=path)(answer)

    async def complete(request: Request) -> Response:
        return await completions.complete(service, request)

    async def chat(request: Request) -> Response:
        return await completions.chat(service, request)

    async def tokenize(request: Request) -> Response:
        asked = await service.body(TokenizeRequest, request)
        with service.arriving():
            try:
                if asked.messages is not None:
                    (ids,) = await service.encode(chat_of(asked.messages))
                else:
                    ids = await service.ids(asked.prompt or "", asked.add_special_tokens)
            except ValueError as error:
                field = "prompt" if asked.messages is None else "messages"
                names: dict[str, str] = dict.fromkeys(("text", "prompt", "messages"), field)
                raise as_api_error(error, names) from error
        maximum = service.ready.engine.sizes.max_model_len
        return json_response({"count": len(ids), "max_model_len": maximum, "tokens": ids})

    async def detokenize(request: Request) -> Response:
        asked = await service.body(DetokenizeRequest, request)
        with service.arriving():
            try:
                text = await service.texts.text(asked.tokens)
            except ValueError as error:
                raise as_api_error(error, {}) from error
        return json_response({"prompt": text})

    answers = (complete, chat, tokenize, detokenize)
    paths = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
    for path, body, answer in zip(paths, bodies, answers, strict=True):
        post(path, body, answer)
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        made = plain()
        made.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return made

    app.openapi = openapi  # pyright: ignore[reportAttributeAccessIssue]


def _add_state(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        engine = service.ready.engine
        model = {
            "id": service.options.name,
            "object": "model",
            "created": service.created,
            "owned_by": "jsparse",
            "root": engine.params.name,
            "max_model_len": engine.sizes.max_model_len,
            "policy": engine.policy.name,
            "policy_short": short_name(engine.policy),
            "chat_template": service.has_chat_template,
        }
        return json_response({"object": "list", "data": [model]})

    @app.head("/health", response_model=None, include_in_schema=False)
    @app.get("/health", response_model=None)
    async def health() -> Response:
        reason = service.unhealthy
        return json_response({"status": reason or "ready"}, 503 if reason else 200)

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        # also while the server is shutting down, and of an engine that has failed
        if service.engine is None:
            raise ApiError(503, "the model is being loaded", code="unavailable")
        return Response(service.metrics.text, media_type="text/plain; version=0.0.4")

    @app.get("/live", response_model=None)
    async def live() -> Response:
        return EventStream(_pictures(service, Live(service)))


def _add_file(app: FastAPI, path: str, name: str, data: bytes) -> None:
    kind = mimetypes.guess_type(name)[0]

    @app.head(path, response_model=None, include_in_schema=False, name=f"head {path}")
    @app.get(path, response_model=None, include_in_schema=False, name=path)
    async def file() -> Response:
        return Response(data, headers=PAGE_HEADERS, media_type=kind)


async def _pictures(service: Service, live: Live) -> AsyncGenerator[bytes]:
    while service.unhealthy is None:
        yield event(live.now())
        await asyncio.sleep(INTERVAL)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if error.status == 500:
        cause = error.__cause__ or error
        # the engine has logged its own failure, which fails all requests
        trace = None if isinstance(cause, EngineError) else cause
        log.error("a request has failed: %r", cause, exc_info=trace)
    return error.response


async def _not_found(_: Request, error: Exception) -> Response:
    """Answers requests that match no route."""
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response


async def _nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unforeseen(_: Request, __: Exception) -> Response:
    """Answers our own faults; the server logs them with their traceback."""
    return ApiError(500, "the server has failed", code="server_error").response
