"""Command writer that never blocks on the pipe."""

from __future__ import annotations

import multiprocessing
import threading
import time

import pytest
from support.processes import wait_until

from loraplex_contracts.errors import Cancelled
from loraplex_server.engine.command_writer import CommandWriter
from loraplex_server.engine.messages import Abandon, Cancel


def test_commands_arrive_in_order_whatever_their_size() -> None:
    ours, theirs = multiprocessing.Pipe()
    writer = CommandWriter(ours)
    sizes = [10, 3_000_000, 10, 100_000, 10, 10]
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.extend(theirs.recv().request_id for _ in sizes))
    reader.start()
    sent = [f"{number}" + "x" * size for number, size in enumerate(sizes)]
    for request_id in sent:
        writer.send(Cancel(request_id, Cancelled("gone")))
    reader.join(20)
    assert got == sent
    writer.close()


def test_nobody_who_reads_holds_nobody_up() -> None:
    """A frozen engine's pipe takes some 200 kB; then the event loop must not wait for it."""
    ours, theirs = multiprocessing.Pipe()
    writer = CommandWriter(ours)
    started_s = time.monotonic()
    for _ in range(200):
        writer.send(Cancel("x" * 20_000, Cancelled("gone")))
    assert time.monotonic() - started_s < 5
    for _ in range(200):
        assert len(theirs.recv().request_id) == 20_000
    writer.close()


def test_a_pipe_without_another_end_says_so_or_takes_it_in() -> None:
    ours, theirs = multiprocessing.Pipe()
    writer = CommandWriter(ours)
    theirs.close()
    with pytest.raises(OSError):
        writer.send(Abandon(1))
    writer.close()


def test_the_connection_stays_open_until_it_is_closed() -> None:
    """Its reader has to see the end of the other side first."""
    ours, theirs = multiprocessing.Pipe()
    writer = CommandWriter(ours)
    for _ in range(20):
        writer.send(Cancel("x" * 20_000, Cancelled("gone")))
    theirs.close()  # in the middle of a write
    time.sleep(0.1)
    assert not ours.closed
    with pytest.raises((EOFError, ConnectionResetError)):
        ours.recv()
    writer.close()
    wait_until(lambda: ours.closed, 10, "closed")
