"""Reports of a server's process to its supervisor: JSON lines on standard output."""

from __future__ import annotations

import json
from typing import Any

from loraplex_contracts.errors import FailedPrecondition, LoraplexError, by_reason


def report_of(line: bytes) -> dict[str, Any]:
    """A server's report: `event` is progress, ready, draining or failed. Empty for anything else that it prints."""
    try:
        message: Any = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def failure_of(report: dict[str, Any]) -> LoraplexError:
    """The error that a report of the event `failed` tells."""
    kind = by_reason().get(report["reason"], FailedPrecondition)
    return kind(report["message"])
