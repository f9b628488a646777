"""Rules for the repository's own text: first lines, links, line lengths."""

from __future__ import annotations

import ast
import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("contracts", "proto", "runtime", "client", "router", "adapters", "server", "training", "demo", "fleet")
THIRD_PARTY = "tests/conformance/third_party/"
MAX_FIRST_LINE_WORDS = 14
NOT_A_TERM = {"what", "who", "how", "that", "whether", "where"}

# Pages that name paths, each of which must exist. Short paths: `server/x.py` is `server/loraplex_server/x.py`.
MAPS = ("docs/architecture.md", "docs/glossary.md", "CONTRIBUTING.md", "README.md")
PROSE = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/", "examples/", "benchmarks/LOG.md")
MAX_PROSE_COLUMNS = 120


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
        if "_pb2" not in (name := name_of(path)) and not name.startswith(THIRD_PARTY)
        if (fault := first_line_fault(path.read_text(encoding="utf-8")))
    }
    assert not faults


def test_files_of_others_are_as_they_were() -> None:
    """Each folder says in ORIGIN where its files are from, with the SHA-256 of each."""
    for origin in (ROOT / THIRD_PARTY).glob("*/ORIGIN"):
        rows = re.findall(r"^([0-9a-f]{64})  (\S+)  ", origin.read_text(), re.MULTILINE)
        assert {name for _, name in rows} | {"ORIGIN"} == {
            path.name for path in origin.parent.iterdir() if path.name != "__pycache__"
        }
        for digest, name in rows:
            assert hashlib.sha256((origin.parent / name).read_bytes()).hexdigest() == digest, name


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


def full_path(named: str) -> Path:
    """The path of a file that a map names, with the package's folder that maps leave out."""
    folder, _, rest = named.partition("/")
    package = "loraplex" if folder == "client" else f"loraplex_{folder}"
    return ROOT / named if (ROOT / named).exists() else ROOT / folder / package / rest


@pytest.mark.parametrize("page", MAPS)
def test_every_path_that_a_map_names_exists(page: str) -> None:
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    named = set(re.findall(r"`([\w.-]+/[\w./-]+)`", (ROOT / page).read_text(encoding="utf-8")))
    paths = {path for path in named if path.partition("/")[0] in folders}
    assert not sorted(path for path in paths if not full_path(path).exists())


def test_a_map_names_functions_where_they_are() -> None:
    """Each module that the page names as "`name` in `path`" or "`path` (`name`" has that name."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = {(path, name) for name, path in re.findall(r"`([\w.]+)` in `([\w/]+/\w+\.py)`", page)}
    named |= set(re.findall(r"`([\w/]+/\w+\.py)` \(`(\w[\w.]*)`", page))
    assert len(named) > 20
    texts = {path: full_path(path).read_text(encoding="utf-8") for path, _ in named}
    parts = [(path, part) for path, name in named if not name.endswith(".py") for part in name.split(".")]
    assert not [(path, part) for path, part in parts if not re.search(rf"\b{part}\b", texts[path])]


def test_glossary_terms_stand_once_in_order() -> None:
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    terms = [line.split("|")[1].strip() for line in lines if line.startswith("| ")][1:]
    assert len(terms) > 30
    assert terms == sorted(set(terms))


def test_glossary_terms_are_words_of_their_modules() -> None:
    """A word of the term, or its stem, is in the text of the module that the glossary names."""
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:4] for line in lines if line.startswith("| ")][1:]
    texts = {where: full_path(where.strip(" `")).read_text(encoding="utf-8").lower() for _, _, where in rows}
    assert not [term for term, _, where in rows if not any(word[:6] in texts[where] for word in term.split())]


def test_prose_is_narrow() -> None:
    """Tables and code blocks may be wider."""
    wide: list[str] = []
    for path in tracked(".md"):
        if not name_of(path).startswith(PROSE):
            continue
        is_code = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            is_code ^= line.startswith("```")
            if len(line) > MAX_PROSE_COLUMNS and not is_code and not line.startswith(("|", "<!--")):
                wide.append(f"{name_of(path)}:{number}")
    assert not wide
