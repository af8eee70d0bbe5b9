"""Computes the constants of a model that policies need, once, and stores them.

They are stored in the loaded model, and on disk under a fingerprint of its config and weights for
the next process. The boundary classes are computed from the tokenizer in less than a second, so
they are only stored in the loaded model.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int32, UInt8

from jsparse.cache import KEY_REACH
from jsparse.cache.key_constants import KEY_CONSTANTS, SPAN, KeyConstants, angles_at, rotated
from jsparse.machine import processes
from jsparse.machine.folders import cache_folder
from jsparse.models.checkpoint import Params
from jsparse.models.constants_file import read_constants, write_constants
from jsparse.models.indexer import file_of, read_constants_at
from jsparse.models.layers import rope_frequencies
from jsparse.models.transformer import Decoder, Weights, hidden_states
from jsparse.policies.clusters.boundary_classes import boundary_classes
from jsparse.policy import Policy
from jsparse.ranks import gathered
from jsparse.runtime.chunk_attention import flash
from jsparse.runtime.prefill import OnChunk
from jsparse.runtime.spread_programs import REPLICATED, by_rank, same_on_all
from jsparse.shapes import Tokens

TOKENS = 1024  # the length of the prompt that finds the constants
GAIN = 0.8  # the mean is subtracted only if it reduces the keys' reach below this share
SAMPLES = 4096  # sampled weights in a fingerprint
BOUNDARY_CLASSES = "boundary_classes"
BOUNDARY_CLASSES_OR_NONE = "boundary_classes_or_none"  # zeros for a model without a tokenizer
VERSION = 2  # of this computation; files of other versions are ignored

logger = logging.getLogger("jsparse.constants")
_tables: WeakKeyDictionary[Params, tuple[UInt8[Array, "V 2"], str]] = WeakKeyDictionary()


def constants(
    params: Params, policy: Policy, report: OnChunk = lambda *_: None
) -> dict[str, Array] | None:
    """Returns the model's constants that a policy or the cache needs; computes missing ones.

    `report` receives ("key constants", tokens done, tokens). ValueError: one cannot be computed.
    """
    require_constants(params, policy)
    needed = policy.constants
    if params.kv_cache_dtype == "int8":
        needed = tuple(dict.fromkeys((*needed, KEY_REACH)))
    for name in needed:
        if name in params.constants:
            continue
        if name in MAKERS:
            made = _found_or_made(params, MAKERS[name], report)
            params.constants.update(made | params.constants)
        elif file := file_of(name):
            params.constants.update(read_constants_at(file))
    of_text = (BOUNDARY_CLASSES, BOUNDARY_CLASSES_OR_NONE)
    return {
        name: _boundary_classes(params, policy) if name in of_text else _placed(params, name)
        for name in needed
    } or None


def renewed(params: Params, known: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the constants of a model with new weights, in place of those of its old weights.

    Those that have a maker are computed, and not stored on disk; the others are kept.
    """
    made: dict[str, Array] = {}
    for make in dict.fromkeys(MAKERS[name] for name in known if name in MAKERS):
        made |= make(params, lambda *_: None)
    params.constants.update(made)
    return {name: _placed(params, name) if name in made else own for name, own in known.items()}


def _placed(params: Params, name: str) -> Array:
    """Returns a constant, placed on all devices of the model: otherwise each dispatch copies it."""
    array = params.constants[name]
    if params.mesh is not None and array.sharding != NamedSharding(params.mesh, REPLICATED):
        array = params.constants[name] = same_on_all(array, params.mesh)
    return array


def require_constants(params: Params, policy: Policy) -> None:
    """Raises ValueError if a policy needs a constant that the model lacks and that has no maker."""
    for name in policy.constants:
        if name in (BOUNDARY_CLASSES, BOUNDARY_CLASSES_OR_NONE):
            _boundary_classes(params, policy)
        elif name not in {*params.constants, *MAKERS} and file_of(name) is None:
            raise ValueError(
                f"policy={policy} needs {name!r}: must be among the constants of the model "
                f"{params.name!r}, which has {sorted(params.constants)}"
            )


def key_constants(params: Params, report: OnChunk = lambda *_: None) -> dict[str, Array]:
    """Computes the mean key, the scales and the reach of keys of every layer and KV head.

    One dense pass over random tokens is enough: the constant part of keys hardly depends on the
    text.
    """
    config = params.config
    count = min(TOKENS, config.max_position_embeddings)
    report("key constants", 0, count)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, count), np.int32)
    of_keys = by_rank(
        _of_keys, params.mesh, sharded=("weights",), static=("decoder",), out=REPLICATED
    )
    made = of_keys(params.decoder, params.weights, jnp.asarray(tokens))
    found, reach = jax.block_until_ready(made)
    report("key constants", count, count)
    return found._asdict() | {KEY_REACH: reach}


MAKERS: dict[str, Callable[[Params, OnChunk], dict[str, Array]]] = dict.fromkeys(
    (*KEY_CONSTANTS, KEY_REACH), key_constants
)


@partial(jax.jit, static_argnames=("decoder",))
def _of_keys(
    decoder: Decoder, weights: Weights, tokens: Tokens
) -> tuple[KeyConstants, Float32[Array, "L K half"]]:
    frequencies = jnp.asarray(rope_frequencies(decoder.config))
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    parts = []

    def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
        queries, keys = (x[0].swapaxes(0, 1) for x in (q, k))
        found = mid_and_scale(keys, queries, positions, frequencies)
        parts.append((*found, reach_of(keys)))
        window = decoder.config.window(layer, tokens.shape[1])
        return flash(q, k, v, causal=True, window=window)[0].astype(q.dtype)

    hidden_states(decoder, weights, tokens, positions[None], attend)
    mid, scale, reach = (gathered(jnp.stack(part), 1) for part in zip(*parts, strict=True))
    return KeyConstants(mid, scale, frequencies), reach


