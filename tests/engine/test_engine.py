"""Tests that a request's result does not depend on the requests that run beside it."""

import dataclasses
import itertools
import signal
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

import jsparse
from jsparse import SamplingParams
from jsparse.engine import sizing
from jsparse.engine.options import EngineOptions
from jsparse.engine.request_state import policy_of
from jsparse.engine.runner import PendingResults
from tests.support.serving import asked, assert_at_rest, bits, greedy, tiny_llm, until
from tests.support.tiny import random_prompts, tiny_params, with_nan

PROMPTS = random_prompts((9, 21, 3, 41, 16, 5), seed=5)
OFFLOADED = "offloaded(quest(budget=16))"
HANDS_ON = "lychee_decode(((1, 1), (0, 0)), value=3, granularity='token', correct_every=5)"
# chunks start at block boundaries, so that cached blocks have the same bits
LADDER = ((0, 16),)
OF_LLM = {
    "steps_per_program": 2,
    "per_request": ["dense"],
    "layer_stats": True,
    "ladder": LADDER,
}


@pytest.fixture(scope="module")
def llm():
    """An engine whose policy hands sets on, maintains rows separately and takes several steps."""
    return tiny_llm(HANDS_ON, **OF_LLM)


@pytest.fixture(scope="module")
def crowd(llm):
    """Results of mixed requests in one batch; later requests compile nothing."""
    return llm.generate(PROMPTS, [mixed(nth) for nth in range(6)])


@pytest.fixture(scope="module")
def dense():
    """A dense-attention engine whose programs for greedy requests are compiled."""
    made = tiny_llm(steps_per_program=2, ladder=LADDER)
    made.generate(PROMPTS, greedy(9))
    return made


def mixed(nth, **options):
    """Options of all kinds, different for each request."""
    kinds = (
        {"temperature": 0.8, "seed": nth},
        {"temperature": 1.3, "top_k": 5, "seed": 2**40 + nth, "logprobs": 4},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"temperature": 0.7, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3},
        {"temperature": 0, "logit_bias": {3: 4.5, 7: -100}, "logprobs": 2},
        {"temperature": 0},
    )
    return SamplingParams(
        **{"max_tokens": 4 + 3 * nth, "logprobs": 0, "seed": nth} | kinds[nth % 6] | options
    )


def test_programs_of_several_steps_match_generate(llm, crowd):
    together = jsparse.generate(
        llm.engine.params,
        PROMPTS,
        sampling=[mixed(nth, logprobs=0) for nth in range(6)],
        policy=llm.engine.policy,
        page_size=8,
        max_length=96,
    )
    for nth, (made, out) in enumerate(zip(together, crowd, strict=True)):
        (seq,) = out.outputs
        assert seq.token_ids == made.token_ids, nth
        assert seq.finish_reason == made.finish_reason
        assert seq.token_logprobs == pytest.approx(made.logprobs, abs=1e-4)
        assert seq.attended_fraction == pytest.approx(made.stats.attended_fraction, rel=1e-4)
        assert seq.read_fraction == pytest.approx(made.stats.read_fraction, rel=1e-4)
    assert_at_rest(llm)


def test_request_in_a_mixed_batch_matches_the_request_alone(llm, crowd):
    for nth, (prompt, out) in enumerate(zip(PROMPTS, crowd, strict=True)):
        own = mixed(nth)
        (alone,) = llm.generate([prompt], [own])
        assert bits(alone) == bits(out)
        assert alone.outputs[0].top_logprobs == out.outputs[0].top_logprobs


@pytest.mark.slow
def test_top_logprobs_are_those_of_the_model(dense):
    (out,) = dense.generate([PROMPTS[0]], greedy(5, logprobs=20))
    (seq,) = out.outputs
    text = [*PROMPTS[0], *seq.token_ids]
    logits = np.asarray(jsparse.logits(dense.engine.params, [text])[0], np.float64)
    for nth in range(5):
        last = logits[len(PROMPTS[0]) - 1 + nth]
        expected = last - np.log(np.exp(last).sum())
        top = seq.top_logprobs[nth]
        assert list(top) == np.argsort(-expected, kind="stable")[:20].tolist()
        assert list(top.values()) == pytest.approx(expected[list(top)].tolist(), abs=1e-4)
        assert seq.token_logprobs[nth] == top[seq.token_ids[nth]]


