"""Texts of checkpoints with parts for images or audio, under everything at once (`support/company.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.company import check_company
from support.dense import greedy
from support.exact_states import whole_text_greedy
from support.multimodal import FAMILIES, STATEFUL, language_model


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_is_that_of_peft(family: str, tmp_path: Path) -> None:
    check_company(language_model(family), whole_text_greedy if family in STATEFUL else greedy, tmp_path)
