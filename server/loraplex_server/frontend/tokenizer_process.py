"""Process that tokenizes long texts, and chats with control tokens in their texts.

The library cannot be interrupted, and a text may take it seconds and a gigabyte: the process can be killed. It loads
neither torch nor Transformers, takes one text at a time, and ends when the other end of its pipe is closed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import signal
import threading
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

from tokenizers import Tokenizer

from loraplex_runtime.shutdown import begin_shielded, start_shielded
from loraplex_server.text.control_tokens import PlainTokenizer, plain_tokenizer
from loraplex_server.text.tokenizer import Truncation, encode, encoding_of
from loraplex_server.text.vocabulary import Vocabulary

# The engine's steps go first where cores are short.
NICENESS: Final = 5
_KILLED: Final = -signal.SIGKILL
_END_S: Final = 10.0

# Makes an answer of token ids and their offsets in the process that has them. A function of a module, since it is
# pickled by name.
Maker = Callable[[Vocabulary, Sequence[int], Sequence[tuple[int, int]]], bytes]


@dataclass(frozen=True, slots=True)
class Job:
    """A text to tokenize. The result is `make` of its token ids; without `make` the ids, or only their number where
    there are more than `max_tokens`."""

    text: str
    add_special_tokens: bool
    max_tokens: int = 0
    make: Maker | None = None
    truncation: Truncation | None = None
    with_offsets: bool = False
    controls: tuple[str, ...] | None = None  # of a `SafeText`


class ProcessEnded(Exception):
    """The process is gone, and the job with it."""

    def __init__(self, exit_status: int | None) -> None:
        super().__init__(f"the process that tokenizes long texts ended with status {exit_status}")
        self.is_out_of_memory = exit_status == _KILLED  # only the kernel kills it unasked


class TokenizerProcess:
    """The parent's side. The process starts with the first job; one job at a time."""

    def __init__(self, serialized: str) -> None:
        self._serialized = serialized
        self._lock = threading.Lock()  # over the two below
        self._process: Any = None
        self._is_killed = False
        self._conn: Any = None

    def run(self, job: Job) -> array[int] | int | bytes:
        """The result of the job. Blocks; `kill` from another thread makes it raise ProcessEnded. Any other error kills
        the process."""
        try:
            conn = self._conn or self._start()
            # Not `send`: as in engine/pipe.py.
            conn.send_bytes(pickle.dumps(job))
            return conn.recv()
        except (EOFError, OSError) as error:
            raise ProcessEnded(self.end()) from error
        except BaseException:  # perhaps of memory: the pipe may be in the middle of a message
            self.kill()
            raise

    @property
    def is_killed(self) -> bool:
        """True once it was killed, or has ended by itself."""
        return self._is_killed

    def kill(self) -> None:
        """Kills the process. Does not wait for its end."""
        with self._lock:
            self._is_killed = True
            if self._process is not None:
                self._process.kill()

    def end(self) -> int | None:
        """Kills the process and waits until it is gone. Returns its exit status; None if it never ran."""
        self.kill()
        if self._conn is not None:
            self._conn.close()
        if self._process is None:
            return None
        self._process.join(_END_S)
        return self._process.exitcode

    def _start(self) -> Any:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with self._lock:
            if self._is_killed:
                raise EOFError
            process = context.Process(target=tokenize_jobs, args=(theirs,), name="loraplex-tokenizer", daemon=True)
            start_shielded(process)
            self._process = process
        theirs.close()
        self._conn = ours
        ours.send_bytes(pickle.dumps(self._serialized))
        return ours


def tokenize_jobs(conn: Connection) -> None:
    """Entry point of the process; does not return."""
    # The front end decides when it ends. When the front end dies, the pipe ends.
    begin_shielded()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    serialized: str = conn.recv()
    tokenizer = Tokenizer.from_str(serialized)
    vocabulary = Vocabulary(tokenizer)
    inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(conn, inbox), daemon=True).start()
    while True:
        job = inbox.get()
        if job.controls is None:
            conn.send(_result(tokenizer, vocabulary, job))
        else:
            conn.send(_safe_result(plain_tokenizer(serialized, job.controls), vocabulary, job))


def _read(conn: Connection, inbox: queue.SimpleQueue[Job]) -> None:
    """Reads jobs off the pipe, in a thread: so the pipe's end is seen in the middle of a text too, and ends the
    process."""
    try:
        while True:
            inbox.put(conn.recv())
    except (EOFError, OSError):
        os._exit(0)


def _safe_result(tokenizer: PlainTokenizer, vocabulary: Vocabulary, job: Job) -> array[int] | bytes:
    """The result of a job whose text has control tokens' words as plain text."""
    if job.make is None:
        return array("I", tokenizer.encode(job.text))
    if job.with_offsets:
        return job.make(vocabulary, *tokenizer.encode_with_offsets(job.text))
    return job.make(vocabulary, tokenizer.encode(job.text), ())


def _result(tokenizer: Tokenizer, vocabulary: Vocabulary, job: Job) -> array[int] | int | bytes:
    if job.make is not None and job.with_offsets:
        encoding = encoding_of(tokenizer, job.text, job.add_special_tokens, job.truncation)
        return job.make(vocabulary, encoding.ids, encoding.offsets)
    ids = encode(tokenizer, job.text, job.add_special_tokens, job.truncation)
    if job.make is not None:
        return job.make(vocabulary, ids, ())
    return array("I", ids) if len(ids) <= job.max_tokens else len(ids)
