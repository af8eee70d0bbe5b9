"""Serves concurrent requests: prints each output when it is complete, the shortest first.

python examples/serve.py
"""

import asyncio

import jsparse

QUESTIONS = ("The capital of France is", "Gravity is", "A prime number is", "Water boils at")


async def answer(engine: jsparse.AsyncEngine, prompt: str, tokens: int) -> None:
    """Follows one request to its end."""
    options = jsparse.SamplingParams(temperature=0, max_tokens=tokens)
    async for out in engine.generate(prompt, options):
        if out.finished:
            (made,) = out.outputs
            attended = f"attended {made.attended_fraction:.0%}"
            print(f"{prompt!r} {made.text!r} ({attended}, {made.finish_reason})")


async def main() -> None:
    """Sends all questions at once."""
    policy = "streaming(sink=4, recent=8)"
    async with jsparse.AsyncEngine("smollm2", policy, max_num_seqs=4, max_model_len=256) as engine:
        asked = zip(QUESTIONS, (24, 16, 12, 8), strict=True)
        await asyncio.gather(*(answer(engine, prompt, tokens) for prompt, tokens in asked))


asyncio.run(main())
