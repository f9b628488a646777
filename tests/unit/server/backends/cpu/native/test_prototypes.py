"""Prototypes of the C functions, against the sources."""

from __future__ import annotations

import re

import pytest

from loraplex_server.backends.cpu.native.build import SOURCES
from loraplex_server.backends.cpu.native.prototypes import IDENTITY, KERNELS


def declared() -> dict[str, list[str]]:
    text = "\n".join(path.read_text() for path in SOURCES.glob("*.cpp"))
    found = re.findall(r"(?m)^[^/\n]*\b(lp_[a-z_0-9]+)\(([^)]*)\)\s*\{", text)
    return {name: re.findall(r"(\w+)\s*(?:,|$)", arguments) for name, arguments in found}


@pytest.mark.parametrize("name", KERNELS)
def test_arguments_have_the_names_of_the_sources(name: str) -> None:
    assert declared()[name] == list(KERNELS[name].names)


def test_every_function_is_declared() -> None:
    assert declared().keys() == {*KERNELS, *IDENTITY}
