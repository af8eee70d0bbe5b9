"""The decoder of all model families, which differ only in its configuration.

The families are Llama 2/3.x, SmolLM2, Mistral, Qwen2/2.5, Qwen3 and the mixtures of experts
Qwen2-MoE and Qwen3-MoE. The caller passes attention as a callable: `attend(layer, q, k, v) -> o`.
Prefill, decoding and a plain dense pass are three such callables, so the decoder depends neither on
the cache nor on how much of it is read. A caller that fuses the rotation of q and k with other work
also passes `rotate(layer, heads) -> q, k, v`.

Weights are a plain pytree. The q, k and v projections are one matrix [in, out] with columns ordered
q | k | v, and likewise gate | up. Matrices in blocks (jsparse.pallas_kernels.weight_blocks) are
[out, in].
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jsparse import ranks
from jsparse.heads import Heads, RopeTable
from jsparse.models.config import ModelConfig
from jsparse.models.experts import ExpertsMLP
from jsparse.models.layers import (
    MLP,
    Scale,
    rope_frequencies,
    rope_scale,
    rope_table,
)
from jsparse.models.linear import Delta, Dense, add_and_norm
from jsparse.models.parameters import parameter
from jsparse.models.quantized import FormAt, plain, random_part, spec_at
from jsparse.pallas_kernels.quantized_product import quantized_product
from jsparse.pallas_kernels.weight_blocks import dequantized, is_blocks, out_axis, rows_of
from jsparse.shapes import ChunkKV, ChunkQueries

Weights = dict[str, Any]
AttendFn = Callable[
    [int, Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]],
    Float[Array, "B T N H"],
]
RotateFn = Callable[[int, Heads], tuple[ChunkQueries, ChunkKV, ChunkKV]]


def rotated(layer: int, heads: Heads) -> tuple[ChunkQueries, ChunkKV, ChunkKV]:
    """Rotates q and k, and nothing else."""
    return heads.rotated()


class Attention(nn.Module):
    """Projections and RoPE around the caller's attention.

    It returns x + delta and attention(norm(x + delta)).
    """

    config: ModelConfig
    layer: int

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        delta: Delta | None,
        scale: Float[Array, "D"],
        table: RopeTable,
        attend: AttendFn,
        rotate: RotateFn,
    ) -> tuple[Float[Array, "B T D"], Delta]:
        c, of_kind = self.config, partial(Dense, dtype=x.dtype)
        shape = (*x.shape[:2], c.num_heads + 2 * c.num_kv_heads, c.head_dim)
        project = of_kind(shape[2] * shape[3], use_bias=c.qkv_bias, name="qkv")(c.hidden_size)
        x, qkv = project.after_norm(x, delta, scale, c.rms_norm_eps, in_parts=True)
        norm = partial(Scale, c.head_dim, x.dtype)
        scales = (norm(name="q_norm")(), norm(name="k_norm")()) if c.qk_norm else None
        qkv = qkv.reshape(*qkv.shape[:-3], *shape)
        heads = Heads(qkv, x.dtype, c.num_heads, table, scales, c.rms_norm_eps)
        o = attend(self.layer, *rotate(self.layer, heads))
        o = o.astype(x.dtype).reshape(*x.shape[:2], -1)
        o = of_kind(c.hidden_size, name="o")(o.shape[-1])(o, in_parts=ranks.count() == 1)
        return x, ranks.across(o, "sum")


class Block(nn.Module):
    """One layer: attention and MLP, each after its norm; maps (x, delta) to (x, delta)."""

    config: ModelConfig
    layer: int

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        delta: Delta | None,
        table: RopeTable,
        attend: AttendFn,
        rotate: RotateFn,
    ) -> tuple[Float[Array, "B T D"], Delta]:
        c = self.config
        norm = partial(Scale, c.hidden_size, x.dtype)
        attention = Attention(c, self.layer, name="attention")
        if c.experts is None:
            mlp = MLP(c.intermediate_size, c.rms_norm_eps, name="mlp")
        else:
            mlp = ExpertsMLP(c.experts, c.rms_norm_eps, name="mlp")
        x, delta = attention(x, delta, norm(name="attention_norm")(), table, attend, rotate)
        return mlp(x, delta, norm(name="mlp_norm")())


class Decoder(nn.Module):
    """The model from token ids to hidden states and logits; see `hidden_states` and `to_logits`.

    `dtype` is that of activations and of weights that are not in blocks.
    """

    config: ModelConfig
    dtype: Any = jnp.float32

    def setup(self) -> None:
        c = self.config
        self.embed: Any = self._matrix("embed", c.vocab_size, c.hidden_size)
        self.layers = [Block(c, layer) for layer in range(c.num_layers)]
        self.final_norm = Scale(c.hidden_size, self.dtype)
        if not c.tie_word_embeddings:
            columns = c.vocab_size // c.vocab_parts(ranks.count())
            self.lm_head: Any = self._matrix("lm_head", c.hidden_size, columns)

    def _matrix(self, name: str, *shape: int) -> Any:
        return parameter(self, name, nn.initializers.normal(0.02), shape, self.dtype)

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: AttendFn,
        rotate: RotateFn = rotated,
    ) -> Float[Array, "B T D"]:
        """Returns the last layer's normalised hidden states."""
        if is_blocks(self.embed):
            rows = rows_of(self.embed, tokens.reshape(-1))
            x = dequantized(rows, self.dtype).reshape(*tokens.shape, -1)
        else:
            x = self.embed[tokens]
        table = rope_table(positions, rope_frequencies(self.config), rope_scale(self.config))
        delta = None
        for layer in self.layers:
            x, delta = layer(x, delta, table, attend, rotate)
        return add_and_norm(x, delta, self.final_norm(), self.config.rms_norm_eps)[1]

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch V"]:
        """Returns the float32 logits of hidden states; each rank computes some of them."""
        parts, tied = self.config.vocab_parts(ranks.count()) > 1, self.config.tie_word_embeddings
        words = self.embed if tied else self.lm_head
        if tied and parts:
            words = own_rows(words)
        if is_blocks(words):
            logits = quantized_product(hidden, words, dtype=jnp.float32)
        elif tied:
            logits = jnp.einsum("...d,vd->...v", hidden, words, preferred_element_type=jnp.float32)
        else:
            logits = jnp.einsum("...d,dv->...v", hidden, words, preferred_element_type=jnp.float32)
        return ranks.gathered(logits, -1) if parts else logits

    def __call__(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], attend: AttendFn):
        return self.logits(self.hidden(tokens, positions, attend))


