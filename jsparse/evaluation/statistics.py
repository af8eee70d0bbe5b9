"""Computes means of cells and their differences from dense, with a paired bootstrap.

It pairs the samples that both have.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

RESAMPLES, SEED, LEVEL = 10_000, 0, 95
YARDSTICK = "yardstick"  # the task with the KL of a policy's yardstick
BY_STEP = "by_step"  # the key of means over blocks of decode steps
STEP_BLOCK = 64  # the steps of such a block
FLOOR = 0.30  # a task that dense itself fails gives no information about a policy

Transform = Callable[[Any], Any]
ScoresBySample = dict[int, float]  # a metric's values by the sample's index


def family(policy: str) -> str:
    """Returns the name of a policy's expression, without its arguments."""
    return policy.partition("(")[0]


def is_dense(policy: str) -> bool:
    """Returns whether an expression names dense attention, with or without parentheses."""
    return family(policy) == "dense"


def mean(average: Any) -> Any:
    """Returns the average over the samples unchanged, as most metrics are reported."""
    return average


def perplexity(average: Any) -> Any:
    """Returns the perplexity for an average log-probability per token.

    The average is over samples, such as documents.
    """
    return np.exp(-average)


# name: the recorded metric from which it is computed
DERIVED: dict[str, tuple[str, Transform]] = {"perplexity": ("logprob", perplexity)}


