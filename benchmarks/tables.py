"""Tables of docs/benchmarks.md and LOG.md, made from benchmarks/results/*.json.

    python benchmarks/tables.py    # rewrites the tables between the markers in both files

A marker is `<!-- table: NAME -->`, or `<!-- table: NAME; COLUMN; COLUMN -->` for some of the columns. A file of results
has `columns` and `rows` beside the provenance that `results.py` describes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "docs/benchmarks.md", ROOT / "benchmarks/LOG.md")
PROVENANCE = ("title", "date", "commit", "command", "machine", "instruction_sets", "versions")
_MARKED = re.compile(r"<!-- table: (?P<spec>[^\n]+?) -->\n.*?<!-- end of table -->", re.DOTALL)


def with_tables(page: str) -> str:
    """The page with every marked table made anew."""
    return _MARKED.sub(lambda match: _marked(match["spec"]), page)


def _marked(spec: str) -> str:
    name, *columns = (part.strip() for part in spec.split(";"))
    return f"<!-- table: {spec} -->\n{table(name, columns)}\n<!-- end of table -->"


def table(name: str, columns: list[str]) -> str:
    """A Markdown table of the results `name`; all columns if none is named."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    chosen = [found["columns"].index(column) for column in columns or found["columns"]]
    lines = [[found["columns"][idx] for idx in chosen], ["---"] * len(chosen)]
    lines += [[str(row[idx]) for idx in chosen] for row in found["rows"]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
