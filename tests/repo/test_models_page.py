"""docs/models.md equals the tables of the tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "scripts/models_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (ROOT / "docs/models.md").read_text() == script.page(), "run python scripts/models_page.py"
