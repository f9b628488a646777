"""Rules for the repository's own text: first lines, links, line lengths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("contracts", "proto", "runtime", "client", "router", "adapters", "server", "training", "demo")
MAX_FIRST_LINE_WORDS = 14
NOT_A_TERM = {"what", "who", "how", "that", "whether", "where"}
# Paths whose first lines do not follow the rule yet. Only ever shorten this list.
NOT_YET_PLAIN = (
    *("contracts/", "proto/", "runtime/", "client/", "router/", "adapters/", "server/", "benchmarks/"),
    *("tests/conftest.py", "tests/unit/", "tests/support/", "tests/integration/", "tests/property/", "tests/parity/"),
    *("tests/repo/", "tests/gpu/", "scripts/gpu_check.py", "hatch_build.py"),
)


def tracked(suffix: str = "") -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    names = [name for name in listing.decode().split("\0") if name.endswith(suffix)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def first_line_fault(source: str) -> str:
    """Empty for a module whose docstring begins with a short line that names a thing."""
    tree = ast.parse(source)
    if not tree.body:
        return ""
    words = (ast.get_docstring(tree) or "").partition("\n")[0].split()
    if not words:
        return "no docstring"
    if len(words) > MAX_FIRST_LINE_WORDS:
        return f"{len(words)} words, of {MAX_FIRST_LINE_WORDS} at most"
    if words[0].strip(",:").lower() in NOT_A_TERM:
        return f"begins with {words[0]}; name a thing of the field"
    return ""


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("", ""),
        ('"""LRU eviction of adapters."""', ""),
        ("x = 1", "no docstring"),
        ('"""What makes room."""', "begins with What"),
        (f'"""{"word " * 15}"""', "15 words"),
    ],
)
def test_a_first_line_is_judged(source: str, fault: str) -> None:
    assert first_line_fault(source).startswith(fault)
    assert bool(first_line_fault(source)) == bool(fault)


def test_every_module_begins_with_a_term_of_the_field() -> None:
    faults = {
        name: fault
        for path in tracked(".py")
        if "_pb2" not in (name := name_of(path)) and not name.startswith(NOT_YET_PLAIN)
        if (fault := first_line_fault(path.read_text(encoding="utf-8")))
    }
    assert not faults


def test_the_architecture_page_names_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    for folder in PACKAGES:
        for path in (ROOT / folder).glob("*/*/__init__.py"):
            name = path.parent.name
            assert f"`{name}/`" in page or f"{name}/" in page, f"docs/architecture.md does not mention {path.parent}"


def test_readme_commands_are_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    readme = (ROOT / "README.md").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme
        assert f"\n{target}:" in makefile


def test_the_table_of_sampling_options_is_that_of_the_source() -> None:
    subprocess.run([sys.executable, ROOT / "scripts/sampling_docs.py"], check=True)


def test_decision_records_are_numbered_dated_and_listed() -> None:
    index = (ROOT / "docs/adr/README.md").read_text()
    for number, path in enumerate(sorted((ROOT / "docs/adr").glob("0*.md")), start=1):
        assert path.name.startswith(f"{number:04}-")
        title, _, date, status = path.read_text().splitlines()[:4]
        assert re.fullmatch(r"Date: \d{4}-\d\d-\d\d", date), path.name
        assert status.startswith("Status: "), path.name
        row = f"| [{number}]({path.name}) | {title.partition('. ')[2]} | {date[6:]} | {status[8:]} |"
        assert row in index, f"docs/adr/README.md lacks: {row}"
