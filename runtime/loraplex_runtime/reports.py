"""Reports of a server's process to its supervisor, and progress that counts."""

from __future__ import annotations

import json
import re
import select
import sys
import time
from collections.abc import Callable
from typing import Any, Final, TextIO

from loraplex_contracts.errors import FailedPrecondition, LoraplexError, by_reason
from loraplex_runtime.shutdown import unread_output_is_lost

Progress = Callable[[str], None]

_COUNT: Final = re.compile(r": ([\d.]+) of ([\d.]+)\b")
_PAUSE_S: Final = 0.2


def no_progress(text: str) -> None:
    """Tells nobody."""


def counted(progress: Progress, what: str, total: float, unit: str) -> Callable[[float], None]:
    """A function that is told how much is done, and reports it a few times a second: "reading weights: 3 of 12
    tensors"."""
    last_s = 0.0

    def tell(done: float) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done >= total or now_s - last_s >= _PAUSE_S:
            last_s = now_s
            progress(f"{what}: {done:.4g} of {total:.4g} {unit}")

    return tell


def share_of(text: str) -> float | None:
    """The share that is done, 0 to 1, where a text of progress counts."""
    found = _COUNT.search(text)
    total = float(found[2]) if found else 0.0
    return min(1.0, float(found[1]) / total) if found and total > 0 else None


def report_of(line: bytes) -> dict[str, Any]:
    """A server's report: `event` is progress, alive, ready, draining or failed. Empty for anything else."""
    try:
        message: Any = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def write_report(**fields: str | list[int]) -> None:
    """Prints a report, one line. Output that nobody reads is lost, also where a full pipe would wait for its reader."""
    with unread_output_is_lost():
        if _has_room(sys.stdout):
            print(json.dumps(fields), flush=True)


def _has_room(stream: TextIO) -> bool:
    """True if a line may be written without waiting; a pipe that takes anything takes 4 KiB."""
    try:
        return bool(select.select([], [stream], [], 0)[1])
    except (OSError, ValueError):  # no descriptor, or one that is closed
        return True


def failure_of(report: dict[str, Any]) -> LoraplexError:
    """The error that a report of the event `failed` tells."""
    kind = by_reason().get(report["reason"], FailedPrecondition)
    return kind(report["message"])
