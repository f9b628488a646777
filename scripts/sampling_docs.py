"""The table of options in docs/sampling.md, made from `SamplingParams`: `--write` it, else compare."""

from __future__ import annotations

import sys
from pathlib import Path

from loraplex_contracts.sampling import SAMPLING_OPTIONS, SamplingOption

PAGE = Path(__file__).resolve().parents[1] / "docs/sampling.md"
MARK = "<!-- table of options: made by scripts/sampling_docs.py -->\n"


def table() -> str:
    lines = ["| option | flag | values | what it does |", "|---|---|---|---|"]
    lines += [_line(option) for option in SAMPLING_OPTIONS.values()]
    return "\n".join(lines) + "\n"


def _line(option: SamplingOption) -> str:
    values = [option.rule.removeprefix("must be ")] if option.rule else []
    if option.max_entries:
        values.append(f"{option.max_entries} at most")
    flag = "--" + option.name.replace("_", "-")
    return f"| `{option.name}` | `{flag}` | {', '.join(values)} | {option.help} |"


def page(text: str) -> str:
    """The page with the table as it should be."""
    before, mark, _ = text.partition(MARK)
    return before + mark + table()


if __name__ == "__main__":
    old = PAGE.read_text()
    if "--write" in sys.argv:
        PAGE.write_text(page(old))
    elif page(old) != old:
        sys.exit("docs/sampling.md is stale: run python scripts/sampling_docs.py --write")
