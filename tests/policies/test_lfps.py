"""Tests LFPS against its formulas: tables, candidates, bypass, and recall."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse import cache as kv_cache
from jsparse.cache import CacheSpec, StepView
from jsparse.hooks import PrefillView
from jsparse.policies.expressions import parse
from jsparse.policies.lfps import History, Tables
from jsparse.runtime.decode_step import attend_layer
from tests.support.marks import slow_except

SINKS, PAGE, BATCH, HEADS, GROUP, DIM = 4, 8, 2, 2, 2, 16
N = HEADS * GROUP


class Layer:
    """Rows of different lengths in one layer that gets queries, keys and values one token at a
    time.
    """

    def __init__(self, policy, q, k, v, prompts, *, dim=DIM):
        """Prefills the prompts; q is [B, T, N, H], k and v are [B, T, K, H]."""
        self.policy, self.q, self.k, self.v = parse(policy), q, k, v
        self.lengths = np.array(prompts)
        num_slots = q.shape[1]
        spec = CacheSpec(1, len(q), N, HEADS, dim, PAGE, -(-num_slots // PAGE), jnp.float32)
        longest = max(prompts)
        self.cache, self.state = _read(
            self.policy, spec, q[:, :longest], k[:, :longest], v[:, :longest], self.lengths
        )
        self.steps, self.knobs = 0, None

    def step(self):
        """Decodes one token of each row; returns the selection and attention's result."""
        row = np.arange(len(self.q))
        new = (jnp.asarray(x[row, self.lengths]) for x in (self.q, self.k, self.v))
        out, chosen, self.cache, self.state = _step(
            self.policy, self.cache, self.state, *new, self.knobs
        )
        self.lengths, self.steps = self.lengths + 1, self.steps + 1
        if self.policy.services.period and self.steps % self.policy.services.period == 0:
            self.state, self.cache = self.policy.services.maintain(self.state, StepView(self.cache))
        return jax.device_get(chosen), jax.device_get(out)

    def tables(self):
        """The true values of both tables, float64[B, K, S]."""
        age = np.asarray(self.cache.positions - self.state.born)
        decay = float(self.policy.name.split("decay=")[1].split(",")[0])
        left = decay ** age[:, None, None]
        return [np.asarray(x.astype(jnp.float32), np.float64) * left for x in self.state.tables[0]]


@partial(jax.jit, static_argnames=("policy", "spec"))
def _read(policy, spec, q, k, v, lengths):
    cache = kv_cache.init(spec)
    tokens = jnp.zeros(q.shape[:2], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(q.shape[1]), tokens.shape)
    cache = kv_cache.append(cache, 0, k, v, positions, lengths)
    at = lengths[:, None] - policy.window + jnp.arange(policy.window)
    window = jnp.take_along_axis(q, jnp.clip(at, 0)[..., None, None], axis=1)
    window = jnp.where((at >= 0)[..., None, None], window, 0.0)
    seen = jnp.minimum(lengths, policy.window)
    view = PrefillView(tokens, positions, k, v, lengths, StepView(cache), window, seen, True)
    state = policy.prefill(policy.init(spec), 0, view)
    return cache._replace(positions=lengths), state


@partial(jax.jit, static_argnames=("policy",))
def _step(policy, cache, state, q, k, v, knobs):
    one = jnp.ones(len(q), jnp.int32)
    cache = kv_cache.append(cache, 0, k[:, None], v[:, None], cache.positions[:, None], one)
    view = StepView(cache, knobs=knobs)
    chosen, _, _ = policy.select(state, 0, q, view)
    out, state, _ = attend_layer(policy, 0, q, view, state)
    state = policy.update(state, 0, out.stats, view)
    return (out.o, out.lse), chosen, cache._replace(positions=cache.positions + 1), state


