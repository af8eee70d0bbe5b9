"""Tests the contract by five methods and every report: toy policies in the engine against slow
models of the same rules.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from jsparse import SamplingParams
from jsparse import cache as kv_cache
from jsparse.builder import dense
from jsparse.evaluation.attention_metrics import measured
from jsparse.evaluation.shared_prefill import prime
from jsparse.hyper_parameters import fraction
from jsparse.policies.combinators import with_state
from jsparse.policies.expressions import as_policy
from jsparse.policy import Eviction, Services
from jsparse.runtime import capacity, prefill, sampling, session, store
from jsparse.runtime import rows as driver
from jsparse.runtime.request import knobs, requests
from tests.support.marks import slow_except
from tests.support.programs import shared
from tests.support.slow_model import SlowModel, SlowRow, attend, logits_of, logsumexp, softmax
from tests.support.tiny import (
    assert_close,
    engine_logits,
    forced_logits,
    random_prompts,
    random_tokens,
    spec_of,
    tiny_params,
    traces,
)
from tests.support.toy_policies import (
    bypass,
    counted,
    even_ids,
    inherit,
    page_bound,
    parity,
    prompt_ends,
    shrink,
)

PAGE = 8
LENGTHS = (37, 18, 3)
STEPS = 27
CHUNK = 16


class SlowRule:
    """A decoding rule over a SlowRow; subclasses determine the attended tokens of a layer."""

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


METHODS = {
    "sidecar, tokens and bits": (page_bound(), SlowPageBound),
    "page mass, inheritance and correction": (inherit(), SlowInherit),
    "summary, token logits and window": (bypass(), SlowBypass),
}
# the first two layers hold exact keys, with and without corrections
LAYERS = {"page mass, inheritance and correction": 3}
PROMPTS = random_prompts(LENGTHS)
FORCED = random_tokens(len(LENGTHS), STEPS)


def model_of(name=None):
    return tiny_params(num_layers=LAYERS.get(name, 1))


@shared
def slow_logits(name):
    """The slow model's logits after the prompt and after each forced token, [steps, B, V], and the
    finished rules.
    """
    _, rule_type = METHODS[name]
    model = SlowModel(model_of(name))
    rules, logits = [], []
    for prompt, forced in zip(PROMPTS, FORCED, strict=True):
        row = SlowRow(model, prompt)
        rule = rule_type(row, prompt)
        logits.append([row.logits, *(rule.step(int(token)) for token in forced[:-1])])
        rules.append(rule)
    return np.swapaxes(np.asarray(logits), 0, 1), rules


@shared
def fast_logits(params, policy):
    return engine_logits(params, policy, PROMPTS, FORCED, chunk=CHUNK, page_size=PAGE)


@shared
def dense_logits(params):
    """The slow model's logits for row 1 if every step attends to all tokens."""
    row = SlowRow(SlowModel(params), PROMPTS[1])
    return np.asarray([row.logits, *(row.push(int(token), row.dense) for token in FORCED[1, :-1])])


# corrections are also tested in `test_corrections_see_the_appended_tokens`
@pytest.mark.parametrize("name", slow_except(METHODS, "summary, token logits and window"))
def test_engine_matches_the_slow_model(name):
    """Several prompt chunks, a ragged batch, 26 steps; the rule is far from dense, otherwise the
    test would prove nothing.
    """
    (policy, _), params = METHODS[name], model_of(name)
    expected, _ = slow_logits(name)
    logits = fast_logits(params, policy)
    for step in range(STEPS):
        assert_close(logits[step], expected[step], rtol=1e-4, step=step)
    far = np.abs(dense_logits(params) - expected[:, 1]).max()
    assert far > 0.1 * np.abs(expected).max()


def test_both_branches_of_the_bypass_are_taken():
    _, rules = slow_logits("summary, token logits and window")
    for rule in rules:
        assert 0 < np.mean(rule.skipped) < 1


@shared
def seen_by_corrections():
    """For each correction: the traces of `append` by number of tokens, and the distance of the
    cached values from them.
    """
    seen = []

    def append(state, layer, k, v, tokens, positions, view):
        seen.append(tokens.shape[1])
        held = view.layers[layer]
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
        services=Services(correct_every=4),
    )
    states = []
    correct = driver.correct

    def watched(decoder, policy, weights, tokens, cache, state, read_only):
        cache, state = correct(decoder, policy, weights, tokens, cache, state, read_only)
        states.append(float(state))
        return cache, state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "correct", watched)
        params = tiny_params(num_layers=1)
        engine_logits(params, policy, PROMPTS, FORCED[:, :10], page_size=PAGE)
    return seen, states


