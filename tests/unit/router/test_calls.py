"""Deadlines of calls: what a worker gets of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex_contracts.errors import DeadlineExceeded
from loraplex_router.calls import MAX_DEADLINE_S, Call
from loraplex_runtime.request_record import RequestRecord


def call_with(left_s: float | None) -> Call:
    context = cast("Any", SimpleNamespace(time_remaining=lambda: left_s))
    return Call(RequestRecord("Generate", "t"), context, cast("Any", None))


def test_a_worker_gets_a_little_less_than_the_client_waits() -> None:
    assert call_with(None).remaining_s() is None
    assert call_with(10.0).remaining_s() == pytest.approx(9.95)
    with pytest.raises(DeadlineExceeded):
        call_with(0.0).remaining_s()


def test_a_deadline_of_centuries_is_bounded() -> None:
    left_s = call_with(1e10).remaining_s()  # "99999999H", as some clients say that there is none
    assert left_s is not None
    assert MAX_DEADLINE_S - 1 < left_s <= MAX_DEADLINE_S
