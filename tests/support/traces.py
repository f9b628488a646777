"""Traces that stay in memory."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loraplex_runtime.tracing import Tracing


def recorded() -> tuple[Tracing, Callable[[], tuple[ReadableSpan, ...]]]:
    """Tracing, and the spans that have ended so far, in their order."""
    provider, exporter = recording_provider()
    return Tracing(provider), exporter.get_finished_spans


def recording_provider() -> tuple[TracerProvider, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter
