"""Shutdown of a process: signals, exit, and output that nobody reads any more.

The first SIGTERM, SIGINT or SIGHUP asks a server to drain, the second to end at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, NoReturn

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HOW_TO_HURRY: Final = "Ctrl-C again ends it at once"


class Ending:
    """Requests to end. From `listen` on it owns the process's handlers of the signals; without, the caller calls
    `ask`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._at_once = asyncio.Event()
        self._first: signal.Signals | None = None

    def listen(self) -> None:
        for number in SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: a closed terminal is not to end it
            asyncio.get_running_loop().add_signal_handler(number, self.ask, number)

    def ask(self, number: signal.Signals | None = None) -> None:
        if not self.asked.is_set():
            self._first = number
            self.asked.set()
        elif number is not signal.SIGHUP:  # kernel and shell both send one when a terminal closes
            self._at_once.set()

    @property
    def status(self) -> int:
        """The exit status of a process that was asked before there was anything to drain."""
        return 128 + (self._first or signal.SIGINT)

    def announce_s(self, configured_s: float) -> float:
        """How long to say NOT_SERVING before draining; 0 after Ctrl-C, where no balancer has to be told first."""
        return configured_s if self._first in (signal.SIGTERM, signal.SIGHUP) else 0.0

    async def drain(self, gently: Coroutine[Any, Any, None], at_once: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `gently`; when asked a second time, before or meanwhile, `at_once` in its place."""
        draining = asyncio.ensure_future(gently)
        hurrying = asyncio.ensure_future(self._at_once.wait())
        try:
            await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                return draining.result()
        finally:
            hurrying.cancel()
            draining.cancel()
            await asyncio.gather(draining, hurrying, return_exceptions=True)
        return await at_once()


def exit_at_once(code: int) -> NoReturn:
    """Ends a process that has closed everything. Tearing down an interpreter full of native threads takes seconds."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or missing
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def unread_output_is_lost() -> Generator[None]:
    """For a block that prints: a closed pipe or terminal raises nothing in here, nor when the process ends."""
    try:
        yield
    except OSError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()  # of text that could not be written, which would raise again at the end
            except OSError:
                with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())
            except (AttributeError, ValueError):
                continue  # the stream is missing or closed
