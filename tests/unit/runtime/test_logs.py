"""Log lines: plain, JSON, request ids."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
from collections.abc import Iterator

import pytest

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.logs import RefusedConnections, bind_request_id, setup_logging

log = logging.getLogger("loraplex.test")


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_plain_lines(stream: io.StringIO) -> None:
    setup_logging("info", "plain", stream)
    log.debug("not shown")
    log.info("hello %s", "you", extra={"request_id": "r1"})
    line = stream.getvalue()
    assert line.endswith("INFO    loraplex.test: hello you request_id=r1\n")
    assert line.count("\n") == 1


def test_nobody_forges_a_line(stream: io.StringIO) -> None:
    setup_logging("info", "plain", stream)
    log.info("id %s", "x\n2026-01-01 ERROR forged\x1b[2J")
    assert stream.getvalue().count("\n") == 1
    assert "\x1b" not in stream.getvalue()
    assert "x\\n2026" in stream.getvalue()


def test_json_lines(stream: io.StringIO) -> None:
    setup_logging("debug", "json", stream)
    try:
        raise ValueError("no")
    except ValueError:
        log.exception("failed\nbadly", extra={"request_id": "r1", "worker": "w:1", "_ray_ns": 3})
    (line,) = stream.getvalue().splitlines()
    fields = json.loads(line)
    assert fields["message"] == "failed\nbadly"
    assert fields["level"] == "error"
    assert fields["logger"] == "loraplex.test"
    assert fields["request_id"] == "r1"
    assert fields["worker"] == "w:1"
    assert "ValueError: no" in fields["exception"]
    assert set(fields) == {"time", "level", "logger", "message", "request_id", "worker", "exception"}


async def test_a_bound_request_id_stays_in_its_task(stream: io.StringIO) -> None:
    setup_logging("info", "json", stream)

    async def one(request_id: str) -> None:
        bind_request_id(request_id)
        await asyncio.sleep(0)
        log.info("in the middle")

    await asyncio.gather(one("a"), one("b"))
    log.info("outside")
    ids = [json.loads(line).get("request_id") for line in stream.getvalue().splitlines()]
    assert ids == ["a", "b", None]


def test_settings_that_are_not_there() -> None:
    with pytest.raises(InvalidArgument, match="--log-level"):
        setup_logging("loud")
    with pytest.raises(InvalidArgument, match="--log-format"):
        setup_logging("info", "xml")  # type: ignore[arg-type]


def test_a_port_that_cannot_accept_says_so_once(stream: io.StringIO) -> None:
    now_s = 0.0
    setup_logging("info", "plain", stream)
    setup_logging("info", "plain", stream)
    asyncio_log = logging.getLogger("asyncio")
    (found,) = [one for one in asyncio_log.filters if isinstance(one, RefusedConnections)]
    asyncio_log.removeFilter(found)
    refused = RefusedConnections(lambda: now_s)
    asyncio_log.addFilter(refused)
    try:
        loop = asyncio.new_event_loop()
        context = {
            "message": "socket.accept() out of system resource",
            "exception": OSError(errno.EMFILE, "Too many open files"),
            "socket": "a socket",
        }
        for _ in range(100):
            loop.call_exception_handler(context)
        assert stream.getvalue().endswith(
            "asyncio: connections cannot be accepted: [Errno 24] Too many open files; they wait\n"
        )
        assert stream.getvalue().count("\n") == 1
        now_s = 10.0
        loop.call_exception_handler(context)
        assert stream.getvalue().count("\n") == 2
        loop.call_exception_handler({"message": "something else", "exception": ValueError("no")})
        assert "ValueError: no" in stream.getvalue()
        loop.close()
    finally:
        asyncio_log.removeFilter(refused)
