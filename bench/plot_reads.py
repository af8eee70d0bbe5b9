"""What does one decode step read? Draws it for the five papers, from SmolLM2's own attention.

SmolLM2 prefills the first tokens of the text of `jsparse eval` and decodes a few with each method.
A figure has a row per KV head, 30 layers of 3 from the top, and a column per token. Blue tokens are
attended to. Orange tokens are skipped although dense attention gives them weight, on the same query
and cache. A figure has this key below it.

    python -m bench.plot_reads --out docs/images/papers

Needs matplotlib.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jsparse.evaluation.inspection import Inspection

POLICIES = {
    "lychee_decode": "lychee_decode('smollm2', value=128, sink=4, recent=32)",
    "lfps": "lfps(budget=0.1)",
    "twilight": "dense_layers(twilight(all_pages(), p=0.9), n=2)",
    "hard_kv": "hard_kv(budget=128, floor=64, cap=256, period=16)",
    "lychee_cluster": "dense_layers(lychee_cluster(budget=192), n=2)",
}
TOKENS, STEP = 960, 24
INK, FAINT, GROUND = (0.09, 0.30, 0.47), (0.93, 0.72, 0.45), (1.0, 1.0, 1.0)


def main() -> None:
    """Draws the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot_reads", description="Draw what one decode step reads."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the figures")
    parser.add_argument("--only", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    args = parser.parse_args()
    import jsparse
    from jsparse.evaluation.inspection import inspect_step
    from jsparse.evaluation.texts import read

    params = jsparse.load("smollm2")
    assert params.tokenizer is not None
    ids = params.tokenizer.encode(read(None))[:TOKENS]
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        shown = inspect_step(params, POLICIES[name], ids, step=STEP)
        draw(shown, POLICIES[name], args.out / f"{name}.png")
        print(f"{name}: {shown.attended_fraction:.1%} of tokens, {shown.covered:.1%} of the weight")


def draw(shown: "Inspection", expression: str, file: Path) -> None:
    """Draws one step, with few colours for a small file."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch
    from PIL import Image

    layers, heads, length = shown.attended.shape
    figure, axis = plt.subplots(figsize=(9, 3.9), dpi=100, facecolor="white")
    axis.imshow(
        picture(shown), aspect="auto", interpolation="nearest", extent=(0, length, layers, 0)
    )
    axis.set_xlabel("position")
    axis.set_ylabel(f"layer, {heads} KV heads each")
    axis.set_title(f"{expression}: {shown.description}", fontsize=9, loc="left")
    key = {"attended to": INK, "passed over, with weight in dense attention": FAINT}
    key["passed over, without weight, or dropped"] = GROUND
    patches = [Patch(facecolor=color, edgecolor="grey", label=name) for name, color in key.items()]
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.legend(handles=patches, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(file)
    plt.close(figure)
    with Image.open(file) as drawn:
        small = drawn.convert("RGB").quantize(128, dither=Image.Dither.NONE)
    small.save(file, optimize=True)


def picture(shown: "Inspection") -> Any:
    """Returns the colours, [L * K, T, 3]; skipped tokens are fainter the less they weigh."""
    attended = shown.attended.reshape(-1, shown.attended.shape[-1])
    weights = shown.weights.reshape(attended.shape)
    missed = np.clip(weights / 0.01, 0, 1)[..., None] ** 0.5
    ground = np.array(GROUND) * (1 - missed) + np.array(FAINT) * missed
    return np.where(attended[..., None], np.array(INK), ground).clip(0, 1)


if __name__ == "__main__":
    main()
