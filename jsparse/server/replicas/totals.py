"""Sums the metrics of replicas, or separates them by a label."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

MEDIA_TYPE = "text/plain; version=0.0.4"
# the suffixes of gauges that are averaged: shares, and the constant 1
AVERAGED = ("_perc", "_info")
CREATED = "_created"


def picture(pictures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the /live data of several replicas combined: sums, and means of shares."""
    total: dict[str, Any] = {}
    for name in pictures[0]:
        known = [each[name] for each in pictures if each[name] is not None]
        if name == "attended_by_layer":
            total[name] = [sum(of) / len(known) for of in zip(*known, strict=True)] or None
        elif name == "requests":
            total[name] = [request for each in known for request in each]
        elif name == "kv_cache_usage":
            total[name] = sum(known) / len(known)
        else:
            total[name] = sum(known) if known else None
    return total


class Totals:
    """Sums of the metrics of replicas; counters include lost replicas, so that none decreases."""

    def __init__(self) -> None:
        self._last: dict[int, str] = {}
        self._gone = ""

    def began_anew(self, nth: int) -> None:
        """Keeps the counts of a replica that restarts: its successor counts from zero."""
        if nth in self._last:
            both = {0: self._last.pop(nth), 1: self._gone}
            self._gone = _merged(both, _added).decode()

    def summed(self, texts: Mapping[int, str]) -> bytes:
        """Returns the sums of the replicas' metrics (means of shares), in Prometheus' format.

        Replicas that do not respond now count with their last metrics.
        """
        silent = [text for nth, text in self._last.items() if nth not in texts]
        self._last |= texts
        past = {-1 - nth: text for nth, text in enumerate([self._gone, *silent])}
        return _merged({**texts, **past}, _added)


def by_replica(texts: Mapping[int, str]) -> bytes:
    """Returns the replicas' metrics with the label `replica`, in Prometheus' format."""

    def apart(_: Metric, samples: list[tuple[int, Sample]]) -> Iterator[Sample]:
        for nth, sample in samples:
            yield Sample(sample.name, {**sample.labels, "replica": f"{nth}"}, sample.value)

    return _merged(texts, apart)


def _added(family: Metric, samples: list[tuple[int, Sample]]) -> Iterator[Sample]:
    """Yields sums of samples, or means (AVERAGED); of replicas below 0, only sums of counts."""
    values = defaultdict[tuple[str, tuple[tuple[str, str], ...]], list[float]](list)
    for nth, sample in samples:
        if nth >= 0 or family.type in ("counter", "histogram"):
            values[sample.name, tuple(sample.labels.items())].append(sample.value)
    for (of, labels), each in values.items():
        yield Sample(of, dict(labels), sum(each) / (len(each) if of.endswith(AVERAGED) else 1))


class _Families(Collector):
    """A collector of given metric families."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def _merged(
    texts: Mapping[int, str],
    merge: Callable[[Metric, list[tuple[int, Sample]]], Iterator[Sample]],
) -> bytes:
    """Returns each family of metrics with its merged samples, without creation times."""
    families: dict[str, Metric] = {}
    samples = defaultdict[str, list[tuple[int, Sample]]](list)
    for nth, text in texts.items():
        for family in text_string_to_metric_families(text):
            if not family.name.endswith(CREATED):
                families.setdefault(family.name, family)
                samples[family.name] += [(nth, sample) for sample in family.samples]
    for name, family in families.items():
        family.samples = list(merge(family, samples[name]))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Families(list(families.values())))
    return generate_latest(registry)