def drawn(tokens, seed=0, spread=1.5):
    """Random queries, keys and values of both rows."""
    rng = np.random.default_rng(seed)
    q = spread * rng.normal(size=(BATCH, tokens, N, DIM))
    k, v = rng.normal(size=(2, BATCH, tokens, HEADS, DIM))
    return [x.astype(np.float32) for x in (q, k, v)]


# The slow model: head by head, slot by slot, in float64.


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def weights_of(q, keys, counted):
    """The maximum over the group [G, H] of the softmaxes over the counted keys [n, H].

    It is normalised to sum 1.
    """
    best = np.max([softmax(keys.astype(np.float64) @ one / DIM**0.5) for one in q], axis=0)
    return best[counted] / best[counted].sum()


class Model:
    """One head's tables as in the paper: both by position, in the paper's indices.

    Attributes:
        vertical, slash: Φver and Φsla over positions; the first SINKS stay empty.
        newest: t, the position of the next step's token.
    """

    def __init__(self, q, keys, decay, num_slots, penalty, aligned=True):
        """Starts from the prompt's queries [n, G, H] and keys [n, H] (equation 4)."""
        n, self.decay, self.penalty, self.aligned = len(keys), decay, penalty, aligned
        self.vertical, self.slash, self.newest = np.zeros(num_slots), np.zeros(num_slots), n
        s = min(n, 32)
        c = (1 - penalty) / (s * (1 - decay))  # the paper's penalty is a half
        for j in range(1, s + 1):
            w = np.zeros(num_slots)
            if n - j >= SINKS:
                w[SINKS : n - j + 1] = weights_of(q[n - j], keys[: n - j + 1], slice(SINKS, None))
            for i in range(num_slots):
                self.vertical[i] += c * w[i]
                if i - j + 1 >= 0:
                    self.slash[i] += c * w[i - j + 1]

    def read(self):
        """Returns the scores of candidates (equation 7), of slots SINKS ≤ i < t.

        The paper reads Φsla(i). With alignment the read is from i - 1, whose value will move to i.
        """
        slash = moved(self.slash) if self.aligned else self.slash
        return self.vertical[SINKS : self.newest], slash[SINKS : self.newest]

    def update(self, listed, q, keys):
        """Updates the tables after a step that attended to `listed`, including the newest (equation
        10).
        """
        counted = np.array(listed) >= SINKS
        self.vertical, self.slash = self.decay * self.vertical, self.decay * moved(self.slash)
        if counted.any():
            w = weights_of(q, keys[listed], counted) - self.penalty / counted.sum()
            listed = np.array(listed)[counted]
            self.vertical[listed] += w
            self.slash[listed] += w
        self.newest += 1


def moved(table):
    """Returns the table whose entry at i is that at i - 1."""
    return np.concatenate([[0.0], table[:-1]])


def candidates(tables, rule, a, number):
    """Returns the slots that a rule chooses by tables over slots from SINKS on, best first.

    There are at most `number`. The threshold's are those of equations 8 and 9.
    """
    slots = range(SINKS, SINKS + len(tables[0]))
    score = dict(zip(slots, np.maximum(*tables), strict=True))
    if rule == "threshold":
        first, above = set(), set()
        for table in tables:
            around = table - table.mean() if len(table) else table
            kurtosis = (around**4).sum() / (around**2).sum() ** 2 if around.any() else 0.0
            tau = a * table.mean() / kurtosis if kurtosis else np.inf
            first |= {i for i, x in zip(slots, table, strict=True) if x > tau}
            above |= {i for i, x in zip(slots, table, strict=True) if x > table.mean()}
        slots = {i + d for i in first for d in (-1, 0, 1, 2)} & above
    return sorted(slots, key=lambda i: (-score[i], i))[:number]


RULES = {
    "top": "lfps(budget=0.2, decay={decay})",
    "exact": "lfps(budget=0.1, decay={decay}, exact=True, penalty=0.5)",
    "threshold": "lfps(budget=0.1, decay={decay}, candidates='threshold', exact=True, a=0.02, "
    "penalty=0.5)",
    "paper": "lfps(budget=0.1, decay={decay}, candidates='threshold', exact=True, a=0.02, "
    "penalty=0.5, wider=10, aligned=False)",
    "floor": "lfps(budget=0.1, decay={decay}, exact=True, candidates='threshold', floor=True)",
}


