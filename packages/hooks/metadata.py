"""Hatchling hook: a distribution's metadata, out of the checkout's pyproject.toml.

Version, requirements, authors and classifiers stand once, in the root. A source distribution has them in its PKG-INFO,
so that this runs in a checkout only.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

SHARED: Final = ("authors", "classifiers", "keywords", "urls")


class CheckoutMetadata(MetadataHookInterface):
    """`dependencies` and `optional-dependencies` of the hook's table name other distributions of Loraplex, which get
    this version, and lists of the root: one of its extras, or `dependencies`."""

    def update(self, metadata: dict[str, Any]) -> None:
        root = tomllib.loads((Path(self.root).resolve().parents[1] / "pyproject.toml").read_text())["project"]
        lists = {"dependencies": root["dependencies"], **root["optional-dependencies"]}
        version = metadata["version"]
        metadata["dependencies"] = requirements(self.config["dependencies"], lists, version)
        if extras := self.config.get("optional-dependencies"):
            metadata["optional-dependencies"] = {
                name: requirements(wanted, lists, version) for name, wanted in extras.items()
            }
        metadata.update({name: root[name] for name in SHARED if name in root})
        metadata["classifiers"] = [one for one in root["classifiers"] if not one.startswith("Private ::")]


def requirements(wanted: Sequence[str], lists: dict[str, list[str]], version: str) -> list[str]:
    found: list[str] = []
    for name in wanted:
        if name.startswith("loraplex"):
            found.append(f"{name}=={version}")
        else:
            found += [one for one in lists[name] if not one.startswith("loraplex")]
    return found
