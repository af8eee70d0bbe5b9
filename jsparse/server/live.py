"""Builds the data of /live: the running requests, their speed and the attended share."""

import time
from collections import deque
from typing import Any

import jax
import numpy as np

from jsparse.models.experts import unread_bytes
from jsparse.server.metrics import kv_cache_usage
from jsparse.server.prompt_stream import PromptStream
from jsparse.server.service import Service

INTERVAL = 0.5
# speed is averaged over this many seconds
SPEED_SECONDS = 4
# bytes per second of the devices' memory, from NVIDIA's data sheets
BANDWIDTH = {
    "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA H200": 4.8e12,
    "NVIDIA L4": 0.3e12,
    "NVIDIA L40S": 0.864e12,
}


class Live:
    """The current state of a service, for /live."""

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.ready.engine
        leaves = jax.tree.leaves(self._engine.params.weights)
        # of one device, like all values below: several devices read their memory in parallel
        mesh = self._engine.params.mesh
        self._devices = 1 if mesh is None else mesh.size
        self._weight_bytes = sum(leaf.nbytes for leaf in leaves) / self._devices
        self._token_bytes = self._engine.spec.token_bytes
        self._bandwidth = BANDWIDTH.get(jax.devices()[0].device_kind)
        self._seen: deque[tuple[float, int]] = deque()

    def now(self) -> dict[str, Any]:
        """Returns the current state."""
        scheduler = self._engine.scheduler
        decoding = list(scheduler.decoding)
        return {
            "running": len(scheduler.begun),
            "preempted": len(scheduler.preempted),
            "waiting": len(scheduler.waiting),
            "kv_cache_usage": kv_cache_usage(self._engine),
            "prefix_cache_hits": self._service.metrics.hit_tokens,
            "prefix_cache_queries": self._service.metrics.query_tokens,
            "tokens_per_second": self._speed(),
            "dense_bound_tokens_per_second": self.dense_bound(
                [len(seq.ids) + seq.planned for seq in decoding]
            ),
            "attended_by_layer": self._attended(),
            "requests": [
                {
                    "id": stream.name,
                    "phase": _phase(stream),
                    "prompt_tokens": len(stream.state.ids),
                    "tokens": sum(len(builder.token_ids) for builder in stream.state.builders),
                }
                for stream in list(self._service.live.values())
            ],
        }

    def dense_bound(self, lengths: list[int]) -> float | None:
        """Returns the most tokens/s of dense decoding, which reads weights, K and V once.

        It counts the experts that random choices need on average.
        """
        if self._bandwidth is None or not lengths:
            return None
        config = self._engine.params.config
        unread = unread_bytes(config, self._engine.params.weights, len(lengths)) / self._devices
        windows = config.windows or (None,)
        tokens = sum(min(length, window or length) for length in lengths for window in windows)
        step = self._weight_bytes - unread + self._token_bytes * tokens / len(windows)
        return len(lengths) * self._bandwidth / step

    def _speed(self) -> float:
        now, tokens = time.monotonic(), self._engine.counters.new_tokens
        self._seen.append((now, tokens))
        while self._seen[0][0] < now - SPEED_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        return (tokens - before) / (now - since) if now > since else 0.0

    def _attended(self) -> list[float] | None:
        """Returns the share that the newest steps attended to in each layer, over all sequences."""
        newest = [
            builder.layers
            for stream in list(self._service.live.values())
            for builder in stream.state.builders
        ]
        known = [layers[0] for layers in newest if layers is not None]
        return np.mean(known, axis=0).tolist() if known else None


def _phase(stream: PromptStream) -> str:
    """Returns the phase of the least advanced sequence, such as decoding or preempted."""
    phases = [seq.phase for seq in stream.state.seqs]
    return min(phases, key=lambda phase: phase.value).name.lower()
