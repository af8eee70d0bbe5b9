"""Implements `api.centroid_scores` in plain jnp: the CPU path and the kernel's oracle."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jsparse.shapes import Lengths, Queries


def centroid_scores(
    q: Queries,
    centroids: Float[Array, "B K L H"],
    number: Lengths,
    radius: Float32[Array, "B K L"] | None,
    unit: Int32[Array, "B K L"] | None,
    chosen: Bool[Array, "B K U"] | None,
) -> Float32[Array, "B K L"]:
    """Implements `api.centroid_scores` in plain jnp."""
    q = q.reshape(*centroids.shape[:2], -1, q.shape[-1])
    products = jnp.einsum("bkgh,bklh->bkgl", q, centroids, preferred_element_type=jnp.float32)
    if radius is not None:
        length = jnp.sqrt(jnp.sum(jnp.square(q.astype(jnp.float32)), -1, keepdims=True))
        products += length * radius[:, :, None]
    there = jnp.arange(centroids.shape[2]) < number[..., None]
    if unit is not None and chosen is not None:
        there &= jnp.take_along_axis(chosen, unit, axis=-1)
    return jnp.where(there, jnp.max(products, axis=2), -jnp.inf)
