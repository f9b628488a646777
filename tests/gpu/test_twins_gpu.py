"""Drafts, sampling and grammars on CUDA against a float64 engine on the CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_checks import Settings

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def checks() -> Any:
    """The module of the checks. Skips without PEFT."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    from support import device_twins

    return device_twins


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_drafts_and_sampling(dtype: torch.dtype, tmp_path: Path) -> None:
    replays: Counter[str] = Counter()
    checks().check_drafts(Settings("cuda", dtype, replays=replays), tmp_path)
    if dtype == torch.float32:
        assert replays["plain replayed"] > 5, replays
        assert replays["adapted replayed"] > 5, replays
        assert replays["graphs of drafts"] > 0, replays


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_masks_of_a_stand_in_for_grammars(dtype: torch.dtype, tmp_path: Path) -> None:
    checks().check_grammars(Settings("cuda", dtype), tmp_path)


def test_grammars(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="llguidance, which compiles grammars, is not installed")
    from loraplex_server.grammars.source import json_schema, regex

    twins = checks()
    grammars = [json_schema(twins.SCHEMA), regex(twins.REGEX)]
    twins.check_grammars(Settings("cuda", torch.float32), tmp_path, grammars)
