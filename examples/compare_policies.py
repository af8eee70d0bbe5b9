"""Compare policies with dense attention on one text: KL divergence and tokens attended."""

import jsparse
from jsparse.evaluation.closeness import closeness
from jsparse.evaluation.teacher_forcing import force
from jsparse.evaluation.texts import read

POLICIES = (
    "streaming(sink=4, recent=60)",
    "quest(budget=64)",
    "oracle_top_k(budget=64)",
)

params = jsparse.load("smollm2")
text = read(None)[:2000]  # the article that `jsparse eval` uses
result = closeness(force(params, POLICIES, text, max_new_tokens=16))
for name, kl, attended in zip(result.policies, result.kl, result.attended, strict=True):
    print(f"KL {kl.mean():8.5f}   attended {attended.mean():4.0%}   {name}")
