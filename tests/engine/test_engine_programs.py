"""Tests which programs an engine compiles and runs, and how it measures their times."""

import itertools
import logging
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsparse.engine import runner
from jsparse.engine.prefill_programs import carry_of
from jsparse.engine.runner import PendingResults
from jsparse.engine.slots import PrefillRows
from jsparse.engine.step_plan import DecodePlan
from jsparse.runtime.program_set import ProgramKey
from jsparse.runtime.state_axes import row_arrays, state_axes
from tests.support.serving import asked, bits, greedy, tiny_llm, until
from tests.support.tiny import random_prompts, tiny_params

PROMPTS = random_prompts((9, 21, 3, 41, 16, 5), seed=5)
HANDS_ON = "lychee_decode(((1, 1), (0, 0)), value=3, granularity='token', correct_every=5)"


def test_first_request_has_its_programs_compiled_in_parallel(monkeypatch):
    """Its first plan requests all programs that it runs: two chunks, and steps of one row.

    It is greedy and sends no options.
    """
    llm = tiny_llm(decode_rows=[1, 4], max_stall_ms=None)
    monkeypatch.setattr(runner, "row_sampling", None)
    llm.engine.add(asked(llm, PROMPTS[3][:20], greedy(6)))
    llm.engine.step()
    made = set(llm.engine.programs._made)
    chunks = [each for each in made if each.name == "prefill"]
    assert {(*each.size, dict(each.static)["last"]) for each in chunks} == {
        (1, 16, False),
        (1, 8, True),
    }
    assert [each.size for each in made if each.name == "decode"] == [(1,)]
    while not llm.engine.idle:
        llm.engine.step()
    assert set(llm.engine.programs._made) == made


def test_engine_measures_the_times_of_its_programs():
    clock = itertools.count(step=10**6)  # compared with which compilation takes no time
    llm = tiny_llm()
    llm.engine._clock = lambda: float(next(clock))
    latency = llm.engine._latency
    assert (latency.prefill(1, 16, 0), latency.step(4)) == (None, None)
    llm.generate(PROMPTS[:2], greedy(9))
    # with a clock that advances at every read
    assert latency.prefill(1, 16, 0) >= 0.99e9
    assert latency.step(4) >= 0.99e9


def test_a_program_that_blocks_the_host_is_timed_without_its_compilation(monkeypatch):
    llm, now, seen = tiny_llm(), 0.0, []
    engine, run = llm.engine, llm.engine._runner.run

    def blocks(plan):
        nonlocal now
        before, pending = engine.programs.seconds, run(plan)
        engine.programs.seconds, now = before + 3, now + 5
        return pending

    monkeypatch.setattr(engine, "_clock", lambda: now)
    monkeypatch.setattr(engine._runner, "run", blocks)
    monkeypatch.setattr(engine._latency, "observe", lambda work, took: seen.append(took))
    engine.add(asked(llm, PROMPTS[0], greedy(9)))
    while not engine.idle:
        engine.step()
    assert seen[0] % 5000 == 2000


@pytest.mark.parametrize(
    ("maximum", "ahead"),
    [
        pytest.param(None, 2, marks=pytest.mark.slow),
        (120, 1),
        pytest.param(119, 0, marks=pytest.mark.slow),
    ],
)
def test_host_waits_for_long_programs_before_it_plans_the_next(maximum, ahead, monkeypatch):
    """A new request waits for the in-flight programs."""
    llm = tiny_llm(max_stall_ms=maximum)
    monkeypatch.setattr(llm.engine._latency, "expected", lambda work: 60.0)
    llm.engine.add(asked(llm, PROMPTS[0], greedy(30)))
    in_flight = []
    while not llm.engine.idle:
        llm.engine.step()
        in_flight.append(len(llm.engine._in_flight))
    assert max(in_flight) <= ahead


@pytest.mark.slow
def test_all_programs_can_be_compiled_ahead(monkeypatch):
    """Later requests of all kinds compile nothing, and greedy ones send no options."""
    llm = tiny_llm(prepare=True, steps_per_program=2, ladder=((0, 32),))
    llm.engine.prepare(["sampled"])  # also waits for the other programs
    before = llm.engine.programs.compiled
    assert before <= 21
    monkeypatch.setattr(runner, "row_sampling", None)
    llm.generate(PROMPTS, greedy(5))
    assert llm.engine.programs.compiled == before
    assert llm.engine.programs.seconds == 0


