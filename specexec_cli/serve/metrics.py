"""/metrics: the engine's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from specexec_cli.engine.text import EngineFigures

CONTENT_TYPE = CONTENT_TYPE_LATEST


class EngineCollector:
    """A Prometheus collector of an engine's figures."""

    def __init__(self, figures: EngineFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        now = self._figures
        gauges = (
            ("specexec_slots", "Texts that can be under way at once.", now.slots),
            ("specexec_texts_running", "Texts under way.", now.running),
            ("specexec_texts_waiting", "Texts in the queue.", now.waiting),
            ("specexec_queue_limit", "Texts that may wait.", now.most_waiting),
        )
        for name, help_text, value in gauges:
            yield GaugeMetricFamily(name, help_text, value)
        counters = (
            ("specexec_target_passes", "Passes over the target's layers.", now.passes),
            ("specexec_generated_tokens", "Committed tokens.", now.generated_tokens),
            ("specexec_streamed_bytes", "Bytes of weights streamed.", now.bytes_streamed),
        )
        for name, help_text, value in counters:
            yield CounterMetricFamily(name, help_text, value)
        texts = CounterMetricFamily(
            "specexec_texts", "Texts that have ended, by how.", labels=["finish"]
        )
        for finish in ("eos", "stop", "length", "cancelled", "failed"):
            texts.add_metric([finish], now.texts.get(finish, 0))
        yield texts


def page(figures: EngineFigures) -> bytes:
    """The page in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(figures))
    return generate_latest(registry)
