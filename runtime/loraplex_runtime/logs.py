"""Log lines of a process: plain or JSON, with request ids."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, Literal, TextIO

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.log_handler import UnblockedHandler
from loraplex_runtime.request_record import log as request_log

LogStyle = Literal["plain", "json"]
LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_request_id: ContextVar[str] = ContextVar("loraplex_request_id", default="")

# Attributes that every record has; others came with `extra=`.
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id"}


def bind_request_id(request_id: str) -> None:
    """Log lines of this task, and of tasks that it starts, carry the id from here on. `extra={"request_id": ...}` on a
    single line goes before it."""
    _request_id.set(request_id)


def _request_id_of(record: logging.LogRecord) -> str:
    return getattr(record, "request_id", "") or _request_id.get()


class PlainFormatter(logging.Formatter):
    """One line for a person: time, level, logger, message, request id. A message cannot forge another line."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = (
            f"{seconds}.{int(record.msecs):03d} {record.levelname:<7} {record.name}: {_one_line(record.getMessage())}"
        )
        if request_id := _request_id_of(record):
            line += f" request_id={_one_line(request_id)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line, exceptions included."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _request_id_of(record):
            line["request_id"] = request_id
        # Libraries (Ray) mark what is theirs with an underscore.
        line |= {key: one for key, one in vars(record).items() if key not in _STANDARD and not key.startswith("_")}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class RefusedConnections(logging.Filter):
    """Says once in `EVERY_S` that a port cannot accept connections, in one line.

    asyncio tries as often as the port's backlog is long, and logs a traceback each time: megabytes a second in a
    process that is out of file descriptors.
    """

    EVERY_S: Final = 10.0
    _WHAT: Final = "socket.accept() out of system resource"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._again_at_s = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith(self._WHAT):
            return True
        if (now_s := self._clock()) < self._again_at_s:
            return False
        self._again_at_s = now_s + self.EVERY_S
        why = record.exc_info[1] if record.exc_info else None
        record.msg, record.args = "connections cannot be accepted: %s; they wait", (why or self._WHAT,)
        record.exc_info = record.exc_text = None
        return True


def _one_line(text: str) -> str:
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def setup_logging(
    level: str = "info", style: LogStyle = "plain", stream: TextIO | None = None, *, requests: bool = True
) -> None:
    """Sends every logger's lines to standard error, and nowhere else. For commands; a library never calls this.
    `requests`: a line for each that ends."""
    if level not in LEVELS:
        raise InvalidArgument(f"--log-level takes {', '.join(LEVELS)}, not {level!a}", field="--log-level")
    if style not in ("plain", "json"):
        raise InvalidArgument(f"--log-format takes plain or json, not {style!a}", field="--log-format")
    handler = _handler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else PlainFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    asyncio_log = logging.getLogger("asyncio")
    asyncio_log.filters[:] = [
        *(one for one in asyncio_log.filters if not isinstance(one, RefusedConnections)),
        RefusedConnections(),
    ]
    request_log.setLevel(logging.NOTSET if requests else logging.CRITICAL)


def _handler(stream: TextIO) -> logging.Handler:
    try:
        return UnblockedHandler(stream.fileno())
    except (AttributeError, OSError, ValueError):  # no descriptor: closed, or text in memory
        return logging.StreamHandler(stream)
