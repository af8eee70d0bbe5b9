"""Defines the application: its middleware, its files and its error responses."""

import hmac
import logging
import mimetypes
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jsparse import __version__
from jsparse.engine.errors import EngineError
from jsparse.server import origins
from jsparse.server.errors import ApiError
from jsparse.server.front import Front
from jsparse.server.routes import router, schemas
from jsparse.server.service import Service
from jsparse.server.sse import ClientGone

PAGE = Path(__file__).parent / "page"
# the page loads only its own files, connects only to this server, and cannot be framed
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
# paths besides the page that need no key
OPEN = ("/health", "/version")
log = logging.getLogger("jsparse.server")


def make_app(service: Service, page: Path = PAGE) -> FastAPI:
    """Returns the application of a service, which may get its engine later."""
    app = gated(service, router, page)
    app.state.service = service
    _add_schemas(app)
    return app


def gated(
    front: Front,
    routes: APIRouter,
    page: Path = PAGE,
    *,
    openapi_url: str | None = "/openapi.json",
) -> FastAPI:
    """Returns an application with these routes and the page, behind the gate."""
    app = FastAPI(
        title="jsparse",
        version=__version__,
        openapi_url=openapi_url,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a client could choose the address
    )
    files = {file.name: file.read_bytes() for file in page.glob("*.*")} if page.is_dir() else {}
    app.add_middleware(Gate, front=front, open_paths={*OPEN, "/", *(f"/{name}" for name in files)})
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _not_found)
    app.add_exception_handler(ClientGone, _client_closed)
    app.add_exception_handler(ClientDisconnect, _client_closed)
    origins.allow(app, front.options.origins)
    app.include_router(routes)
    for name, data in files.items():
        _add_file(app, f"/{name}", name, data)
    if "index.html" in files:
        _add_file(app, "/", "index.html", files["index.html"])
    return app


class Gate:
    """The middleware that admits requests with the key, and counts those in progress."""

    def __init__(self, app: ASGIApp, front: Front, open_paths: set[str]) -> None:
        self._app, self._front, self._open = app, front, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return await refusal.response(scope, receive, send)
        begun = False

        async def sent(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        self._front.inside += 1
        try:
            await self._app(scope, receive, sent)
        except Exception:
            if not begun:  # a bug; the server logs it with its traceback
                failed = ApiError(500, "the server has failed", code="server_error")
                await failed.response(scope, receive, send)
            raise
        finally:
            self._front.inside -= 1

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers, key = Headers(scope=scope), self._front.options.api_key
        if foreign := self._front.options.foreign(headers):
            return ApiError(403, foreign, code="foreign_host")
        if key is not None and scope["path"] not in self._open:
            authorization = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(authorization, b"Bearer " + key.encode()):
                return ApiError(
                    401,
                    "Authorization: must be 'Bearer ' and the server's API key",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        if self._front.draining and scope["method"] == "POST":
            wait = {"Connection": "close"}
            return ApiError(503, "the server is shutting down", code="unavailable", headers=wait)
        return None


def _add_schemas(app: FastAPI) -> None:
    """Adds the schemas of request bodies to OpenAPI's, since FastAPI does not parse the bodies."""
    plain, definitions = app.openapi, schemas()

    def openapi() -> dict[str, Any]:
        document = plain()
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions)
        return document

    app.openapi = openapi  # pyright: ignore[reportAttributeAccessIssue]


def _add_file(app: FastAPI, path: str, name: str, data: bytes) -> None:
    kind = mimetypes.guess_type(name)[0]

    @app.head(path, response_model=None, include_in_schema=False, name=f"head {path}")
    @app.get(path, response_model=None, include_in_schema=False, name=path)
    async def file() -> Response:
        return Response(data, headers=PAGE_HEADERS, media_type=kind)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if error.status == 500:
        cause = error.__cause__ or error
        # the engine has logged its own failure, which fails all requests
        trace = None if isinstance(cause, EngineError) else cause
        log.error("a request has failed: %r", cause, exc_info=trace)
    return error.response


async def _not_found(_: Request, error: Exception) -> Response:
    """Responds to requests that match no route."""
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response


async def _client_closed(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # never read
