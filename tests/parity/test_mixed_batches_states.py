"""Families with mixers that keep a state, under everything at once (`support/mixed_batches.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.exact_states import whole_text_greedy
from support.mixed_batches import check_mixed_batches, slowly
from support.zoo import HYBRIDS, random_model


@pytest.mark.parametrize("family", slowly(HYBRIDS))
def test_every_text_is_that_of_peft(family: str, tmp_path: Path) -> None:
    check_mixed_batches(random_model(family, seed=3), whole_text_greedy, tmp_path)


LINEAR, FULL = "linear_attention", "full_attention"
# Configurations at the edge: one layer, attention alone, convolutions of one token, heads of odd sizes, small windows.
ODD: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5", {"num_hidden_layers": 1, "layer_types": [LINEAR]}),
    ("qwen3_5", {"num_hidden_layers": 1, "layer_types": [FULL]}),
    ("granitemoehybrid", {"layer_types": [FULL, FULL, FULL]}),
    ("lfm2", {"conv_L_cache": 1}),
    ("mamba2", {"num_hidden_layers": 1, "conv_kernel": 3, "n_groups": 8}),
    ("qwen3_next", {"linear_key_head_dim": 5, "linear_value_head_dim": 3, "num_key_value_heads": 1}),
    ("jamba", {"mamba_d_state": 3, "mamba_dt_rank": 1, "mamba_d_conv": 3}),
    ("lfm3", {"sliding_window": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), ODD, ids=str)
def test_odd_configurations(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    check_mixed_batches(random_model(family, seed=3, changes=changes), whole_text_greedy, tmp_path)
