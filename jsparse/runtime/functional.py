"""Prefill and decode steps as functions of arrays, for your own JAX programs.

`init_batch` allocates; `prefill` and `decode_step` may be called in jitted functions and loops.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.core as jax_core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from jsparse.cache import KVCache, ReadOnly
from jsparse.cache.spec import CacheSpec
from jsparse.hooks import State
from jsparse.hyper_parameters import whole_number
from jsparse.machine.jax_settings import own_settings
from jsparse.models.checkpoint import Params, require_on_one_device, require_params
from jsparse.models.config import ModelConfig
from jsparse.models.transformer import to_logits
from jsparse.policies.expressions import as_policy
from jsparse.policy import AnyPolicy, Policy
from jsparse.runtime import capacity, chunk_attention, room, rows
from jsparse.runtime import decode_step as step
from jsparse.runtime import prefill as prompts
from jsparse.runtime.admission import admit
from jsparse.runtime.decode_step import StepStats
from jsparse.runtime.store import on_host
from jsparse.shapes import Rows


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["cache", "state", "recent", "steps", "constants"],
    meta_fields=["policy", "spec", "config", "prefilled"],
)
@dataclass(frozen=True)
class Batch:
    """B sequences under a policy: a pytree, whose policy and sizes are static.

    Attributes:
        cache: K and V. `cache.positions` counts the tokens of each row, Int32[B], and
            `cache.overflow`, Bool[B], marks full rows, whose further logits are invalid.
        state: the policy's state.
        recent: the newest tokens, which a correction recomputes.
        steps: the number of decode steps so far.
        constants: the model's arrays that the policy needs.
        policy: the policy that decodes.
        spec: the sizes of the cache.
        config: the model's configuration.
        prefilled: whether it has prompts.
    """

    cache: KVCache
    state: State
    recent: Int32[Array, "B n"]
    steps: Int32[Array, ""]
    constants: Mapping[str, Array] | None
    policy: Policy
    spec: CacheSpec
    config: ModelConfig
    prefilled: bool = False


@own_settings()
def init_batch(
    params: Params,
    policy: AnyPolicy | str = "dense",
    *,
    batch: int = 1,
    max_length: int,
    page_size: int = 16,
) -> Batch:
    """Allocates an empty batch, and computes the model's constants that the policy needs.

    Args:
        params: the model; its weights must not be traced.
        policy: the policy or its expression.
        batch: B, the number of sequences.
        max_length: the most tokens of a sequence, prompt included; rounded up to whole pages.
        page_size: the number of tokens per page.

    Raises:
        ValueError: an argument is out of range, the model is on several devices, the policy keeps K
            and V in host memory, or memory does not suffice.
    """
    require_params(params)
    require_on_one_device(params)
    if isinstance(jax.tree.leaves(params.weights)[0], jax_core.Tracer):
        raise ValueError("params: must not be traced by init_batch; call it outside of jax.jit")
    for name, value in (("batch", batch), ("max_length", max_length)):
        whole_number(name, value, 1)
    spec = capacity.spec_of(params, batch, max_length, page_size)
    if spec.capacity > (most := params.config.max_position_embeddings):
        raise ValueError(
            f"max_length={max_length}: must be at most {most}, the model's maximum, in whole pages"
        )
    deployment = admit(params, as_policy(policy), spec)
    policy = deployment.policy
    if on_host(policy):
        raise ValueError(f"policy={policy}: must keep K and V on the device here")
    cache, state = deployment.store.begin(chunk_attention.chunk_tokens(spec, policy.prefill_method))
    recent, steps = rows.no_recent(policy, batch), jnp.int32(0)
    constants = deployment.constants()
    return Batch(cache, state, recent, steps, constants, policy, spec, params.config)


@own_settings()
def prefill(
    params: Params, batch: Batch, tokens: Any, lengths: Any = None
) -> tuple[Batch, Float32[Array, "B V"]]:
    """Prefills the prompts of an empty batch, densely; returns it with the logits that follow them.

    Outside of jax.jit, the given batch is donated. Not differentiable.

    Args:
        params: the model of the batch.
        batch: the result of `init_batch`.
        tokens: the prompts' ids, padded at the end, [B, T].
        lengths: the number of each prompt's tokens, from 1 to T, [B]; None: T.

    Raises:
        ValueError: the model or the shapes do not fit the batch, a number is out of range, or the
            batch has prompts.
    """
    _require_of(params, batch, prefilled=False)
    tokens = _ids(batch, tokens, 2, params.config.vocab_size - 1)
    if tokens.shape[1] >= batch.spec.capacity:
        raise ValueError(
            f"tokens of shape {tokens.shape}: must leave room in the {batch.spec.capacity} tokens "
            "of each row"
        )
    if lengths is None:
        lengths = np.full(tokens.shape[0], tokens.shape[1], np.int32)
    lengths = _ids(batch, lengths, 1, tokens.shape[1], name="lengths", least=1)
    # constants belong to the model, and must not be donated
    after, logits = _prefill(
        params, replace(batch, constants=None), batch.constants, tokens, lengths
    )
    return replace(after, constants=batch.constants, prefilled=True), logits


@own_settings()
def decode_step(
    params: Params, batch: Batch, tokens: Any
) -> tuple[Batch, Float32[Array, "B V"], StepStats]:
    """Runs one token of each row through the model, with attention to the policy's selection.

    Outside of jax.jit, the given batch is donated. Not differentiable. Returns the batch, the
    logits that follow `tokens`, and the shares of the positions so far that were attended and read
    in each layer.

    Args:
        params: the model of the batch.
        batch: the result of `prefill` or of this function.
        tokens: the next token of each row, [B].

    Raises:
        ValueError: the model or the shape does not fit the batch, a token is not in the
            vocabulary, or the batch has no prompts.
    """
    _require_of(params, batch, prefilled=True)
    tokens = _ids(batch, tokens, 1, params.config.vocab_size - 1)
    constants = batch.constants
    after, *results = _decode_step(params, replace(batch, constants=None), constants, tokens)
    return replace(after, constants=constants), *results


@partial(jax.jit, donate_argnames=("batch",))
def _prefill(
    params: Params,
    batch: Batch,
    constants: Mapping[str, Array] | None,
    tokens: Int32[Array, "B T"],
    lengths: Rows,
) -> tuple[Batch, Float32[Array, "B V"]]:
    decoder, policy, spec = params.decoder, batch.policy, batch.spec
    read_only = ReadOnly(constants)
    carry = prompts.prefill_prompts(
        decoder,
        policy,
        params.weights,
        tokens,
        lengths,
        prompts.start(decoder, policy, batch.cache, batch.state),
        chunk=chunk_attention.chunk_tokens(spec, policy.prefill_method),
        read_only=read_only,
        within=True,
    )
    longest = tokens.shape[1]
    cache, state = room.after_prompt(
        policy,
        spec,
        carry.cache,
        carry.state,
        read_only,
        [longest] * spec.batch,
        [spec.capacity - longest] * spec.batch,
        within=True,
    )
    logits = to_logits(decoder, params.weights, carry.last_hidden)
    return replace(batch, cache=cache, state=state), logits


@partial(jax.jit, donate_argnames=("batch",))
def _decode_step(
    params: Params, batch: Batch, constants: Mapping[str, Array] | None, tokens: Rows
) -> tuple[Batch, Float32[Array, "B V"], StepStats]:
    model, read_only = (params.decoder, batch.policy, params.weights), ReadOnly(constants)
    logits, cache, state, stats = step.decode_step(
        *model, tokens, batch.cache, batch.state, read_only
    )
    recent = jnp.concatenate([batch.recent, tokens[:, None]], axis=1)[:, 1:]
    made = rows.Batch(tokens, cache, state, (), batch.steps + 1, recent)
    for service, every in batch.policy.services.every.items():
        run = partial(rows.serviced, service, *model, read_only, within=True)
        made = jax.lax.cond(made.made % every == 0, run, lambda same: same, made)
    after = replace(batch, cache=made.cache, state=made.state, recent=made.recent, steps=made.made)
    return after, logits, stats


def _require_of(params: Params, batch: Batch, *, prefilled: bool) -> None:
    """Raises ValueError unless a batch is of this model, and has prompts or not."""
    require_params(params)
    require_on_one_device(params)
    if params.config != batch.config:
        raise ValueError(f"params={params!r}: must be the model that init_batch was given")
    if batch.prefilled != prefilled:
        rule = "the result of prefill" if prefilled else "the result of init_batch"
        raise ValueError(f"batch.prefilled={batch.prefilled}: must be {prefilled}, {rule}")


def _ids(
    batch: Batch, given: Any, ndim: int, most: int, *, name: str = "tokens", least: int = 0
) -> Array:
    """Returns integers of the batch, [B] or [B, T].

    Those on a device are not read, which would wait for them.

    Raises:
        ValueError: they are something else, or numbers on the host are out of range.
    """
    try:
        ids = given if isinstance(given, jax.Array) else np.asarray(given)
    except ValueError as error:
        raise ValueError(f"{name}: must be integers ({error})") from None
    size = batch.spec.batch
    if not np.issubdtype(ids.dtype, np.integer) or ids.ndim != ndim or ids.shape[0] != size:
        wanted = f"[{size}]" if ndim == 1 else f"[{size}, T]"
        raise ValueError(
            f"{name} of shape {ids.shape} and type {ids.dtype}: must be integers {wanted}"
        )
    if isinstance(ids, np.ndarray) and ids.size and not least <= ids.min() <= ids.max() <= most:
        raise ValueError(
            f"{name} range from {ids.min()} to {ids.max()}: must be in {least} … {most}"
        )
    return jnp.asarray(ids, jnp.int32)
