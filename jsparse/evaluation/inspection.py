"""Shows which tokens each layer and KV head attends to in one decode step.

`recorded` wraps a policy: it decodes as before, and its state also keeps the last step's
selections, together with dense attention's weights. The decode step is unchanged.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from jsparse.cache import CacheSpec, StepView, slot_positions
from jsparse.hyper_parameters import whole_number
from jsparse.models.checkpoint import Params, require_full_attention
from jsparse.policies.combinators import WrappedState, with_state
from jsparse.policies.expressions import as_policy
from jsparse.policies.oracle import attention_logits
from jsparse.policy import AnyPolicy, Policy, at_layer, resolved
from jsparse.runtime import capacity
from jsparse.runtime.compilation import keep_compilations
from jsparse.runtime.host_reader import OnChunk
from jsparse.runtime.sampling import greedy
from jsparse.runtime.session import Session
from jsparse.runtime.spread_programs import on_host
from jsparse.selection.attended import token_mask
from jsparse.shapes import Queries, Rows
from jsparse.text import prompts


class Inspection(NamedTuple):
    """The tokens attended in one decode step; the cache has T tokens, including the newest.

    Attributes:
        tokens: the text of each token.
        prompt_tokens: the number of prompt tokens; the others were generated.
        next_token: the text of the token that the step chose.
        attended: the tokens that each KV head attends to.
        weights: the softmax of dense attention on the same query and cache, mean over the group of
            query heads; 0 for dropped tokens, and in layers of `fell_back`.
        fell_back: the layers in which the policy used dense attention in this step.
        evicts: whether the policy drops tokens; `weights` are then over the remaining tokens.
    """

    model: str
    policy: str
    tokens: list[str]
    prompt_tokens: int
    next_token: str
    attended: Bool[np.ndarray, "L K T"]
    weights: Float32[np.ndarray, "L K T"]
    fell_back: tuple[int, ...]
    evicts: bool = False

    @property
    def attended_fraction(self) -> float:
        """The share of tokens that heads attend to."""
        return float(self.attended.mean())

    @property
    def covered(self) -> float:
        """The share of dense attention's weight on the attended tokens.

        Layers that fell back do not count; it is 1 if all did.
        """
        layers = [i for i in range(len(self.attended)) if i not in self.fell_back]
        weights = self.weights[layers]
        total = weights.sum()
        return float((weights * self.attended[layers]).sum() / total) if total else 1.0

    def overlap(self, count: int) -> Float32[np.ndarray, "pairs K"]:
        """Returns the share of each head's `count` heaviest tokens that are also the next layer's.

        Row l compares heads of one index in layers l and l + 1, by dense attention's weights; NaN
        if one of the two fell back (LycheeDecode, arXiv:2602.04541, Figures 2 and 11 to 14).
        """
        whole_number("overlap", count, 1)
        if count > len(self.tokens):
            raise ValueError(
                f"overlap={count}: must be at most {len(self.tokens)}, the number of tokens"
            )
        heaviest = np.argsort(-self.weights, axis=-1, kind="stable")[..., :count]
        marks = np.zeros(self.weights.shape, np.bool_)
        np.put_along_axis(marks, heaviest, True, axis=-1)
        shares = (marks[:-1] & marks[1:]).sum(-1, dtype=np.float32) / count
        fell_back = np.isin(np.arange(len(marks)), self.fell_back)
        shares[fell_back[:-1] | fell_back[1:]] = np.nan
        return shares

    @property
    def description(self) -> str:
        """The step's shares as text."""
        whose = "what is left" if self.evicts else "dense attention's weight"
        return f"{self.attended_fraction:.1%} of the tokens, with {self.covered:.1%} of {whose}"


class Record(NamedTuple):
    """One layer's last selection by position, and the position of its query, -1 initially."""

    attended: Bool[Array, "B K S"]
    weights: Float32[Array, "B K S"]
    position: Rows


