"""Runs a policy on a small random model, for jsparse.evaluation.policy_checks.

A trial decodes given tokens, so that all runs of a policy see the same text. It keeps the
selections of every step, donates nothing, and minimises the number of compiled programs: runs
differ only in size.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, KVCache, ReadOnly, StepView, replace_layer, truncate
from jsparse.evaluation.selection_mass import covered
from jsparse.hooks import State
from jsparse.models.checkpoint import Params
from jsparse.models.config import ModelConfig
from jsparse.models.indexer import INDEXER, mean_indexer
from jsparse.models.transformer import Decoder, Weights, weight_shapes
from jsparse.policy import Policy, never_dense, selected
from jsparse.runtime import correct, prefill, rereading, room, rows
from jsparse.runtime.compilation import inlined
from jsparse.runtime.constants import constants
from jsparse.runtime.decode_step import decode_step
from jsparse.runtime.pauses import due
from jsparse.runtime.prefill import PrefillCarry
from jsparse.runtime.state_axes import clear_rows
from jsparse.selection import Selection
from jsparse.shapes import Lengths, Queries, Rows

PAGE, VOCAB, CHUNK, PIECE = 8, 300, 32, 13
LENGTHS, STEPS = (29, 9), 12  # of the prompts; the second ends in a page's first slot


class TrialRows(NamedTuple):
    """State of rows between two steps."""

    cache: KVCache
    state: State


class LayerSelection(NamedTuple):
    """One step's selection in one layer, each head's length, and the results of `covered`."""

    selection: Selection
    lengths: Lengths
    tokens: Float32[Array, "B K"]
    mass: Float32[Array, "B K"]


class TrialResult(NamedTuple):
    """The logits and selections of all steps, and the rows after the last step."""

    logits: Float32[np.ndarray, "steps B V"]
    chosen: list[LayerSelection]
    rows: TrialRows


@cache
def random_model(
    num_layers: int = 2, num_heads: int = 4, num_kv_heads: int = 2, seed: int = 0
) -> Params:
    """Returns a model with weights large enough for peaked attention, so that errors show.

    It has an indexer, for policies that need one.
    """
    config = ModelConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        max_position_embeddings=512,
    )
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> Array:
        if leaf.ndim == 1:
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape).astype(leaf.dtype))
        gain = 1.0 if "embed" in jax.tree_util.keystr(path) else 1.7 * leaf.shape[0] ** -0.5
        return jnp.asarray((gain * rng.standard_normal(leaf.shape)).astype(leaf.dtype))

    weights = jax.tree_util.tree_map_with_path(draw, weight_shapes(config, jnp.float32))
    sizes = num_layers, num_heads, num_kv_heads, config.head_dim
    constants = dict(zip(INDEXER, map(jnp.asarray, mean_indexer(*sizes)), strict=True))
    return Params(weights, config, None, {}, "random", constants)


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Returns a prompt of random ids for each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCAB, size=n).tolist() for n in lengths]


class Trial:
    """A policy's prefill and decoding, with K and V on the device.

    `owned`: whether each array of the state has an owner, so that rows may skip steps.
    """

    def __init__(self, params: Params, policy: Policy, *, owned: bool = True) -> None:
        self.params, self.policy, self.owned = params, policy, owned
        self.read_only = ReadOnly(constants(params, policy))

    def spec(self, batch: int, pool_pages: int | None = None) -> CacheSpec:
        """Returns the sizes of a cache with `batch` rows."""
        config = self.params.config
        pages = -(-(max(LENGTHS) + STEPS) // PAGE) + 1
        sizes = config.num_heads, config.num_kv_heads, config.head_dim, PAGE, pages
        dtype = jnp.dtype(self.params.dtype)
        kind = self.params.kv_cache_dtype
        return CacheSpec(config.num_layers, batch, *sizes, dtype, pool_pages, kv_cache_dtype=kind)

    def run(self, prompts: list[list[int]], forced: np.ndarray, piece: int = CHUNK) -> TrialResult:
        """Prefills prompts in pieces of `piece` tokens, and decodes the tokens forced[B, steps]."""
        spec = self.spec(len(prompts))
        carry = self.read(self.begin(spec), prompts, piece)
        return self.decode(self.after_prompt(spec, carry), forced)

    def run_in_a_used_pool(self, prompts: list[list[int]], forced: np.ndarray) -> TrialResult:
        """Runs as `run` does, in a pool of shuffled pages that other rows have used before."""
        pages = sum(-(-(length + forced.shape[1]) // PAGE) for length in LENGTHS)
        spec = self.spec(len(prompts), self.params.config.num_kv_heads * pages + 1)
        decoder, policy = self.params.decoder, self.policy
        carry = _scrambled(self.begin(spec))
        carry = self.read(carry, random_prompts(LENGTHS[::-1], seed=4))
        carry = _given_back(decoder, policy, spec, carry.cache, carry.state)
        return self.decode(self.after_prompt(spec, self.read(carry, prompts)), forced)

    def begin(self, spec: CacheSpec) -> PrefillCarry:
        """Returns the carry before the first chunk: an empty cache and the policy's first state."""
        return _empty(self.params.decoder, self.policy, spec)

    def read(
        self, carry: PrefillCarry, prompts: list[list[int]], piece: int = CHUNK
    ) -> PrefillCarry:
        """Prefills prompts in pieces of `piece` tokens, in chunks padded to one size.

        A policy that scores prompts by a second pass over them gets it.
        """
        longest = max(map(len, prompts))
        for first in range(0, longest, piece):
            parts = [ids[first : first + piece] for ids in prompts]
            tokens = np.array([[*ids, *[0] * (CHUNK - len(ids))] for ids in parts], np.int32)
            valid = np.array([len(ids) for ids in parts], np.int32)
            carry = _read_chunk(
                self.params.decoder,
                self.policy,
                self.params.weights,
                tokens,
                valid,
                carry,
                self.read_only,
                last=first + piece >= longest,
            )
        if self.policy.eviction is None or self.policy.eviction.reread is None:
            return carry
        # one size for prompts of all lengths
        tokens = np.zeros((len(prompts), carry.cache.layers[0].capacity), np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)] = ids
        model = self.params.decoder, self.policy, self.params.weights
        state = _reread(*model, tokens, carry.cache, carry.state, self.read_only)
        return carry._replace(state=state)

    def after_prompt(self, spec: CacheSpec, carry: PrefillCarry) -> TrialRows:
        """Evicts the tokens of the prompts that the policy drops."""
        sizes = np.asarray(carry.cache.positions).tolist(), [STEPS + 1] * spec.batch
        cache, state = room.after_prompt(
            self.policy, spec, carry.cache, carry.state, self.read_only, *sizes
        )
        return TrialRows(cache, state)

    def step(
        self, current: TrialRows, tokens: np.ndarray, active: Sequence[bool] | None = None
    ) -> tuple[Float32[Array, "B V"], list[LayerSelection], TrialRows]:
        """Decodes one token of each active row."""
        some = np.array(active or [True] * len(tokens)) if self.owned else None
        logits, chosen, *after = _step(
            self.params.decoder,
            self.policy,
            self.params.weights,
            tokens,
            current.cache,
            current.state,
            self.read_only,
            some,
        )
        return logits, chosen, TrialRows(*after)

    def decode(self, current: TrialRows, forced: np.ndarray) -> TrialResult:
        """Decodes the tokens forced[B, steps], and runs the policy's services between steps."""
        services = self.policy.services
        recent = np.zeros((len(forced), services.correct_every), np.int32)
        logits_of_steps, chosen = [], []
        for nth, tokens in enumerate(forced.T, 1):
            logits, new, current = self.step(current, tokens)
            logits_of_steps.append(np.asarray(logits))
            chosen += new
            recent = np.concatenate([recent, tokens[:, None]], axis=1)[:, 1:]
            for name in due(services.every, nth):
                current = self._serviced(name, current, recent)
        return TrialResult(np.stack(logits_of_steps), chosen, current)

    def _serviced(self, name: str, current: TrialRows, recent: np.ndarray) -> TrialRows:
        if name == "correct":
            model = self.params.decoder, self.policy, self.params.weights
            return TrialRows(*_correct(*model, recent, *current, self.read_only))
        return TrialRows(*_maintain(self.policy, *current, self.read_only))


