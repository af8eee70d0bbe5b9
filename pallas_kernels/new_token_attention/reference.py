"""Implements `api.new_token_attention` in plain jnp: the CPU path and the kernel's oracle."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jsparse.selection.partials import merge, softmax_partial


def new_token_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    past_o: Float32[Array, "B K rows H"],
    past_lse: Float32[Array, "B K rows"],
) -> Float[Array, "B T N H"]:
    """Implements `api.new_token_attention` in plain jnp."""
    batch, tokens, _, head_dim = q.shape
    by_group = q.reshape(batch, tokens, k.shape[2], -1, head_dim)
    logits = jnp.einsum("btkgh,bskh->bktgs", by_group, k, preferred_element_type=jnp.float32)
    causal = jnp.tri(tokens, dtype=jnp.bool_)[:, None]
    logits = jnp.where(causal, head_dim**-0.5 * logits, -jnp.inf)
    weights, total, lse = softmax_partial(logits)
    o = jnp.einsum("bktgs,bskh->bktgh", weights / total[..., None], v.astype(jnp.float32))
    of_past = past_o.reshape(o.shape), past_lse.reshape(lse.shape)
    o, _ = merge(*of_past, o, lse)
    return o.swapaxes(1, 2).reshape(q.shape).astype(q.dtype)
