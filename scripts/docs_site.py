"""MkDocs hook: pages from outside docs/, the Python reference, links for named paths.

Pages name files of the checkout in backticks (`docs/http.md`). On the site such a name is a link where its page is
there too.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[1]
# Page of the site: file of the checkout.
FROM_OUTSIDE: Final = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md",
    "log.md": "benchmarks/LOG.md",
    "changelog.md": "CHANGELOG.md",
}
PAGES: Final = {source: page for page, source in FROM_OUTSIDE.items()} | {
    path.relative_to(ROOT).as_posix(): path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")
}
SECTIONS: Final = {
    "Clients": ("loraplex.client", "loraplex.aio", "loraplex.chat"),
    "Functions": ("loraplex.options",),
    "Types": ("loraplex.types",),
    "Errors": ("loraplex_contracts.errors",),
}
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PATH_IN_CODE = re.compile(r"(?<!\[)`([\w./-]+\.md|docs/adr/)`(?!\])")
LINK = re.compile(r"(!?)\[([^]]*)\]\((?!\w+:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for page, source in FROM_OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "python.md", content=python_reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = FROM_OUTSIDE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    parts: list[str] = []
    end = 0
    for fence in FENCE.finditer(markdown):
        parts += [linked(markdown[end : fence.start()], source, page.file.src_uri), fence[0]]
        end = fence.end()
    return "".join([*parts, linked(markdown[end:], source, page.file.src_uri)])


def linked(text: str, source: str, page: str) -> str:
    """Text of the file `source`, with the links that it has as `page` of the site."""
    folder, here = posixpath.dirname(source), posixpath.dirname(page)

    def moved(found: re.Match[str]) -> str:
        image, label, target, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(folder, target))
        to = PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
        return f"{image}[{label}]({posixpath.relpath(to, here or '.')}{anchor or ''})" if to else label

    def named(found: re.Match[str]) -> str:
        target = "docs/adr/README.md" if found[1] == "docs/adr/" else found[1]
        to = PAGES.get(target)
        return found[0] if to is None or to == page else f"[{found[0]}]({posixpath.relpath(to, here or '.')})"

    return PATH_IN_CODE.sub(named, LINK.sub(moved, text))


def python_reference() -> str:
    """Sections for the names that the package `loraplex` exports, by the module that has them."""
    tree = ast.parse((ROOT / "client/loraplex/__init__.py").read_text(encoding="utf-8"))
    parts = ["# Python reference\n\nWhat `loraplex` exports; [the guide](sdk.md) says how to use it.\n"]
    for heading, modules in SECTIONS.items():
        parts.append(f"\n## {heading}\n")
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                parts += [f"\n::: loraplex.{alias.name}\n" for alias in node.names]
    return "".join(parts)
