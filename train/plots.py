"""Plots the gates during training: a heat map over the steps, and the densities of two of them.

The plots follow the last figure of LycheeDecode's appendix D (arXiv:2602.04541). They need
matplotlib, and do not touch its settings and windows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jsparse.machine.extras import install
from jsparse.train import hard_kuma, stretch_and_rectify

MAX_STEPS, DPI = 6, 120
MAP, DENSITY = (2.0, 4.6), (4.8, 3.8)  # inches per panel
DENSEST = 8.0  # the top of the densities' axis; many are infinite at 0 or 1


def heat_map(path: Path | str, steps: Sequence[int], values: Any) -> None:
    """Plots the mean gate of each layer and KV head as PNG, one panel per step, at most six.

    `values`: the means from 0 (sparse) to 1 (retrieval), [steps, layers, KV heads].

    Raises:
        ValueError: `values` has a wrong shape, or matplotlib is not installed.
    """
    values = np.asarray(values, np.float32)
    if values.ndim != 3 or not values.size or len(values) != len(steps):
        raise ValueError(
            f"values of shape {values.shape}: must be [{len(steps)} steps, layers, KV heads], none "
            "of them 0"
        )
    chosen = _chosen(len(steps))
    figure = _figure(MAP[0] * len(chosen) + 1, MAP[1])
    axes = figure.subplots(1, len(chosen), sharex=True, sharey=True, squeeze=False)[0]
    images = []
    for axis, i in zip(axes, chosen, strict=True):
        images.append(
            axis.imshow(
                values[i], cmap="coolwarm", vmin=0, vmax=1, aspect="auto", interpolation="none"
            )
        )
        axis.set_title(f"step {steps[i]}", fontsize=9)
        axis.set_xlabel("KV head")
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("layer")
    axes[0].yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(images[-1], ax=axes, label="mean gate: 0 sparse, 1 retrieval", pad=0.01)
    figure.savefig(path, dpi=DPI)


def densities(path: Path | str, steps: Sequence[int], a: Any, b: Any, names: Sequence[str]) -> None:
    """Plots the Kumaraswamy densities of the gates with the highest and lowest final E[s], as PNG.

    `a` and `b` are the shapes [steps, ...] of the gates with these names. If s is in a grey margin,
    the gate is exactly 0 or 1.

    Raises:
        ValueError: `a`, `b` or `names` has a wrong shape, or matplotlib is not installed.
    """
    a, b = (np.asarray(shape, np.float32) for shape in (a, b))
    if (
        a.shape != b.shape
        or not a.size
        or a.ndim < 2
        or (len(a), a[0].size) != (len(steps), len(names))
    ):
        raise ValueError(
            f"a of shape {a.shape} and b of shape {b.shape}: must both be "
            f"[{len(steps)} steps, ...] of {len(names)} named gates, at least one"
        )
    a, b = a.reshape(len(steps), -1), b.reshape(len(steps), -1)
    scores = np.asarray(hard_kuma.score(hard_kuma.Kuma(a[-1], b[-1])))
    x = jnp.linspace(0, 1, 1001)[1:-1]
    figure, chosen = _figure(2 * DENSITY[0] + 1, DENSITY[1]), _chosen(len(steps))
    axes, colours = figure.subplots(1, 2, sharey=True), _colours(len(chosen))
    clearest = {"retrieval": int(scores.argmax()), "sparse": int(scores.argmin())}
    for axis, (role, gate) in zip(axes, clearest.items(), strict=True):
        _margin(axis, 0.0, stretch_and_rectify.ZERO, " ← z = 0", "left")
        _margin(axis, 1.0, stretch_and_rectify.ONE, "z = 1 → ", "right")
        for i, colour in zip(chosen, colours, strict=True):
            density = hard_kuma.pdf(hard_kuma.Kuma(a[i, gate], b[i, gate]), x)
            axis.plot(x, density, color=colour, label=f"step {steps[i]}")
        axis.set_title(f"most clearly {role}: {names[gate]}, E[s] = {scores[gate]:.2f}", fontsize=9)
        axis.set(xlim=(0, 1), ylim=(0, DENSEST), xlabel="s")
    axes[0].set_ylabel("density")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=9)
    figure.savefig(path, dpi=DPI)


def _margin(axis: Any, end: float, inner: float, label: str, side: str) -> None:
    """Shades the range of s in which a gate is exactly 0 or 1."""
    axis.axvspan(end, inner, color="0.92", linewidth=0)
    axis.text(inner, 0.95 * DENSEST, label, ha=side, va="center", color="0.4", fontsize=9)


def _chosen(count: int) -> list[int]:
    """Returns at most six of `count` indices, evenly spaced, including the first and the last."""
    return np.linspace(0, count - 1, min(count, MAX_STEPS)).round().astype(int).tolist()


def _colours(count: int) -> Any:
    """Returns `count` colours, from light to dark."""
    from matplotlib import colormaps

    return colormaps["viridis_r"](np.linspace(0.1, 1, count))


def _figure(width: float, height: float) -> Any:
    """Returns an empty figure of this size in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"plots need {error.name}: {install('eval')}") from None
    return Figure((width, height), layout="constrained")
