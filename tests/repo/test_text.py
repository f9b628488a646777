"""What the repository's own text must keep to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked(suffix: str = "") -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    names = [name for name in listing.decode().split("\0") if name.endswith(suffix)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_the_architecture_page_names_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    for folder in ("contracts", "proto", "runtime", "client", "router", "adapters", "server", "training", "demo"):
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
