"""A mixture of experts in place of the MLP: a router chooses a few experts for each token.

Sources: transformers' Qwen3-MoE, and Qwen2-MoE, which has a shared expert with a sigmoid gate.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jsparse import ranks
from jsparse.models.config import Experts, ModelConfig
from jsparse.models.linear import Delta, Dense, add_and_norm
from jsparse.models.parameters import parameter
from jsparse.pallas_kernels.expert_choice import expert_choice
from jsparse.pallas_kernels.expert_product import expert_product

# rows whose products are returned in parts, in float32; those of more rows are added here
FEW = 64


class Router(nn.Module):
    """The weights of logits, a row for each; logits are float32."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "*batch D"]) -> Float32[Array, "*batch features"]:
        of_kind = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        rows = parameter(self, "rows", of_kind, (self.features, x.shape[-1]), self.dtype)
        return jnp.einsum("...d,ed->...e", x, rows, preferred_element_type=jnp.float32)


class ExpertMatrices(nn.Module):
    """The matrices of a rank's experts: gate | up [E, in, 2 · ffn] and down [E, ffn, in]."""

    experts: Experts
    dtype: Any

    @nn.compact
    def __call__(self, width: int) -> tuple[Float[Array, "E in two_ffn"], Float[Array, "E ffn in"]]:
        number, ffn = self.experts.own, self.experts.intermediate_size
        of_kind = nn.initializers.lecun_normal(batch_axis=0)
        gate_up = parameter(self, "gate_up", of_kind, (number, width, 2 * ffn), self.dtype)
        return gate_up, parameter(self, "down", of_kind, (number, ffn, width), self.dtype)


class SharedExpert(nn.Module):
    """The expert of all tokens, whose product a gate scales; on each rank, a part of it."""

    intermediate_size: int

    @nn.compact
    def __call__(self, normed: Float[Array, "B T D"]) -> Float32[Array, "B T D"]:
        of_kind, width = partial(Dense, dtype=normed.dtype), normed.shape[-1]
        gate_up = of_kind(2 * self.intermediate_size, name="gate_up")(width)
        down = of_kind(width, name="down")(self.intermediate_size)
        opened = jax.nn.sigmoid(Router(1, normed.dtype, name="gate")(normed))
        return down.after_gate(gate_up(normed)).astype(jnp.float32) * opened


class ExpertsMLP(nn.Module):
    """The experts of the normalised sum x + delta; it returns that sum and their weighted sum."""

    experts: Experts
    eps: float

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        delta: Delta | None,
        scale: Float[Array, "D"],
    ) -> tuple[Float[Array, "B T D"], Delta]:
        c, width = self.experts, x.shape[-1]
        whole, normed = add_and_norm(x, delta, scale, self.eps)
        rows = normed.reshape(-1, width)
        logits = Router(c.number, x.dtype, name="router")(rows)
        chosen, weights = expert_choice(logits, c.chosen, normalized=c.normalized)
        gate_up, down = ExpertMatrices(c, x.dtype, name="experts")(width)
        own, few = self._own(chosen), len(rows) <= FEW
        gated = expert_product(rows, gate_up, own, gated=True)
        dtype = jnp.float32 if few else x.dtype
        parts = expert_product(gated, down, own, weights, dtype=dtype).reshape(-1, *x.shape)
        if c.shared_size:
            shared = SharedExpert(c.shared_size, name="shared")(normed)
            parts = jnp.concatenate([parts, shared.astype(dtype)[None]])
        if few and ranks.count() == 1:
            return whole, parts
        made = jnp.sum(parts, axis=0, dtype=jnp.float32).astype(x.dtype)
        return whole, ranks.across(made, "sum")

    def _own(self, chosen: Int32[Array, "k R"]) -> Int32[Array, "k R"]:
        """Returns the numbers of chosen experts among the rank's own; `own` for those of others."""
        if ranks.count() == 1:
            return chosen
        number = self.experts.own
        nth = chosen - ranks.rank() * number
        return jnp.where((nth >= 0) & (nth < number), nth, number)


def unread_bytes(config: ModelConfig, weights: Any, tokens: int) -> float:
    """Returns the bytes of experts that none of `tokens` tokens has, if all choose at random."""
    if (experts := config.experts) is None:
        return 0.0
    layers = [weights["params"][f"layers_{i}"] for i in range(config.num_layers)]
    of_experts = sum(x.nbytes for x in jax.tree.leaves([x["mlp"]["experts"] for x in layers]))
    return of_experts * (1 - experts.chosen / experts.number) ** tokens
