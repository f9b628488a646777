"""Progress reports of a server command: spinner, plain lines, JSON lines, the log."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from loraplex_contracts.errors import LoraplexError
from loraplex_runtime.shutdown import HOW_TO_HURRY, unread_output_is_lost

log = logging.getLogger("loraplex.start")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would end the server's process."""
        raise BrokenPipeError


class Report:
    """Owns the spinner. Progress goes to stderr; `--json` lines go to stdout, where a supervisor reads them. A
    closed stream loses the text and does no other harm."""

    def __init__(self, what: str, *, as_json: bool) -> None:
        self._what = what
        self._as_json = as_json
        self._is_logged = False
        self._console = _Console(stderr=True, highlight=False)
        self._status: Status | None = None

    def use_log(self) -> None:
        """Sends messages for people to the log from here on, so that with --log-format json each line is an object."""
        self._is_logged = not self._as_json

    def __enter__(self) -> Report:
        if not (self._as_json or self._is_logged) and self._console.is_terminal:
            with unread_output_is_lost():
                self._status = self._console.status(f"starting the {self._what}")
                self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_spinner()

    def progress(self, text: str) -> None:
        with unread_output_is_lost():
            if self._as_json:
                self._line(event="progress", text=text)
            elif self._is_logged:
                log.info("%s: %s", self._what, text)
            elif self._status is not None:
                self._status.update(escape(text))
            else:
                print(f"{self._what}: {text}", file=sys.stderr, flush=True)

    def ready(self, address: str, model_id: str, metrics_ports: Sequence[int] = (), http: str | None = None) -> None:
        self._stop_spinner()
        if self._as_json:
            more = {} if http is None else {"http": http}
            self._line(event="ready", address=address, model=model_id, metrics_ports=list(metrics_ports), **more)
        else:
            metrics = f", metrics on {', '.join(map(str, metrics_ports))}" if metrics_ports else ""
            metrics += "" if http is None else f", HTTP on {http}"
            self._print(f"{self._what} ready on {address}, serving {model_id}{metrics} (Ctrl-C ends it)")

    def draining(self, num_requests: int) -> None:
        if self._as_json:
            self._line(event="draining")
        else:
            what = "1 request" if num_requests == 1 else f"{num_requests} requests"
            self._print(f"{self._what} is draining: {what} under way ({HOW_TO_HURRY})")

    def failed(self, error: LoraplexError) -> int:
        """Prints the reason and returns the exit status."""
        self._stop_spinner()
        if self._as_json:
            self._line(event="failed", reason=error.reason, message=error.message)
        elif self._is_logged:
            log.error("%s", error.message, extra={"reason": error.reason})
        else:
            with unread_output_is_lost():
                self._console.print(f"[red]error:[/red] {escape(error.message)}", soft_wrap=True)
        return error.exit_code

    def _stop_spinner(self) -> None:
        if self._status is not None:
            with unread_output_is_lost():
                self._status.stop()
            self._status = None

    def _print(self, text: str) -> None:
        if self._is_logged:
            log.info("%s", text)
            return
        with unread_output_is_lost():
            self._console.print(escape(text), soft_wrap=True)

    def _line(self, **fields: str | list[int]) -> None:
        with unread_output_is_lost():
            print(json.dumps(fields), flush=True)
