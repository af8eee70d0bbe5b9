"""An engine continues with other weights, and without K and V, as training loops need it."""

import asyncio
import gc
import weakref

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


def test_other_shapes_are_refused(llm):
    before = llm.engine.params
    for wrong, message in (
        (tiny_params(num_layers=2, num_heads=2), "must be float32"),
        (tiny_params(num_layers=1), "must have .*layers_1"),
        (tiny_params(num_layers=3), "must not have .*layers_2"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.update_weights(wrong)
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


def test_a_paused_engine_holds_requests_back():
    engine = jsparse.AsyncEngine(tiny_params(num_layers=2), POLICY, **small(max_stall_ms=200))

    async def last(prompt, options):
        return [out async for out in engine.generate(prompt, options)][-1].outputs[0]

    async def run():
        first = asyncio.create_task(last(PROMPTS[0], greedy(20)))
        while not engine.engine.unfinished:
            await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="unfinished"):
            await engine.update_weights(other())
        await engine.pause()
        assert len((await first).token_ids) == 20
        held = asyncio.create_task(last(PROMPTS[1], greedy(6)))
        await engine.sleep()
        await engine.update_weights(other())
        await engine.wake_up()
        assert not held.done()
        await engine.resume()
        made = await held
        endless = asyncio.create_task(last(PROMPTS[0], greedy(60)))
        while not engine.engine.unfinished:
            await asyncio.sleep(0.01)
        await engine.pause(abort=True)
        assert (await endless).finish_reason == "abort"
        return made

    made = asyncio.run(run())
    engine.close()
    expected = tiny_llm(POLICY, params=other()).generate([PROMPTS[1]], greedy(6))[0].outputs[0]
    assert made.token_ids == expected.token_ids
    with pytest.raises(jsparse.EngineError):
        asyncio.run(engine.sleep())
