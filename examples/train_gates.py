"""Train gates that separate retrieval heads from the others, and decode with them.

Three steps on short texts show the workflow; the resulting gates are useless. On a GPU use
`steps=1000` and contexts of 1,024 to 7,680 tokens, or the command `jsparse train-gates`.
"""

import tempfile
from pathlib import Path

import jsparse
from jsparse.evaluation.texts import read
from jsparse.train.passkey import passkeys
from jsparse.train.settings import Settings
from jsparse.train.trainer import Trainer

params = jsparse.load("smollm2", weights="plain")
heads = params.config.num_layers * params.config.num_kv_heads
# one in eight, including all heads of the first layer
target = max(heads // 8, params.config.num_kv_heads + 1)
assert params.tokenizer is not None
source = passkeys(
    params.tokenizer, read(None), min_length=160, max_length=200, needles=1, words=1, asked=1
)
with tempfile.TemporaryDirectory() as folder:
    settings = Settings(target=target, steps=3, held_out=1)
    (found,) = Trainer(params, source, settings, Path(folder)).run()["seeds"]
    print(f"{found['retrieval_heads']} retrieval heads of {heads}, E[L0] {found['active']:.1f}")
    policy = jsparse.lychee_decode(f"{folder}/gates_0.safetensors", value=32, recent=16)
text = "The tides are caused by the gravity of the moon and of the sun. " * 8 + "At new moon,"
out = jsparse.generate(params, text, max_new_tokens=16, policy=policy)
print(f"attended {out.stats.attended_fraction:.0%} of the tokens")
print(out.text)