def test_layer_shares_average_to_the_reported_share(llm):
    (out,) = llm.generate([PROMPTS[1]], greedy(9))
    (seq,) = out.outputs
    assert seq.layer_stats.shape == (8, 2, 2)
    attended, read = seq.layer_stats.mean(axis=(0, 2))
    assert seq.attended_fraction == pytest.approx(attended)
    assert seq.read_fraction == pytest.approx(read)
    # the first layer is full attention, the second picks three tokens
    assert seq.layer_stats[:, 0, 0] == pytest.approx(1)
    assert (seq.layer_stats[:, 0, 1] < 1).all()


def test_requests_set_the_hyper_parameters_that_the_engine_allows(llm, dense):
    (sparse, full) = llm.generate([PROMPTS[3]] * 2, [greedy(8), greedy(8, policy={"dense": True})])
    (exact,) = dense.generate([PROMPTS[3]], greedy(8))
    assert full.outputs[0].token_ids == exact.outputs[0].token_ids
    assert full.outputs[0].attended_fraction == pytest.approx(1)
    assert sparse.outputs[0].attended_fraction < 0.9
    assert (full.policy, sparse.policy) == ("dense", llm.engine.policy.name)
    assert policy_of(llm.engine.policy, {"p": 0.5}) == f"{sparse.policy} with p=0.5"


def test_sequences_of_one_prompt_differ_and_match_separate_requests(dense):
    options = SamplingParams(temperature=1.0, n=3, seed=4, max_tokens=8, logprobs=0)
    (out,) = dense.generate([PROMPTS[3]], options)
    texts = [tuple(seq.token_ids) for seq in out.outputs]
    assert [seq.index for seq in out.outputs] == [0, 1, 2]
    assert len(set(texts)) == 3
    # two of three sequences do not prefill the first 32 tokens
    assert out.num_cached_tokens == 32
    again, *_ = dense.generate([PROMPTS[3], *PROMPTS], [options, *[greedy(3)] * 6])
    assert bits(again) == bits(out)
    single = dataclasses.replace(options, n=1)
    (first,) = dense.generate([PROMPTS[3]], single)
    assert tuple(first.outputs[0].token_ids) == texts[0]


def test_end_tokens_and_lengths_end_sequences(dense):
    (out,) = dense.generate([PROMPTS[0]], greedy(12))
    ids = out.outputs[0].token_ids
    assert (out.outputs[0].finish_reason, len(ids)) == ("length", 12)
    end = ids[6]
    (cut,) = dense.generate([PROMPTS[0]], greedy(12, stop_token_ids=[end]))
    assert cut.outputs[0].token_ids == ids[: ids.index(end) + 1]
    assert cut.outputs[0].finish_reason == "stop"
    (one,) = dense.generate([PROMPTS[0]], greedy(1))
    assert one.outputs[0].token_ids == ids[:1]
    assert one.outputs[0].attended_fraction is None
    assert_at_rest(dense)


def test_abort_in_every_phase(dense, monkeypatch):
    """An aborted request frees its memory, and the others continue unchanged."""
    (alone,) = dense.generate([PROMPTS[1]], greedy(12))
    # results are never ready at a poll, so that programs stay in flight
    monkeypatch.setattr(PendingResults, "ready", property(lambda pending: False))
    for phase in ("waiting", "prefill", "decoding", "in flight", "ended"):
        updates = _aborted_while(dense, phase)
        (other,) = {id(s): s for s in updates if s.finished and s.request_id == "other"}.values()
        assert bits(other.output()) == bits(alone), phase
        assert dense.engine.abort("gone") is None, phase
        assert_at_rest(dense)


