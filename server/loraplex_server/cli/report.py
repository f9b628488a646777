"""Progress reports of a server command: spinner, plain lines, JSON lines, the log."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn

from loraplex_contracts.errors import LoraplexError
from loraplex_runtime.child_processes import CHECK_S
from loraplex_runtime.reports import share_of, write_report
from loraplex_runtime.shutdown import HOW_TO_HURRY, unread_output_is_lost

log = logging.getLogger("loraplex.start")

# Elsewhere than on a terminal, progress that counts is told so often, and at its end.
_COUNT_S: Final = 5.0


class _Bar(BarColumn):
    """A progress bar where there is a count, else nothing."""

    def render(self, task: Task) -> RenderableType:  # type: ignore[override]
        return "" if task.total is None else super().render(task)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raises BrokenPipeError, where Rich would end the server's process."""
        raise BrokenPipeError


class Report:
    """Reports of a server command. Owns the spinner and its bar. Progress goes to stderr; `--json` lines go to stdout,
    where a supervisor reads them. A closed stream loses the text and does no other harm."""

    def __init__(self, what: str, *, as_json: bool) -> None:
        self._what = what
        self._as_json = as_json
        self._is_logged = False
        self._console = _Console(stderr=True, highlight=False)
        self._shown: Progress | None = None
        self._counted_s = 0.0

    def use_log(self) -> None:
        """Sends messages for people to the log from here on, so that with --log-format json each line is an object."""
        self._is_logged = not self._as_json

    def __enter__(self) -> Report:
        if not (self._as_json or self._is_logged) and self._console.is_terminal:
            with unread_output_is_lost():
                columns = (SpinnerColumn(), TextColumn("{task.description}"), _Bar(bar_width=30))
                self._shown = Progress(*columns, console=self._console, transient=True)
                self._shown.add_task(f"starting the {self._what}", total=None)
                self._shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_spinner()

    def progress(self, text: str) -> None:
        share = share_of(text)
        with unread_output_is_lost():
            if self._as_json:
                write_report(event="progress", text=text)
            elif self._shown is not None:
                (task,) = self._shown.tasks
                self._shown.update(task.id, description=escape(text), completed=share or 0.0)
                task.total = None if share is None else 1.0
            elif share is not None and not self._is_due(share):
                pass
            elif self._is_logged:
                log.info("%s: %s", self._what, text)
            else:
                print(f"{self._what}: {text}", file=sys.stderr, flush=True)

    def _is_due(self, share: float) -> bool:
        now_s = time.monotonic()
        if share < 1 and now_s - self._counted_s < _COUNT_S:
            return False
        self._counted_s = now_s
        return True

    def ready(
        self,
        address: str,
        model_id: str,
        metrics_ports: Sequence[int] = (),
        http: str | None = None,
        hints: Sequence[str] = (),
    ) -> None:
        """Reports a server that is ready. `hints`: lines for a person, such as how to try it."""
        self._stop_spinner()
        if self._as_json:
            more = {} if http is None else {"http": http}
            write_report(event="ready", address=address, model=model_id, metrics_ports=list(metrics_ports), **more)
        else:
            metrics = f", metrics on {', '.join(map(str, metrics_ports))}" if metrics_ports else ""
            metrics += "" if http is None else f", HTTP on {http}"
            self._print(f"{self._what} ready on {address}, serving {model_id}{metrics} (Ctrl-C ends it)")
            for hint in hints:
                self._print(hint)

    async def stay_alive(self) -> None:
        """Tells a supervisor every few seconds that the event loop runs. Ends when cancelled."""
        while self._as_json:
            write_report(event="alive")
            await asyncio.sleep(CHECK_S)

    def draining(self, num_requests: int) -> None:
        """Says so in the log: a print would wait for a reader that has stopped, and requests that run with it."""
        if self._as_json:
            write_report(event="draining")
        else:
            what = "1 request" if num_requests == 1 else f"{num_requests} requests"
            log.info("%s is draining: %s under way (%s)", self._what, what, HOW_TO_HURRY)

    def failed(self, error: LoraplexError) -> int:
        """Prints the reason and returns the exit status."""
        self._stop_spinner()
        if self._as_json:
            write_report(event="failed", reason=error.reason, message=error.message)
        elif self._is_logged:
            log.error("%s", error.message, extra={"reason": error.reason})
        else:
            with unread_output_is_lost():
                self._console.print(f"[red]error:[/red] {escape(error.message)}", soft_wrap=True)
        return error.exit_code

    def _stop_spinner(self) -> None:
        if self._shown is not None:
            with unread_output_is_lost():
                self._shown.stop()
            self._shown = None

    def _print(self, text: str) -> None:
        if self._is_logged:
            log.info("%s", text)
            return
        with unread_output_is_lost():
            self._console.print(escape(text), soft_wrap=True)
