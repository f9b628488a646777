"""Families, kinds of adapters and pooling on CUDA against Transformers and PEFT."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device_checks import Settings
from support.zoo import HYBRIDS, MIXTURES, ON_DEVICES, ZOO

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# Whose small rounding errors stay small: elsewhere routers take other experts, or norms make much of little.
NARROW = ("qwen2", "phi3", "gpt2", "lfm2", "bamba")
CASES = [(family, torch.float32) for family in ON_DEVICES] + [(family, torch.bfloat16) for family in NARROW]


def checks() -> Any:
    """The module of the checks. Skips without PEFT."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    from support import device_kinds

    return device_kinds


def needs_patterns() -> None:
    pytest.importorskip("re2", reason="google-re2, which reads patterns in adapters' configurations, is not installed")


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_family(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    kinds, replays = checks(), Counter[str]()
    try:
        (ZOO | MIXTURES | HYBRIDS)[family]()
    except AttributeError as error:
        pytest.skip(f"this Transformers has no {family}: {error}")
    if family in MIXTURES:  # whose experts are targets
        needs_patterns()
    kinds.check_family(Settings("cuda", dtype, replays=replays), tmp_path, family)
    if family in HYBRIDS:
        assert replays["graphs"] == 0  # models with states run without
    else:
        assert replays["plain replayed"] > 0, replays
        assert replays["adapted replayed"] > 5, replays


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_kinds_of_adapters(family: str, tmp_path: Path) -> None:
    replays: Counter[str] = Counter()
    needs_patterns()
    checks().check_formats(Settings("cuda", torch.float32, replays=replays), tmp_path, family)
    assert replays["adapted replayed"] > 5, replays


def test_pooled_values(tmp_path: Path) -> None:
    checks().check_pooling(Settings("cuda", torch.float32), tmp_path)
