"""Ask two questions about one document; the second turn does not prefill the document again."""

import time

import jsparse
from jsparse.evaluation.texts import read

QUESTIONS = ("Who is this text about?", "Name one of the plays that it mentions.")

params = jsparse.load("smollm2")
document = read(None)[:3000]  # the article that `jsparse eval` uses
chat = jsparse.Conversation(params, policy="quest(budget=256)", max_new_tokens=24)
messages = [{"role": "user", "content": f"{document}\n\n{QUESTIONS[0]}"}]
for question in QUESTIONS:
    if len(messages) > 1:
        messages.append({"role": "user", "content": question})
    began = time.perf_counter()
    out = chat.answer(messages)
    messages.append({"role": "assistant", "content": out.text})
    print(f"{question} {out.text}")
    print(
        f"{time.perf_counter() - began:.1f} s, compiling included; "
        f"attended {out.stats.attended_fraction:.0%} of the tokens"
    )
