"""Builds sidecars: arrays of a policy that accompany K, with one entry per layer.

An entry is updated with the same tokens as the cache, at prefill and at every step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from jsparse.cache import CacheSpec, LayerCache, StepView, taking_part
from jsparse.cache.key_constants import KeyFrame, frame_at
from jsparse.hooks import AppendFn, InitFn, PrefillFn, PrefillView, State
from jsparse.policy import at_layer
from jsparse.shapes import ChunkKV, Lengths, Rows, Tokens


class Sidecar(NamedTuple):
    """The hooks of a policy whose state is only a sidecar."""

    init: InitFn
    prefill: PrefillFn
    append: AppendFn


class TakeInFn(Protocol):
    """Updates a layer's entry with new tokens."""

    def __call__(
        self, entry: Any, kv: LayerCache, k: ChunkKV, valid: Rows, first: Lengths, /
    ) -> Any: ...


class TakeIntoFrameFn(Protocol):
    """Updates a layer's entry, stored in the layer's key frame, with new tokens."""

    def __call__(
        self,
        entry: Any,
        kv: LayerCache,
        k: ChunkKV,
        valid: Rows,
        first: Lengths,
        /,
        *,
        frame: KeyFrame,
    ) -> Any: ...


def sidecar(init: Callable[[CacheSpec], Any], take_in: TakeInFn) -> Sidecar:
    """Builds a sidecar of all layers from the functions of one.

    Args:
        init: returns the initial entry of a layer.
        take_in: updates an entry with new tokens. When it is called, the first `valid[b]` of T
            tokens have been written to the slots first, first + 1, … of each head, and its lengths
            count them.
    """
    return _of_layers(init, take_in, framed=False)


def framed_sidecar(init: Callable[[CacheSpec], Any], take_in: TakeIntoFrameFn) -> Sidecar:
    """Builds a sidecar that is stored in the frame of the model's key constants.

    Arguments are those of `sidecar`; the policy `needs` KEY_CONSTANTS.
    """
    return _of_layers(init, take_in, framed=True)


def _of_layers(
    init: Callable[[CacheSpec], Any], take_in: Callable[..., Any], *, framed: bool
) -> Sidecar:
    new = partial(_taken_in, take_in, framed)
    return Sidecar(partial(_entries, init), partial(_prefill, new), partial(_append, new))


def _entries(init: Callable[[CacheSpec], Any], spec: CacheSpec) -> State:
    return tuple(init(spec) for _ in range(spec.num_layers))


def _prefill(new: Callable[..., State], state: State, layer: int, view: PrefillView) -> State:
    return new(state, layer, view.step, view.k, view.valid)


def _append(
    new: Callable[..., State],
    state: State,
    layer: int,
    k: ChunkKV,
    v: ChunkKV,
    tokens: Tokens,
    positions: Tokens,
    view: StepView,
) -> State:
    return new(state, layer, view, k, taking_part(view, k.shape[1]))


def _taken_in(
    take_in: Callable[..., Any],
    framed: bool,
    state: State,
    layer: int,
    view: StepView,
    k: ChunkKV,
    valid: Rows,
) -> State:
    kv = view.layers[layer]
    first = kv.lengths - valid[:, None]
    frame = {"frame": frame_at(view, layer)} if framed else {}
    return at_layer(state, layer, take_in(state[layer], kv, k, valid, first, **frame))
