"""The arithmetic of heads, and their files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from loraplex_training.heads import MedusaHeads, read_heads, write_heads


def random_heads(num_heads: int = 3, num_layers: int = 2, hidden: int = 8) -> MedusaHeads:
    heads = MedusaHeads(num_heads, num_layers, hidden)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return heads


def test_untrained_heads_change_nothing() -> None:
    x = torch.randn(5, 8)
    made = MedusaHeads(3, 2, 8)(x)
    assert made.shape == (3, 5, 8)
    assert all(torch.equal(head, x) for head in made)


def test_they_are_residual_blocks_by_the_names_on_disk(tmp_path: Path) -> None:
    heads = random_heads()
    write_heads(tmp_path, heads, base_name="org/base", dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
        "base_model_name_or_path": "org/base",
        "version": "2",
    }
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert set(tensors) == {f"{i}.{j}.linear.{what}" for i in range(3) for j in range(2) for what in ("weight", "bias")}
    x = torch.randn(5, 8)
    made = heads(x)
    for i in range(3):
        wanted = x
        for j in range(2):
            wanted = wanted + F.silu(
                F.linear(wanted, tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"])
            )
        torch.testing.assert_close(made[i], wanted)


def test_they_are_read_as_they_were_written(tmp_path: Path) -> None:
    heads = random_heads().to(torch.bfloat16)
    write_heads(tmp_path, heads, base_name="b", dtype=torch.bfloat16)
    again = read_heads(tmp_path)
    assert again.weight.dtype == torch.bfloat16
    assert torch.equal(again.weight, heads.weight)
    assert torch.equal(again.bias, heads.bias)