def traces() -> int:
    """Returns the number of programs that the trials of this process have traced."""
    programs: tuple[Any, ...] = (_read_chunk, _reread, _step, _correct, _maintain)
    return sum(program._cache_size() for program in programs)


_read_chunk = jax.jit(inlined(prefill.prefill_chunk), static_argnames=("decoder", "policy", "last"))
_reread = jax.jit(inlined(rereading.reread), static_argnames=("decoder", "policy"))
_correct = jax.jit(inlined(correct.correct), static_argnames=("decoder", "policy"))
_maintain = jax.jit(inlined(rows.maintain), static_argnames=("policy",))


@partial(jax.jit, static_argnames=("decoder", "policy", "spec"))
def _empty(decoder: Decoder, policy: Policy, spec: CacheSpec) -> PrefillCarry:
    cache = kv_cache.init(spec, fields=policy.fields)
    return prefill.start(decoder, policy, cache, policy.init(spec))


@partial(jax.jit, static_argnames=("decoder", "policy"))
def _step(
    decoder: Decoder,
    policy: Policy,
    weights: Weights,
    tokens: Rows,
    cache: KVCache,
    state: State,
    read_only: ReadOnly,
    active: Bool[Array, "B"] | None,
) -> tuple[Float32[Array, "B V"], list[LayerSelection], KVCache, State]:
    """Runs `decode_step`, and also returns its selections if no row can be short."""
    chosen = []

    def select(state: State, layer: int, q: Queries, view: StepView):
        choice = policy.select(state, layer, q, view)
        if policy.dense_below is never_dense:
            selection, kv = selected(policy, state, choice)[0], view.layers[layer]
            chosen.append(LayerSelection(selection, kv.lengths, *covered(q, kv, selection)))
        return choice

    watched = policy._replace(select=select)
    logits, cache, state, _ = decode_step(
        decoder, watched, weights, tokens, cache, state, read_only, active
    )
    return logits, chosen, cache, state


@partial(jax.jit, static_argnames=("decoder", "policy", "spec"))
def _given_back(
    decoder: Decoder, policy: Policy, spec: CacheSpec, cache: KVCache, state: State
) -> PrefillCarry:
    """Empties all rows, and returns their pages to the free lists."""
    layers = tuple(truncate(layer, jnp.zeros_like(layer.lengths)) for layer in cache.layers)
    every = jnp.arange(spec.batch)
    cleared = clear_rows(policy, spec, cache._replace(layers=layers), state, every)
    return prefill.start(decoder, policy, *cleared)


def _scrambled(carry: PrefillCarry) -> PrefillCarry:
    """Shuffles the free pages of every layer, except the scratch page."""
    cache = carry.cache
    for nth, layer in enumerate(cache.layers):
        assert layer.free is not None
        pages, count = np.array(layer.free.pages), int(layer.free.count)
        pages[:count] = np.random.default_rng(nth).permutation(pages[:count])
        free = layer.free._replace(pages=jnp.asarray(pages))
        cache = replace_layer(cache, nth, layer._replace(free=free))
    return carry._replace(cache=cache)
