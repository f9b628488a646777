"""Layouts of Medusa heads, from files to weights, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapter_files import HIDDEN, VOCAB, base_targets
from support.medusa_files import (
    load,
    medusa_config,
    sequential_tensors,
    write_heads,
)
from torch import Tensor

from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.weights import MedusaHead


def check_blocks(heads: tuple[MedusaHead, ...], tensors: dict[str, Tensor], prefix: str = "") -> None:
    """Compares the heads' blocks with tensors under sequential names."""
    for idx, head in enumerate(heads):
        for layer, block in enumerate(head.layers):
            assert torch.equal(block.weight, tensors[f"{prefix}{idx}.{layer}.linear.weight"])
            assert block.bias is not None
            assert torch.equal(block.bias, tensors[f"{prefix}{idx}.{layer}.linear.bias"])


PREFIXES = ["", "medusa_head.", "medusa_heads.", "heads."]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 1), (3, 1), (5, 2), (12, 3)])
def test_a_own_projections(prefix: str, num_heads: int, num_layers: int, tmp_path: Path) -> None:
    tensors = sequential_tensors(num_heads, num_layers, VOCAB, prefix)
    write_heads(tmp_path / "a", tensors, medusa_config(num_heads, num_layers))
    imported, weights = load(DirectorySource(tmp_path), "a", base_targets(), tmp_path / "store")
    assert (imported.key.kind, imported.layout.max_rank, imported.layout.num_heads) == ("medusa", 0, num_heads)
    assert not weights.factors
    assert len(weights.heads) == num_heads
    check_blocks(weights.heads, tensors, prefix)
    for idx, head in enumerate(weights.heads):
        assert len(head.layers) == num_layers
        assert head.projection is not None
        assert head.token_ids is None
        assert torch.equal(head.projection, tensors[f"{prefix}{idx}.{num_layers}.weight"])


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("num_heads", "num_layers"), [(1, 1), (4, 1), (5, 2)])
def test_b_the_base_models_head(prefix: str, num_heads: int, num_layers: int, tmp_path: Path) -> None:
    tensors = sequential_tensors(num_heads, num_layers, None, prefix)
    write_heads(tmp_path / "b", tensors, medusa_config(num_heads, num_layers, version="2"))
    imported, weights = load(DirectorySource(tmp_path), "b", base_targets(), tmp_path / "store")
    assert (imported.key.kind, imported.layout.num_heads) == ("medusa", num_heads)
    assert len(weights.heads) == num_heads
    check_blocks(weights.heads, tensors, prefix)
    assert all(head.projection is None and head.token_ids is None for head in weights.heads)
    assert imported.layout.num_bytes == num_layers * num_heads * (HIDDEN + 1) * HIDDEN * 4


