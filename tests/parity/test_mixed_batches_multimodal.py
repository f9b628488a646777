"""Texts of checkpoints with parts for images or audio, under everything at once (`support/mixed_batches.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.dense import greedy
from support.exact_states import whole_text_greedy
from support.mixed_batches import check_mixed_batches
from support.multimodal import FAMILIES, STATEFUL, language_model


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_is_that_of_peft(family: str, tmp_path: Path) -> None:
    check_mixed_batches(language_model(family), whole_text_greedy if family in STATEFUL else greedy, tmp_path)
