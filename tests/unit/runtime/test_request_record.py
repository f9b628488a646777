"""Records of requests, and their lines in the log."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from loraplex_contracts.errors import Overloaded
from loraplex_runtime.logs import setup_logging
from loraplex_runtime.request_record import RequestRecord, log, log_end


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    log.setLevel(logging.NOTSET)


def ended(method: str = "GenerateStream", **fields: Any) -> RequestRecord:
    record = RequestRecord(method, "acme", request_id="r1", adapter="sql", adapter_digest="d1", code="OK")
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def test_a_request_that_ended_is_one_object(stream: io.StringIO) -> None:
    setup_logging("info", "json", stream)
    log_end(
        ended(num_prompt_tokens=8, num_output_tokens=4, queue_s=0.1, first_token_s=0.25, total_s=1.5, worker_id="w")
    )
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert line.pop("message").startswith("GenerateStream ended: OK (tenant=acme adapter=sql digest=d1 worker=w ")
    del line["time"]
    assert line == {
        "level": "info",
        "logger": "loraplex.requests",
        "request_id": "r1",
        "method": "GenerateStream",
        "code": "OK",
        "tenant": "acme",
        "adapter": "sql",
        "digest": "d1",
        "worker": "w",
        "prompt_tokens": 8,
        "tokens": 4,
        "queue_s": 0.1,
        "ttft_s": 0.25,
        "total_s": 1.5,
    }


def test_a_failure_is_one_line_with_its_reason(stream: io.StringIO) -> None:
    setup_logging("info", "plain", stream)
    record = RequestRecord("Generate", "acme", request_id="r1", adapter="sql")
    record.fail(Overloaded("too many\nrequests"))
    record.end("CANCELLED")
    log_end(record)
    (line,) = stream.getvalue().splitlines()
    assert "Generate failed: RESOURCE_EXHAUSTED: too many\\nrequests (tenant=acme adapter=sql " in line
    assert line.endswith(" request_id=r1")
    assert (record.code, record.reason, record.was_refused) == ("RESOURCE_EXHAUSTED", "OVERLOADED", True)


def test_questions_are_logged_where_they_fail(stream: io.StringIO) -> None:
    setup_logging("info", "plain", stream)
    log_end(ended("GetInfo"))
    assert not stream.getvalue()
    record = RequestRecord("GetInfo")
    record.fail(Overloaded("no"))
    log_end(record)
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("method", ["LoadAdapter", "UnloadAdapter"])
def test_a_change_of_what_is_served_is_logged_where_it_succeeds(stream: io.StringIO, method: str) -> None:
    setup_logging("info", "plain", stream)
    log_end(ended(method, adapter_digest=""))
    assert f"{method} ended: OK (tenant=acme adapter=sql total_s=0.0) request_id=r1\n" in stream.getvalue()


def test_names_that_nobody_has_checked_are_cut() -> None:
    record = RequestRecord("Generate")
    record.ask_for("r" * 10_000, "acme/a@" + "0" * 64)
    assert (record.request_id, record.adapter) == ("r" * 128, "acme/a@" + "0" * 64)
    record.ask_for("", "a" * 10_000)
    assert len(record.adapter) < 200


def test_lines_of_requests_can_be_left_out(stream: io.StringIO) -> None:
    setup_logging("info", "plain", stream, requests=False)
    log_end(ended())
    assert not stream.getvalue()


def test_drafts_add_up_by_proposer() -> None:
    record = ended()
    record.add_drafts("medusa", 4, 2)
    record.add_drafts("medusa", 3, 3)
    record.add_drafts("grammar", 1, 1)
    assert record.drafts == {"medusa": (7, 5), "grammar": (1, 1)}
