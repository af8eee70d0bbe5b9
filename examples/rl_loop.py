"""Trains SmolLM2 to write short words, with REINFORCE: an engine samples, optax learns.

pip install optax
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jsparse

PROMPTS = ["My favourite animal is", "The old house"]
SAMPLES, TOKENS, STEPS = 8, 12, 10
OPTIMISER = optax.adam(3e-4)


def reward(text: str) -> float:
    """Returns the share of words of at most four letters."""
    words = text.split()
    return sum(len(word) <= 4 for word in words) / max(len(words), 1)


@jax.jit
def learn(params, state, tokens, generated, advantages):
    """Makes the generated tokens of texts with a positive advantage more likely, others less."""

    def loss(params):
        logits = jsparse.logits(params, tokens)[:, :-1]
        cost = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(cost * generated[:, 1:] * advantages[:, None]) / jnp.sum(generated)

    updates, state = OPTIMISER.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state


def main() -> None:
    """Trains, and prints the mean reward of each step's samples."""
    params: Any = jsparse.load("smollm2", dtype="float32", weights="plain")
    state = OPTIMISER.init(params)
    # with another policy, exact=True: the learner's attention is dense
    llm = jsparse.LLM(params, "dense", max_model_len=64, max_num_seqs=len(PROMPTS) * SAMPLES)
    options = {"temperature": 1, "n": SAMPLES, "max_tokens": TOKENS, "ignore_eos": True}
    for step in range(STEPS):
        sampling = jsparse.SamplingParams(**options, seed=step)
        outs = llm.generate(PROMPTS, sampling, use_tqdm=False)
        rows = [(out.prompt_token_ids, each) for out in outs for each in out.outputs]
        longest = max(len(prompt) for prompt, _ in rows) + TOKENS
        tokens, generated = np.zeros((2, len(rows), longest), np.int32)
        for row, (prompt, each) in enumerate(rows):
            ids = [*prompt, *each.token_ids]
            tokens[row, : len(ids)] = ids
            generated[row, len(prompt) : len(ids)] = 1
        rewards = np.array([[reward(each.text) for each in out.outputs] for out in outs])
        advantages = rewards - rewards.mean(axis=1, keepdims=True)  # compared with the same prompt
        print(f"step {step:2}: reward {rewards.mean():.2f}  {outs[0].outputs[0].text!r}")
        params, state = learn(params, state, tokens, generated, advantages.ravel())
        llm.update_weights(params)


if __name__ == "__main__":
    main()
