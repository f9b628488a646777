"""Prometheus metrics of requests, and the port that serves metrics.

What changes all the time (queues, residency) is made into metrics at the moment of a scrape (`gauges`, `counter`), so
that no label set outlives what it stood for. prometheus_client is imported where metrics are made only.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol
from urllib.parse import parse_qs

from loraplex_contracts.errors import QUOTAS, FailedPrecondition
from loraplex_runtime.request_record import RequestRecord
from loraplex_runtime.usage import UsageCollector

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

PREFIX: Final = "loraplex:"
Role = Literal["worker", "router"]

_REQUEST_BUCKETS_S: Final = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_FIRST_MESSAGE_BUCKETS_S: Final = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


def new_registry() -> CollectorRegistry:
    """A registry for one server, so that two in one process (tests) stay apart. Raises FailedPrecondition."""
    try:
        from prometheus_client import CollectorRegistry, disable_created_metrics
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            "metrics need the package prometheus-client: pip install 'loraplex[router]', or leave --metrics-port out",
            field="--metrics-port",
        ) from error
    disable_created_metrics()  # a second series for each counter and histogram, which nobody reads
    return CollectorRegistry()


def describe_process(registry: CollectorRegistry, role: Role, version: str) -> None:
    """Metrics of this process, and a constant one that says what it is."""
    from prometheus_client import Gauge, ProcessCollector

    ProcessCollector(registry=registry)
    labels = {"role": role, "version": version, "python": platform.python_version()}
    Gauge(f"{PREFIX}build_info", "Constant 1, with the version.", list(labels), registry=registry).labels(**labels).set(
        1
    )


class RequestMetrics:
    """Counts and latencies of requests, by method, and what adapters and tenants used."""

    def __init__(self, registry: CollectorRegistry | None, role: Role) -> None:
        """Adds its metrics to the registry. Without a registry the numbers are not shown anywhere."""
        from prometheus_client import Counter, Histogram

        registry = new_registry() if registry is None else registry
        name = PREFIX if role == "worker" else f"{PREFIX}router_"
        self.usage = UsageCollector(registry, name)
        self._requests = Counter(name + "requests", "Requests that have ended.", ["method", "code"], registry=registry)
        self._seconds = Histogram(
            name + "request_seconds",
            "From a request's arrival to its end.",
            ["method"],
            buckets=_REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._first_message_seconds = Histogram(
            name + "time_to_first_message_seconds",
            "From a request's arrival to the first message of its stream.",
            ["method"],
            buckets=_FIRST_MESSAGE_BUCKETS_S,
            registry=registry,
        )

        self._quota_refusals = Counter(
            name + "quota_refusals", "Requests refused because of a tenant's quota.", ["quota"], registry=registry
        )
        for quota in sorted(QUOTAS):
            self._quota_refusals.labels(quota)  # shown from the start, as zero: a rate needs the value before

    def quota_refused(self, quota: str) -> None:
        """Counts a refusal. `quota` is one of `loraplex_contracts.errors.QUOTAS`; others count as "other"."""
        self._quota_refusals.labels(quota if quota in QUOTAS else "other").inc()

    def ended(self, record: RequestRecord) -> None:
        self._requests.labels(record.method, record.code).inc()
        self._seconds.labels(record.method).observe(record.total_s)
        if record.computes:
            self.usage.add(record)

    def first_message(self, method: str, seconds: float) -> None:
        self._first_message_seconds.labels(method).observe(seconds)


def gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    """One gauge with one sample."""
    return gauges(name, text, tuple(labels or ()), [(tuple((labels or {}).values()), value)])


def gauges(name: str, text: str, labels: Sequence[str], samples: Sequence[tuple[Sequence[str], float]]) -> Metric:
    """One gauge with a sample for each row of label values."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(PREFIX + name, text, labels=list(labels))
    for values, value in samples:
        family.add_metric(list(values), value)
    return family


def counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """One counter with a sample for each value of `label`."""
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def total(name: str, text: str, value: float) -> Metric:
    """One counter with one sample."""
    from prometheus_client.core import CounterMetricFamily

    return CounterMetricFamily(PREFIX + name, text, value=value)