def _aborted_while(dense, phase):
    """Runs the request "other" to completion and aborts "gone" beside it."""
    engine, scheduler = dense.engine, dense.engine.scheduler
    engine.add(asked(dense, PROMPTS[1], greedy(12)), request_id="other")
    (unread,) = random_prompts([41], seed=sum(phase.encode()))  # not cached by another phase
    engine.add(asked(dense, unread, greedy(20)), request_id="gone")
    number = max(engine._live)
    held = engine._live[number][1]
    updates = []
    if phase == "prefill":
        updates = until(dense, lambda: held in scheduler.prefilling and held.prefilled > 0)
    elif phase == "decoding":
        updates = until(dense, lambda: len(engine._live[number][2].token_ids) > 3)
    elif phase == "in flight":
        updates = until(dense, lambda: held.planned > 3 and bool(engine._in_flight))
    elif phase == "ended":
        updates = until(dense, lambda: "gone" not in engine._requests)
    gone = engine.abort("gone")
    if phase == "ended":
        assert gone is None
    else:
        assert gone.finished and gone.output().outputs[0].finish_reason == "abort", phase
    return updates + until(dense, lambda: engine.idle)


def test_sequences_grow_into_memory_too_small_for_all(dense, monkeypatch):
    """More requests run than if each reserved all its memory; some wait for others to finish."""
    monkeypatch.setattr(sizing, "GROWTH_TOKENS", 8)
    llm = tiny_llm(steps_per_program=2, ladder=LADDER, kv_cache_tokens=128)
    prompts = [PROMPTS[nth] for nth in (0, 2, 4, 5)]
    outs = llm.generate(prompts, greedy(40))
    expected = dense.generate(prompts, greedy(40))
    assert [bits(out) for out in outs] == [bits(out) for out in expected]
    counters = llm.engine.counters
    assert 2 < counters.row_steps / counters.decode_steps < 4
    assert_at_rest(llm)


def test_prompt_that_cannot_be_tokenised_leaves_no_state(dense):
    with pytest.raises(ValueError, match=r"prompt\[1\] has token id 300"):
        dense.generate([PROMPTS[0], [300]], greedy(3))
    with pytest.raises(ValueError, match="must be at most max_model_len=96"):
        dense.generate([PROMPTS[0], list(range(95))], greedy(3))
    assert_at_rest(dense)


def test_calls_from_several_threads_run_in_turn(dense):
    expected = [bits(out) for out in dense.generate(PROMPTS[:2], greedy(9))]
    with ThreadPoolExecutor(3) as threads:
        outs = threads.map(lambda _: dense.generate(PROMPTS[:2], greedy(9)), range(3))
        assert [[bits(out) for out in each] for each in outs] == [expected] * 3
    assert_at_rest(dense)


def test_on_output_must_not_call_the_same_llm(dense):
    def again(output):
        dense.generate(PROMPTS[0], greedy(2))

    with pytest.raises(ValueError, match="on_output: must not call generate of the LLM"):
        dense.generate(PROMPTS[0], greedy(2), on_output=again)
    assert len(dense.generate(PROMPTS[0], greedy(2))) == 1
    assert_at_rest(dense)


def test_outputs_are_yielded_as_they_finish(dense):
    """In any order of prefill, which depends on lengths and on the prefix cache."""
    order = []
    outs = dense.generate(
        PROMPTS[:3], [greedy(48), greedy(2), greedy(20)], on_output=lambda out: order.append(out)
    )
    assert [len(out.outputs[0].token_ids) for out in order] == [2, 20, 48]
    assert {id(out) for out in outs} == {id(out) for out in order}
    metrics = outs[0].metrics
    assert [len(out.metrics.token_times) for out in outs] == [48, 2, 20]
    ends = [out.metrics.token_times[-1] for out in order]
    assert ends == sorted(ends)
    times = metrics.token_times
    assert metrics.arrived <= metrics.scheduled <= times[0] < times[-1]
    assert times == sorted(times)
    assert metrics.time_to_first_token == times[0] - metrics.arrived