def summarize(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns one dict per cell, in the order in which the cells first occur.

    Keys: policy, task, length; metrics, with mean, samples, difference (from dense's mean over the
    pairs, the samples that both have), interval (95 %) and pairs for each; samples, with index,
    values and meta. Difference and interval are None without pairs, and for dense itself.
    Perplexity is that of the mean logprob over samples. The KL of a yardstick has a ratio: see
    `ratio`. by_step has the means by step over samples, if every sample's meta has them.
    """
    cells: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for entry in entries:
        cells.setdefault((entry["policy"], entry["task"], entry["length"]), []).append(entry)
    columns = {key: _columns(samples) for key, samples in cells.items()}
    dense = {key[1:]: column for key, column in columns.items() if is_dense(key[0])}

    def metrics(policy: str, task: str, length: int) -> dict[str, Any]:
        own = columns[policy, task, length]
        if task == YARDSTICK:
            return _of_yardstick(own, columns.get((policy, "kl", length), {}))
        return _metrics(own, {} if is_dense(policy) else dense.get((task, length), {}))

    return [
        {
            "policy": policy,
            "task": task,
            "length": length,
            "metrics": metrics(policy, task, length),
            **_by_step([sample["meta"] for sample in samples]),
            "samples": [
                {name: sample[name] for name in ("index", "values", "meta")} for sample in samples
            ],
        }
        for (policy, task, length), samples in cells.items()
    ]


def ratio(kl: ScoresBySample, yardstick: ScoresBySample) -> dict[str, Any] | None:
    """Returns a policy's mean KL over its yardstick's, over their common samples.

    Keys: mean, interval (None for fewer than two samples). Returns None if the yardstick's mean is
    not above 0 in some resample, which rounding can cause for a KL of 0.
    """
    ours, theirs = _paired(kl, yardstick)
    if not len(ours):
        return None
    weights = _weights(len(ours))
    under = [theirs.mean(), *(weights @ theirs)]
    if min(under) <= 0:
        return None
    first, *drawn = np.divide([ours.mean(), *(weights @ ours)], under).tolist()
    return {"mean": first, "interval": _middle(drawn) if len(ours) > 1 else None}


def averages(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Averages scores over tasks: returns one dict for each policy and length that has scores.

    Keys: policy, length; tasks, the averaged ones, in which dense scores at least 30 %; left_out,
    the others; and mean, difference and interval as in `summarize`, None if no task is averaged.
    """
    scored = {(c["policy"], c["task"], c["length"]): c for c in cells if "score" in c["metrics"]}
    kept = {
        key[1:]
        for key, c in scored.items()
        if is_dense(key[0]) and c["metrics"]["score"]["mean"] >= FLOOR
    }
    dense = {
        key[1:]: _columns(c["samples"])["score"] for key, c in scored.items() if is_dense(key[0])
    }
    rows = []
    for policy, length in dict.fromkeys((policy, length) for policy, _, length in scored):
        tasks = [task for p, task, at in scored if (p, at) == (policy, length)]
        used = [task for task in tasks if (task, length) in kept]
        scores = [_columns(scored[policy, task, length]["samples"])["score"] for task in used]
        base = [{} if is_dense(policy) else dense[task, length] for task in used]
        rows.append(
            {
                "policy": policy,
                "length": length,
                "tasks": used,
                "left_out": [task for task in tasks if task not in used],
                **_compared(scores, base, mean),
            }
        )
    return rows


def _by_step(metas: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Returns the means over samples of their means by step; {} if a sample has none."""
    if not all(BY_STEP in meta for meta in metas):
        return {}
    means = {
        metric: np.mean([meta[BY_STEP][metric] for meta in metas], axis=0)
        for metric in metas[0][BY_STEP]
    }
    for name, (metric, transform) in DERIVED.items():
        means[name] = transform(means[metric])
    return {BY_STEP: {name: values.tolist() for name, values in means.items()}}


def _columns(samples: Iterable[Mapping[str, Any]]) -> dict[str, ScoresBySample]:
    """Returns the values of each metric by the sample's index."""
    columns: dict[str, ScoresBySample] = {}
    for sample in samples:
        for metric, value in sample["values"].items():
            columns.setdefault(metric, {})[sample["index"]] = value
    return columns


def _metrics(
    columns: dict[str, ScoresBySample], dense: dict[str, ScoresBySample]
) -> dict[str, Any]:
    sources = {metric: (metric, mean) for metric in columns} | {
        name: source for name, source in DERIVED.items() if source[0] in columns
    }
    return {
        name: {"samples": len(columns[metric])}
        | _compared([columns[metric]], [dense.get(metric, {})], transform)
        for name, (metric, transform) in sources.items()
    }


def _of_yardstick(
    columns: dict[str, ScoresBySample], policy: dict[str, ScoresBySample]
) -> dict[str, Any]:
    """Returns the metrics of a policy's yardstick; it has none if the policy reads everything."""
    metrics = _metrics(columns, {})
    if "kl" in metrics:
        metrics["kl"]["ratio"] = ratio(policy.get("kl", {}), columns["kl"])
    return metrics


def _compared(
    columns: list[ScoresBySample], dense: list[ScoresBySample], transform: Transform
) -> dict[str, Any]:
    """Returns mean, difference and interval of the average over columns.

    `pairs` is the minimum over the columns.
    """
    pairs = [_paired(column, base) for column, base in zip(columns, dense, strict=True)]
    shortest = min((len(ours) for ours, _ in pairs), default=0)
    shifts = (
        [transform(np.mean(ours)) - transform(np.mean(theirs)) for ours, theirs in pairs]
        if shortest
        else []
    )
    return {
        "mean": float(np.mean([transform(np.mean(list(column.values()))) for column in columns]))
        if columns
        else None,
        "difference": float(np.mean(shifts)) if shifts else None,
        "interval": _interval(pairs, transform) if shortest > 1 else None,
        "pairs": shortest,
    }


def _paired(column: ScoresBySample, dense: ScoresBySample) -> tuple[np.ndarray, np.ndarray]:
    common = sorted(column.keys() & dense.keys())
    return np.array([column[index] for index in common]), np.array(
        [dense[index] for index in common]
    )


def _interval(pairs: Sequence[tuple[np.ndarray, np.ndarray]], transform: Transform) -> list[float]:
    """Returns the percentile bootstrap's 95 % interval of the average difference from dense.

    Each pair has a policy's values [n] and dense's of the same samples, which are resampled
    together.
    """
    differences = [
        transform(_weights(len(ours)) @ ours) - transform(_weights(len(theirs)) @ theirs)
        for ours, theirs in pairs
    ]
    return _middle(np.mean(differences, axis=0))


def _middle(drawn: Any) -> list[float]:
    """Returns the interval of the middle 95 % of the resamples."""
    tail = (100 - LEVEL) / 2
    return np.percentile(drawn, [tail, 100 - tail]).tolist()


@lru_cache(maxsize=2)
def _weights(n: int) -> np.ndarray:
    """Returns how often each of n samples is drawn, over n: [RESAMPLES, n], always the same.

    It takes 80 kB per sample.
    """
    places = (
        np.random.default_rng(SEED).integers(n, size=(RESAMPLES, n))
        + n * np.arange(RESAMPLES)[:, None]
    )
    return np.bincount(places.ravel(), minlength=RESAMPLES * n).reshape(RESAMPLES, n) / n
