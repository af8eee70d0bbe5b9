"""Tests that requests may join and leave a running batch, whose pages the host hands out.

They are those of policies that the engine does not serve: toys, and methods that drop tokens. What
it serves, tests/engine/test_policies_in_the_engine.py tests.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse import cache as kv_cache
from jsparse.policies import channel_ranking
from jsparse.policies.double_sparsity import double_sparsity
from jsparse.policies.expressions import as_policy, parse
from tests.support.crowd import Crowd
from tests.support.marks import slow_except
from tests.support.policy_table import METHODS
from tests.support.programs import shared
from tests.support.tiny import random_prompts, spec_of, tiny_params
from tests.support.toy_policies import bypass, even_ids, inherit, page_bound, shrink

PAGE, SLOTS, PAGES, HEADS, CHUNK = 8, 4, 5, 2, 16
GROUPS = 13  # of one page per head; too few for all requests at once, so that pages are used again
TOYS = (page_bound(), inherit(), bypass(), shrink(), even_ids())


class Ask(NamedTuple):
    """One request: when it comes, its prompt, and how many tokens it wants."""

    born: int
    prompt: list[int]
    tokens: int


REQUESTS = tuple(
    map(
        Ask,
        (0, 0, 1, 4, 6, 9, 10),
        random_prompts((9, 16, 3, 14, 7, 16, 5), seed=5),
        (14, 5, 21, 9, 17, 6, 11),
    )
)


def pages_of(asked):
    """The pages per head that a request needs in the end."""
    return -(-(len(asked.prompt) + asked.tokens) // PAGE)


@partial(jax.jit, static_argnames=("policy", "spec"))
def empty(policy, spec):
    made = kv_cache.init(spec, fields=policy.fields)
    layers = tuple(layer._replace(free=None) for layer in made.layers)
    return made._replace(layers=layers), policy.init(spec)


class Slots(Crowd):
    """A running batch of four slots over one pool; the host owns the block tables."""

    def __init__(self, policy, groups):
        params = tiny_params(num_layers=2)
        spec = spec_of(params, SLOTS, page_size=PAGE, num_pages=PAGES)
        spec = spec._replace(pool_pages=GROUPS * HEADS + 1)
        super().__init__(params, policy, spec, *empty(policy, spec), chunk=CHUNK)
        self.free = list(groups)
        self.slots = [None] * SLOTS

    def join(self, slot, nth, asked, shared=()):
        """Reads a prompt as a batch of one over the same pool, and puts it into a slot.

        The pages of its first tokens may be shared with another request that has read the same.
        """
        self.clear(slot)
        groups = [*shared, *(self.free.pop() for _ in range(pages_of(asked) - len(shared)))]
        known, cache = len(shared) * PAGE, self.batch.cache
        for layer, held in enumerate(cache.layers):
            pages = jnp.array(groups)[None] * HEADS + jnp.arange(HEADS)[:, None]
            table = held.block_table.at[slot, :, : len(groups)].set(pages)
            held = held._replace(block_table=table, lengths=held.lengths.at[slot].set(known))
            cache = kv_cache.replace_layer(cache, layer, held)
        cache = cache._replace(positions=cache.positions.at[slot].set(known))
        self.batch = self.batch._replace(cache=cache)
        logits = self.read(slot, asked.prompt[known:])
        self.slots[slot] = {"nth": nth, "asked": asked, "groups": groups, "logits": [logits]}

    def leave(self, slot):
        done = self.slots[slot]
        self.free += done["groups"]
        self.slots[slot] = None
        self.clear(slot)
        return done["logits"]

    def step(self):
        """Decodes a token of every request."""
        logits = super().step()
        assert np.isfinite(logits).all()
        for slot, held in enumerate(self.slots):
            if held is not None:
                held["logits"].append(logits[slot])

    def run(self, requests, order):
        """Serves the requests as slots and pages allow; each one's logits [tokens, V]."""
        waiting, done, clock = list(range(len(requests))), {}, 0
        while waiting or any(self.slots):
            for slot, held in enumerate(self.slots):
                if held and len(held["logits"]) == held["asked"].tokens:
                    done[held["nth"]] = np.stack(self.leave(slot))
            for slot in order:
                if self.slots[slot] is None and waiting and self.fits(requests[waiting[0]], clock):
                    nth = waiting.pop(0)
                    self.join(slot, nth, requests[nth])
            if any(self.slots):
                self.step()
            clock += 1
        return [done[nth] for nth in range(len(requests))]

    def fits(self, asked, clock):
        return asked.born <= clock and pages_of(asked) <= len(self.free)