@pytest.mark.parametrize(
    "config",
    [
        None,
        {},
        medusa_config(2, 7, version="2"),  # says B; its heads have projections
        medusa_config(99, 99, version=1.5, base_model_name_or_path=["no", "name"]),
        {"medusa_num_heads": "three", "medusa_num_layers": -1, "hidden_size": 4096, "vocab_size": None},
        {"model_type": "llama", "num_hidden_layers": 32, "base_model_name_or_path": "x" * 10_000},
    ],
)
def test_the_tensors_decide_and_not_the_configuration(
    config: dict[str, Any] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = sequential_tensors(5, 2, VOCAB)
    write_heads(tmp_path / "a", tensors, config)
    _, weights = load(DirectorySource(tmp_path), "a", base_targets(), tmp_path / "store")
    assert len(weights.heads) == 5
    assert all(len(head.layers) == 2 and head.projection is not None for head in weights.heads)
    check_blocks(weights.heads, tensors)
    lies = config is not None and config.get("medusa_num_heads") in (2, 99)
    assert ("its tensors say 5" in caplog.text) is lies


def test_the_same_content_is_the_same_key_whatever_it_is_called(tmp_path: Path) -> None:
    write_heads(tmp_path / "plain", sequential_tensors(), medusa_config())
    write_heads(tmp_path / "prefixed", sequential_tensors(prefix="medusa_heads."), None)
    write_heads(tmp_path / "other", sequential_tensors(seed=1), medusa_config())
    keys = [
        load(DirectorySource(tmp_path), name, base_targets(), tmp_path / name / "store")[0].key
        for name in ("plain", "prefixed", "other")
    ]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_converted_to_the_served_dtype(dtype: str, tmp_path: Path) -> None:
    tensors = sequential_tensors(2, 1, VOCAB)
    write_heads(tmp_path / "a", tensors, medusa_config(2))
    _, weights = load(DirectorySource(tmp_path), "a", base_targets(dtype), tmp_path / "store")
    for idx, head in enumerate(weights.heads):
        wanted = getattr(torch, dtype)
        assert torch.equal(head.layers[0].weight, tensors[f"{idx}.0.linear.weight"].to(wanted))
        assert head.projection is not None
        assert torch.equal(head.projection, tensors[f"{idx}.1.weight"].to(wanted))


def test_layers_that_share_their_memory_when_trained_come_as_equal_tensors(tmp_path: Path) -> None:
    """The reference code makes every layer of a head the same module."""
    tensors = sequential_tensors(2, 3, VOCAB)
    for head in range(2):
        for layer in (1, 2):
            for part in ("weight", "bias"):
                tensors[f"{head}.{layer}.linear.{part}"] = tensors[f"{head}.0.linear.{part}"].clone()
    write_heads(tmp_path / "a", tensors, medusa_config(2, 3))
    _, weights = load(DirectorySource(tmp_path), "a", base_targets(), tmp_path / "store")
    for head in weights.heads:
        assert len(head.layers) == 3
        assert all(torch.equal(block.weight, head.layers[0].weight) for block in head.layers)


def test_heads_without_a_block_are_projections_alone(tmp_path: Path) -> None:
    tensors = sequential_tensors(2, 0, VOCAB)
    write_heads(tmp_path / "a", tensors, medusa_config(2, 0))
    _, weights = load(DirectorySource(tmp_path), "a", base_targets(), tmp_path / "store")
    for idx, head in enumerate(weights.heads):
        assert head.layers == ()
        assert head.projection is not None
        assert torch.equal(head.projection, tensors[f"{idx}.0.weight"])


def test_heads_without_biases(tmp_path: Path) -> None:
    tensors = {name: t for name, t in sequential_tensors(2, 2).items() if not name.endswith("bias")}
    write_heads(tmp_path / "b", tensors, medusa_config(2, 2))
    _, weights = load(DirectorySource(tmp_path), "b", base_targets(), tmp_path / "store")
    assert all(block.bias is None for head in weights.heads for block in head.layers)
    assert torch.equal(weights.heads[1].layers[1].weight, tensors["1.1.linear.weight"])


def test_a_set_of_heads_is_one_stacked_matrix(tmp_path: Path) -> None:
    """One allocation, and the same tensor of all heads lies together: kernels need not copy to batch them."""
    tensors = sequential_tensors(3, 2, VOCAB)
    write_heads(tmp_path / "a", tensors, medusa_config(3, 2))
    _, weights = load(DirectorySource(tmp_path), "a", base_targets(), tmp_path / "store")
    begin = weights.storage.data_ptr()
    for layer in range(2):
        first = weights.heads[0].layers[layer].weight
        stack = first.as_strided((3, HIDDEN, HIDDEN), (HIDDEN * HIDDEN, HIDDEN, 1))
        for idx in range(3):
            assert torch.equal(stack[idx], tensors[f"{idx}.{layer}.linear.weight"])
        assert first.is_contiguous()
        assert first.data_ptr() % 64 == 0
        assert begin <= first.data_ptr() < begin + weights.num_bytes
