"""Speculation in an engine that loads heads and draft models itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from support.as_on_cuda import build_as_on_cuda
from support.device_checks import Settings
from support.device_twins import REGEX, SCHEMA, check_drafts, check_grammars

from loraplex_server.grammars.source import json_schema, regex


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_everything_that_flags_bring(dtype: torch.dtype, tmp_path: Path) -> None:
    check_drafts(Settings("cpu", dtype), tmp_path)


@pytest.mark.slow
def test_as_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_as_on_cuda(monkeypatch)
    replays: Counter[str] = Counter()
    check_drafts(Settings("cpu", torch.float32, replays=replays), tmp_path)
    assert replays["plain replayed"] > 5, replays
    assert replays["adapted replayed"] > 5, replays


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_a_stand_in_for_grammars(dtype: torch.dtype, tmp_path: Path) -> None:
    check_grammars(Settings("cpu", dtype), tmp_path)


def test_grammars_of_the_library(tmp_path: Path) -> None:
    check_grammars(Settings("cpu", torch.float32), tmp_path, [json_schema(SCHEMA), regex(REGEX)])