def test_nan_logits_end_only_their_request(caplog):
    """Neither concurrent requests nor later owners of its pages are affected."""
    llm = tiny_llm(
        params=with_nan(tiny_params(num_layers=2), 7),
        steps_per_program=2,
        ladder=LADDER,
        enable_prefix_caching=False,
    )
    good, bad = [[5, 8, 13, 21], [34, 55, 89]], [7] * 41
    expected = [bits(out) for out in llm.generate(good, greedy(9))]
    outs = llm.generate([good[0], bad, good[1]], greedy(9))
    assert [out.outputs[0].finish_reason for out in outs] == ["length", "error", "length"]
    assert outs[1].outputs[0].token_ids == []
    assert [bits(outs[0]), bits(outs[2])] == expected
    assert "request 3: the model's logits are NaN" in caplog.text
    for _ in range(3):
        llm.generate([bad] * 4, greedy(9))
    assert [bits(out) for out in llm.generate(good, greedy(9))] == expected
    assert_at_rest(llm)


def test_prompt_with_nan_leaves_no_cached_blocks():
    """Wherever the NaN is: the cache holds zeros in its place."""
    params = with_nan(tiny_params(num_layers=2), 7)
    llm = tiny_llm(params=params, steps_per_program=2, ladder=LADDER)
    for place in (0, 20, 37):
        prompt = [13] * 41
        prompt[place] = 7
        for _ in range(2):
            (out,) = llm.generate(prompt, greedy(9))
            assert (out.outputs[0].finish_reason, out.num_cached_tokens) == ("error", 0), place
    while not llm.engine.idle:
        llm.engine.step()
    assert_at_rest(llm)
    (out,) = llm.generate([13] * 41, greedy(9))
    assert out.outputs[0].finish_reason == "length"


def test_device_error_fails_all_requests_and_the_engine(monkeypatch):
    llm = tiny_llm(steps_per_program=2, ladder=LADDER)
    llm.generate([PROMPTS[0]], greedy(3))
    engine = llm.engine
    served = []
    for prompt in PROMPTS[:3]:
        engine.add(asked(llm, prompt, greedy(9)))
        served.append(engine._requests[next(reversed(engine._requests))])
    for _ in range(3):
        engine.step()

    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("INTERNAL: injected")

    monkeypatch.setattr("jsparse.engine.runner.unpack", fail)
    with pytest.raises(jsparse.EngineError, match="the engine has failed: INTERNAL: injected"):
        until(llm, lambda: False)
    assert not any(one.output().finished for one in served)
    with pytest.raises(jsparse.EngineError, match="the engine has failed"):
        llm.generate([PROMPTS[0]], greedy(3))
    assert not engine._live
    assert not engine._requests


def test_rows_decode_during_a_long_prefill():
    """The host also stays less than a whole prompt ahead of the device."""
    llm = tiny_llm(ladder=((0, 8),), steps_per_program=3)
    llm.generate([PROMPTS[0]], greedy(4))
    engine = llm.engine
    engine.add(asked(llm, PROMPTS[2], greedy(4)), request_id="short")
    engine.add(asked(llm, random_prompts([90])[0], greedy(2)), request_id="long")
    held = engine._requests["long"].seqs[0]
    until(llm, lambda: "short" not in engine._requests)
    assert held in engine.scheduler.prefilling
    while held in engine.scheduler.prefilling:
        assert sum(pending.steps for pending in engine._in_flight) <= 3
        engine.step()
    until(llm, lambda: engine.idle)
    assert_at_rest(llm)


def test_generated_request_ids_never_equal_given_ones(dense):
    dense.engine._names = itertools.count()
    for name in ("0", "2"):
        dense.engine.add(asked(dense, PROMPTS[0], greedy(3)), request_id=name)
    outs = dense.generate(PROMPTS[:2], greedy(2))
    assert [out.request_id for out in outs] == ["1", "3"]
    until(dense, lambda: dense.engine.idle)


def test_ctrl_c_waits_for_the_end_of_a_step(dense, monkeypatch):
    step = dense.engine.step
    # a background process may ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(dense.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dense.generate(PROMPTS, greedy(9))
    monkeypatch.undo()
    signal.signal(signal.SIGINT, before)
    assert dense.engine.error is None
    (out,) = dense.generate([PROMPTS[3]], greedy(9))
    (again,) = dense.generate([PROMPTS[3]], greedy(9))
    assert bits(out) == bits(again)
    until(dense, lambda: dense.engine.idle)
    assert_at_rest(dense)