def mid_and_scale(
    k: Float[Array, "K T H"],
    q: Float[Array, "N Q H"],
    positions: Int32[Array, "T"],
    frequencies: Float32[Array, "half"],
) -> tuple[Float32[Array, "K H"], Float32[Array, "K half"]]:
    """Returns `mid` and `key_scale` of one layer, from keys after RoPE at these positions."""
    k = k.astype(jnp.float32)
    mid = jnp.mean(rotated(k, angles_at(-positions, frequencies)), axis=1)
    of_spans = angles_at(positions // SPAN * SPAN, frequencies)
    before, after = (_reach(x) for x in (k, k - rotated(mid[:, None], of_spans)))
    shorter = after < GAIN * before
    reach = jnp.where(shorter, after, before)
    squares = jnp.square(q.astype(jnp.float32)).reshape(len(k), -1, 2, k.shape[-1] // 2)
    scale = jnp.sqrt(reach / jnp.sqrt(jnp.mean(squares, axis=(1, 2))))
    usable = (scale > 0) & jnp.isfinite(scale)  # a pair may be 0 in all keys or all queries
    return mid * jnp.tile(shorter, 2), jnp.where(usable, scale, 1.0)


def reach_of(k: Float[Array, "K T H"]) -> Float32[Array, "K half"]:
    """Returns the reach of each pair of channels of one layer; 1 if that is 0 or not finite."""
    reach = _reach(k.astype(jnp.float32))
    return jnp.where((reach > 0) & jnp.isfinite(reach), reach, 1.0)


def _reach(k: Float32[Array, "K T H"]) -> Float32[Array, "K half"]:
    """Returns the largest |k| of each pair."""
    return jnp.max(jnp.abs(k).reshape(*k.shape[:2], 2, k.shape[-1] // 2), axis=(1, 2))


def _boundary_classes(params: Params, policy: Policy) -> UInt8[Array, "V 2"]:
    """Returns the boundary classes of the model's tokenizer; zeros if the policy accepts none."""
    size = params.config.vocab_size
    if BOUNDARY_CLASSES in params.constants:
        classes = jnp.asarray(params.constants[BOUNDARY_CLASSES])
        if classes.dtype != jnp.uint8 or classes.shape != (size, 2):
            raise ValueError(
                f"constants[{BOUNDARY_CLASSES!r}]={classes.dtype}{[*classes.shape]}: must be "
                f"uint8[{size}, 2], the vocabulary's"
            )
        return classes
    table, missing = _tables.get(params) or _made_classes(params)
    if missing and BOUNDARY_CLASSES in policy.constants:
        raise ValueError(f"policy={policy} needs {BOUNDARY_CLASSES!r}: {missing}")
    if params not in _tables:
        if missing:
            logger.warning("chunks will be of a fixed size: %s", missing)
        _tables[params] = table, missing
    return table


def _made_classes(params: Params) -> tuple[UInt8[Array, "V 2"], str]:
    """Returns the table, or zeros and the reason why there is none."""
    size = params.config.vocab_size
    try:
        if params.tokenizer is not None:
            return jnp.asarray(boundary_classes(params.tokenizer, size)), ""
        missing = f"the model {params.name!r} must have a tokenizer, and has none"
    except ValueError as error:  # its tokens cannot be spelled
        missing = str(error)
    return jnp.zeros((size, 2), jnp.uint8), missing


def _found_or_made(
    params: Params, make: Callable[[Params, OnChunk], dict[str, Array]], report: OnChunk
) -> dict[str, Array]:
    """Returns the constants that `make` computes, from disk if they are stored there."""
    path, arrays = None, {}
    try:
        path = cache_folder() / make.__name__ / f"{fingerprint(params)}.safetensors"
        arrays = read_constants(path)
    except FileNotFoundError as error:  # no folder
        logger.debug("%s", error)
    except ValueError as error:
        logger.warning("%s; computed again", error)
    # a collective computation: skipped only if all processes have the constants
    together = None if params.mesh is None else processes.link()
    if together is not None and not all(together.all_gather("constants", bool(arrays))):
        arrays = {}
    if arrays:
        logger.debug("%s: read from %s", make.__name__, path)
        return arrays
    arrays = make(params, report)
    if path is not None:
        _keep(arrays, path)
    return arrays


def _keep(arrays: dict[str, Array], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_constants(arrays, path)
    except OSError as error:
        logger.warning("%s cannot be written and will be computed again: %s", path, error)


def fingerprint(params: Params) -> str:
    """Returns a digest of the config and of weights at fixed indices."""
    leaves = jax.tree.leaves(params.weights)
    each = max(SAMPLES // len(leaves), 1)
    digest = hashlib.sha256(f"{VERSION} {params.dtype} ".encode())
    digest.update(json.dumps(dataclasses.asdict(params.config), sort_keys=True).encode())
    for sample in jax.device_get([_sampled(leaf, each) for leaf in leaves]):
        digest.update(sample.tobytes())
    return digest.hexdigest()[:32]


@partial(jax.jit, static_argnames=("count",))
def _sampled(leaf: Array, count: int) -> Array:
    """Returns evenly spaced values of an array."""
    places = np.linspace(0, leaf.size - 1, min(count, leaf.size)).astype(np.int64)
    return leaf[np.unravel_index(places, leaf.shape)]
