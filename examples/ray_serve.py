"""Serves a model with Ray Serve: each replica has an engine and the API of `jsparse serve`.

pip install "ray[serve]"
python examples/ray_serve.py
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import ray  # pyright: ignore[reportMissingImports]
from ray import serve  # pyright: ignore[reportMissingImports]
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import jsparse
from jsparse.server.app import make_app
from jsparse.server.front import Options
from jsparse.server.service import Service

ADDRESS = "http://127.0.0.1:8000/v1/completions"
REPLICAS = 2
QUESTIONS = ("The capital of France is", "Gravity is", "A prime number is", "Water boils at")


@serve.ingress()
class Server:
    """A replica: an engine on a GPU of its own, or on the CPU."""

    def __init__(self, model: str, policy: str, **options: Any) -> None:
        """Loads the model; `options` are those of AsyncEngine."""
        self.service = Service(Options(model))
        self.service.begin(jsparse.AsyncEngine(model, policy, **options))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the application, whose responses name the replica; Ray Serve calls this."""
        app, name = make_app(self.service), serve.get_replica_context().replica_id.unique_id

        async def named(scope: Scope, receive: Receive, send: Send) -> None:
            async def sent(message: Message) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (b"x-replica", name.encode())]
                await send(message)

            await app(scope, receive, sent)

        return named

    def check_health(self) -> None:
        """Raises an error if the engine has failed: Ray Serve then replaces the replica."""
        if reason := self.service.unhealthy:
            raise RuntimeError(reason)


def ask(prompt: str) -> str:
    """Streams the answer to a prompt and prints it; returns the replica that gave it."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text, pieces, attended = "", 0, 0.0
    with httpx.stream("POST", ADDRESS, json=body, timeout=300) as got:
        for line in got.raise_for_status().iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                text, pieces = text + choice["text"], pieces + 1
            if event.get("usage"):
                attended = event["usage"]["jsparse"]["attended"]
    replica = got.headers["x-replica"]
    print(f"{replica}: {prompt!r} {text!r} ({pieces} pieces, attended {attended:.0%})")
    return replica


def main() -> None:
    """Starts the replicas, sends all questions at once, and stops the replicas."""
    ray.init()
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= REPLICAS else 0
    # at Ray's default of 5 requests per replica, slots of larger engines would stay empty
    server = serve.deployment(
        num_replicas=REPLICAS, max_ongoing_requests=32, ray_actor_options={"num_gpus": gpus}
    )(Server)
    policy = "streaming(sink=4, recent=8)"
    serve.run(server.bind("smollm2", policy, max_num_seqs=4, max_model_len=256))
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        replicas = {*pool.map(ask, QUESTIONS)}
    print(f"{len(replicas)} replicas have answered")
    serve.shutdown()


if __name__ == "__main__":
    main()