def test_requests_past_the_queue_limit_are_refused_and_the_rest_continue(dense, monkeypatch):
    engine, options = dense.engine, greedy(3)
    few = dataclasses.replace(engine._options, max_waiting=2)
    monkeypatch.setattr(engine, "_options", few)
    for prompt in PROMPTS:
        engine.add(asked(dense, prompt, options))
    with pytest.raises(jsparse.EngineFull, match="6 requests wait: must be at most max_waiting=2"):
        engine.add(asked(dense, PROMPTS[0], options))
    updates = until(dense, lambda: engine.idle)
    assert len({one.request_id for one in updates if one.finished}) == 6
    assert_at_rest(dense)


def test_smallest_sizes_are_in_range():
    least = {"max_num_seqs": 1, "max_model_len": 1, "max_waiting": 0, "kv_cache_tokens": 1}
    assert dataclasses.asdict(EngineOptions(**least)).items() >= least.items()


def test_options_out_of_range_are_refused():
    for options, message in (
        ({"prepare": "top"}, "prepare='top': must be True or False"),
        ({"cascade_attention": 1}, "cascade_attention=1: must be"),
        (
            {"cascade_attention": True, "batch_invariant": True, "decode_rows": None},
            "cascade_attention=True: must be False if batch_invariant is true",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be an integer of at least 1"),
        ({"max_model_len": 513}, "max_model_len=513: must be at most 512"),
        ({"max_waiting": -1}, "max_waiting=-1: must be an integer of at least 0"),
        ({"kv_cache_tokens": 0}, "kv_cache_tokens=0: must be an integer of at least 1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5: must be a number above 0"),
        ({"page_size": 12}, "page_size=12: must be one of"),
        ({"steps_per_program": 0}, "steps_per_program=0: must be an integer of at least 1"),
        ({"ladder": ((0, 12),)}, r"ladder=\(\(0, 12\),\): sizes must be multiples"),
        ({"ladder": ((8, 16),)}, r"positions must start at 0 and ascend"),
        ({"per_request": ["p"]}, r"per_request=\('p',\): must be among \['dense'\]"),
        ({"kv_cache_tokens": 2**50}, "must fit in the .* that gpu_memory_utilization=0.9 leaves"),
        # with K and V in host memory
        ({"policy": OFFLOADED, "kv_offloading_size": 1.0}, "kv_offloading_size=1.0: must be 0 if"),
        (
            {"policy": OFFLOADED, "cascade_attention": True, "batch_invariant": False},
            "cascade_attention=True: must be False if K and V are in",
        ),
        ({"policy": OFFLOADED, "steps_per_program": 2}, "steps_per_program=2: must be 1 with K"),
        (
            {"policy": OFFLOADED, "exact": True, "batch_invariant": False},
            "but keeps K and V in host memory",
        ),
        # with rows that draft for dense attention
        ({"exact": True}, "exact=True: must be False if batch_invariant"),
        (
            {"exact": True, "batch_invariant": False, "cascade_attention": True},
            "cascade_attention=True: must be .* if exact is true",
        ),
        ({"kv_offloading_size": -1}, "kv_offloading_size=-1: must be a finite number of at"),
        ({"swap_space": 4}, "swap_space=4: use kv_offloading_size"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_llm(**{"policy": "quest(budget=16)"} | options)


def test_requests_for_disabled_features_are_refused(dense):
    with pytest.raises(ValueError, match=r"policy=\{'dense': …\}: must be among per_request="):
        dense.generate([PROMPTS[0]], greedy(3, policy={"dense": True}))
    dense.engine.add(asked(dense, PROMPTS[0], greedy(3)), request_id="a")
    with pytest.raises(ValueError, match="request_id='a': must not be that of a live request"):
        dense.engine.add(asked(dense, PROMPTS[0], greedy(3)), request_id="a")
    until(dense, lambda: dense.engine.idle)
