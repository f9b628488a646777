"""The engine's process and its pipe."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time

import pytest

from loraplex_server.engine.pipe import Abandon, Command, SendCost, Shutdown, Wake
from loraplex_server.engine.process import ORPHAN_END_S, SHUTDOWN_END_S, _read, _take


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


def test_nothing_is_read_after_shutdown() -> None:
    """The connection is closed after Shutdown, which a read under way would not survive."""
    theirs, ours = multiprocessing.Pipe()
    inbox = inbox_of()
    for command in (Abandon(1), Shutdown(), SendCost(1.0)):
        theirs.send(command)
    _read(ours, inbox, lambda seconds: None)
    assert _take(inbox, 0.0) == [Abandon(1), Shutdown()]
    assert ours.poll()


def test_the_end_of_the_connection_is_a_shutdown() -> None:
    theirs, ours = multiprocessing.Pipe()
    inbox = inbox_of()
    theirs.send(Abandon(1))
    theirs.close()
    _read(ours, inbox, lambda seconds: None)
    assert _take(inbox, 0.0) == [Abandon(1), Shutdown()]


@pytest.mark.parametrize("is_told", [True, False])
def test_an_engine_has_a_time_to_end_whether_it_is_told_or_alone(is_told: bool) -> None:
    """The process that tells the engine to end may die before the engine has ended, and then nobody reads the
    connection."""
    theirs, ours = multiprocessing.Pipe()
    if is_told:
        theirs.send(Shutdown())
    theirs.close()
    inbox, killed_after_s = inbox_of(), list[float]()
    _read(ours, inbox, killed_after_s.append)
    assert _take(inbox, 0.0) == [Shutdown()]
    assert killed_after_s == [SHUTDOWN_END_S if is_told else ORPHAN_END_S]
