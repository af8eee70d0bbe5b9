"""Counts the bytes that a policy's `select` reads: its index or copies of K, and K or V themselves.

They are counted in the traced program, without running it. An array counts once, whole, if an
operation uses all of it; if only gathers and slices do, their results count, up to the whole array.
Loops and kernels count as users of all of it. Writing to an array reads nothing. Reads of K and V
that only a summary needs do not count here: they are in its own count, `read`.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jax.interpreters import partial_eval

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, KVCache, ReadOnly, step_view
from jsparse.hooks import State
from jsparse.models.checkpoint import Params
from jsparse.policy import Policy, selected
from jsparse.runtime.constants import constants
from jsparse.shapes import Queries

# primitives whose result is their first operand: in another form, or with another part written
SAME = {
    "reshape",
    "transpose",
    "squeeze",
    "broadcast_in_dim",
    "convert_element_type",
    "bitcast_convert_type",
    "copy",
    "scatter",
    "dynamic_update_slice",
}
PARTS = {"gather", "dynamic_slice", "slice"}
# primitives that run a program, by the name of its parameter
CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
ALL = 2**62  # more elements than any array has

Shapes = tuple[tuple[str, jax.ShapeDtypeStruct], ...]


def selection_bytes(params: Params, policy: Policy, spec: CacheSpec) -> int:
    """Returns the bytes that selecting reads in one step, of all layers, heads and rows.

    They are those of the policy's state and of K and V in a full cache of these sizes, as the ops'
    implementations on this device read them. The model's constants do not count. For a model over
    several devices, they are the sum over the devices.
    """
    made = constants(params, policy) or {}
    shapes = tuple((name, jax.ShapeDtypeStruct(x.shape, x.dtype)) for name, x in made.items())
    heads = {"num_heads": spec.num_heads * spec.ranks, "num_kv_heads": spec.model_kv_heads}
    return _traced(policy, spec._replace(**heads, ranks=1), shapes)


@cache
def _traced(policy: Policy, spec: CacheSpec, shapes: Shapes) -> int:
    state = jax.eval_shape(lambda: policy.init(spec))
    cache = jax.eval_shape(lambda: kv_cache.init(spec, fields=policy.fields))
    q = jax.ShapeDtypeStruct((spec.batch, spec.num_heads, spec.head_dim), spec.dtype)

    def select(state: State, pools: Any, cache: KVCache, q: Queries, made: dict[str, Any]):
        layers = (
            layer._replace(k=k, v=v) for layer, (k, v) in zip(cache.layers, pools, strict=True)
        )
        view = step_view(cache._replace(layers=tuple(layers)), ReadOnly(made or None))
        view = view._replace(valid=jnp.ones_like(cache.positions))
        chosen, summaries = [], []
        for layer in range(spec.num_layers):
            choice, summary, state = selected(policy, state, policy.select(state, layer, q, view))
            chosen.append(choice)
            summaries.append(summary)
        return (chosen, state), summaries

    pools = [(layer.k, layer.v) for layer in cache.layers]
    traced, made = jax.make_jaxpr(select, return_shape=True)(state, pools, cache, q, dict(shapes))
    own, counted = len(jax.tree.leaves(state)), jax.tree.leaves((state, pools))
    read = _inputs_read(traced.jaxpr, len(counted))
    # with the operations that only the summaries need removed
    wanted = [nth < len(jax.tree.leaves(made[0])) for nth in range(len(traced.jaxpr.outvars))]
    rest, _ = partial_eval.dce_jaxpr(traced.jaxpr, wanted, instantiate=True)
    of_selections = _inputs_read(rest, len(counted))
    return sum(
        min((read if nth < own else of_selections)[nth], math.prod(x.shape)) * x.dtype.itemsize
        for nth, x in enumerate(counted)
    )


def _inputs_read(program: Jaxpr, count: int) -> Counter[int]:
    """Returns the elements that a program reads of each of its first `count` inputs."""
    others: list[int | None] = [None] * (len(program.invars) - count)
    read, _ = _elements_read(program, [*range(count), *others])
    return read


def _elements_read(
    program: Jaxpr, inputs: Sequence[int | None]
) -> tuple[Counter[int], list[int | None]]:
    """Returns the elements that a program reads of each array, and the arrays that it returns.

    Arrays are numbers, and `inputs` has those of the program's inputs; None: another value. The
    elements are ALL or more if the whole array is read.
    """
    read: Counter[int] = Counter()
    arrays = dict(zip(program.invars, inputs, strict=True))

    def number(x: Any) -> int | None:
        return None if isinstance(x, Literal) else arrays.get(x)

    for step in program.eqns:
        name, operands = step.primitive.name, [number(x) for x in step.invars]
        if name in CALLS or name == "cond":
            given = operands[1:] if name == "cond" else operands
            bodies = step.params["branches"] if name == "cond" else [step.params[CALLS[name]]]
            ways = [_elements_read(body.jaxpr, given) for body in bodies]
            read += reduce(or_, (way for way, _ in ways))  # the most of any branch
            returned = zip(*(out for _, out in ways), strict=True)
            for x, numbers in zip(step.outvars, returned, strict=True):
                arrays[x] = numbers[0] if len({*numbers}) == 1 else None
            continue
        first, *rest = operands or [None]
        if first is not None and name in SAME | PARTS:
            result: Any = step.outvars[0]
            operands = rest
            if name in SAME:
                arrays[result] = first
            else:
                read[first] += math.prod(result.aval.shape)
        read.update({nth: ALL for nth in operands if nth is not None})
    return read, [number(x) for x in program.outvars]
