"""Numbers for Prometheus, called as vLLM calls them where it has them."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pi2.engine.answer import SequenceResult, Ticket
from pi2.engine.statistics import read_peak_rss_bytes
from pi2.logging import get_logger
from pi2.serving.hosts import Host

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)


class Metrics:
    def __init__(self, hosts: Sequence[Host], *, replica: str = "") -> None:
        """``replica``: a label of all numbers if the server is one of several."""
        self._replica = replica
        self._registry = CollectorRegistry()
        self._registry.register(_ModelCollector(hosts))

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=self._registry)

        def divide(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, text, ["model_name"], registry=self._registry, buckets=buckets)

        self._prompt = count("vllm:prompt_tokens", "Tokens of prompts.")
        self._generated = count("vllm:generation_tokens", "Tokens that were generated.")
        self._ended = count("vllm:request_success", "Sequences that ended.", "finished_reason")
        self._queries = count("vllm:prefix_cache_queries", "Tokens of prompts that were looked up.")
        self._hits = count("vllm:prefix_cache_hits", "Tokens of prompts that were not read again.")
        self._failed = count("pi2:request_errors", "Sequences that failed.")
        self._first = divide(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", _SECONDS
        )
        self._each = divide(
            "vllm:inter_token_latency_seconds", "Mean time of a token after it.", _TOKEN_SECONDS
        )
        self._whole = divide("vllm:e2e_request_latency_seconds", "From request to end.", _SECONDS)
        self._queue = divide("vllm:request_queue_time_seconds", "Time in line.", _SECONDS)
        self._prompts = divide("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._answers = divide("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)

    def note_first_token(self, model: str, first_s: float, ticket: Ticket) -> None:
        self._first.labels(model).observe(first_s)
        assert ticket.answer is not None
        self._queue.labels(model).observe(max(0.0, first_s - ticket.answer.first_token_s))
        self._prompt.labels(model).inc(len(ticket.request.prompt_ids))
        self._queries.labels(model).inc(len(ticket.request.prompt_ids))
        self._hits.labels(model).inc(max(ticket.reused_tokens, ticket.shared_tokens))
        self._prompts.labels(model).observe(len(ticket.request.prompt_ids))

    def note_end(
        self, model: str, reason: str, result: SequenceResult, whole_s: float, ticket: Ticket
    ) -> None:
        count = len(result.token_ids)
        self._ended.labels(model, reason).inc()
        self._generated.labels(model).inc(count)
        self._answers.labels(model).observe(count)
        self._whole.labels(model).observe(whole_s)
        if count > 1:
            self._each.labels(model).observe(result.decode_s / (count - 1))

    def note_abort(self, model: str) -> None:
        self._ended.labels(model, "abort").inc()

    def note_error(self, model: str, error: Exception) -> None:
        self._failed.labels(model).inc()
        get_logger().error("a generation failed", model=model, reason=str(error))

    def write(self) -> bytes:
        if not self._replica:
            return generate_latest(self._registry)
        labelled = CollectorRegistry()
        labelled.register(_Labelled(self._registry, self._replica))
        return generate_latest(labelled)


class _Labelled(Collector):
    def __init__(self, registry: CollectorRegistry, replica: str) -> None:
        self._registry = registry
        self._more = {"replica": replica}

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, **self._more}) for sample in metric.samples
            ]
            yield metric


class _ModelCollector(Collector):
    def __init__(self, hosts: Sequence[Host]) -> None:
        self._hosts = hosts

    def collect(self) -> Iterator[Metric]:
        models = [
            (host.plan.name, host.model, host.model.scheduler)
            for host in self._hosts
            if host.is_loaded
        ]

        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(name, text, labels=["model_name"])

        running = gauge("vllm:num_requests_running", "Sequences that have a place.")
        waiting = gauge("vllm:num_requests_waiting", "Sequences that wait for a place or a model.")
        used = gauge("vllm:kv_cache_usage_perc", "Share of the contexts that is used.")
        for name, _, scheduler in models:
            running.add_metric([name], scheduler.running)
            used.add_metric([name], scheduler.measure_context_use())
        for host in self._hosts:
            in_model = host.model.scheduler.waiting if host.is_loaded else 0
            waiting.add_metric([host.plan.name], host.waiting + in_model)
        yield from (running, waiting, used)
        counters = {
            "pi2:flash_read_bytes": ("Bytes of neurons read from flash.", "flash_read_bytes"),
            "pi2:neuron_cache_hits": ("Named neurons that were in memory.", "cache_hits"),
            "pi2:neuron_cache_misses": ("Named neurons that were read.", "cache_misses"),
            "pi2:neuron_cache_evictions": ("Neurons that made room.", "cache_evictions"),
            "pi2:predicted_neurons": ("Neurons that predictors named.", "predicted_neurons"),
            "pi2:active_neurons": ("Predicted neurons that fired.", "active_neurons"),
        }
        yield from _count(counters, [(name, model.stats) for name, model, _ in models])
        yield from self._collect_speculation()
        segments = GaugeMetricFamily(
            "pi2:memory_segment_bytes", "The plan's segments.", labels=["model_name", "segment"]
        )
        budget = gauge("pi2:memory_budget_bytes", "The plan's budget.")
        for name, model, _ in models:
            for segment, size in dict(model.plan.plan.memory.segments).items():
                segments.add_metric([name, segment], size)
            budget.add_metric([name], model.plan.plan.memory.budget)
        yield from (segments, budget)
        yield GaugeMetricFamily(
            "pi2:peak_memory_bytes",
            "Highest resident memory of the process.",
            value=read_peak_rss_bytes(),
        )

    def _collect_speculation(self) -> Iterator[Metric]:
        found = [
            (host.plan.name, host.model.stats.speculation)
            for host in self._hosts
            if host.is_loaded and host.model.scheduler.speculation is not None
        ]
        counters = {
            "vllm:spec_decode_num_drafts": ("Drafts of one token or more.", "drafts"),
            "vllm:spec_decode_num_draft_tokens": ("Tokens guessed.", "draft_tokens"),
            "vllm:spec_decode_num_accepted_tokens": ("Those kept.", "accepted_tokens"),
            "pi2:spec_decode_drafted_tokens": ("Tokens of steps with drafts.", "drafted_tokens"),
            "pi2:spec_decode_drafted_bytes": ("Bytes these touched.", "drafted_bytes"),
            "pi2:spec_decode_plain_tokens": ("Tokens of other steps.", "plain_tokens"),
            "pi2:spec_decode_plain_bytes": ("Bytes these touched.", "plain_bytes"),
        }
        yield from _count(counters, found)
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by their place in the draft.",
            labels=["model_name", "position"],
        )
        for name, counts in found:
            for position, count in enumerate(counts.accepted_by_position):
                places.add_metric([name, str(position)], count)
        yield places


def _count(
    counters: Mapping[str, tuple[str, str]], found: Sequence[tuple[str, object]]
) -> Iterator[Metric]:
    """A metric for each of ``counters`` (text and attribute), with values ``found`` by model; a
    value that a model's backend does not count is left out."""
    for key, (text, field) in counters.items():
        family = CounterMetricFamily(key, text, labels=["model_name"])
        for name, counts in found:
            if (value := getattr(counts, field)) is not None:
                family.add_metric([name], value)
        if family.samples or not found:
            yield family
