"""Version of the checkout and image of the wire, beside the newest release."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

from loraplex_proto import __version__

ROOT = Path(__file__).resolve().parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
NEWEST_RELEASE = max(map(Version, re.findall(r"^## (\S+) - \d{4}-\d\d-\d\d$", CHANGELOG, re.MULTILINE)))


def test_what_is_not_released_has_a_version_of_its_own() -> None:
    """Otherwise pip takes a new build for installed, and metrics cannot tell old processes from new ones."""
    own = Version(__version__)
    if own.is_devrelease:
        assert own > NEWEST_RELEASE
    else:
        assert own == NEWEST_RELEASE
        assert "\n## Unreleased" not in CHANGELOG


def test_the_image_of_the_wire_is_as_new_as_the_newest_release() -> None:
    """An older one would let a field be removed that users of that release have."""
    first_line = (ROOT / "proto/baseline.yaml").read_text().partition("\n")[0]
    assert Version(first_line.removeprefix("# The wire of version ")) >= NEWEST_RELEASE
