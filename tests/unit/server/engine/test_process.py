from __future__ import annotations

import queue
import threading
import time

import pytest

from loraplex_server.engine.messages import Abandon, Command, Wake
from loraplex_server.engine.process import _take


def inbox_of(*commands: Command) -> queue.SimpleQueue[Command]:
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    for command in commands:
        inbox.put(command)
    return inbox


@pytest.mark.parametrize("timeout_s", [0.0, 30.0, None])
def test_what_is_there_comes_at_once_and_in_order(timeout_s: float | None) -> None:
    commands = (Abandon(1), Wake(), Abandon(2))
    started_s = time.monotonic()
    assert _take(inbox_of(*commands), timeout_s) == list(commands)
    assert time.monotonic() - started_s < 5


def test_without_patience_nothing_is_waited_for() -> None:
    started_s = time.monotonic()
    assert _take(inbox_of(), 0.0) == []
    assert time.monotonic() - started_s < 5


def test_the_wait_ends_with_its_time() -> None:
    started_s = time.monotonic()
    assert _take(inbox_of(), 0.05) == []
    assert 0.04 < time.monotonic() - started_s < 5


@pytest.mark.parametrize("timeout_s", [30.0, None])
def test_the_wait_ends_with_the_first_command(timeout_s: float | None) -> None:
    inbox = inbox_of()
    timer = threading.Timer(0.05, inbox.put, (Wake(),))
    timer.start()
    started_s = time.monotonic()
    assert _take(inbox, timeout_s) == [Wake()]
    assert 0.04 < time.monotonic() - started_s < 5
    timer.join()
