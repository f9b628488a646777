"""Markdown pages of the repository: code blocks, links, anchors."""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_HEREDOC = re.compile(r"^.*<<(\w+)\n.*?^\1$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str  # "": commands of a shell, or a picture in letters
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_picture(self) -> bool:
        return not self.language and re.search("[─►▲]", self.text) is not None

    @property
    def commands(self) -> list[list[str]]:
        """Commands of a shell block, as words, without comments and without what goes into files."""
        text = _HEREDOC.sub("", self.text).replace("\\\n", " ")
        return [words for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def pages() -> list[Path]:
    """Every page that git knows, of others' projects none."""
    listing = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, check=True, capture_output=True).stdout
    paths = [ROOT / name for name in listing.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and "third_party" not in path.parts]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = _FENCE.finditer(text)
    return [Block(name_of(path), text.count("\n", 0, one.start()) + 1, one[1], one[2]) for one in found]


def prose(path: Path) -> str:
    """The page without fenced blocks."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def code(path: Path) -> list[str]:
    """The texts between backticks in the page's prose."""
    return [" ".join(one[2].split()) for one in _CODE.finditer(prose(path))]


def links(path: Path) -> list[str]:
    return _LINK.findall(_CODE.sub("`", prose(path)))


def anchors(path: Path) -> set[str]:
    """Anchors of the page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in texts}