@pytest.mark.slow
def test_corrections_see_the_appended_tokens():
    """Guarantees for append, select and update: the new tokens are already held, at the end of
    every head.
    """
    seen, states = seen_by_corrections()
    assert states == [0.0, 0.0]
    assert set(seen) == {1, 4}


# After the prompt


def read_by(policy, params=None, prompts=PROMPTS, **options):
    """A session that has prefilled the prompts, with room for 27 more tokens."""
    params = tiny_params(num_layers=1) if params is None else params
    spec = capacity.cache_spec(params, prompts, STEPS, None, PAGE)
    made = session.Session(params, as_policy(policy), spec, **options)
    made.prefill(prompts)
    return made


def test_eviction_after_the_prompt_shrinks_the_cache():
    """Once, before the first step, with the slots that `max_length` gives for the longest row."""
    calls, policy = [], prompt_ends()
    assert policy.eviction is not None
    rework, max_length = policy.eviction.after_prompt, policy.eviction.max_length
    assert rework is not None
    assert max_length is not None

    def after_prompt(state, view, slots):
        calls.append(slots)
        return rework(state, view, slots)

    prompts = random_prompts((130, 9, 3))
    watched = policy._replace(eviction=Eviction(after_prompt, max_length))
    made = read_by(watched, prompts=prompts)
    assert made.deployment.spec.capacity == 512
    assert not calls
    steps = made.steps(sampling.greedy, (), limits=[STEPS, STEPS, 2])
    next(steps)
    steps.close()
    assert calls == [64]
    assert max_length(130, STEPS) == 7 + STEPS <= 64
    cache = made.prefilled.cache
    for held in cache.layers:
        assert held.capacity == 64
        assert held.k.nbytes == made.deployment.spec.nbytes // (2 * len(cache.layers)) * 64 // 512
        assert held.lengths.tolist() == [[7, 4], [7, 4], [3, 3]]
    assert cache.positions.tolist() == [130, 9, 3]


@pytest.mark.slow
def test_wrapper_with_a_state_leaves_after_prompt_to_its_base():
    def init(spec):
        return jnp.zeros(spec.batch)

    wrapped = with_state(prompt_ends(), init)._replace(name="wrapped")
    expected = fast_logits(model_of(), prompt_ends())
    np.testing.assert_array_equal(fast_logits(model_of(), wrapped), expected)


@pytest.mark.parametrize(
    "case", slow_except(["max_length", "no max_length", "as before"], "max_length")
)
def test_too_little_room_after_the_prompt_is_an_error(case):
    prompts = random_prompts((130, 9, 3))

    def begin(policy, limits):
        next(read_by(policy, prompts=prompts).steps(sampling.greedy, (), limits=limits))

    eviction = prompt_ends().eviction
    assert eviction is not None
    rework, max_length = eviction.after_prompt, eviction.max_length
    assert rework is not None

    def cramped(state, cache, slots):
        return rework(state, cache, 40)

    policy = prompt_ends()._replace(eviction=Eviction(cramped, max_length), name="cramped")
    said = "policy=cramped: after_prompt left room for 40 tokens per head: must be at least {}, its"
    if case == "max_length":
        for limits, minimum in (([STEPS] * 3, 64), ([1, 1, 62], 128)):
            with pytest.raises(ValueError, match=said.format(minimum)):
                begin(policy, limits)
    elif case == "no max_length":  # a head may hold the prompt and all new tokens
        minimum = 256 if jax.default_backend() == "cpu" else 192  # on a CPU a power of two
        with pytest.raises(ValueError, match=said.format(minimum)):
            begin(policy._replace(eviction=Eviction(cramped)), [1, 25, 4])
    else:  # heads never hold more than the cache did
        vast = Eviction(lambda state, view, slots: (state, view.cache), lambda *_: 10**9)
        begin(policy._replace(eviction=vast), [STEPS] * 3)


def test_wrappers_refuse_policies_that_evict():
    wrappers = jsparse.keep, jsparse.dense_layers, jsparse.twilight, measured
    for wrapped in wrappers:
        argument = "base" if wrapped is jsparse.twilight else "policy"
        for policy in (shrink(), jsparse.hard_kv()):
            with pytest.raises(ValueError, match="must keep every token, ") as error:
                wrapped(policy)
            assert str(error.value).startswith(f"{argument}={policy}: ")


def test_corrections_and_further_turns_refuse_policies_that_evict():
    params = tiny_params()
    with pytest.raises(ValueError, match="correct_every=4: must be 0 if the policy evicts"):
        jsparse.generate(params, [1], policy=shrink()._replace(services=Services(correct_every=4)))
    spec = spec_of(params, 1)
    late = dense()._replace(eviction=Eviction(lambda *held: held[:2]), name="late")
    for policy in (shrink(), jsparse.hard_kv(), late):
        said = f"policy={policy}: must not change the cache after the prompt"
        with pytest.raises(ValueError) as error:  # noqa: PT011 - what it says is checked below
            session.Session(params, policy, spec, resumable=True)
        assert str(error.value).startswith(said)
        session.Session(params, policy, spec)