def check(kind, steps, decay):
    """Compares every step of both rows with the model: the tables, then the selection from them."""
    prompts = (45, 9)
    q, k, v = drawn(max(prompts) + steps + 1)
    layer = Layer(RULES[kind].format(decay=decay), q, k, v, prompts)
    num_slots, budget = q.shape[1], 0.2 if kind == "top" else 0.1
    penalty = 0.5 if "penalty" in RULES[kind] else 0.0
    aligned = "aligned=False" not in RULES[kind]
    # bfloat16 rounds every sum by at most 2^-8 of it; errors decay like the sums
    error = 2.0**-8 / (1 - decay)
    grouped = q.reshape(BATCH, num_slots, HEADS, GROUP, DIM).swapaxes(1, 2)
    models = {
        (b, h): Model(
            *(grouped[b, h, : prompts[b]], k[b, : prompts[b], h]),
            decay,
            num_slots,
            penalty,
            aligned,
        )
        for b in range(BATCH)
        for h in range(HEADS)
    }
    for _ in range(steps):
        vertical, distance = layer.tables()
        chosen, _ = layer.step()
        for (b, h), model in models.items():
            t, keys, now = model.newest, k[b, :, h], grouped[b, h, model.newest]
            # the policy's own scores of slots; the rule must match them to the bit
            slots = np.arange(SINKS, t)
            found = vertical[b, h, slots], distance[b, h, t - slots]
            for table, own in zip(model.read(), found, strict=True):
                np.testing.assert_allclose(own, table, atol=error * np.abs(table).max(initial=0))
            number = int(np.ceil(budget * (1 - 1e-6) * (t + 1)))
            always = {*range(min(SINKS, t + 1)), t}
            ids = chosen.ids[b, h, : chosen.count[b, h]].tolist()
            if kind == "top":
                wanted = {*candidates(found, "top", 0, number - len(always)), *always}
            else:
                wanted = expected(found, kind, number, always, now, keys)
            # a budget below sinks plus newest lists the oldest of these
            wanted = sorted(wanted) if number >= len(always) else [*range(min(number, SINKS))]
            assert ids == [int(i) for i in wanted], (t, b, h)
            model.update([*{*ids, t}] if ids else [], now, keys)
    return layer


def expected(tables, kind, number, always, q, keys):
    """The `number` candidates of largest exact weight, with those that are always attended to."""
    room = (10 if kind == "paper" else 3) * number - len(always)
    if kind == "exact":
        found = candidates(tables, "top", 0, max(room, 0))
    else:
        a = 0.2 if kind == "floor" else 0.02
        found = candidates(tables, "threshold", a, max(room, 0))
        if kind == "floor" and len(found) < number - len(always):
            others = [i for i in candidates(tables, "top", 0, None) if i not in set(found)]
            found = [*found, *others[: number - len(always) - len(found)]]
    found = np.array(sorted(found), int)
    if found.size == 0:
        return always
    both = sorted({*found.tolist(), *always})
    w = weights_of(q, keys[both], np.isin(both, found))
    order = sorted(range(len(found)), key=lambda n: (-w[n], n))
    return {*found[order[: max(number - len(always), 0)]], *always}


@pytest.mark.parametrize("kind", slow_except(RULES, "top", "paper"))
def test_steps_match_the_slow_model(kind):
    """Over two renormalisations at decay 0.5, which has a period of 12."""
    layer = check(kind, 26, 0.5)
    assert layer.policy.services.period == 12


# Recall of the tables.


