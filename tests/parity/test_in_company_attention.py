"""Families with attention alone, under everything at once (`support/company.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.company import check_company, slowly
from support.dense import greedy
from support.zoo import ZOO, random_model


@pytest.mark.parametrize("family", slowly(ZOO))
def test_every_text_is_that_of_peft(family: str, tmp_path: Path) -> None:
    check_company(random_model(family, seed=3), greedy, tmp_path)
