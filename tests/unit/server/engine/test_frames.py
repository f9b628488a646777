from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_server.engine.frames import FrameReader


@pytest.mark.parametrize("size", [0, 10, 16_384, 16_385, 1_000_000])
def test_what_a_connection_sends(size: int) -> None:
    """Of every size, since it writes large messages in two pieces."""
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