def unit(rng, *shape):
    x = rng.normal(size=shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.slow
@pytest.mark.parametrize("candidates", ["top", "threshold"])
def test_vertical_and_slash_heads_are_recalled_fully(candidates):
    """KV head 0 attends to three positions at every step, head 1 to three distances."""
    tokens = dim = 144
    prompt, places, distances, sharp = 110, (17, 53, 90), (9, 31, 70), 12.0 * dim**0.5
    k = np.broadcast_to(np.eye(tokens)[None, :, None], (1, tokens, HEADS, dim))
    q = np.zeros((1, tokens, N, dim))
    for t in range(tokens):
        q[0, t, :GROUP] = sharp * sum(k[0, p, 0] for p in places)
        q[0, t, GROUP:] = sharp * sum(k[0, t - d, 1] for d in distances if t >= d)
    v = np.ones(k.shape)
    exact = ", exact=True, candidates='threshold'" if candidates == "threshold" else ""
    layer = Layer(
        f"lfps(budget=0.1, decay=0.95{exact})",
        *(x.astype(np.float32) for x in (q, k, v)),
        (prompt,),
        dim=dim,
    )
    for t in range(prompt, tokens - 1):
        chosen, _ = layer.step()
        listed = [set(chosen.ids[0, h, : chosen.count[0, h]].tolist()) for h in range(HEADS)]
        assert set(places) <= listed[0], t
        assert {t - d for d in distances} <= listed[1], t
        assert len(listed[0]) <= np.ceil(0.1 * (t + 1))


# Bypass.


def of_bypass(q, keys, values, t, prompt, alone):
    """ρ and the output of one query head by equations 5 and 6; the prompt is all but the newest."""
    last, newest = q
    middle = slice(SINKS, prompt)
    scale = DIM**-0.5
    spread = np.var(keys[middle] @ last * scale) / (last @ last)
    of_sinks = np.exp(keys[:SINKS] @ newest * scale)
    centre = keys[middle].mean(0) @ newest * scale
    rest = (prompt - SINKS) * np.exp(centre + newest @ newest * spread / 2)
    local = np.exp(keys[t - 6 : t] @ newest * scale).sum()
    mean = values[middle].mean(0)
    share = of_sinks.sum() / (of_sinks.sum() + rest + local)
    o = (of_sinks @ values[:SINKS] + rest * mean) / (of_sinks.sum() + rest)
    return share, mean if alone else o


def with_sinks(prompt, looking):
    """Draws one step in which the query heads `looking` [B, N] attend to the first tokens."""
    q, k, v = drawn(prompt + 1, seed=3)
    towards = unit(np.random.default_rng(5), HEADS, DIM)
    k[:, :SINKS] = 8 * towards + 0.3 * k[:, :SINKS]
    q[:, prompt] = np.where(
        np.array(looking)[..., None], 4 * np.repeat(towards, GROUP, axis=0), q[:, prompt] / 8
    )
    return q, k, v


@pytest.mark.parametrize("bypass", slow_except((True, "mean"), True))
def test_bypass_matches_the_formulas(bypass):
    prompt = 40
    # both heads of the first group in one row, one head of the second in the other
    q, k, v = with_sinks(prompt, [[1, 1, 0, 0], [0, 0, 1, 0]])
    layer = Layer(f"lfps(budget=0.2, decay=0.95, bypass={bypass!r})", q, k, v, (prompt, prompt))
    before = layer.tables()
    chosen, (o, lse) = layer.step()
    shares = {}
    for b in range(BATCH):
        for n in range(N):
            h = n // GROUP
            pair = q[b, [prompt - 1, prompt], n].astype(np.float64)
            keys, values = (x[b, :, h].astype(np.float64) for x in (k, v))
            shares[b, n], wanted = of_bypass(pair, keys, values, prompt, prompt, bypass == "mean")
            if (b, h) == (0, 0):
                np.testing.assert_allclose(o[b, n], wanted, rtol=1e-4, atol=1e-5)
    passed = {at for at, share in shares.items() if share > 0.85}
    assert passed == {(0, 0), (0, 1), (1, 2)}
    assert chosen.count[0, 0] == 0 and (chosen.ids[0, 0] == 0).all()
    assert (chosen.count.ravel()[1:] > 0).all() and np.isfinite(lse).all()
    # its tables only decay; those of the others are updated
    for was, now in zip(before, layer.tables(), strict=True):
        np.testing.assert_allclose(now[0, 0], 0.95 * was[0, 0], rtol=1e-5)
        assert not np.allclose(now[0, 1], 0.95 * was[0, 1], rtol=1e-2)


def test_retrieval_heads_are_dense_where_others_bypass():
    prompt = 40
    q, k, v = with_sinks(prompt, np.ones((BATCH, N)))
    inner = "lfps(budget=0.2, decay=0.95, bypass=True)"
    alone, mixed = (
        Layer(name, q, k, v, (prompt, prompt)).step()[1][0].reshape(BATCH, HEADS, GROUP, DIM)
        for name in (inner, f"retrieval_heads({inner}, ((1, 0),))")
    )
    np.testing.assert_allclose(mixed[:, 1], alone[:, 1], rtol=1e-5, atol=1e-6)
    for b in range(BATCH):
        for g in range(GROUP):
            dense = softmax(k[b, :, 0] @ q[b, prompt, g] / DIM**0.5) @ v[b, :, 0]
            np.testing.assert_allclose(mixed[b, 0, g], dense, rtol=1e-4, atol=1e-5)
            assert np.abs(alone[b, 0, g] - dense).max() > 5e-4


def test_rows_may_have_smaller_budgets():
    q, k, v = drawn(72)
    layer = Layer(RULES["top"].format(decay=0.5), q, k, v, (45, 39))
    layer.knobs = {"budget": jnp.array([0.13, jnp.nan])}
    chosen, _ = layer.step()
    assert chosen.count.tolist() == [[6, 6], [8, 8]]


def test_tables_without_updates_do_not_vanish():
    policy = parse("lfps(budget=0.5)")
    entries = jnp.asarray(np.linspace(0, 2.0**-18, 16), jnp.bfloat16).reshape(1, 1, 16)
    view: Any = SimpleNamespace(positions=jnp.full(1, 100, jnp.int32), cache=None)
    state = History((Tables(entries, entries),), jnp.zeros(1, jnp.int32), ())
    for _ in range(40):
        state, _ = policy.services.maintain(state._replace(born=view.positions - 100), view)
    assert (np.diff(np.asarray(state.tables[0].vertical.astype(jnp.float32))[0, 0]) > 0).all()


def test_wrong_hyper_parameters_are_refused():
    for expression, message in (
        ("lfps(budget=1.5)", "budget=1.5: must be a number above 0 and at most 1"),
        ("lfps(decay=1.0)", "decay=1.0: must be a number above 0 and below 1"),
        ("lfps(a=0.0)", "a=0.0: must be a finite number above 0"),
        ("lfps(penalty=1)", "penalty=1: must be a number from 0 to below 1"),
        ("lfps(candidates='best')", r"candidates='best': must be one of \['top', 'threshold'\]"),
        ("lfps(exact='yes')", r"exact='yes': must be True or False"),
        ("lfps(wider=0)", "wider=0: must be an integer of at least 1"),
        ("lfps(aligned=0)", r"aligned=0: must be True or False"),
        ("lfps(bypass='sinks')", r"bypass='sinks': must be one of \[True, False, 'mean'\]"),
        ("lfps(candidates='threshold')", "candidates='threshold': must be 'top' with exact=False"),
        ("lfps(floor=True)", "floor=True: must be False with candidates='top'"),
        ("twilight(lfps(), p=0.9)", r"prune='page_mass': must be 'token' over lfps\("),
        ("retrieval_heads(h2o(), ((0, 1),))", "policy=h2o.*must keep every token"),
        ("retrieval_heads(auto(), ((0, 1),))", "policy=auto.*must not be inside another policy"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(expression)
