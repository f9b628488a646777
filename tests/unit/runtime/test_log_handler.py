"""Log lines whose reader stops, goes or comes back."""

from __future__ import annotations

import errno
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from loraplex_runtime import log_handler
from loraplex_runtime.log_handler import MAX_WAITING, UnblockedHandler

PIPE_BYTES = 1 << 16
LINE = "x" * 99


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    for end in (reader, writer):
        try:
            os.close(end)
        except OSError:
            continue


def logger_to(writer: int) -> tuple[logging.Logger, UnblockedHandler]:
    handler = UnblockedHandler(writer)
    log = logging.Logger("of this test")
    log.addHandler(handler)
    return log, handler


def read_lines(reader: int, last: str) -> list[str]:
    found = b""
    while last.encode() not in found:
        found += os.read(reader, PIPE_BYTES)
    return found.decode().splitlines()


def test_lines_keep_their_order(pipe: tuple[int, int]) -> None:
    log, handler = logger_to(pipe[1])
    for number in range(100):
        log.info("%d", number)
    handler.flush()
    assert os.read(pipe[0], PIPE_BYTES).decode() == "".join(f"{number}\n" for number in range(100))


def test_a_reader_that_stops_holds_nobody_up(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_handler, "FLUSH_S", 0.01)
    log, handler = logger_to(pipe[1])
    num_lines = 3 * MAX_WAITING  # more than wait and are in the pipe
    for _ in range(num_lines):
        log.info(LINE)
    handler.flush()  # comes back too
    *lines, said = read_lines(pipe[0], "dropped, because nobody read them\n")
    assert set(lines) == {LINE}
    assert MAX_WAITING < len(lines) < num_lines
    assert said == f"{num_lines - len(lines)} log lines were dropped, because nobody read them"


def test_a_reader_that_goes_ends_nothing(pipe: tuple[int, int]) -> None:
    log, handler = logger_to(pipe[1])
    os.close(pipe[0])
    log.info("nobody reads this")
    start_s = time.monotonic()
    handler.flush()
    assert time.monotonic() - start_s < log_handler.FLUSH_S  # nothing waits


def test_a_pipe_that_another_program_made_non_blocking(pipe: tuple[int, int]) -> None:
    os.set_blocking(pipe[1], False)
    log, _ = logger_to(pipe[1])
    num_lines = PIPE_BYTES // len(LINE) + 100
    for _ in range(num_lines):
        log.info(LINE)
    log.info("last")
    assert len(read_lines(pipe[0], "last")) == num_lines + 1


def test_what_cannot_be_written_as_utf8(pipe: tuple[int, int]) -> None:
    log, handler = logger_to(pipe[1])
    log.info("half a \ud83d pair")
    handler.flush()
    assert os.read(pipe[0], PIPE_BYTES) == b"half a \\ud83d pair\n"


SAYS = """
import logging, sys
from loraplex_runtime.logs import setup_logging
setup_logging()
for _ in range(3000):
    logging.info(sys.argv[1] * 299)
"""


def test_processes_that_share_a_pipe_do_not_cut_each_others_lines(pipe: tuple[int, int]) -> None:
    """The reader is slower than they are, so that the pipe is full and each write waits in it."""
    reader, writer = pipe
    processes = [subprocess.Popen([sys.executable, "-c", SAYS, letter], stderr=writer) for letter in "abc"]
    os.close(writer)
    found = b""
    while data := os.read(reader, PIPE_BYTES // 4):
        found += data
        time.sleep(0.002)
    assert [process.wait(20) for process in processes] == [0, 0, 0]
    lines = found.splitlines()
    assert len(lines) == 9000
    assert {line.rpartition(b" ")[2] for line in lines} == {letter * 299 for letter in (b"a", b"b", b"c")}


def test_a_piece_leaves_room_for_the_end_of_a_line_that_was_cut() -> None:
    lines = ["x" * (select.PIPE_BUF // 4 - 1)] * 8
    pieces = list(log_handler._pieces(lines))
    assert max(len(piece) for piece, _ in pieces) < select.PIPE_BUF
    assert sum(num_lines for _, num_lines in pieces) == len(lines)


def test_a_line_that_is_larger_than_a_pipe(pipe: tuple[int, int]) -> None:
    log, _ = logger_to(pipe[1])
    log.info("before")
    log.info("y" * 2 * PIPE_BYTES)
    log.info("last")
    assert read_lines(pipe[0], "last") == ["before", "y" * 2 * PIPE_BYTES, "last"]


def test_lines_that_find_no_room_on_the_disk_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    disk, room = bytearray(), 250

    def write(_: int, data: bytes) -> int:
        if len(disk) >= room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        part = data[: room - len(disk)]
        disk.extend(part)
        return len(part)

    monkeypatch.setattr(log_handler.os, "write", write)
    log, handler = logger_to(-1)
    for _ in range(5):
        log.info(LINE)
        handler.flush()
    room = 10_000
    log.info("there is room again")
    handler.flush()
    whole, also_whole, half, told, last = disk.decode().splitlines()
    assert whole == also_whole == LINE
    assert half == LINE[:50]
    assert told == "up to 3 log lines could not be written: No space left on device"
    assert last == "there is room again"


SAYS_AND_ENDS = """
import logging, sys
from loraplex_runtime.shutdown import exit_at_once
from loraplex_runtime.logs import setup_logging
setup_logging()
for _ in range(int(sys.argv[1])):
    logging.info("x" * 99)
logging.info("the last line")
if sys.argv[2] == "at once":
    exit_at_once(3)
raise SystemExit(3)
"""


@pytest.mark.parametrize("end", ["at once", "in order"])
def test_the_last_lines_of_a_process_are_written(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", SAYS_AND_ENDS, "2000", end], stderr=subprocess.PIPE, check=False)
    assert done.returncode == 3
    assert done.stderr.count(b"\n") == 2001
    assert done.stderr.rstrip().endswith(b"the last line")


@pytest.mark.parametrize("end", ["at once", "in order"])
def test_a_process_ends_though_nobody_reads(end: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", SAYS_AND_ENDS, "2000", end], stderr=subprocess.PIPE)
    try:
        assert process.wait(60) == 3
    finally:
        process.kill()
        process.communicate()