# Tokens of a summary


@shared
def counted_results(plain):
    made = read_by(counted(plain=plain))
    forced = jnp.asarray(FORCED[:, :3].T)
    return list(made.steps(sampling.forced, forced, limits=[3] * 3, keep_logits=True))


@pytest.mark.parametrize("plain", [False, True])
def test_tokens_of_a_summary_are_in_the_shares(plain):
    """Head 1 lists 4 tokens and counts 2 more as attended and 3 as read; a pair counts none."""
    attended, read = (0, 0) if plain else (2, 3)
    for nth, result in enumerate(counted_results(plain)[1:], 1):
        assert result.stats is not None
        all_attended, all_read = np.asarray(result.stats.attended), np.asarray(result.stats.read)
        for row, prompt in enumerate(LENGTHS):
            length = prompt + nth
            listed = min(4, length)
            assert all_attended[0, row] == pytest.approx((listed + attended / 2) / length)
            assert all_read[0, row] == pytest.approx((listed + read / 2) / length)


# Hyper-parameters per row


KNOB_PROMPTS = random_prompts((37, 30, 26, 33))
KNOB_TOKENS = random_tokens(4, 6, seed=5)


def knob_logits(policies, layers=2):
    """A function of a policy and of the hyper-parameters of four rows that returns logits."""
    params, policies = tiny_params(num_layers=layers), tuple(map(as_policy, policies))
    spec = capacity.cache_spec(params, KNOB_PROMPTS, KNOB_TOKENS.shape[1], None, PAGE)
    shared = prime(params, policies, KNOB_PROMPTS, spec, lambda *_: None)

    def logits(index, *rows):
        options = [SamplingParams(policy=row) for row in rows or [{}] * 4]
        asked = requests(params, KNOB_PROMPTS, options, policies[index])
        return forced_logits(shared.session(index), KNOB_TOKENS, knobs(asked))

    return logits


PER_ROW = [
    ("oracle_top_k(budget={}, granularity='page')", "budget", 9, 24, 16),
    ("keep(twilight(quest(budget=16), p={}, prune='token'), sink=1, recent=2)", "p", 0.5, 0.7, 0.9),
    (
        "twilight(lychee_decode(((1, 1), (0, 0)), rule='top_p', value={}, recent=2), p=0.9)",
        "value", 0.3, 0.6, 0.8,
    ),
]  # fmt: skip


@shared
def own_and_mixed():
    """Logits of `oracle_top_p(p=0.7)` with rows that set another p or are dense; and of 0.7 and 0.5
    for all.
    """
    logits = knob_logits(["oracle_top_p(p=0.7)", "oracle_top_p(p=0.5)"], 1)
    return logits(0, {"p": 0.5}, {}, {"p": 0.9}, {"dense": True}), logits(0), logits(1)


@pytest.mark.slow
def test_row_sets_its_own_value():
    mixed, own, half = own_and_mixed()
    row = SlowRow(SlowModel(tiny_params(num_layers=1)), KNOB_PROMPTS[3])
    exact = [row.logits, *(row.push(int(token), row.dense) for token in KNOB_TOKENS[3, :-1])]
    assert_close(mixed[:, 0], half[:, 0], rtol=1e-6)
    assert_close(mixed[:, 1], own[:, 1], rtol=1e-6)
    assert_close(mixed[:, 3], exact, rtol=1e-5)
    for row in (0, 2, 3):
        assert np.abs(own[:, row] - mixed[:, row]).max() > 1e-3 * np.abs(own).max()


@pytest.mark.parametrize("case", PER_ROW, ids=str)
@pytest.mark.slow
def test_rows_set_different_values(case):
    """Each matches the policy with that value, and no value compiles a program.

    Rows that set none have the policy's own value.
    """
    expression, name, one, own, other = case
    layers = 2 if "lychee" in expression else 1  # has layers that hand sets on
    policies = [*(expression.format(value) for value in (one, own, other)), "dense"]
    logits = knob_logits(policies, layers)
    rows = {name: one}, {}, {name: other}, {"dense": True}
    mixed = logits(1, *rows)
    for row in range(4):
        assert_close(mixed[:, row], logits(row)[:, row], rtol=1e-6, row=row)
    plain = logits(1)
    for row in (0, 2, 3):
        assert np.abs(plain[:, row] - mixed[:, row]).max() > 1e-3 * np.abs(plain).max()
    before = traces(driver.decode_steps)
    logits(1, {name: other, "dense": True}, {name: one}, {"dense": False}, {})
    assert traces(driver.decode_steps) == before


