"""Tests that wrappers keep the declarations of a policy, and that its hooks see its own state."""

import pytest

import jsparse
from jsparse import cache as kv_cache
from jsparse.builder import dense
from jsparse.cache import StepView
from jsparse.hyper_parameters import fraction
from jsparse.policies.combinators import with_state
from jsparse.policy import Eviction, Policy, PrefillMethod, Reread, Services
from tests.support.tiny import spec_of, tiny_params

HOOKS = {"init", "prefill", "append", "select", "update", "services"}
# the fields that each wrapper may change; all others are the base's own
CHANGED = {
    "keep": (lambda base: jsparse.keep(base), {"select"}),
    "dense_layers": (lambda base: jsparse.dense_layers(base), {"select", "dense_heads"}),
    "retrieval_heads": (
        lambda base: jsparse.retrieval_heads(base, ((1, 1), (0, 1))),
        {"select", "init", "dense_heads"},
    ),
    "twilight": (
        lambda base: jsparse.twilight(base, dense_below=9),
        HOOKS | {"dense_below", "needs", "per_row"},
    ),
    "with_state": (lambda base: with_state(base, lambda spec: (), shares="pages"), HOOKS),
    "a state of one row": (
        lambda base: with_state(base, lambda spec: (), select=base.select),
        HOOKS | {"shares"},
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_wrappers_keep_every_trait(case):
    """Hooks are included. A new field fails here until wrappers keep it."""
    wrap, changed = CHANGED[case]

    def hook(state, *_):
        return state

    hooks = dict.fromkeys(("init", "prefill", "append", "update"), hook)
    base = dense()._replace(
        **hooks,
        services=Services(hook, period=7, correct_every=3),
        stats=lambda layer: "page_mass",
        dense_below=lambda held: 3,
        window=5,
        needs=("bias", "shift"),
        shares="pages",
        per_row={"q": fraction},
        reads=3,
        dense_heads=lambda layer, heads: (1,),
        prefill_method=PrefillMethod(lambda *_: None, lambda *_: None),
        name="base",
    )
    unset = {name for name in Policy._fields if getattr(base, name) == getattr(dense(), name)}
    assert unset <= {"select", "shares", "eviction", "offload"}
    wrapped = wrap(base)
    differ = {n for n in Policy._fields if getattr(wrapped, n) != getattr(base, n)} - {"name"}
    assert differ <= changed
    assert wrapped.needs[:2] == base.needs and wrapped.per_row["q"] is fraction
    assert wrapped.services[1:] == base.services[1:]
    assert 1 in wrapped.dense_heads(1, 2)


def test_wrapper_state_leaves_eviction_to_the_base():
    """Its hook gets only the base's state."""

    def after_prompt(state, view, slots):
        return (*state, slots), view.cache

    def score(state, layer, view):
        return (*state, layer)

    base = dense()._replace(
        init=lambda spec: ("own",),
        eviction=Eviction(after_prompt, lambda prompt, new: prompt, Reread(8, score)),
    )
    wrapped = with_state(base, lambda spec: "second")
    spec = spec_of(tiny_params(), 1)
    state, view = wrapped.init(spec), StepView(kv_cache.init(spec))
    assert wrapped.eviction is not None and wrapped.eviction.after_prompt is not None
    reworked, _ = wrapped.eviction.after_prompt(state, view, 9)
    assert tuple(reworked) == (("own", 9), "second")
    assert wrapped.eviction.reread is not None
    assert tuple(wrapped.eviction.reread.score(state, 1, None)) == (("own", 1), "second")
    assert base.eviction is not None
    assert wrapped.eviction.max_length is base.eviction.max_length
