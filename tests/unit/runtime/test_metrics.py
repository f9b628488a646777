"""Metrics of requests and the port that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import pytest
from prometheus_client import Gauge

from loraplex_contracts.errors import QUOTAS, FailedPrecondition
from loraplex_runtime.metrics import MetricsEndpoint, RequestMetrics, describe_process, histogram, new_registry
from loraplex_runtime.request_record import RequestRecord


def value(registry: Any, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


@pytest.mark.parametrize(("role", "prefix"), [("worker", "loraplex:"), ("router", "loraplex:router_")])
def test_requests_are_counted(role: Any, prefix: str) -> None:
    registry = new_registry()
    metrics = RequestMetrics(registry, role)
    metrics.first_message("GenerateStream", 0.01)
    metrics.ended(RequestRecord("GenerateStream", code="OK", total_s=0.2))
    metrics.ended(RequestRecord("GenerateStream", code="UNAVAILABLE", total_s=0.1))
    assert value(registry, f"{prefix}requests_total", method="GenerateStream", code="OK") == 1
    assert value(registry, f"{prefix}request_seconds_count", method="GenerateStream") == 2
    assert value(registry, f"{prefix}time_to_first_message_seconds_sum", method="GenerateStream") == 0.01
    names = {sample.name for family in registry.collect() for sample in family.samples}
    assert not {name for name in names if name.endswith("_created")}


@pytest.mark.parametrize(("role", "prefix"), [("worker", "loraplex:"), ("router", "loraplex:router_")])
def test_refusals_have_bounded_labels(role: Any, prefix: str) -> None:
    registry = new_registry()
    metrics = RequestMetrics(registry, role)
    assert {value(registry, f"{prefix}quota_refusals_total", quota=quota) for quota in QUOTAS} == {0}
    for quota in ("tokens_per_minute", "tokens_per_minute", "x\n" * 50, "another"):
        metrics.quota_refused(quota)
    name = f"{prefix}quota_refusals_total"
    assert (value(registry, name, quota="tokens_per_minute"), value(registry, name, quota="other")) == (2, 2)


def test_without_a_registry_nothing_happens() -> None:
    metrics = RequestMetrics(None, "worker")
    metrics.ended(RequestRecord("Generate", code="OK", total_s=1.0))
    metrics.first_message("Generate", 1.0)


def test_a_process_says_what_it_is() -> None:
    registry = new_registry()
    describe_process(registry, "router", "1.2.3")
    (info,) = [one for family in registry.collect() for one in family.samples if one.name == "loraplex:build_info"]
    assert (info.labels["role"], info.labels["version"], info.value) == ("router", "1.2.3", 1)
    if sys.platform == "linux":
        assert (value(registry, "process_resident_memory_bytes") or 0) > 1 << 20


def test_a_histogram_of_counts_by_bucket() -> None:
    found = {
        (one.name, one.labels.get("le")): one.value for one in histogram("h", "", (1.0, 2.5), (3, 0, 1), 9.5).samples
    }
    assert found == {
        ("loraplex:h_bucket", "1.0"): 3,
        ("loraplex:h_bucket", "2.5"): 3,
        ("loraplex:h_bucket", "+Inf"): 4,
        ("loraplex:h_count", None): 4,
        ("loraplex:h_sum", None): 9.5,
    }


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(FailedPrecondition, match="prometheus-client"):
        new_registry()


# --- the port ---------------------------------------------------------------------------------------------------------


async def ask(port: int, text: bytes) -> tuple[str, dict[str, str], str]:
    """Status line, headers, body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    answer = b""
    with contextlib.suppress(ConnectionResetError):  # what a server does that closes before it has read everything
        answer = await reader.read()
    head, _, body = answer.decode().partition("\r\n\r\n")
    writer.close()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        await writer.wait_closed()
    status, *lines = head.split("\r\n")
    return status, {name.lower(): text for name, _, text in (line.partition(": ") for line in lines)}, body


@pytest.fixture
async def endpoint() -> Any:
    registry = new_registry()
    Gauge("loraplex:num_requests_running", "Requests.", registry=registry).set(7)
    endpoint = await MetricsEndpoint.start("127.0.0.1", 0, registry)
    yield endpoint
    await endpoint.stop()


async def test_a_scrape(endpoint: MetricsEndpoint) -> None:
    status, headers, body = await ask(endpoint.port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status == "HTTP/1.1 200 OK"
    assert headers["content-type"].startswith("text/plain")
    assert int(headers["content-length"]) == len(body)
    assert "loraplex:num_requests_running 7.0\n" in body


async def test_a_scraper_may_ask_for_names_without_a_colon(endpoint: MetricsEndpoint) -> None:
    _, _, body = await ask(endpoint.port, b"GET /metrics?names=plain HTTP/1.1\r\n\r\n")
    assert "# TYPE loraplex_num_requests_running gauge\nloraplex_num_requests_running 7.0\n" in body
    assert ":" not in body


async def test_who_asks_for_openmetrics_gets_the_same_names(endpoint: MetricsEndpoint) -> None:
    """A client that asks for OpenMetrics, as Prometheus does, gets the same names in the text format."""
    request = b"GET /metrics?x=1 HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0,text/plain\r\n\r\n"
    status, headers, body = await ask(endpoint.port, request)
    assert status.endswith("200 OK")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\nloraplex:num_requests_running 7.0\n" in body


async def test_other_questions(endpoint: MetricsEndpoint) -> None:
    assert (await ask(endpoint.port, b"GET / HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 404 Not Found"
    assert (await ask(endpoint.port, b"POST /metrics HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 405 Method Not Allowed"
    assert (await ask(endpoint.port, b"\xff\x00\r\n\r\n"))[0] == "HTTP/1.1 404 Not Found"
    # More than a head may have: the connection is closed without a word.
    assert (await ask(endpoint.port, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 70_000))[0] == ""
    # It goes on.
    assert (await ask(endpoint.port, b"GET /metrics HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"


async def test_a_taken_port(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(FailedPrecondition, match="--metrics-port"):
        await MetricsEndpoint.start("127.0.0.1", endpoint.port, new_registry())


async def test_a_client_that_asks_for_nothing_does_not_hold_up_the_end() -> None:
    endpoint = await MetricsEndpoint.start("127.0.0.1", 0, new_registry())
    reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
    await ask(endpoint.port, b"GET / HTTP/1.1\r\n\r\n")  # so that the first has been accepted
    async with asyncio.timeout(5):
        await endpoint.stop()
        assert await reader.read() == b""
    writer.close()
