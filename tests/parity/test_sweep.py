"""Sweep: every causal family of Transformers is served rightly or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.sweep import AS_DECODERS, FAMILIES, PROPERTY, as_decoder, expected, sweep

# One of each outcome, with the ordinary tests.
QUICK = ("apertus", "bart", "bert", "doge", "minimax", "whisper")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_serves_or_refuses(family: str, record_property: Callable[[str, object], None]) -> None:
    """Texts of up to 70 tokens, which cross windows, chunks and the lengths that rotations are scaled at."""
    outcome = sweep(family)
    record_property(PROPERTY, (family, outcome.what, outcome.sentence))
    assert outcome.what == expected(family), outcome.sentence


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in ("roberta", "marian") else pytest.mark.slow) for name in AS_DECODERS],
)
def test_serves_or_refuses_decoders(family: str) -> None:
    """Decoders of encoder and encoder-decoder families are served rightly or refused."""
    outcome = sweep(family, as_decoder)
    assert outcome.what == AS_DECODERS[family], outcome.sentence
