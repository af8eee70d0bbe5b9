"""Collects the metrics of /metrics, those that vLLM has also under its names.

Routers and dashboards that know vLLM then need no settings.
"""

from collections.abc import Iterator
from itertools import pairwise

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jsparse.engine.core import Engine
from jsparse.engine.request_state import RequestState

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1)
OURS, VLLMS = "jsparse:", "vllm:"
# the metrics that vLLM has too
SHARED = {
    "cache_config_info",
    "e2e_request_latency_seconds",
    "generation_tokens",
    "inter_token_latency_seconds",
    "kv_cache_usage_perc",
    "num_preemptions",
    "num_requests_running",
    "num_requests_waiting",
    "prefix_cache_hits",
    "prefix_cache_queries",
    "prompt_tokens",
    "request_queue_time_seconds",
    "request_success",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_drafts",
    "time_to_first_token_seconds",
}


class Metrics:
    """Counts and times of requests, with the engine's counters read on demand.

    `query_tokens` are the prompt tokens looked up in the prefix cache, `hit_tokens` those found,
    and `host_hit_tokens` those of them that were in host memory.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine, self._model = engine, model
        self.query_tokens = self.hit_tokens = self.host_hit_tokens = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        label = {"labelnames": ("model_name",), "registry": self._registry}

        def histogram(name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
            return Histogram(f"jsparse:{name}", text, buckets=buckets, **label).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"jsparse:{name}", text, **label).labels(model)

        self._prompt = counter("prompt_tokens", "Tokens of prefilled prompts.")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._queue = histogram("request_queue_time_seconds", "From arrival to the first chunk.")
        self._itl = histogram(
            "inter_token_latency_seconds",
            "Time between tokens, of requests for one completion.",
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self._attended = histogram(
            "attended_fraction", "Tokens attended over positions so far, by completion.", SHARES
        )
        self._read = histogram(
            "read_fraction", "Tokens read over positions so far, by completion.", SHARES
        )
        self._success = Counter(
            "jsparse:request_success",
            "Completions that have ended.",
            labelnames=("model_name", "finished_reason"),
            registry=self._registry,
        )

    @property
    def text(self) -> bytes:
        """All metrics, in Prometheus' format."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_UnderBothNames(self._registry))
        return generate_latest(registry)

    def begun(self, state: RequestState) -> None:
        """Counts a request that has its first token."""
        metrics = state.metrics
        self._prompt.inc(len(state.ids))
        self.query_tokens += len(state.ids) * len(state.seqs)
        self.hit_tokens += sum(seq.cached_tokens for seq in state.seqs)
        self.host_hit_tokens += sum(seq.host_tokens for seq in state.seqs)
        self._ttft.observe(metrics.time_to_first_token or 0.0)
        if metrics.scheduled is not None:
            self._queue.observe(metrics.scheduled - metrics.arrived)

    def left(self, state: RequestState) -> None:
        """Counts a request that has ended, or whose client has left."""
        times = list(state.metrics.token_times)
        for builder in state.builders:
            self._success.labels(self._model, builder.finish or "abort").inc()
            attended, read = builder.shares
            if attended is not None and read is not None:
                self._attended.observe(attended)
                self._read.observe(read)
        if state.finished and times:
            self._e2e.observe(times[-1] - state.metrics.arrived)
        if len(state.builders) == 1:
            # tokens of one program arrive at the same time
            for before, after in pairwise(dict.fromkeys(times)):
                self._itl.observe(after - before)

    def collect(self) -> Iterator[Metric]:
        """Yields the engine's counters; the registry calls this."""
        scheduler, counters = self._engine.scheduler, self._engine.counters
        running, pool = len(scheduler.begun), scheduler.pool
        places, block = pool.used_places, self._engine.block_bytes
        share = places / max(pool.num_places, 1)
        for name, text, value in (
            ("num_requests_running", "Sequences that have a slot.", running),
            ("num_requests_waiting", "Sequences that wait for a slot.", len(scheduler.waiting)),
            ("num_requests_preempted", "Sequences that wait for memory.", len(scheduler.preempted)),
            ("kv_offloading_blocks", "Blocks with a place in host memory.", places),
            ("kv_offloading_usage_perc", "Share of these places in use; 1 is all.", share),
            ("kv_host_bytes", "Bytes of K and V in host memory.", self._engine.kv_host_bytes),
            (
                "kv_cache_usage_perc",
                "Share of K and V in use; 1 is all.",
                kv_cache_usage(self._engine),
            ),
        ):
            gauge = GaugeMetricFamily(f"jsparse:{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in (
            ("prefix_cache_queries", "Tokens looked up in the prefix cache.", self.query_tokens),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", self.hit_tokens),
            ("prefix_cache_host_hits", "Tokens found there in host memory.", self.host_hit_tokens),
            ("kv_offloading_out_bytes", "Bytes copied to the host.", counters.blocks_out * block),
            ("kv_offloading_in_bytes", "Bytes copied from the host.", counters.blocks_in * block),
            ("num_preemptions", "Times that a sequence was preempted.", counters.preemptions),
            ("generation_tokens", "Generated tokens.", counters.new_tokens),
            (
                "computed_prompt_tokens",
                "Prompt tokens that were computed.",
                counters.prefill_tokens,
            ),
            ("decode_steps", "Decode steps.", counters.decode_steps),
            ("spec_decode_num_drafts", "Verification rounds with drafts.", counters.drafts),
            ("spec_decode_num_draft_tokens", "Tokens drafted.", counters.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Drafts accepted.", counters.accepted_tokens),
            ("compressed_rows", "Compressions of a sequence's tokens.", counters.compressed_rows),
            ("programs_compiled", "Programs compiled so far.", self._engine.programs.compiled),
        ):
            count = CounterMetricFamily(f"jsparse:{name}", text, labels=["model_name"])
            count.add_metric([self._model], value)
            yield count
        config = {"block_size": self._engine.sizes.page_size, "num_gpu_blocks": pool.size}
        labels = {"model_name": self._model} | {name: f"{value}" for name, value in config.items()}
        info = GaugeMetricFamily(
            "jsparse:cache_config_info", "Tokens per page, and pages of a head.", labels=[*labels]
        )
        info.add_metric([*labels.values()], 1)
        yield info
        accepted = CounterMetricFamily(
            "jsparse:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position.",
            labels=["model_name", "position"],
        )
        for position in range(max(self._engine.sizes.drafts, default=0)):
            accepted.add_metric([self._model, f"{position}"], counters.accepted_at[position])
        yield accepted
        host = CounterMetricFamily(
            "jsparse:host_seconds", "Time of the engine's thread.", labels=["model_name", "part"]
        )
        for part in ("plan", "dispatch", "results"):
            host.add_metric([self._model, part], getattr(counters, f"{part}_seconds"))
        yield host


class _UnderBothNames(Collector):
    """The metrics of a registry, and those that vLLM has too again under its names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            yield family
            if family.name.removeprefix(OURS) in SHARED:
                same = Metric(_vllms(family.name), family.documentation, family.type)
                same.samples = [
                    sample._replace(name=_vllms(sample.name)) for sample in family.samples
                ]
                yield same


def _vllms(name: str) -> str:
    return VLLMS + name.removeprefix(OURS)


def kv_cache_usage(engine: Engine) -> float:
    """Returns the share of the KV cache that requests use now."""
    pool = engine.scheduler.pool
    return 1 - pool.available / pool.size
