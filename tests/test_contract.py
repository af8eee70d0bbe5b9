"""The contract carries five methods and every report: toy policies run by the engine against slow
models of the same rules.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow_except
from slow_model import SlowModel, SlowRow, attend, logits_of, logsumexp, softmax
from tiny import assert_close, engine_logits, random_prompts, random_tokens, spec_of, tiny_params
from toy_policies import bypass, echo, even_ids, inherit, page_bound, shrink

from jsparse import cache as kv_cache
from jsparse.policy import dense
from jsparse.runtime import prefill, session
from jsparse.runtime.decode_step import decode_step

PAGE = 8
LENGTHS = (37, 18, 3)
STEPS = 27
CHUNK = 16


class SlowRule:
    """A rule of decoding over a SlowRow; subclasses say what a layer attends to."""

    def __init__(self, row: SlowRow, prompt):
        self.row, self.prompt, self.steps = row, prompt, 0
        self.num_layers, self.num_heads = len(row.k), len(row.k[0])

    def step(self, token):
        logits = self.row.push(token, self.layer)
        self.steps += 1
        self.after_step()
        return logits

    def after_step(self):
        pass

    def layer(self, layer, q):
        return self.row.over(
            layer, q, [self.slots(layer, head, q) for head in range(self.num_heads)]
        )

    def slots(self, layer, head, q):
        raise NotImplementedError


class SlowPageBound(SlowRule):
    pages = 3

    def slots(self, layer, head, q):
        row = self.row
        keys, group = row.k[layer][head], range(head * row.group, (head + 1) * row.group)
        bounds = []
        for start in range(0, len(keys), PAGE):
            maxima = np.max(keys[start : start + PAGE], axis=0)
            bounds.append(max(np.sum(np.maximum(q[n], 0) * maxima) for n in group))
        best = sorted(range(len(bounds)), key=lambda page: (-bounds[page], page))[: self.pages]
        listed = [
            slot for page in best for slot in range(page * PAGE, min((page + 1) * PAGE, len(keys)))
        ]
        logits = dict(
            zip(listed, logits_of(row.mean_query(q, head), [keys[s] for s in listed]), strict=True)
        )
        mean = np.mean(list(logits.values()))
        kept = {slot for slot in listed if logits[slot] >= mean or row.tokens[slot] % 2 == 0}
        return sorted(kept | {len(keys) - 1} if kept else kept)


class SlowInherit(SlowRule):
    pages, share, every = 2, 0.02, 8

    def __init__(self, row, prompt):
        super().__init__(row, prompt)
        self.handed = {}

    def layer(self, layer, q):
        out = []
        for head in range(self.num_heads):
            keys, values = self.row.k[layer][head], self.row.v[layer][head]
            queries = q[head * self.row.group : (head + 1) * self.row.group]
            if layer == 0 or (layer == 1 and head == 0):
                self.handed[layer + 1, head] = self.pick(layer, head, q)
                out += [attend(query, keys, values) for query in queries]
                continue
            pages = self.handed[layer + 1, head] = self.handed[layer, head]
            slots = {
                s for page in pages for s in range(page * PAGE, min((page + 1) * PAGE, len(keys)))
            }
            slots = sorted(slots | {len(keys) - 1})
            summary = np.full(
                len(keys[0]), sum(key[0] for key in keys[len(self.prompt) :]) / len(keys)
            )
            for query in queries:
                weights = softmax([*logits_of(query, [keys[s] for s in slots]), 0.0])
                out.append(weights @ np.asarray([*(values[s] for s in slots), summary]))
        return out

    def pick(self, layer, head, q):
        keys = self.row.k[layer][head]
        logits = np.asarray(logits_of(self.row.mean_query(q, head), keys))
        mass = [logsumexp(logits[start : start + PAGE]) for start in range(0, len(keys), PAGE)]
        enough = [
            page
            for page in range(len(mass))
            if np.exp(mass[page] - logsumexp(logits)) >= self.share
        ]
        return sorted(sorted(enough, key=lambda page: (-mass[page], page))[: self.pages])

    def after_step(self):
        if self.steps % self.every:
            return
        row, count = self.row, self.every
        tokens = row.tokens[-count:]
        del row.tokens[-count:]
        for layer in range(self.num_layers):
            for head in range(self.num_heads):
                del row.k[layer][head][-count:]
                del row.v[layer][head][-count:]
        for token in tokens:
            row.push(token, row.dense)


class SlowBypass(SlowRule):
    budget, decay, window = 6, 0.9, 4

    def __init__(self, row, prompt):
        super().__init__(row, prompt)
        self.skipped = []
        self.table = {
            (layer, h): self.primed(layer, h)
            for layer in range(self.num_layers)
            for h in range(self.num_heads)
        }

    def primed(self, layer, head):
        row, table = self.row, np.zeros(200)
        for position in range(max(len(self.prompt) - self.window, 0), len(self.prompt)):
            query = row.mean_query(row.q[layer][position], head)
            table[: position + 1] += softmax(logits_of(query, row.k[layer][head][: position + 1]))
        return table

    def layer(self, layer, q):
        row, out = self.row, []
        for head in range(self.num_heads):
            keys, values, table = row.k[layer][head], row.v[layer][head], self.table[layer, head]
            mean_query = row.mean_query(q, head)
            first, newest = logits_of(mean_query, [keys[0], keys[-1]])
            skip = first > newest
            self.skipped.append(skip)
            ranked = sorted(range(len(keys)), key=lambda slot: (-table[slot], slot))[: self.budget]
            chosen = [] if skip else sorted(set(ranked) | {len(keys) - 1})
            summary = np.mean(values, axis=0) if skip else values[0]
            for n in range(head * row.group, (head + 1) * row.group):
                logits = [
                    *logits_of(q[n], [keys[s] for s in chosen]),
                    logits_of(q[n], [keys[0]])[0] - 1.0,
                ]
                out.append(softmax(logits) @ np.asarray([*(values[s] for s in chosen), summary]))
            table *= self.decay
            if chosen:
                table[chosen] += softmax(logits_of(mean_query, [keys[s] for s in chosen]))
        return out


class SlowShrink(SlowRule):
    period, newest = 8, 5

    def __init__(self, row, prompt):
        super().__init__(row, prompt)
        self.shape = [
            [(layer, h) for h in range(self.num_heads)] for layer in range(self.num_layers)
        ]
        self.bias = {at: [0.0] * len(prompt) for heads in self.shape for at in heads}
        self.position = {at: list(range(len(prompt))) for heads in self.shape for at in heads}

    def layer(self, layer, q):
        row, out = self.row, []
        for head in range(self.num_heads):
            at = layer, head
            self.bias[at].append(0.0)
            self.position[at].append(len(row.tokens) - 1)
            length = len(row.k[layer][head])
            chosen = [
                s for s in range(length) if self.position[at][s] % 5 != 2 or self.bias[at][s] > 0
            ]
            chosen = sorted({*chosen, length - 1})
            keys, values, bias = (
                [x[s] for s in chosen]
                for x in (row.k[layer][head], row.v[layer][head], self.bias[at])
            )
            out += [
                attend(q[n], keys, values, bias)
                for n in range(head * row.group, (head + 1) * row.group)
            ]
        return out

    def after_step(self):
        if self.steps % self.period == 0:
            for layer in range(self.num_layers):
                for head in range(self.num_heads):
                    self.shrink(layer, head)

    def shrink(self, layer, head):
        row, at = self.row, (layer, head)
        length = len(row.k[layer][head])
        norms = [np.linalg.norm(key) for key in row.k[layer][head]]
        recent = length - (self.newest + layer + 2 * head)
        kept, biases, dropped = [], [], 0
        for slot in range(length):
            if slot == 0 or slot >= recent or norms[slot] > np.mean(norms):
                kept.append(slot)
                biases.append(np.log(np.exp(self.bias[at][slot]) + dropped))
                dropped = 0
            else:
                dropped += 1
        row.k[layer][head] = [row.k[layer][head][s] for s in kept]
        row.v[layer][head] = [row.v[layer][head][s] for s in kept]
        self.position[at] = [self.position[at][s] for s in kept]
        self.bias[at] = biases


class SlowEvenIds(SlowRule):
    budget, recent, within = 12, 3, 24

    def slots(self, layer, head, q):
        length = len(self.row.tokens)
        if length <= self.within:
            return list(range(length))
        even = [slot for slot in range(length) if self.row.tokens[slot] % 2 == 0][-self.budget :]
        return sorted({*even, *range(length - self.recent, length)})


class SlowEcho(SlowRule):
    sink, recent = 2, 6

    def __init__(self, row, prompt):
        super().__init__(row, prompt)
        self.seen = {}

    def layer(self, layer, q):
        out = []
        for n in range(len(q)):
            head = n // self.row.group
            keys, values = self.row.k[layer][head], self.row.v[layer][head]
            if (layer, head) == (0, 0):
                out.append(attend(q[n], keys, values))
                continue
            ends = [*range(self.sink), *range(len(keys) - self.recent, len(keys))]
            slots = sorted({slot for slot in ends if 0 <= slot < len(keys)})
            logits = logits_of(q[n], [keys[s] for s in slots])
            weights = softmax([*logits, self.seen.get((layer, n), -np.inf)])
            out.append(weights[:-1] @ np.asarray([values[s] for s in slots]))
            self.seen[layer, n] = logsumexp(
                [logit for slot, logit in zip(slots, logits, strict=True) if slot % 2 == 0]
            )
        return out


METHODS = {
    "sidecar, tokens and bits": (page_bound(), SlowPageBound),
    "page mass, inheritance and correction": (inherit(), SlowInherit),
    "summary, token logits and window": (bypass(), SlowBypass),
    "maintenance, bias and positions": (shrink(), SlowShrink),
    "token lists and fallback": (even_ids(), SlowEvenIds),
    "token lists, listed logits and summary": (echo(), SlowEcho),
}
PROMPTS = random_prompts(LENGTHS)
FORCED = random_tokens(len(LENGTHS), STEPS)


@cache
def slow_logits(name):
    """The slow model's logits after the prompt and after each forced token, [steps, B, V], and the
    finished rules.
    """
    _, rule_type = METHODS[name]
    model = SlowModel(tiny_params())
    rules, logits = [], []
    for prompt, forced in zip(PROMPTS, FORCED, strict=True):
        row = SlowRow(model, prompt)
        rule = rule_type(row, prompt)
        logits.append([row.logits, *(rule.step(int(token)) for token in forced[:-1])])
        rules.append(rule)
    return np.swapaxes(np.asarray(logits), 0, 1), rules


@cache
def dense_logits():
    return engine_logits(tiny_params(), "dense", PROMPTS, FORCED, chunk=CHUNK, page_size=PAGE)


@pytest.mark.parametrize("name", METHODS)
def test_engine_equals_the_slow_model(name):
    """Several prompt chunks, a ragged batch, 26 steps; and the rule is far from dense, or this
    would show nothing.
    """
    policy, _ = METHODS[name]
    expected, _ = slow_logits(name)
    logits = engine_logits(tiny_params(), policy, PROMPTS, FORCED, chunk=CHUNK, page_size=PAGE)
    for step in range(STEPS):
        assert_close(logits[step], expected[step], rtol=1e-4, step=step)
    assert np.abs(dense_logits() - expected).max() > 0.1 * np.abs(expected).max()


def test_slow_model_equals_the_engine_when_dense():
    row = SlowRow(SlowModel(tiny_params()), PROMPTS[1])
    expected = [row.logits, *(row.push(int(token), row.dense) for token in FORCED[1, :-1])]
    assert_close(dense_logits()[:, 1], np.asarray(expected), rtol=1e-5)


@pytest.mark.parametrize("name", slow_except(METHODS, "summary, token logits and window"))
def test_pieces_of_the_prompt_and_the_batch_do_not_matter(name):
    policy, _ = METHODS[name]
    expected, _ = slow_logits(name)
    whole = engine_logits(tiny_params(), policy, PROMPTS, FORCED, chunk=64, page_size=PAGE)
    assert_close(whole, expected, rtol=1e-4)
    alone = engine_logits(
        tiny_params(), policy, [PROMPTS[1]], FORCED[1:2, :12], chunk=64, page_size=PAGE
    )
    assert_close(alone[:, 0], expected[:12, 1], rtol=1e-4)


def test_correction_shows_in_the_logits():
    """Without it the same rule gives other logits from the first correction on, and the same
    before.
    """
    name = "page mass, inheritance and correction"
    policy, _ = METHODS[name]
    expected, _ = slow_logits(name)
    without = engine_logits(
        tiny_params(),
        policy._replace(correct_every=0),
        PROMPTS,
        FORCED,
        chunk=CHUNK,
        page_size=PAGE,
    )
    difference = np.abs(without - expected).max(axis=(1, 2)) / np.abs(expected).max()
    assert difference[: inherit().correct_every + 1].max() < 1e-4
    assert difference[inherit().correct_every + 1 :].max() > 1e-2


def test_both_branches_of_the_bypass_were_taken():
    _, rules = slow_logits("summary, token logits and window")
    for rule in rules:
        assert 0 < np.mean(rule.skipped) < 1


@pytest.mark.parametrize("pool_pages", [None, 400])
def test_shrinking_frees_pages_and_heads_differ(pool_pages):
    """maintain over either table: the logits of the slow model, its lengths, and pages back on the
    free list.
    """
    params, policy = tiny_params(), shrink()
    expected, rules = slow_logits("maintenance, bias and positions")
    spec = spec_of(params, len(LENGTHS), page_size=PAGE)._replace(pool_pages=pool_pages)
    cache = kv_cache.init(spec, fields=policy.needs)
    carry = prefill.start(params.decoder, policy, cache, policy.init(spec))
    tokens = np.zeros((len(LENGTHS), 40), np.int32)
    for b, prompt in enumerate(PROMPTS):
        tokens[b, : len(prompt)] = prompt
    carry = prefill.prefill_chunk(
        params.decoder,
        policy,
        params.weights,
        jnp.asarray(tokens),
        jnp.asarray(LENGTHS, jnp.int32),
        carry,
        last=True,
    )
    cache, state = carry.cache, carry.state
    step = jax.jit(decode_step, static_argnames=("decoder", "policy"))
    for i in range(STEPS - 1):
        logits, cache, state, stats = step(
            params.decoder, policy, params.weights, jnp.asarray(FORCED[:, i]), cache, state
        )
        assert_close(logits, expected[i + 1], rtol=1e-4, step=i)
        if (i + 1) % policy.period == 0:
            state, cache = jax.jit(policy.maintain)(state, cache)
    for layer, held in enumerate(cache.layers):
        lengths = np.array([[len(rule.row.k[layer][h]) for h in range(2)] for rule in rules])
        np.testing.assert_array_equal(held.lengths, lengths)
        assert (lengths[:, 0] != lengths[:, 1]).any()
        positions = np.asarray(kv_cache.slot_positions(held))
        for b, rule in enumerate(rules):
            for head in range(2):
                assert positions[b, head, : lengths[b, head]].tolist() == rule.position[layer, head]
        if held.free is not None:
            pages = np.ceil(lengths / PAGE).sum()
            assert int(held.free.count) == pool_pages - 1 - pages
    assert not cache.overflow.any()
    # heads that hold less can attend to less: the shares are of positions, not of the slots that
    # are left
    longest = max(
        len(rule.row.k[layer][h]) for rule in rules[:1] for layer in range(3) for h in range(2)
    )
    assert float(stats.attended[0]) <= longest / (LENGTHS[0] + STEPS - 1)


def test_correction_and_stats_see_the_lengths_that_policies_expect():
    """What append, select and update may rely on: the new tokens are already held, at the end of
    every head.
    """
    seen = []

    def append(state, layer, k, v, tokens, positions, cache):
        seen.append(("append", tokens.shape[1], layer))
        held = cache.layers[layer]
        slots = held.lengths[:, :, None] - tokens.shape[1] + jnp.arange(tokens.shape[1])
        rows = kv_cache.read_slots(held.k, held, slots)
        return (
            state
            + jnp.max(jnp.abs(rows - k.swapaxes(1, 2)))
            + jnp.max(jnp.abs(slots - positions[:, None]))
        )

    policy = inherit()._replace(
        select=dense().select,
        init=lambda spec: jnp.float32(0),
        append=append,
        update=lambda state, *_: state,
        correct_every=4,
    )
    states = []
    correct = session.correct

    def watched(decoder, policy, weights, tokens, cache, state, lent):
        cache, state = correct(decoder, policy, weights, tokens, cache, state, lent)
        states.append(float(state))
        return cache, state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "correct", watched)
        engine_logits(tiny_params(), policy, PROMPTS, FORCED[:, :10], page_size=PAGE)
    assert states == [0.0, 0.0]
    assert {width for _, width, _ in seen} == {1, 4}
