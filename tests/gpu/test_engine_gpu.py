"""Whole engines on a CUDA device against float64."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from support.device_checks import CHECKS, Settings, check_replays

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("has_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str, dtype: torch.dtype, has_graphs: bool, tmp_path: Path) -> None:
    replays: Counter[str] = Counter()
    CHECKS[check](Settings("cuda", dtype, has_graphs, replays=replays), tmp_path)
    if has_graphs:
        check_replays(replays)
    else:
        assert replays["graphs"] == 0


@pytest.mark.parametrize("check", CHECKS)
def test_float64(check: str, tmp_path: Path) -> None:
    """Exactly the reference's texts, on whatever computes in float64."""
    CHECKS[check](Settings("cuda", torch.float64), tmp_path)


def test_wider_layers(tmp_path: Path) -> None:
    """Heads of 128, and products as wide as a small real model's."""
    CHECKS["mixed-batch"](Settings("cuda", torch.bfloat16, hidden_size=1024), tmp_path)
