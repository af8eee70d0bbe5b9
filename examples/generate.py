"""Continue a text with SmolLM2, with dense attention and with a window of recent tokens."""

import jsparse

params = jsparse.load("smollm2")
text = "The tides are caused by the gravity of the moon and of the sun. " * 12 + "At new moon,"

for policy in ("dense", "streaming(sink=4, recent=64)"):
    out = jsparse.generate(params, text, max_new_tokens=24, policy=policy)
    print(f"{policy}: attended {out.stats.attended_fraction:.0%} of the tokens")
    print(out.text)
