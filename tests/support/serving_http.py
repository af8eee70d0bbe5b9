"""Runs a server of a tiny model in a thread, for tests that send requests to it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import uvicorn

import jsparse
from jsparse.models.checkpoint import Params
from jsparse.models.tokenizer import Tokenizer
from jsparse.server.app import PAGE as FILES
from jsparse.server.app import make_app
from jsparse.server.front import Options
from jsparse.server.run import configured, listen
from jsparse.server.service import Service
from tests.support.serving import LADDER, PAGE
from tests.support.tiny import VOCAB, tiny_params

TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    "{% if tools %}w{{ tools | length }} {# <tool_call> #}{% endif %}"
    "{% if add_generation_prompt %}w7{% endif %}{% if more %} {{ more }}{% endif %}"
)


def with_words(**others: int) -> Params:
    """The tiny model with a word per token, with a chat template.

    `others` are the tokens of further words, which replace those of the same number.
    """
    import dataclasses

    named = {nth: word for word, nth in others.items()}
    words = {named.get(nth, f"w{nth}"): nth for nth in range(VOCAB)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = Tokenizer(core, chat_template=TEMPLATE)
    return dataclasses.replace(tiny_params(num_layers=1), tokenizer=tokenizer)


def an_engine(policy="twilight(all_pages(), p=0.9)", **options) -> jsparse.AsyncEngine:
    """An engine of four slots over the tiny model."""
    given = {
        "max_num_seqs": 4,
        "decode_rows": [4],
        "max_model_len": 96,
        "kv_cache_tokens": 384,
        "page_size": PAGE,
        "ladder": LADDER,
        "prepare": False,
        "per_request": ("dense", "p"),
        "layer_stats": True,
        "max_waiting": 200,
    }
    params = options.pop("params", None) or with_words()
    return jsparse.AsyncEngine(params, policy, **given | options)


@contextmanager
def serving(
    service: Service, engine: jsparse.AsyncEngine | None, page: Path = FILES
) -> Iterator[str]:
    """Serves on any port of loopback; yields the address."""
    if engine is not None:
        service.begin(engine)
    listening = listen("127.0.0.1", 0)
    config = configured(make_app(service, page))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        service.close()


def a_service(**options) -> Service:
    """A service of the model called tiny."""
    return Service(Options("tiny", **{"max_waiting": 200} | options))


def at_rest(service: Service) -> bool:
    """Waits until the service is idle, then until all its memory is free; returns whether it is.

    The memory of a request is freed shortly after its response was sent.
    """
    assert service.engine is not None
    outer, inner = service.engine, service.engine.engine

    def idle() -> bool:
        return inner.idle and not (service.live or service.inside or outer._inbox)

    def free() -> bool:
        pool = inner.scheduler.pool
        return (
            pool.available == pool.size
            and inner._free_slots == inner.sizes.num_slots
            and not (inner._live or inner._requests or outer._listeners)
            and not (service.live or service.inside or service._arriving or service.buffered)
        )

    if not soon(idle):
        return False
    inner.scheduler.plan()
    return soon(free)


def soon(condition: Callable[[], Any]) -> bool:
    """Waits until a condition holds; returns whether it did in time."""
    wait = threading.Event()
    return any(condition() or wait.wait(0.01) for _ in range(1000))
