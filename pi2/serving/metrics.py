"""Numbers for Prometheus, called as vLLM calls them where it has them."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pi2.engine.answer import SequenceResult, Ticket
from pi2.engine.statistics import read_peak_rss_bytes
from pi2.logging import get_logger
from pi2.serving.hosts import Host

_TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))


class Metrics:
    def __init__(self, hosts: Sequence[Host], *, replica: str = "") -> None:
        """``replica``: a label of all numbers if the server is one of several."""
        self._replica = replica
        self._registry = registry = CollectorRegistry()
        registry.register(_ModelCollector(hosts))
        self._counts = {
            key: Counter(name, text, ["model_name", *labels], registry=registry)
            for key, (name, text, *labels) in _TABLE["counts"].items()
        }
        self._histograms = {
            key: Histogram(
                name, text, ["model_name"], registry=registry, buckets=_TABLE["buckets"][kind]
            )
            for key, (name, text, kind) in _TABLE["histograms"].items()
        }

    def _add(self, model: str, **values: int) -> None:
        for key, value in values.items():
            self._counts[key].labels(model).inc(value)

    def _observe(self, model: str, **values: float) -> None:
        for key, value in values.items():
            self._histograms[key].labels(model).observe(value)

    def note_first_token(self, model: str, first_s: float, ticket: Ticket) -> None:
        assert ticket.answer is not None
        prompt = len(ticket.request.prompt_ids)
        queue_s = max(0.0, first_s - ticket.answer.first_token_s)
        self._observe(model, first=first_s, queue=queue_s, prompts=prompt)
        known = max(ticket.reused_tokens, ticket.shared_tokens)
        self._add(model, prompt=prompt, queries=prompt, hits=known)

    def note_end(
        self, model: str, reason: str, result: SequenceResult, whole_s: float, ticket: Ticket
    ) -> None:
        count = len(result.token_ids)
        self._counts["ended"].labels(model, reason).inc()
        self._add(model, generated=count)
        self._observe(model, answers=count, whole=whole_s)
        if count > 1:
            self._observe(model, each=result.decode_s / (count - 1))

    def note_abort(self, model: str) -> None:
        self._counts["ended"].labels(model, "abort").inc()

    def note_error(self, model: str, error: Exception) -> None:
        self._add(model, failed=1)
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
        yield from _count(_TABLE["statistics"], [(name, model.stats) for name, model, _ in models])
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
        yield from _count(_TABLE["speculation"], found)
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
    """A metric for each of ``counters`` (name and text by field), with values ``found`` by model; a
    value that a model's backend does not count is left out."""
    for field, (key, text) in counters.items():
        family = CounterMetricFamily(key, text, labels=["model_name"])
        for name, counts in found:
            if (value := getattr(counts, field)) is not None:
                family.add_metric([name], value)
        if family.samples or not found:
            yield family
