"""How a server's command tells what it is doing: a spinner on a terminal, plain lines elsewhere, JSON lines on
request."""

from __future__ import annotations

import json
import sys
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from loraplex_proto.errors import InvalidArgument, LoraplexError


class Report:
    """Owns the spinner. Progress goes to stderr; `--json` lines go to stdout, where a supervisor reads them."""

    def __init__(self, what: str, *, as_json: bool) -> None:
        self._what = what
        self._as_json = as_json
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None

    def __enter__(self) -> Report:
        if not self._as_json and self._console.is_terminal:
            self._status = self._console.status(f"starting the {self._what}")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_spinner()

    def progress(self, text: str) -> None:
        if self._as_json:
            self._line(event="progress", text=text)
        elif self._status is not None:
            self._status.update(escape(text))
        else:
            print(f"{self._what}: {text}", file=sys.stderr, flush=True)

    def ready(self, address: str, model_id: str) -> None:
        self._stop_spinner()
        if self._as_json:
            self._line(event="ready", address=address, model=model_id)
        else:
            self._console.print(f"{self._what} ready on {address}, serving {escape(model_id)} (Ctrl-C ends it)")

    def failed(self, error: LoraplexError) -> int:
        """Says why, and returns the exit status: 2 where the command line is wrong, 1 for anything else."""
        self._stop_spinner()
        if self._as_json:
            self._line(event="failed", reason=error.reason, message=error.message)
        else:
            self._console.print(f"[red]error[/red] {escape(error.message)}", soft_wrap=True)
        return 2 if isinstance(error, InvalidArgument) else 1

    def _stop_spinner(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _line(self, **fields: str) -> None:
        print(json.dumps(fields), flush=True)
