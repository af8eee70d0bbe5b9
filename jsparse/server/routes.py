"""Defines the routes of the application: completions, tokens, and the state of the server."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from jsparse import __version__
from jsparse.server import completions
from jsparse.server.body import RequestBody
from jsparse.server.errors import ApiError, as_api_error, json_response
from jsparse.server.live import INTERVAL, Live
from jsparse.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from jsparse.server.service import Service
from jsparse.server.sse import EventStream, event
from jsparse.text.short_names import short_name

BODIES = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
SCHEMA = "#/components/schemas/{model}"
# a docstring of a route would be its description in /openapi.json
router = APIRouter(redirect_slashes=False)


async def _service_of(request: Request) -> Service:
    return request.app.state.service


ServiceOfApp = Annotated[Service, Depends(_service_of)]


def schemas() -> dict[str, Any]:
    """Returns the JSON schemas of requests, by name."""
    _, definitions = models_json_schema(
        [(body, "validation") for body in BODIES], ref_template=SCHEMA
    )
    return definitions["$defs"]


def _post(
    path: str, body: type[RequestBody]
) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Awaitable[Any]]]:
    """Returns the decorator of a route with such a body, which the route itself parses."""
    schema = {"$ref": SCHEMA.format(model=body.__name__)}
    content = {"application/json": {"schema": schema}}
    extra = {"requestBody": {"required": True, "content": content}}
    return router.post(path, response_model=None, openapi_extra=extra, name=path)


@_post("/v1/completions", CompletionRequest)
async def _complete(service: ServiceOfApp, request: Request) -> Response:
    return await completions.complete(service, request)


@_post("/v1/chat/completions", ChatRequest)
async def _chat(service: ServiceOfApp, request: Request) -> Response:
    return await completions.chat(service, request)


@_post("/tokenize", TokenizeRequest)
async def _tokenize(service: ServiceOfApp, request: Request) -> Response:
    body = await service.body(TokenizeRequest, request)
    with service.arriving():
        try:
            if body.messages is not None:
                prompt = body.chat(body.messages, service.options.template_kwargs)
                (ids,) = await service.encode(prompt)
            else:
                ids = await service.ids(body.prompt or "", body.add_special_tokens)
        except ValueError as error:
            field = "prompt" if body.messages is None else "messages"
            names: dict[str, str] = dict.fromkeys(("text", "prompt", "messages"), field)
            names |= completions.TEMPLATE_NAMES
            raise as_api_error(error, names) from error
    maximum = service.ready.engine.sizes.max_model_len
    return json_response({"count": len(ids), "max_model_len": maximum, "tokens": ids})


@_post("/detokenize", DetokenizeRequest)
async def _detokenize(service: ServiceOfApp, request: Request) -> Response:
    body = await service.body(DetokenizeRequest, request)
    with service.arriving():
        try:
            text = await service.texts.text(body.tokens)
        except ValueError as error:
            raise as_api_error(error, {}) from error
    return json_response({"prompt": text})


@router.get("/tokenizer_info", response_model=None, name="tokenizer_info")
async def _tokenizer_info(service: ServiceOfApp) -> Response:
    tokenizer = service.texts.tokenizer
    if tokenizer is None:
        raise ApiError(404, "the model has no tokenizer", code="no_tokenizer")
    template = {"chat_template": tokenizer.chat_template}
    return json_response({"bos_token": None, "eos_token": None} | tokenizer.named_tokens | template)


@router.get("/v1/models", response_model=None, name="models")
async def _models(service: ServiceOfApp) -> Response:
    models = [_model_named(service, name) for name in service.options.names]
    return json_response({"object": "list", "data": models})


# a name may have slashes
@router.get("/v1/models/{name:path}", response_model=None, name="model")
async def _model(service: ServiceOfApp, name: str) -> Response:
    service.require_model(name)
    return json_response(_model_named(service, name))


def _model_named(service: Service, name: str) -> dict[str, Any]:
    engine = service.ready.engine
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "jsparse",
        "root": engine.params.name,
        "max_model_len": engine.sizes.max_model_len,
        "policy": engine.policy.name,
        "policy_short": short_name(engine.policy),
        "chat_template": service.has_chat_template,
    }


@router.head("/health", response_model=None, include_in_schema=False, name="health")
@router.get("/health", response_model=None, name="health")
async def _health(service: ServiceOfApp) -> Response:
    reason = service.unhealthy
    return json_response({"status": reason or "ready"}, 503 if reason else 200)


@router.get("/version", response_model=None, name="version")
async def _version() -> Response:
    return json_response({"version": __version__})


@router.get("/metrics", response_model=None, name="metrics")
async def _metrics(service: ServiceOfApp) -> Response:
    # available even if the server is shutting down, or the engine has failed
    if service.engine is None:
        raise ApiError(503, "the model is being loaded", code="unavailable")
    return Response(service.metrics.text, media_type="text/plain; version=0.0.4")


@router.get("/live", response_model=None, name="live")
async def _live(service: ServiceOfApp) -> Response:
    return EventStream(_pictures(service, Live(service)))


async def _pictures(service: Service, live: Live) -> AsyncGenerator[bytes]:
    while service.unhealthy is None:
        yield event(live.now())
        await asyncio.sleep(INTERVAL)
