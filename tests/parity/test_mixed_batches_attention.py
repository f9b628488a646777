"""Families with attention alone, under everything at once (`support/mixed_batches.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.dense import greedy
from support.exact_states import whole_text_greedy
from support.mixed_batches import check_mixed_batches, slowly
from support.zoo import ZOO, random_model


@pytest.mark.parametrize("family", slowly(ZOO))
def test_every_text_is_that_of_peft(family: str, tmp_path: Path) -> None:
    check_mixed_batches(random_model(family, seed=3), greedy, tmp_path)


# Of one token: Transformers' cache keeps the last `window - 1`, by a slice that means all where that is none. The text
# without a cache counts.
WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 1, "num_hidden_layers": 1}),
    ("gemma3", {"sliding_window": 1}),
    ("gpt_oss", {"sliding_window": 1}),
    ("llama4-chunks", {"attention_chunk_size": 1}),
]
ODD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "tie_word_embeddings": True}),
    ("llama", {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6}),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0}}),
    ("deepseek_v3", {"num_hidden_layers": 1, "first_k_dense_replace": 0}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), ODD + WINDOWS, ids=str)
def test_odd_configurations(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    oracle = whole_text_greedy if (family, changes) in WINDOWS else greedy
    check_mixed_batches(random_model(family, seed=3, changes=changes), oracle, tmp_path)
