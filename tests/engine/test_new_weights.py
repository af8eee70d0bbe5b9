"""An engine continues with other weights, and without K and V, as training loops need it."""

import asyncio
import gc
import threading
import weakref
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jsparse
from tests.support.serving import asked, bits, greedy, small, tiny_llm
from tests.support.tiny import tiny_params

# its ranking needs the model's mean keys, which change with the weights
POLICY = "twilight(all_pages(), p=0.9)"
PROMPTS = [[(7 * nth + row) % 97 for nth in range(30 + row)] for row in range(2)]


def other(seed: int = 1) -> jsparse.Params:
    return tiny_params(num_layers=2, seed=seed)


@pytest.fixture(scope="module")
def llm():
    # copies: the model itself is kept for other tests
    made = tiny_llm(POLICY, params=jax.tree.map(jnp.copy, other(0)))
    made.generate(PROMPTS, greedy(6))
    return made


def test_outputs_are_those_of_the_new_weights(llm):
    """Nothing is compiled, cached prefixes are forgotten, and old weights are freed."""
    compiled, old = llm.engine.programs.compiled, llm.engine.params
    assert old.constants
    weights = [weakref.ref(leaf) for leaf in jax.tree.leaves(old.weights)]
    del old
    llm.update_weights(other())
    outs = llm.generate(PROMPTS, greedy(6))
    assert llm.engine.programs.compiled == compiled
    assert [out.num_cached_tokens for out in outs] == [0, 0]
    expected = tiny_llm(POLICY, params=other())
    assert [*map(bits, outs)] == [*map(bits, expected.generate(PROMPTS, greedy(6)))]
    for name, array in llm.engine.params.constants.items():
        np.testing.assert_array_equal(array, expected.engine.params.constants[name])
    gc.collect()
    assert [each() for each in weights] == [None] * len(weights)


def test_weights_are_converted_and_donated_ones_replaced(llm):
    """A learner that donates the weights it has given may give its next ones."""
    given = other(2)
    llm.update_weights(given)
    for leaf in jax.tree.leaves(given.weights):
        leaf.delete()
    llm.update_weights(jax.tree.map(lambda x: x.astype("bfloat16"), other(3)))
    rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype(x.dtype), other(3))
    found, wanted = (jax.tree.leaves(x.weights) for x in (llm.engine.params, rounded))
    for own, expected in zip(found, wanted, strict=True):
        assert own.dtype == expected.dtype
        np.testing.assert_array_equal(own, expected)


def test_other_models_are_refused(llm):
    before, good = llm.engine.params, other()
    own, deleted = good.weights["params"], jax.tree.map(jnp.copy, good)
    jax.tree.leaves(deleted.weights)[0].delete()
    embed = {
        "values": jnp.zeros(own["embed"].shape, jnp.int8),
        "scales": jnp.zeros((own["embed"].shape[1] // 32, len(own["embed"])), jnp.float16),
    }
    for wrong, message in (
        (tiny_params(num_layers=1), "must have the configuration"),
        (replace(good, weights={"params": own | {"more": own["embed"]}}), "must not have .*more"),
        (replace(good, weights={"params": own | {"embed": own["embed"][1:]}}), "must be float32"),
        (jax.tree.map(lambda x: x.astype(int), good), "int32.*: must be float32"),
        (replace(good, weights={"params": own | {"embed": embed}}), "in float32.* weights='plain'"),
        (deleted, "neither traced nor deleted"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.update_weights(wrong)
    with pytest.raises(ValueError, match="neither traced nor deleted"):
        jax.jit(llm.update_weights)(good)
    assert llm.engine.params is before
    request = asked(llm, PROMPTS[0], greedy(2))
    state = llm.engine.add(request)
    with pytest.raises(ValueError, match="while no request is unfinished; 1 are"):
        llm.update_weights(other())
    llm.engine.abort(state.request_id)


def test_a_sleeping_engine_has_no_cache(llm):
    before = llm.generate(PROMPTS, greedy(6))
    slots = llm.engine._runner._slots
    llm.sleep()
    assert all(array.is_deleted() for array in jax.tree.leaves(slots))
    with pytest.raises(ValueError, match="asleep"):
        llm.generate(PROMPTS, greedy(6))
    llm.wake_up()
    after = llm.generate(PROMPTS, greedy(6))
    assert [*map(bits, after)] == [*map(bits, before)]
    assert [out.num_cached_tokens for out in after] == [0, 0]
    with pytest.raises(ValueError, match="level=2: must be 1"):
        llm.sleep(level=2)


@pytest.mark.slow
def test_pages_in_host_memory_survive_new_weights():
    llm = tiny_llm("offloaded(quest(budget=16))")
    llm.generate(PROMPTS, greedy(6))
    llm.sleep()
    llm.update_weights(other())
    llm.wake_up()
    expected = tiny_llm("offloaded(quest(budget=16))", params=other()).generate(PROMPTS, greedy(6))
    assert [*map(bits, llm.generate(PROMPTS, greedy(6)))] == [*map(bits, expected)]


@pytest.mark.slow
def test_a_paused_engine_holds_requests_back():
    engine = jsparse.AsyncEngine(tiny_params(num_layers=2), POLICY, **small(max_stall_ms=200))

    async def last(prompt, options):
        return [out async for out in engine.generate(prompt, options)][-1].outputs[0]

    async def submitted(tokens):
        """A request that the engine's thread takes only after `gate.set()`, and the gate."""
        holding, gate = threading.Event(), threading.Event()
        busy = asyncio.create_task(engine._on_thread(lambda: (holding.set(), gate.wait())))
        while not holding.is_set():
            await asyncio.sleep(0.01)
        request = asyncio.create_task(last(PROMPTS[0], greedy(tokens)))
        while not engine._inbox:
            await asyncio.sleep(0.01)
        return request, gate, busy

    async def run():
        first, gate, busy = await submitted(20)
        updating = asyncio.create_task(engine.update_weights(other()))
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(ValueError, match="unfinished"):
            await updating
        await asyncio.gather(busy, pausing)
        assert len((await first).token_ids) == 20
        held = asyncio.create_task(last(PROMPTS[1], greedy(6)))
        await engine.sleep()
        await engine.update_weights(other())
        assert not held.done()
        await engine.resume()  # still asleep
        await engine.wake_up()
        made = await held
        # cancelled calls leave a working engine
        for call in (engine.update_weights(other()), engine.sleep(), engine.pause()):
            task = asyncio.create_task(call)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await engine.wake_up()
        await last(PROMPTS[0], greedy(1))
        # a request that the engine's thread has not taken yet is aborted too
        endless, gate, busy = await submitted(60)
        pausing = asyncio.create_task(engine.pause(abort=True))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(busy, pausing)
        assert (await endless).finish_reason == "abort"
        return made

    made = asyncio.run(run())
    engine.close()
    expected = tiny_llm(POLICY, params=other()).generate([PROMPTS[1]], greedy(6))[0].outputs[0]
    assert made.token_ids == expected.token_ids
    with pytest.raises(jsparse.EngineError):
        asyncio.run(engine.sleep())