def recorded(base: Policy) -> Policy:
    """Wraps a policy so that its state keeps a Record of each layer's last selection."""

    def init(spec: CacheSpec) -> tuple[Record, ...]:
        shape = spec.batch, spec.num_kv_heads, spec.capacity
        return tuple(
            Record(
                jnp.zeros(shape, jnp.bool_),
                jnp.zeros(shape, jnp.float32),
                jnp.full(spec.batch, -1, jnp.int32),
            )
            for _ in range(spec.num_layers)
        )

    def select(state: WrappedState, layer: int, q: Queries, view: StepView):
        chosen, summary, inner = base.select(state.base, layer, q, view)
        layer_cache, old = view.layers[layer], state.own[layer]
        mask = token_mask(
            chosen,
            layer_cache.lengths,
            num_pages=layer_cache.num_pages,
            page_size=layer_cache.page_size,
        )
        weights = jnp.mean(jax.nn.softmax(attention_logits(q, layer_cache), axis=-1), axis=2)
        seen = jnp.arange(layer_cache.capacity, dtype=jnp.int32) < layer_cache.lengths[..., None]
        # slots past a head's end are dropped
        at = jnp.where(seen, slot_positions(layer_cache), old.attended.shape[-1])
        record = Record(
            _placed(mask, at, old.attended), _placed(weights, at, old.weights), view.positions
        )
        return chosen, summary, WrappedState(inner, at_layer(state.own, layer, record))

    wrapped = with_state(
        base, init, select=select, needs=("slot_positions",) if base.evicts else ()
    )
    return wrapped._replace(reads=None, offload=None)


def _placed(values: Array, at: Int32[Array, "B K S"], like: Array) -> Array:
    """Returns values of slots by the positions of their tokens, 0 for positions without a slot."""
    row, head = (i[..., None] for i in jnp.indices(at.shape[:2]))
    return jnp.zeros_like(like).at[row, head, at].set(values, mode="drop")


def inspect_step(
    params: Params,
    policy: AnyPolicy | str,
    prompt: Any,
    *,
    step: int = 1,
    page_size: int = 16,
    on_progress: OnChunk | None = None,
) -> Inspection:
    """Prefills a prompt, decodes greedily, and returns the tokens that one step attended to.

    `prompt` is a single prompt of `jsparse.generate`. The query of `step` 1 is the first generated
    token's; the prompt itself is prefilled. `on_progress` receives ("prefill", done, tokens).

    Raises:
        ValueError: an argument is out of range, there are several prompts, prompt and steps do not
            fit, or the model has sliding windows.
    """
    whole_number("step", step, 1)
    require_full_attention(params)
    rows, _ = prompts.encode(params, prompt)
    if len(rows) != 1:
        raise ValueError(f"prompt: must be one prompt, not {len(rows)}")
    spec = capacity.cache_spec(params, rows, step + 1, None, page_size)
    runs = resolved(as_policy(policy), spec)
    watched = recorded(runs)
    keep_compilations()
    session = Session(params, watched, spec, steps_per_program=1)
    with capacity.exhaustion(spec):
        session.prefill(rows, on_progress or (lambda *_: None))
        results = session.steps(greedy, (), limits=[step + 1])
        new_ids = [int(result.tokens[0, 0]) for result in results]
    records = on_host(session.prefilled.state.own, params.mesh)
    ids = rows[0] + new_ids[:-1]
    attended = np.stack([record.attended[0, :, : len(ids)] for record in records])
    weights = np.stack([record.weights[0, :, : len(ids)] for record in records])
    fell_back = tuple(
        layer for layer, record in enumerate(records) if record.position[0] != len(ids) - 1
    )
    for layer in fell_back:
        attended[layer], weights[layer] = True, 0
    *tokens, following = _texts(params, [*ids, new_ids[-1]])
    return Inspection(
        model=params.name,
        policy=runs.name,
        tokens=tokens,
        prompt_tokens=len(rows[0]),
        next_token=following,
        attended=attended,
        weights=weights,
        fell_back=fell_back,
        evicts=runs.evicts,
    )


def _texts(params: Params, ids: list[int]) -> list[str]:
    """Returns the text of each token, or its id without a tokenizer; � in partial characters."""
    if params.tokenizer is None:
        return [f"<{token}>" for token in ids]
    return [params.tokenizer.token_text(token) for token in ids]
