"""Families with mixers that keep a state, under everything at once (`support/company.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.company import check_company, slowly
from support.exact_states import whole_text_greedy
from support.zoo import HYBRIDS, random_model


@pytest.mark.parametrize("family", slowly(HYBRIDS))
def test_every_text_is_that_of_peft(family: str, tmp_path: Path) -> None:
    check_company(random_model(family, seed=3), whole_text_greedy, tmp_path)
