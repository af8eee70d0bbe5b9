"""Implements `api.centroid_scores` in plain jnp, as CPU path and oracle of the kernel."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jsparse.shapes import Lengths, Queries


def centroid_scores(
    q: Queries,
    centroids: Float[Array, "B K L H"],
    number: Lengths,
    radius: Float32[Array, "B K L"] | None,
) -> Float32[Array, "B K L"]:
    """Implement `api.centroid_scores` in plain jnp."""
    q = q.reshape(*centroids.shape[:2], -1, q.shape[-1])
    products = jnp.einsum("bkgh,bklh->bkgl", q, centroids, preferred_element_type=jnp.float32)
    if radius is not None:
        length = jnp.sqrt(jnp.sum(jnp.square(q.astype(jnp.float32)), -1, keepdims=True))
        products += length * radius[:, :, None]
    there = jnp.arange(centroids.shape[2]) < number[..., None]
    return jnp.where(there, jnp.max(products, axis=2), -jnp.inf)
