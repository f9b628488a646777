"""Pages of the repository: links, commands, code and the table of features."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from support.command_lines import check_arguments, command_of
from support.documents import ROOT, Block, anchors, blocks, code, links, name_of, pages

from loraplex import Grammar
from loraplex.cli.main import KNOWN

LOG = "benchmarks/LOG.md"  # speaks of flags and files of its time, as the records of decisions do
PAGES = [path for path in pages() if name_of(path) != LOG and not name_of(path).startswith("docs/adr/0")]
BLOCKS = [block for path in PAGES for block in blocks(path)]
COMMANDS = [
    (block.name, words) for block in BLOCKS if not block.language and not block.is_picture for words in block.commands
]
# Commands of others, which are not looked into.
OTHERS = {"pip", "curl", "uvx", "pipx", "cat", ".", "kubectl", "docker", "echo", "mkdir", "cp", "python3"}


def test_there_is_something_to_check() -> None:
    assert len(PAGES) > 30
    assert len(BLOCKS) > 35
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("page", [path for path in pages() if links(path)], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken: list[str] = []
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            is_well_formed = parts.scheme == "https" and "." in (parts.hostname or "") and not parts.username
            broken += [] if is_well_formed else [link]
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        if not target.exists() or (parts.fragment and parts.fragment not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_on_the_site() -> None:
    text = re.sub(r"!!python\S+", "", (ROOT / "mkdocs.yml").read_text())
    nav: list[Any] = yaml.safe_load(text)["nav"]
    entries = [
        page for section in nav for value in section.values() for page in ([value] if isinstance(value, str) else value)
    ]
    listed = {page if isinstance(page, str) else next(iter(page.values())) for page in entries}
    assert {path.name for path in ROOT.glob("docs/*.md")} <= listed


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language], ids=lambda one: one.name)
def test_a_block_is_of_its_language(block: Block) -> None:
    parse = {
        "python": ast.parse,
        "json": json.loads,
        "toml": tomllib.loads,
        "yaml": yaml.safe_load,
        **dict.fromkeys(("nginx", "haproxy"), str.strip),  # tests/integration/test_balancers.py runs them
    }[block.language]
    assert parse(block.text)


@pytest.mark.parametrize(("block", "words"), COMMANDS)
def test_a_command_is_one(block: str, words: list[str]) -> None:
    name = words[0]
    if name == "loraplex":
        check_arguments(words[1:])
    elif name == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif name == "python" and words[1] not in ("-m", "-c"):
        script = (ROOT / words[1]).read_text()
        flags = [word for word in words if word.startswith("--")]
        assert not [flag for flag in flags if f'"{flag}"' not in script]
    elif not re.match(r"\w+=", name):  # NAME=$(...)
        assert name in OTHERS | {"python"}, f"{block}: {' '.join(words)}"


@functools.cache
def flags_of(command: str) -> frozenset[str]:
    """Flags of a command and of those below it."""
    found: set[str] = set()
    waiting = [command_of(command)]
    while waiting:
        one = waiting.pop()
        found |= {flag for parameter in one.params for flag in (*parameter.opts, *parameter.secondary_opts)}
        waiting += list(getattr(one, "commands", {}).values())
    return frozenset(found | {"--help"})


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_prose_have_their_flags(page: Path) -> None:
    wrong: list[str] = []
    for text in code(page):
        found = re.fullmatch(r"loraplex ([a-z][\w-]*)\b(.*)", text)
        if found is None:
            continue
        flags = re.findall(r"(?<![\w-])--[a-z][\w-]*", found[2])
        allowed = flags_of(found[1]) if found[1] in KNOWN else frozenset[str]()
        if found[1] == "config":  # takes those of the command that it is asked about
            allowed |= flags_of("serve")
        if found[1] not in KNOWN or set(flags) - allowed:
            wrong.append(text)
    assert not wrong


def test_each_kind_of_grammar_is_told_with_its_flag() -> None:
    """By the table of the page, which has a kind in the first cell and flags of `generate` in the last."""
    rows = re.findall(r"^\| `(\w+)` \|.* \|(.*)\|$", (ROOT / "docs/grammars.md").read_text(), re.MULTILINE)
    told = {kind: re.findall(r"--[a-z][\w-]*", last) for kind, last in rows[1:]}
    assert told.keys() == {one.name for one in fields(Grammar)} - {"compact"}
    assert not [kind for kind, flags in told.items() if not flags or set(flags) - flags_of("generate")]


def test_features_name_what_shows_them() -> None:
    """Each row of the README's table ends with a test, or a page, that is there."""
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| ") and line.count(" | ") == 6][2:]
    assert len(rows) >= 10
    for row in rows:
        *_, shown, _ = (cell.strip() for cell in row.split("|"))
        paths = re.findall(r"`([^`]+)`", shown)
        assert paths, row
        for path in paths:
            assert path.startswith(("tests/", "docs/")), row
            assert os.path.exists(ROOT / path), path


def test_the_readme_counts_the_families_of_the_list() -> None:
    readme, listed = (ROOT / "README.md").read_text(), (ROOT / "docs/models.md").read_text()
    plain, states = listed.split("## Families with recurrent")[:2]
    families = re.findall(r"^\| ([a-z]\w*?)(?:-\w+)? \| \w+ \|.*vs `generate\(\)`", plain, re.MULTILINE)
    with_states = re.findall(r"^\| \w+ \| \w+ \| .* \| vs Transformers \| vs PEFT \|$", states, re.MULTILINE)
    assert f"{len(set(families))} families of decoder-only models, {len(with_states)} with recurrent states" in readme