@pytest.mark.parametrize(
    "policy",
    [
        bypass(),
        even_ids(within=31),
        inherit(),
        "duo_attention(((1, 1), (0, 1)), sink=1, recent=6)",
        "keep(streaming(sink=1, recent=4), sink=2, recent=6)",
        "twilight(all_pages(), p=0.7, dense_below=32)",
    ],
    ids=str,
)
@pytest.mark.slow
def test_rows_can_be_dense(policy):
    """With a summary, with short rows: they equal dense, and leave the others unchanged."""
    logits = knob_logits([policy, "dense"], 1 if policy is bypass() else 2)
    mixed = logits(0, {}, {"dense": True}, {"dense": False}, {"dense": True})
    plain, exact = logits(0), logits(1)
    for row in range(4):
        expected = (plain, exact)[row % 2]
        assert_close(mixed[:, row], expected[:, row], rtol=1e-5, row=row)
    assert np.abs(plain - exact)[:, 1].max() > 1e-3 * np.abs(plain).max()


def test_bad_values_of_rows_are_refused():
    lychee = "lychee_decode(((1, 1), (0, 0)), rule={!r})"
    for policy, given, message in (
        ("quest(budget=16)", {"p": 0.5}, r"policy=\{'p': 0.5\}: quest\(.* set \['dense'\]"),
        ("oracle_top_p()", {3: 0.5}, r"policy=\{3: 0.5\}: .*\['dense', 'p'\]"),
        ("oracle_top_p()", {"p": 1.5}, "p=1.5: .* at most 1"),
        ("oracle_top_p()", {"p": float("nan")}, "p=nan: .*number"),
        ("oracle_top_p()", {"p": True}, "p=True: .*number"),
        ("oracle_top_k()", {"budget": 0}, "budget=0: .* at least 1"),
        ("keep(dense_layers(oracle_top_p()))", {"p": 2}, "p=2: .* at most 1"),
        (lychee.format("top_p"), {"value": 3}, "value=3: .* at most 1 with rule='top_p'"),
        (lychee.format("threshold"), {"value": -0.5}, "value=-0.5: .* from 0 .*rule='threshold'"),
        (lychee.format("top_k"), {"value": 16}, r"policy=\{'value': 16\}: .* set \['dense'\]"),
        ("dense", {"dense": 1}, "dense=1: .*true or false"),
        ("snapkv(budget=64)", {"dense": True}, "dense=True: .*drops tokens, as snapkv"),
    ):
        rows = [SamplingParams(), SamplingParams(policy=given)]
        with pytest.raises(ValueError, match=message):
            jsparse.generate(tiny_params(num_layers=2), [[1], [2]], policy=policy, sampling=rows)


def test_values_for_policies_without_a_builder_are_numbers():
    checks = {"p": fraction, "q": lambda name, value: None}
    policy = as_policy("oracle_top_p()")._replace(per_row=checks, name="own")
    params = tiny_params(num_layers=2)
    with pytest.raises(ValueError, match="q=inf: must be a finite number"):
        requests(params, [[1]], SamplingParams(policy={"q": float("inf")}), policy)
    asked = requests(
        params, [[1], [2]], [SamplingParams(policy={"q": 7}), SamplingParams()], policy
    )
    np.testing.assert_array_equal(knobs(asked)["q"], [7, np.nan])


# Constants of the model


def with_shift(shift):
    return dataclasses.replace(tiny_params(num_layers=1), constants={"shift": jnp.int32(shift)})


def test_constants_are_passed_like_weights():
    """Two models that differ only in constants share programs, and each has its own results."""
    options = {"page_size": PAGE}
    first = engine_logits(with_shift(0), parity(), PROMPTS, FORCED[:, :6], **options)
    programs = driver.decode_steps, prefill.prefill_chunk
    before = traces(*programs)
    second = engine_logits(with_shift(1), parity(), PROMPTS, FORCED[:, :6], **options)
    assert traces(*programs) == before
    assert np.abs(first - second)[1:].max() > 1e-2 * np.abs(first).max()


def test_missing_constant_is_refused_before_prefill(monkeypatch):
    monkeypatch.setattr(store, "empty_rows", lambda *_: pytest.fail("allocated"))
    params = dataclasses.replace(with_shift(1), constants={"other": jnp.zeros(3)})
    said = r"policy=parity\(shift=None\) needs 'shift': must be among .* 'tiny', .* \['other'\]"
    with pytest.raises(ValueError, match=said):
        jsparse.generate(params, [1], policy=parity())
    with pytest.raises(ValueError, match="needs 'shift'"):
        prime(params, (dense(), parity()), [[1]], spec_of(params, 1), lambda *_: None)
