"""Free memory of a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.zoo import random_model

from loraplex_server.model.loader import adopt_model
from loraplex_server.model.memory import adapter_bytes, free_memory_bytes, layer_bytes

MIB = 1 << 20


def test_something_is_free_here() -> None:
    assert free_memory_bytes(torch.device("cpu")) > MIB


def test_the_budget_of_adapters_grows_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    totals: dict[torch.device, int] = {gpu: 140 * 1024 * MIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, totals[device]))
    assert adapter_bytes(None, gpu) == 7 * 1024 * MIB
    assert adapter_bytes(5 * MIB, gpu) == adapter_bytes(5 * MIB, cpu) == 5 * MIB
    totals[gpu] = 8 * 1024 * MIB
    assert adapter_bytes(None, gpu) == adapter_bytes(None, cpu) == 1024 * MIB


@pytest.mark.parametrize(
    ("family", "few", "many", "ratio"),
    [
        ("hunyuan_v1_moe", {"moe_topk": 1}, {"moe_topk": [1, 3]}, 3),  # by layer
        ("llama4-experts", {"num_local_experts": 2}, {"num_local_experts": 4}, 2),  # which all compute each token
        ("qwen3_moe", {"num_experts_per_tok": 1}, {"num_experts_per_tok": 4}, 4),
        ("jetmoe", {"num_experts_per_tok": 1}, {"num_experts_per_tok": 2}, 2),  # experts of another form
    ],
)
def test_layers_are_larger_where_tokens_go_through_more_experts(
    family: str, few: dict[str, Any], many: dict[str, Any], ratio: int
) -> None:
    """The wide part of them is that of the experts, so many times."""
    sizes = [layer_bytes(adopt_model(random_model(family, changes=changes)), 10) for changes in (few, many)]
    hidden = 10 * 10 * 32 * 8
    assert (sizes[1] - hidden) == pytest.approx(ratio * (sizes[0] - hidden))
