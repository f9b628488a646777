"""Plain tables for a terminal, and the results as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for a terminal: numbers to the right, words to the left."""
    cells = [[_cell(value) for value in row] for row in rows]
    is_number = [all(isinstance(row[i], int | float | None) for row in rows) for i in range(len(columns))]
    widths = [max(len(columns[i]), *(len(row[i]) for row in cells), 0) for i in range(len(columns))]
    lines = [title, "  ".join(_pad(columns[i], widths[i], is_number[i]) for i in range(len(columns)))]
    lines += ["  ".join(_pad(row[i], widths[i], is_number[i]) for i in range(len(columns))) for row in cells]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _pad(text: str, width: int, is_number: bool) -> str:
    return text.rjust(width) if is_number else text.ljust(width)


def _cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
        case _:
            return str(value)


def write_json(folder: Path, name: str, values: Mapping[str, Any]) -> None:
    """Replaces a file at one go: what is there is always whole."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{name}.part"
    unfinished.write_text(json.dumps(values, indent=1) + "\n")
    unfinished.replace(folder / name)
