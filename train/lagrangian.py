"""Minimises the gates' distance subject to a target expected number, by a Lagrange multiplier.

LycheeDecode (arXiv:2602.04541), equations 7 and 8. Gates descend on, and the multiplier ascends on,
    distance + multiplier · (expected share of retrieval heads - wanted share),
or its augmented form, whose squared surplus damps their oscillation. Both terms are scale-free, so
one learning rate works for models of any size. Several seeds are trained side by side, along the
first axis of every array.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float32, Key

from jsparse.train.families import GateParams, Gates, noise

Penalty = Literal["ascent", "exponential", "fixed"]


class LagrangianState(NamedTuple):
    """The state of a training: gates [seeds, layers but the first, KV heads], and multipliers."""

    gates: GateParams
    multiplier: Float32[Array, "seeds"]
    optimiser: optax.OptState


class StepReport(NamedTuple):
    """Report of one step, by seed, with the multiplier before it and E[L0], including layer 0's."""

    distance: Float32[Array, "seeds"]
    active: Float32[Array, "seeds"]
    multiplier: Float32[Array, "seeds"]


class Lagrangian(NamedTuple):
    """The rules of a training, all static.

    Attributes:
        shape: the numbers of layers and KV heads, including the first layer.
        target: the wanted number of retrieval heads, including the first layer's.
        rate: AdamW learning rate, with a warmup over the first fifth of the steps and a decay over
            the last fifth.
        penalty: "ascent": the multiplier ascends by gradient, clipped to one head's surplus;
            "exponential": by a power of e, as in LycheeDecode's public code, and never falls;
            "fixed": a plain L1 penalty as in DuoAttention.
        penalty_rate: the multiplier's rate of ascent.
        penalty_start: the multiplier's initial value.
        anneal: the fraction of the steps over which the wanted number falls from all heads to the
            target; 0: the target from the start, as in the paper.
        damping: the weight of the squared surplus in the augmented Lagrangian; 0: the paper's.
    """

    gates: Gates
    shape: tuple[int, int]
    target: int
    steps: int
    rate: float
    penalty: Penalty
    penalty_rate: float
    penalty_start: float
    anneal: float = 0.0
    damping: float = 0.0

    def cost(self, multiplier: Array, surplus: Array) -> Array:
        """Returns λc of a surplus c, or with damping ρ (max(0, λ + ρc)² - λ²) / 2ρ."""
        if not self.damping:
            return multiplier * surplus
        return (jnp.maximum(multiplier + self.damping * surplus, 0) ** 2 - multiplier**2) / (
            2 * self.damping
        )

    def wanted(self, nth: int | Array) -> Float32[Array, ""]:
        """Returns the number of retrieval heads wanted at the nth step, from 0 on."""
        left = jnp.clip(1 - nth / max(self.anneal * self.steps, 1), 0, 1) if self.anneal else 0.0
        return self.target + (self.shape[0] * self.shape[1] - self.target) * jnp.float32(left)

    @property
    def optimiser(self) -> optax.GradientTransformation:
        """AdamW for the gates, and the penalty's rule for the multiplier.

        AdamW's second moment decays within twenty steps. With a slower decay, gates near 0 or 1
        would not move again, since their gradients are far smaller than before.
        """
        fifth = max(self.steps // 5, 1)
        rise, fall = (
            optax.linear_schedule(0, self.rate, fifth),
            optax.linear_schedule(self.rate, 0, fifth),
        )
        schedule = optax.join_schedules(
            [rise, optax.constant_schedule(self.rate), fall],
            [fifth, max(self.steps - fifth, fifth)],
        )
        rules: Any = {
            "gates": optax.adamw(schedule, b2=0.95, weight_decay=0.0),
            "multiplier": _rule(
                self.penalty, self.penalty_rate, one_head=1 / (self.shape[0] * self.shape[1])
            ),
        }
        return optax.multi_transform(rules, {"gates": "gates", "multiplier": "multiplier"})


def start(problem: Lagrangian, seeds: int) -> LagrangianState:
    """Returns the initial state; only the noise differs between seeds."""
    layers, heads = problem.shape
    gates = problem.gates.init((seeds, layers - 1, heads))
    multiplier = jnp.full(seeds, problem.penalty_start, jnp.float32)
    return LagrangianState(
        gates, multiplier, problem.optimiser.init({"gates": gates, "multiplier": multiplier})
    )


def step(
    problem: Lagrangian,
    state: LagrangianState,
    keys: Key[Array, "seeds"],
    distance: Callable[[Float32[Array, "L K"]], Array],
    nth: int | Array = 0,
) -> tuple[LagrangianState, StepReport]:
    """Takes the nth step (from 0) of all seeds, with a key of the noise per seed.

    `distance` is the function to minimise, of all gates, with layer 0's set to 1.
    """

    def objective(learned: GateParams, key: Array) -> tuple[Array, tuple[Array, Array]]:
        z = problem.gates.sample(
            learned["gates"], noise(key, (problem.shape[0] - 1, problem.shape[1]))
        )
        far, active = distance(with_first_layer(z)), expected(problem, learned["gates"])
        surplus = (active - problem.wanted(nth)) / (problem.shape[0] * problem.shape[1])
        return far + problem.cost(learned["multiplier"], surplus), (far, active)

    learned: Any = {"gates": state.gates, "multiplier": state.multiplier}
    (_, (far, active)), gradients = jax.vmap(jax.value_and_grad(objective, has_aux=True))(
        learned, keys
    )
    updates, optimiser = problem.optimiser.update(gradients, state.optimiser, learned)
    moved: Any = optax.apply_updates(learned, updates)
    gates = problem.gates.project(moved["gates"])
    return LagrangianState(gates, moved["multiplier"], optimiser), StepReport(
        far, active, state.multiplier
    )


def expected(problem: Lagrangian, gates: GateParams) -> Float32[Array, ""]:
    """Returns E[L0] of one seed's gates, including layer 0's heads."""
    return jnp.sum(problem.gates.active(gates)) + problem.shape[1]


def with_first_layer(gates: Float32[Array, "*seeds learned K"]) -> Float32[Array, "*seeds L K"]:
    """Returns the gates of all layers, with those of the first set to 1."""
    return jnp.concatenate([jnp.ones_like(gates[..., :1, :]), gates], axis=-2)


def _rule(penalty: Penalty, rate: float, one_head: float) -> optax.GradientTransformation:
    match penalty:
        case "ascent":
            return optax.chain(
                optax.clip(one_head), optax.scale(rate), optax.keep_params_nonnegative()
            )
        case "exponential":
            return _exponential(rate)
        case "fixed":
            return optax.set_to_zero()


def _exponential(rate: float, decay: float = 0.9) -> optax.GradientTransformation:
    """Multiplies by exp(rate · a moving average of the surplus above 0)."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        state = jax.tree.map(
            lambda old, new: decay * old + (1 - decay) * jnp.maximum(new, 0), state, updates
        )
        return jax.tree.map(lambda x, mean: x * jnp.expm1(rate * mean), params, state), state

    return optax.GradientTransformation(init, update)
