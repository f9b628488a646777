"""Reads and writes that leave no pages in the cache."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex_adapters.io import uncached
from loraplex_adapters.io.uncached import CHUNK_BYTES, MIN_READ_BYTES, ChunkWriter, read_uncached, write_uncached

Calls = list[tuple[int, int]]  # offset and number of bytes


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    found = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield found
    os.close(found)


def random_bytes(num: int) -> bytes:
    return os.urandom(num)


@pytest.mark.parametrize("refusal", [None, errno.EOPNOTSUPP, errno.EINVAL])
def test_what_was_written_is_read(fd: int, refusal: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are read back, also where the system does not know the flag, or refuses it."""
    read, write = os.preadv, os.pwritev
    seen: list[tuple[int, ...]] = []

    def refuse(flags: tuple[int, ...]) -> None:
        seen.append(flags)
        if flags and refusal is not None:
            raise OSError(refusal, "no")

    def preadv(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        refuse(flags)
        return read(fd, buffers, offset)

    def pwritev(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        refuse(flags)
        return write(fd, [buffers[0][:50_000]], offset)  # never more than that at once

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(uncached, "_DONTCACHE", 0x80)
    data = random_bytes(200_001)
    write_uncached(fd, memoryview(data), 77)
    buffer = bytearray(300_000)
    assert read_uncached(fd, memoryview(buffer), 77) == len(data)
    assert buffer[: len(data)] == data
    assert read_uncached(fd, memoryview(buffer), 77 + len(data)) == 0
    assert seen[0] == (0x80,)
    assert seen[-2 if refusal else -1] == (0x80,)
    assert (() in seen) == (refusal is not None)


def test_small_reads_keep_their_pages(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row after the other would read every page once per row."""
    write_uncached(fd, memoryview(b"abc"), 0)
    monkeypatch.setattr(uncached, "_DONTCACHE", 1 << 30)  # that no system knows
    buffer = bytearray(MIN_READ_BYTES - 1)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, buffers, offset))
    assert read_uncached(fd, memoryview(buffer), 0) == 3


def test_without_flags_in_python(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uncached, "_DONTCACHE", 0)
    write_uncached(fd, memoryview(b"abc"), 0)
    assert read_uncached(fd, memoryview(bytearray(MIN_READ_BYTES)), 0) == 3


def test_other_errors_are_the_callers(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "preadv", full)
    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="full"):
        write_uncached(fd, memoryview(b"x"), 0)
    with pytest.raises(OSError, match="full"):
        read_uncached(fd, memoryview(bytearray(1)), 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found: Calls = []
    real = uncached.write_uncached

    def write(fd: int, data: memoryview, offset: int) -> None:
        found.append((offset, data.nbytes))
        real(fd, data, offset)

    monkeypatch.setattr(uncached, "write_uncached", write)
    return found


@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize("num_bytes", [1, 4096, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 777])
@pytest.mark.parametrize("piece_bytes", [1000, 128_000, 5 * CHUNK_BYTES])
def test_pieces_become_whole_chunks(fd: int, calls: Calls, num_bytes: int, piece_bytes: int, has_memory: bool) -> None:
    data = random_bytes(num_bytes)
    memory = memoryview(bytearray(num_bytes)) if has_memory else None
    seen: list[bytes] = []
    write = ChunkWriter(fd, 8192, lambda piece: seen.append(bytes(piece)), memory)
    for start in range(0, num_bytes, piece_bytes):
        write(memoryview(data)[start : start + piece_bytes])
    write.flush()
    assert write.num_bytes == num_bytes
    assert b"".join(seen) == data
    assert os.pread(fd, num_bytes + 1, 8192) == data
    assert memory is None or bytes(memory) == data
    # One behind the other, and only the last one may be part of a chunk.
    assert [offset for offset, _ in calls] == [8192 + idx * CHUNK_BYTES for idx in range(len(calls))]
    assert {num for _, num in calls[:-1]} <= {CHUNK_BYTES}


def test_more_than_the_memory_holds_is_written_all_the_same(fd: int) -> None:
    """Whoever counts will notice."""
    data = random_bytes(CHUNK_BYTES + 10)
    write = ChunkWriter(fd, 0, lambda piece: None, memoryview(bytearray(CHUNK_BYTES - 10)))
    write(memoryview(data))
    write.flush()
    assert write.num_bytes == len(data)
    assert os.pread(fd, len(data), 0) == data
