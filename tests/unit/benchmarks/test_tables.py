"""Tables of README.md and LOG.md equal the committed results."""

from __future__ import annotations

import json

from tables import PAGES, PROVENANCE, RESULTS, with_tables


def test_the_committed_tables_are_those_of_the_data() -> None:
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        assert "<!-- table: " in page
        assert page == with_tables(page), f"run python benchmarks/tables.py: {path.name} differs"


def test_every_result_says_where_it_comes_from_and_is_shown() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert all(found[name] for name in PROVENANCE), path.name
        assert {len(row) for row in found["rows"]} == {len(found["columns"])}, path.name
        assert f"<!-- table: {path.stem}" in pages, path.name
