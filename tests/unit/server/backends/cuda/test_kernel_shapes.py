"""Launch options of the Triton kernels, without defaults that differ between releases."""

from __future__ import annotations

import ast
from pathlib import Path

from loraplex_server.backends import cuda

SOURCES = sorted(Path(str(cuda.__file__)).parent.rglob("*.py"))


def launches() -> dict[str, set[str | None]]:
    """Calls of the form `kernel[(4, 2)](...)`, by place, with the names of their arguments."""
    return {
        f"{source.name}:{node.lineno}": {keyword.arg for keyword in node.keywords}
        for source in SOURCES
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Call)
        if isinstance(node.func, ast.Subscript) and isinstance(node.func.slice, ast.Tuple)
    }


def test_every_launch_says_whether_products_are_rounded_before_sums() -> None:
    found = launches()
    assert len(found) >= 11
    assert not [place for place, names in found.items() if "enable_fp_fusion" not in names]