def test_cpu_serves_before_all_programs_are_compiled(monkeypatch):
    """The programs that all requests need are compiled first, and a request for others stalls no
    row.
    """
    programs = tiny_llm(decode_rows=[1, 4]).engine.programs
    waited = []

    def compile_nothing(keys, logger):
        waited.extend(keys)
        return keys

    monkeypatch.setattr(programs, "compile", compile_nothing)
    monkeypatch.setattr(
        programs, "expect", lambda keys: programs._made.update((key, Future()) for key in keys)
    )
    programs.prepare(["sampled", "top"], wait=False)
    assert {(key.name, key.size) for key in waited if key.name == "decode"} == {("decode", (4,))}
    assert all(dict(key.static).get("choice") != "top" for key in waited)
    later = programs._made.keys() - set(waited)
    assert {key.size for key in later if key.name == "decode"} == {(1,), (4,)}
    assert programs.coming("top")
    for key in later:
        if dict(key.static).get("choice") == "top":
            programs._made[key].set_result(None)
    for key in waited:
        programs._made[key] = Future()
        programs._made[key].set_result(None)
    assert not programs.coming("top")
    assert not programs.coming("sampled")


def test_program_that_failed_to_compile_fails_later_requests_for_it():
    programs, key = tiny_llm().engine.programs, ProgramKey.of("join", 1, choice="sampled")
    programs._made[key] = Future()
    programs._made[key].set_exception(RuntimeError("no room"))
    with pytest.raises(RuntimeError, match="no room"):
        programs.compile([key], logging.getLogger("jsparse.engine"))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dense", HANDS_ON])
def test_warm_up_changes_no_row(policy):
    """Programs run once with empty inputs during prefill and decoding, as on a GPU."""
    options = {"steps_per_program": 2, "cascade_attention": True, "kv_cache_tokens": 384}
    llm = tiny_llm(policy, ladder=((0, 16),), **options)
    engine, outs = llm.engine, []
    for disturbed in (False, True):
        states = [engine.add(asked(llm, prompt, greedy(6))) for prompt in PROMPTS]
        until(llm, lambda: engine.scheduler.decoding and engine.scheduler.prefilling)
        if disturbed:
            engine._runner.warm_up(
                [
                    *list(engine.programs._made),
                    ProgramKey.of("decode", 4, 1, 4, choice="sampled"),
                    *([ProgramKey.of("replay", 1, 16)] if engine.policy.shares == "keys" else []),
                ]
            )
        until(llm, lambda: engine.idle)
        outs.append([bits(state.output()) for state in states])
    assert outs[0] == outs[1]


def test_prefill_starts_from_the_initial_state():
    """Whatever state the slot held before; a later chunk finds the state of the chunk before it."""
    engine = tiny_llm("lfps(budget=0.5)", params=tiny_params(num_layers=1)).engine
    policy, spec, slots = engine.policy, engine.spec, engine._runner._slots
    used = jax.tree.map(lambda x: x + x.dtype.type(7), slots.rows.state)
    slots = slots._replace(rows=slots.rows._replace(state=used))
    rows = jnp.array([2, 0, 4])  # the last index is past the end
    none = PrefillRows(
        rows, rows, rows == 2, 0 * rows, 0 * rows, jnp.zeros((3, spec.num_pages), jnp.int32)
    )
    carry = carry_of(engine.programs._made_for, slots, none, none.start, 16)
    empty = row_arrays(policy, spec, policy.init(spec._replace(batch=1)))
    axes = [at.axis for at in state_axes(policy, spec) if at.kind == "row"]
    found = row_arrays(policy, spec, carry.state)
    assert len(found) > 0
    for axis, own, new, old in zip(axes, found, empty, row_arrays(policy, spec, used), strict=True):
        assert own.shape[axis] == 3
        np.testing.assert_array_equal(jnp.take(own, 0, axis), jnp.take(new, 0, axis))
        np.testing.assert_array_equal(jnp.take(own, 1, axis), jnp.take(old, 0, axis))


def test_programs_are_timed_only_if_their_end_was_observed(monkeypatch):
    """If two programs finished since the last poll, the first one's finish time is unknown."""

    class Packed:
        def __init__(self, there):
            self.is_ready = lambda: there

    engine, timed = tiny_llm().engine, []
    monkeypatch.setattr(engine._runner, "results", lambda pending: [])
    monkeypatch.setattr(engine._latency, "observe", lambda work, milliseconds: timed.append(work))
    for there in ([True, True, True], [True, False, True], [False, True, False]):
        works = [DecodePlan(4, 1, []) for _ in there]
        engine._in_flight += [
            PendingResults(Packed(each), [], work) for each, work in zip(there, works, strict=True)
        ]
        timed.clear()
        engine.step()
        expected = [nth == 0 or not each for nth, each in enumerate(there)]
        assert [any(x is work for x in timed) for work in works] == expected
    assert engine.idle