def own_rows(words: Any) -> Any:
    """Returns a rank's rows of the embedding."""
    if not is_blocks(words):
        return ranks.own_part(words, 0)
    return {name: ranks.own_part(words[name], out_axis(name)) for name in words}


def hidden_states(
    decoder: Decoder,
    weights: Weights,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: AttendFn,
    rotate: RotateFn = rotated,
) -> Float[Array, "B T D"]:
    """Calls `Decoder.hidden` as a pure function of the weights."""
    made = decoder.apply(weights, tokens, positions, attend, rotate, method="hidden")
    return cast(Array, made)


def to_logits(
    decoder: Decoder, weights: Weights, hidden: Float[Array, "*batch D"]
) -> Float32[Array, "*batch V"]:
    """Calls `Decoder.logits` as a pure function of the weights."""
    return cast(Array, decoder.apply(weights, hidden, method="logits"))


def weight_shapes(config: ModelConfig, dtype: Any, form_at: FormAt = plain) -> Weights:
    """Returns the tree of weights, with a jax.ShapeDtypeStruct per array.

    `form_at` returns the format of the matrix at a path, or None if it has numbers of `dtype`.
    """
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def init(tokens):
        return Decoder(config, dtype).init(
            jax.random.key(0), tokens, tokens, lambda layer, q, k, v: q
        )

    def shaped(path: Any, leaf: Any) -> Any:
        return spec_at("/".join(entry.key for entry in path), leaf, form_at)

    params = jax.eval_shape(init, tokens)["params"]
    return {"params": jax.tree.map_with_path(shaped, params)}


def random_weights(
    config: ModelConfig,
    dtype: Any,
    seed: int = 0,
    *,
    form_at: FormAt = plain,
    place: Callable[[str, Array], Array] = lambda _, whole: whole,
) -> Weights:
    """Returns random weights of the real shapes, for measuring speed and memory.

    Matrices have a deviation of about 0.02, and norms are 1. `place` receives each array with its
    path, before the next one is made, and returns the part to keep.
    """
    shapes = weight_shapes(config, dtype, form_at)["params"]
    paths, tree = jax.tree.flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(seed), len(paths))
    made = []
    for key, (path, leaf) in zip(keys, paths, strict=True):
        *parents, name = (entry.key for entry in path)
        form = form_at("/".join(parents))
        if form is None:
            whole = random_weight(key, leaf.shape, leaf.dtype)
        else:
            whole = random_part(key, name, leaf.shape, form)
        made.append(place("/".join([*parents, name]), whole))
    return {"params": jax.tree.unflatten(tree, made)}


@partial(jax.jit, static_argnames=("shape", "dtype"))
def random_weight(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Returns one array of `random_weights`."""
    return (
        jnp.ones(shape, dtype)
        if len(shape) == 1
        else (0.02 * jax.random.normal(key, shape)).astype(dtype)
    )
