"""Tables of README.md and LOG.md equal the committed results."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tables import PAGES, PROVENANCE, RESULTS, with_tables

ROOT = Path(__file__).resolve().parents[3]


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


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone of the repository")
def test_results_name_commits_of_this_repository() -> None:
    if (
        subprocess.run(
            ["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "true"
    ):
        pytest.skip("a shallow clone has no old commits")
    named = {json.loads(path.read_text(encoding="utf-8"))["commit"] for path in RESULTS.glob("*.json")}
    known = {
        one for one in named if subprocess.run(["git", "cat-file", "-e", one], cwd=ROOT, check=False).returncode == 0
    }
    assert named == known
