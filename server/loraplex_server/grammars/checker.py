"""Process that compiles new grammars first, but for simple ones.

A grammar may take the library minutes, or more than the stack. Here that costs its own request alone: the process has
bounds on time and memory, and a smaller stack than the engine. It starts with the first grammar that is not simple.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Collection
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_contracts.request import Grammar
from loraplex_server.grammars.matcher import CompileLimit, Compiler

COMPILE_S: Final = 2.0
START_S: Final = 60.0
MEMORY_BYTES: Final = 4 << 30
STACK_BYTES: Final = 2 << 20  # a quarter of the engine's


class Checker:
    """The engine's side. `check` is for one thread at a time."""

    def __init__(self, serialized: str, num_logits: int, eos_token_ids: Collection[int]) -> None:
        self._args = serialized, num_logits, frozenset(eos_token_ids)
        self._process: subprocess.Popen[bytes] | None = None
        self._conn: Any = None

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidArgument for a grammar that cannot be compiled, CompileLimit for one that comes to a bound."""
        try:
            conn = self._conn or self._start()
            conn.send(grammar)
            if not conn.poll(COMPILE_S):
                self.close()
                raise CompileLimit(f"it takes more than {COMPILE_S:g} s to compile; make it smaller or simpler")
            error: LoraplexError | None = conn.recv()
        except (EOFError, OSError):
            self.close()
            raise CompileLimit("it cannot be compiled within the bounds of memory; make it simpler") from None
        if error is not None:
            raise error

    def close(self) -> None:
        """Kills the process. From any thread: a `check` under way refuses its grammar."""
        process, conn, self._process, self._conn = self._process, self._conn, None, None
        if process is not None:
            process.kill()
            process.wait()
            conn.close()

    def _start(self) -> Any:
        conn, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "loraplex_server.grammars.checker", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        self._conn = conn
        conn.send(self._args)
        if not conn.poll(START_S):
            raise EOFError
        conn.recv()
        return conn


def main(fd: int) -> None:
    """Ends with the other end of the pipe, in the middle of a grammar too."""
    parent = os.getppid()
    conn: Any = Connection(fd)
    compiler = Compiler(*conn.recv())
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    conn.send(None)
    os.nice(5)
    threading.stack_size(STACK_BYTES)
    while True:
        try:
            grammar = conn.recv()
        except EOFError:
            os._exit(0)
        thread = threading.Thread(target=_answer, args=(conn, compiler, grammar))
        thread.start()
        while thread.is_alive():
            thread.join(0.5)
            if os.getppid() != parent:
                os._exit(0)


def _answer(conn: Any, compiler: Compiler, grammar: Grammar) -> None:
    try:
        matcher = compiler.compile(grammar).copy()
        matcher.num_legal(matcher.forced())
    except InvalidArgument as error:
        conn.send(error)
    else:
        conn.send(None)


if __name__ == "__main__":
    main(int(sys.argv[1]))
