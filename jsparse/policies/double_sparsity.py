"""Double Sparsity ranks tokens by a few heavy channels of q and k and attends to the best.

These channels carry most of the logit. Which channels are heavy hardly depends on the input, so
they are found offline. K's heavy channels are stored separately in 4 bits (the label cache):
ranking all tokens then reads r · 4 bits per token instead of H numbers.

Paper: "Post-Training Sparse Attention with Double Sparsity" (Yang et al.), arXiv:2408.07092.

Where we differ: the query heads of a group share the channels and the tokens of their KV head, and
tokens are ranked by their highest weight in any of these heads (the paper's models have one query
head per KV head). Labels are a copy of K like Twilight's, in the frame of the model's key
constants; a channel is heavy by its varying part, since the constant part is added exactly, in all
channels. Without a calibration file the channels are found in the row's own prompt, by the mean |q|
of its last queries times the mean |k| in the frame. Whole pages can also be selected, by their
tokens' mass.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from jsparse.builder import builder
from jsparse.cache import CacheSpec, LayerCache, StepView, read_heads
from jsparse.cache.key_constants import (
    KEY_CONSTANTS,
    KeyFrame,
    frame_at,
    into_frame,
    scaled_queries,
)
from jsparse.hooks import PrefillView, State
from jsparse.hyper_parameters import one_of, whole_number
from jsparse.pallas_kernels import int4_keys
from jsparse.pallas_kernels.int4_append import int4_append
from jsparse.pallas_kernels.int4_keys import Int4Keys
from jsparse.pallas_kernels.int4_scores import int4_scores
from jsparse.pallas_kernels.threshold_select import TopK, threshold_select
from jsparse.pallas_kernels.threshold_select.api import OutputGranularity
from jsparse.policies import channel_ranking
from jsparse.policies.sidecars import Sidecar, framed_sidecar
from jsparse.policies.slot_sums import slot_sums
from jsparse.policy import Policy, at_layer
from jsparse.ranks import own_part
from jsparse.selection import Granularity
from jsparse.shapes import ChunkKV, Lengths, Queries, Rows

LISTED_AS: dict[str, OutputGranularity] = {"token": "token", "page": "page_mass"}
WINDOW = 32  # the number of last prompt queries that rank channels


class Labels(NamedTuple):
    """One layer's heavy channels, ascending, and the 4-bit copy of these channels of K."""

    channels: Int32[Array, "B K r"]
    keys: Int4Keys


class Settings(NamedTuple):
    """The hyper-parameters.

    Attributes:
        budget, channels, granularity, calibration: those of `double_sparsity`.
        ranking: the content of the calibration file; None without one.
    """

    budget: int
    channels: int | None
    granularity: Granularity
    calibration: str | None
    ranking: channel_ranking.Ranking | None


@builder
def double_sparsity(
    budget: int = 1024,
    channels: int | None = None,
    calibration: str | None = None,
    granularity: Granularity = "token",
) -> Policy:
    """Attends to the `budget` tokens with the highest weights, estimated from a few heavy channels.

    With granularity="page" these are the budget // P pages with the highest weights.

    Args:
        budget: the number of tokens that a KV head attends to.
        channels: r, the number of heavy channels; even. None: H/4, rounded up to a multiple of 8,
            which the GPU kernel needs.
        calibration: a file written by `jsparse calibrate-channels` (read once per process); None:
            each row's channels are found in its prompt.
        granularity: the unit of selection, "token" or "page".
    """
    whole_number("budget", budget, 1)
    if channels is not None:
        whole_number("channels", channels, 2)
        if channels % 2:
            raise ValueError(f"channels={channels}: must be even, two labels share a byte")
    if calibration is not None and not isinstance(calibration, str):
        raise ValueError(f"calibration={calibration!r}: must be the path of a file")
    one_of("granularity", granularity, LISTED_AS)
    ranking = None if calibration is None else channel_ranking.load(calibration)
    own = ranking is None  # each row finds its own channels
    settings = Settings(budget, channels, granularity, calibration, ranking)
    labels = framed_sidecar(partial(no_labels, settings), taken_in)
    return Policy(
        partial(select, settings),
        init=labels.init if own else partial(calibrated, settings, labels),
        prefill=prefill if own else labels.prefill,
        append=labels.append,
        window=WINDOW if own else 0,
        needs=KEY_CONSTANTS,
        # pages hold labels of a row's own channels, which other rows could not use
        shares=None if own else "pages",
        reads=0,
    )


