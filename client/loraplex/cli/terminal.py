"""Output of the commands, on a terminal and elsewhere.

stdout carries only the answer, so that it can be piped; remarks about it go to stderr.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Final

# Control characters that could move the cursor or retitle the window: a model's text is not trusted.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def is_terminal() -> bool:
    return sys.stdout.isatty()


def write(text: str) -> None:
    """Writes a model's text to stdout at once: unchanged into a pipe, without control characters on a terminal."""
    sys.stdout.write(without_control(text) if is_terminal() else text)
    sys.stdout.flush()


def without_control(text: str) -> str:
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def write_json(value: Any, *, is_line: bool = False) -> None:
    """One JSON document, bytes as lists of numbers; `is_line` keeps it on one line."""
    indent = 2 if is_terminal() and not is_line else None
    sys.stdout.write(json.dumps(value, indent=indent, default=list) + "\n")
    sys.stdout.flush()


def write_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; lines of tab-separated values elsewhere. Both begin with the columns' names."""
    if not is_terminal():
        for row in (columns, *rows):
            sys.stdout.write("\t".join(cell.replace("\t", " ").replace("\n", " ") for cell in row) + "\n")
        return
    from rich.console import Console  # late: most runs print no table
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(without_control(cell)) for cell in row))
    Console().print(table)


@contextmanager
def progress(text: str) -> Generator[None, None, None]:
    """A spinner on stderr while the block runs; a plain line where stderr is not a terminal."""
    if not sys.stderr.isatty():
        sys.stderr.write(f"{text}\n")
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(without_control(text))):
        yield


def remark(text: str) -> None:
    """Prints a dimmed line on stderr, on a terminal only."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\x1b[2m{without_control(text)}\x1b[0m\n")
        sys.stderr.flush()


def complain(message: str) -> None:
    """Prints an error on stderr, as one line."""
    text = without_control(" ".join(message.split()))
    label = "\x1b[31merror:\x1b[0m" if sys.stderr.isatty() else "error:"
    sys.stderr.write(f"{label} {text}\n")
    sys.stderr.flush()
