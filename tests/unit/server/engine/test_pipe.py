"""Command writer that never blocks on the pipe."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.processes import wait_until

from loraplex_contracts.errors import Cancelled
from loraplex_server.engine.pipe import Abandon, Cancel, CommandWriter, FrameReader


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


@pytest.mark.parametrize("size", [0, 10, 16_384, 16_385, 1_000_000])
def test_what_a_connection_sends(size: int) -> None:
    """Messages of every size arrive; a connection writes large ones in two pieces."""
    ours, theirs = multiprocessing.Pipe()
    sent = [b"x" * size, b"", {"y": size}]
    thread = threading.Thread(target=lambda: [theirs.send(one) for one in sent])
    thread.start()
    reader, got = FrameReader(), list[object]()
    while len(got) < len(sent):
        got += map(pickle.loads, reader.feed(os.read(ours.fileno(), 5000)))
    thread.join()
    assert got == sent


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(1, 30), min_size=1))
def test_wherever_it_is_cut(messages: list[bytes], sizes: list[int]) -> None:
    raw = b"".join(struct.pack("!i", len(message)) + message for message in messages)
    reader, got, number = FrameReader(), list[bytes](), 0
    while raw:
        size = sizes[number % len(sizes)]
        got += reader.feed(raw[:size])
        raw, number = raw[size:], number + 1
    assert got == messages


def test_very_large_messages_have_a_longer_length() -> None:
    reader = FrameReader()
    header = struct.pack("!i", -1) + struct.pack("!Q", 5)
    assert reader.feed(header[:7]) == []
    assert reader.feed(header[7:] + b"abc") == []
    assert reader.feed(b"de" + struct.pack("!i", 1) + b"f") == [b"abcde", b"f"]