@shared
def in_the_crowd(policy):
    return Slots(policy, range(GROUPS)).run(REQUESTS, order=(0, 1, 2, 3))


EVICTORS = [expression for expression in METHODS if parse(expression).evicts]
every_policy = pytest.mark.parametrize("policy", slow_except((*EVICTORS, *TOYS)), ids=str)


@every_policy
def test_a_request_gives_in_a_crowd_what_it_gives_alone(policy):
    """Bit for bit, in another slot and over other pages."""
    policy = as_policy(policy)
    crowd = in_the_crowd(policy)
    slots = Slots(policy, reversed(range(GROUPS)))
    for nth in (0, 3, 4):
        asked = REQUESTS[nth]
        (alone,) = slots.run([asked._replace(born=0)], order=(3, 2, 1, 0))
        np.testing.assert_array_equal(crowd[nth], alone)


@pytest.mark.slow
@every_policy
def test_a_request_gives_in_a_crowd_the_tokens_of_generate(policy):
    policy = as_policy(policy)
    outs = jsparse.generate(
        tiny_params(num_layers=2),
        [asked.prompt for asked in REQUESTS],
        policy=policy,
        sampling=[
            jsparse.SamplingParams(max_tokens=asked.tokens, ignore_eos=True) for asked in REQUESTS
        ],
        max_length=PAGE * PAGES,
        page_size=PAGE,
    )
    for out, logits in zip(outs, in_the_crowd(policy), strict=True):
        assert out.token_ids == logits.argmax(-1).tolist()


PREFIX, *SUFFIXES = random_prompts((CHUNK, 7, 5), seed=6)
OWNER, SHARER = (Ask(0, PREFIX + suffix, 8) for suffix in SUFFIXES)


def logits_beside(policy, owner, sharer, *, shared):
    """The logits of two requests of which the second joins three steps after the first.

    It reads everything itself, or takes over the pages of what both prompts begin with.
    """
    slots = Slots(policy, range(GROUPS))
    slots.join(0, 0, owner)
    for _ in range(3):
        slots.step()
    slots.join(1, 1, sharer, slots.slots[0]["groups"][: CHUNK // PAGE] if shared else ())
    for _ in range(4):
        slots.step()
    return [np.stack(slots.slots[slot]["logits"]) for slot in (0, 1)]


def may_share(policy):
    """Whether owner and sharer give, bit for bit, what they give without sharing."""
    apart, together = (
        logits_beside(policy, OWNER, SHARER, shared=shared) for shared in (False, True)
    )
    return all(np.array_equal(a, b) for a, b in zip(apart, together, strict=True))


@pytest.mark.slow
def test_what_a_policy_says_it_shares_can_be_shared():
    policy = parse("quest(budget=16)")
    assert policy.shares == "pages"
    assert may_share(policy)


@pytest.mark.slow
def test_sharing_what_a_row_s_own_channels_wrote_is_found_out():
    """Without calibration Double Sparsity writes each row's own channels into the pages."""
    policy = parse("double_sparsity(budget=8)")
    assert policy.shares is None
    assert not may_share(policy)


@pytest.mark.slow
def test_calibrated_double_sparsity_shares_its_pages(tmp_path):
    order = np.random.default_rng(0).permuted(np.tile(np.arange(16), (2, HEADS, 1)), axis=-1)
    channel_ranking.save(order.astype(np.int32), tmp_path / "ranking.safetensors")
    policy = double_sparsity(budget=8, calibration=str(tmp_path / "ranking.safetensors"))
    assert policy.shares == "pages"
    assert may_share(policy)
