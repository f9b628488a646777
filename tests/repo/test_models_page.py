"""Pages and tables of docs/ that scripts make equal what those make now."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("page", "script_name"),
    [
        ("models", "models_page"),
        ("adapters", "adapters_page"),
        ("metrics", "metrics_page"),
        ("wire", "wire_page"),
    ],
)
def test_the_page_is_what_the_script_makes(page: str, script_name: str) -> None:
    spec = importlib.util.spec_from_file_location(script_name, ROOT / f"scripts/{script_name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (ROOT / f"docs/{page}.md").read_text() == script.page(), f"run python scripts/{script_name}.py"
