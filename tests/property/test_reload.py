"""Reloaded files: the last sound content that was read twice is in force."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.reload import Followed


def parse(raw: bytes) -> str:
    if b"x" in raw:
        raise InvalidArgument("an x")
    return raw.decode()


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(["1", "2", "1x", "2x", None]), st.integers(1, 3)), max_size=20))
def test_in_force_is_what_was_read_twice(steps: list[tuple[str | None, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("loraplex_runtime.reload"), "disabled", True)
        path = Path(folder, "file")
        path.write_text("0")
        followed = Followed([(path, "--file")], parse)
        seen: list[str | None] = ["0"]
        expected = "0"
        for text, num_polls in steps:
            if text is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(text)
            for _ in range(num_polls):
                seen.append(text)
                followed.poll()
                if text in ("1", "2") and seen[-2] == text:
                    expected = text
                assert followed.value == expected