def summary(name: str, text: str, count: int, sum_value: float) -> Metric:
    from prometheus_client.core import SummaryMetricFamily

    return SummaryMetricFamily(PREFIX + name, text, count_value=count, sum_value=sum_value)


def histogram(name: str, text: str, bounds: Sequence[float], counts: Sequence[int], sum_value: float) -> Metric:
    """`counts`: of values up to each bound and above the one before, and behind them of those above all bounds."""
    from prometheus_client.core import HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

    ends = [*map(floatToGoString, bounds), "+Inf"]
    return HistogramMetricFamily(PREFIX + name, text, list(zip(ends, accumulate(counts), strict=True)), sum_value)


class _Families(Protocol):
    """The part of a registry that an encoder needs."""

    def collect(self) -> Iterable[Metric]: ...


class PlainNames:
    """A registry's metrics with `_` in the place of the colon, which Prometheus keeps for recording rules."""

    def __init__(self, registry: _Families) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            plain = copy.copy(family)
            plain.name = family.name.replace(":", "_")
            plain.samples = [sample._replace(name=sample.name.replace(":", "_")) for sample in family.samples]
            yield plain


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def encoded(registry: _Families, query: str) -> tuple[bytes, str]:
    """A page of metrics, with its content type. `query`: of the URL; `names=plain` asks for names without a colon.

    Always Prometheus' text, which scrapers that ask for OpenMetrics take as well: in that, prometheus_client 0.26
    writes samples with `_` in the place of the colon, so that each would have another name than its metric."""
    from prometheus_client.exposition import generate_latest

    page: Any = PlainNames(registry) if parse_qs(query).get("names") == ["plain"] else registry
    return generate_latest(page), CONTENT_TYPE


# --- the port -------------------------------------------------------------------------------------------------------

_MAX_HEAD_BYTES: Final = 16 << 10
_CLIENT_TIMEOUT_S: Final = 10.0
_END_S: Final = 1.0  # that a page under way gets when the port is closed


class MetricsEndpoint:
    """`GET /metrics` on the server's own event loop: a scrape reads state between two callbacks, never within one.

    Speaks just enough HTTP/1.1 for a scraper; every connection carries one request.
    """

    def __init__(self, server: asyncio.Server, host: str, clients: set[asyncio.StreamWriter]) -> None:
        self._server = server
        self._clients = clients  # connected now
        self.host = host
        self.port: int = server.sockets[0].getsockname()[1]

    @classmethod
    async def start(cls, host: str, port: int, registry: CollectorRegistry) -> MetricsEndpoint:
        """Listens. Port 0 takes a free one. Raises FailedPrecondition when it cannot listen."""
        clients: set[asyncio.StreamWriter] = set()
        serve = partial(_serve_scrape, registry, clients)
        try:
            server = await asyncio.start_server(serve, host.strip("[]"), port, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            raise FailedPrecondition(
                f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another --metrics-port",
                field="--metrics-port",
            ) from error
        return cls(server, host, clients)

    async def stop(self) -> None:
        self._server.close()
        for client in self._clients:  # one that has sent no request would be waited for
            client.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._server.wait_closed(), _END_S)


async def _serve_scrape(
    registry: CollectorRegistry,
    clients: set[asyncio.StreamWriter],
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    # A client that hangs, lies about its size or leaves is not answered.
    clients.add(writer)
    try:
        with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_CLIENT_TIMEOUT_S):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                writer.write(_answer(head, registry))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
    finally:  # also where a collector raises
        clients.discard(writer)
        writer.close()


def _answer(head: str, registry: CollectorRegistry) -> bytes:
    method, _, target = head.partition("\r\n")[0].partition(" ")
    path, _, query = target.partition(" ")[0].partition("?")
    if path != "/metrics":
        return _response("404 Not Found", "text/plain", b"metrics are at /metrics\n")
    if method != "GET":
        return _response("405 Method Not Allowed", "text/plain", b"GET only\n")
    page, content_type = encoded(registry, query)
    return _response("200 OK", content_type, page)


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
