"""Rows that join and leave one batch, for policies that the engine does not serve."""

import jax
import jax.numpy as jnp
import numpy as np

from jsparse.cache import StepView
from jsparse.runtime import prefill
from jsparse.runtime import rows as driver
from jsparse.runtime.decoding import with_logits
from jsparse.runtime.pauses import due
from jsparse.runtime.sampling import greedy
from jsparse.runtime.session_prefill import first_logits
from jsparse.runtime.state_axes import clear_rows
from tests.support.tiny import read_only

static = {"static_argnames": ("policy", "spec")}
take, put, clear = (jax.jit(f, **static) for f in (driver.take, driver.put, clear_rows))


class Crowd:
    """A batch over one pool; all rows decode greedily.

    Attributes:
        batch: the rows.
        ages: the number of decoded tokens of each row; None: an empty row.
    """

    def __init__(self, params, policy, spec, cache, state, *, chunk):
        self.params, self.policy, self.spec, self.chunk = params, policy, spec, chunk
        self.read_only = read_only(params, policy)
        zeros = jnp.zeros(spec.batch, jnp.int32)
        recent = jnp.zeros((spec.batch, policy.services.correct_every), jnp.int32)
        self.batch = driver.Batch(zeros, cache, state, (), zeros, recent)
        self.ages = [None] * spec.batch

    def clear(self, slot):
        """Empties a row without freeing its pages."""
        self.ages[slot] = None
        cache, state = clear(
            self.policy, self.spec, self.batch.cache, self.batch.state, jnp.array([slot])
        )
        self.batch = self.batch._replace(cache=cache, state=state)

    def read(self, slot, prompt):
        """Prefills a prompt as a batch of one, evicts, and puts it into a row; returns its logits
        [V].
        """
        p, policy, rows = self.params, self.policy, jnp.array([slot])
        part = take(policy, self.spec, self.batch, rows)
        carry = prefill.start(p.decoder, policy, part.cache, part.state)
        new = np.array([prompt], np.int32)
        tokens = np.pad(new, ((0, 0), (0, -new.size % self.chunk)))
        carry = prefill.prefill_prompts(
            *(p.decoder, policy, p.weights, tokens, np.array([new.size]), carry),
            chunk=self.chunk,
            read_only=self.read_only,
        )
        cache, state = carry.cache, carry.state
        if policy.eviction is not None and policy.eviction.after_prompt is not None:
            view = StepView(cache, self.read_only.constants)
            state, cache = policy.eviction.after_prompt(state, view, self.spec.capacity)
        logits = first_logits(p.decoder, p.weights, carry.last_hidden)
        token = jnp.argmax(logits, -1).astype(jnp.int32)
        recent = jnp.zeros_like(part.recent)
        part = driver.Batch(token, cache, state, (), jnp.ones(1, jnp.int32), recent)
        self.batch = put(policy, self.spec, self.batch, part, rows)
        self.ages[slot] = 0
        return np.asarray(logits)[0]

    def step(self):
        """Decodes a token of every row, and services due rows; returns logits [B, V], shares."""
        p, policy = self.params, self.policy
        active = np.array([age is not None for age in self.ages])
        self.batch, result = driver.decode_steps(
            *(p.decoder, policy, greedy, 1, with_logits, p.weights, self.read_only, self.batch),
            jnp.asarray(active, jnp.int32),
        )
        for slot, age in enumerate(self.ages):
            if age is not None:
                self.ages[slot] = age + 1
                for name in due(policy.services.every, age + 1):
                    rows = jnp.array([slot])
                    part = take(policy, self.spec, self.batch, rows)
                    part = driver.serviced(
                        name, p.decoder, policy, p.weights, self.read_only, part, within=False
                    )
                    self.batch = put(policy, self.spec, self.batch, part, rows)
        assert (np.asarray(result.stats.attended)[0, ~active] == 0).all()
        return np.asarray(result.logits)[0]