def no_labels(settings: Settings, spec: CacheSpec) -> Labels:
    """Returns a layer's initial labels, without keys."""
    count = _count(settings.channels, spec.head_dim)
    chosen = jnp.zeros((spec.batch, spec.num_kv_heads, count), jnp.int32)
    return Labels(chosen, int4_keys.init(spec._replace(head_dim=count)))


def calibrated(settings: Settings, labels: Sidecar, spec: CacheSpec) -> State:
    """Returns initial labels with the first channels of the ranking, the same for every row."""
    assert settings.ranking is not None
    state = labels.init(spec)
    channel_ranking.require_fit(settings.ranking, str(settings.calibration), spec)
    shape = state[0].channels.shape
    ascending = np.sort(settings.ranking[..., : shape[-1]])
    return tuple(
        # during shape evaluation outside a mesh, any rank's part will do
        entry._replace(channels=jnp.broadcast_to(own_part(channels, 0)[: shape[1]], shape))
        for entry, channels in zip(state, ascending, strict=True)
    )


def taken_in(
    labels: Labels, kv: LayerCache, k: ChunkKV, valid: Rows, first: Lengths, *, frame: KeyFrame
) -> Labels:
    """Adds the labels of new tokens."""
    keys = int4_append(labels.keys, kv, k, valid, first, frame=frame, channels=labels.channels)
    return labels._replace(keys=keys)


def prefill(state: State, layer: int, view: PrefillView) -> State:
    """Finds a row's heavy channels at the end of its prompt, and labels the whole prompt."""
    if not view.last:
        return state
    kv, frame = view.step.layers[layer], frame_at(view.step, layer)
    count = state[layer].channels.shape[-1]
    labels = state[layer]._replace(channels=heavy_channels(view.q_window, kv, frame, count))
    k = read_heads(kv.k, kv).swapaxes(1, 2)
    start = jnp.zeros_like(kv.lengths)
    labels = taken_in(labels, kv, k, kv.lengths[:, 0], start, frame=frame)
    return at_layer(state, layer, labels)


def select(settings: Settings, state: State, layer: int, q: Queries, view: StepView):
    """Lists the units with the highest weight in any head of the group."""
    kv = view.layers[layer]
    size = kv.page_size if settings.granularity == "page" else None
    capacity = max(min(settings.budget, kv.capacity) // (size or 1), 1)
    logits = label_logits(q, kv, state[layer], frame_at(view, layer))
    chosen = threshold_select(
        logits,
        TopK(capacity),
        capacity=capacity,
        granularity=LISTED_AS[settings.granularity],
        page_size=size,
        group="max",
    )
    return chosen, None, state


def heavy_channels(
    queries: Float[Array, "B W N H"], kv: LayerCache, frame: KeyFrame, count: int
) -> Int32[Array, "B K r"]:
    """Returns each head's `count` heaviest channels, ascending; ties go to the first.

    The weight of a channel is the mean |q| of the prompt's last queries, over all heads of the
    group, times the mean |k|, both in the frame.
    """
    batch, window, heads, head_dim = queries.shape
    scaled = scaled_queries(queries.reshape(batch * window, heads, head_dim), frame)
    grouped = jnp.abs(scaled).reshape(batch, window, kv.lengths.shape[1], -1, head_dim)
    weights = jnp.sum(grouped, axis=(1, 3)) * key_magnitudes(kv, frame)
    return jnp.sort(jax.lax.top_k(weights, count)[1])


def key_magnitudes(kv: LayerCache, frame: KeyFrame) -> Float32[Array, "B K H"]:
    """Sums |k| in the frame over the tokens of each head."""
    slots = jnp.arange(kv.capacity, dtype=jnp.int32)
    all_slots = jnp.broadcast_to(slots, (*kv.lengths.shape, kv.capacity))
    k = into_frame(read_heads(kv.k, kv), frame, all_slots)
    return slot_sums(jnp.where((slots < kv.lengths[..., None])[..., None], jnp.abs(k), 0.0))


def label_logits(
    q: Queries, kv: LayerCache, labels: Labels, frame: KeyFrame
) -> Float32[Array, "B K G S"]:
    """Estimates every slot's logit from the heavy channels; -inf past a head's tokens."""
    logits = int4_scores(q, kv, labels.keys, None, frame=frame, channels=labels.channels)
    return logits.reshape(*kv.lengths.shape, -1, kv.capacity)


def _count(channels: int | None, head_dim: int) -> int:
    """Returns r; raises ValueError if a head has fewer channels."""
    if channels is not None and channels > head_dim:
        raise ValueError(
            f"channels={channels}: must be at most {head_dim}, the model's head dimension"
        )
    return min(-(-head_dim // 32) * 8, head_dim) if channels is None else channels
