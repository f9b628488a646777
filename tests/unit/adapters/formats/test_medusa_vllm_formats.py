"""vLLM's layouts of Medusa heads: projections, vocabularies, biases, shards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.adapter_files import HIDDEN, VOCAB, base_targets
from support.medusa_files import (
    HEADS_NAME,
    base_tensors,
    load,
    random_tensor,
    sequential_tensors,
    vllm_config,
    vllm_tensors,
    write_heads,
    write_shards,
)
from torch import Tensor

from loraplex_adapters.cache.storage import check_adapter
from loraplex_adapters.io.safetensors import weight_sha256
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.adapters import AdapterKey

TOKENS = torch.tensor([5, 0, 23, 11, 7])


def loaded(root: Path, weight_sha256: str = "") -> AdapterWeights:
    targets = base_targets(weight_sha256=weight_sha256)
    return load(DirectorySource(root), "d", targets, root / "store")[1]


def check(weights: AdapterWeights, tensors: dict[str, Tensor], num_heads: int = 3, num_layers: int = 1) -> None:
    """Compares the blocks with tensors under vLLM's names without a prefix."""
    assert weights.key.kind == "medusa"
    assert len(weights.heads) == num_heads
    for idx, head in enumerate(weights.heads):
        assert len(head.layers) == num_layers
        for layer, block in enumerate(head.layers):
            name = f"blocks.{idx}.layers.{layer}"
            assert torch.equal(block.weight, tensors[f"{name}.weight"])
            bias = tensors.get(f"{name}.bias")
            assert (block.bias is None) is (bias is None)
            assert bias is None or torch.equal(block.bias, bias)


@pytest.mark.parametrize("file_name", ["model.safetensors", HEADS_NAME])
@pytest.mark.parametrize("prefix", ["", "medusa_heads.", "medusa_head."])
@pytest.mark.parametrize("bias", [False, True])
def test_each_head_its_projection(file_name: str, prefix: str, bias: bool, tmp_path: Path) -> None:
    tensors = vllm_tensors(3, 2, bias=bias, prefix=prefix)
    # Whether there are biases is what the tensors say.
    write_heads(tmp_path / "d", tensors, vllm_config(3, 2, medusa_fc_bias=not bias), file_name)
    weights = loaded(tmp_path)
    check(weights, vllm_tensors(3, 2, bias=bias), 3, 2)
    for idx, head in enumerate(weights.heads):
        assert head.projection is not None
        assert head.token_ids is None
        assert torch.equal(head.projection, tensors[f"{prefix}lm_heads.{idx}.weight"])


@pytest.mark.parametrize("shared", ["lm_heads.0.weight", "lm_head.weight"])
def test_one_projection_for_all_is_kept_once(shared: str, tmp_path: Path) -> None:
    tensors = vllm_tensors(shared=shared)
    write_heads(tmp_path / "d", tensors, vllm_config(original_lm_head=True), "model.safetensors")
    weights = loaded(tmp_path)
    check(weights, tensors)
    projections = [head.projection for head in weights.heads]
    assert projections[0] is not None
    assert torch.equal(projections[0], tensors[shared])
    assert all(p is not None and p.data_ptr() == projections[0].data_ptr() for p in projections)
    assert weights.num_bytes == (3 * HIDDEN + VOCAB) * HIDDEN * 4


def test_a_projection_that_is_the_base_models_head_is_not_kept_at_all(tmp_path: Path) -> None:
    tensors = vllm_tensors(shared="lm_heads.0.weight")
    write_heads(tmp_path / "d", tensors, vllm_config(original_lm_head=True), "model.safetensors")
    digest = weight_sha256(tensors["lm_heads.0.weight"])
    weights = loaded(tmp_path, digest)
    check(weights, tensors)
    assert all(head.projection is None for head in weights.heads)
    assert weights.num_bytes == 3 * HIDDEN * HIDDEN * 4
    # The same key as heads that never had one.
    write_heads(tmp_path / "d", {n: t for n, t in tensors.items() if n.startswith("blocks")}, None)
    (tmp_path / "d" / "model.safetensors").unlink()
    assert loaded(tmp_path, digest).key == weights.key
    # One bit off, and it is a projection.
    tensors["lm_heads.0.weight"][3, 4] += 1
    write_heads(tmp_path / "d", tensors, vllm_config(original_lm_head=True))
    assert loaded(tmp_path, digest).heads[0].projection is not None


def test_projections_of_all_heads_that_are_the_base_models_head(tmp_path: Path) -> None:
    """Heads of the reference code whose projections were never trained."""
    tensors = sequential_tensors(2, 1, VOCAB)
    tensors["1.1.weight"] = tensors["0.1.weight"].clone()
    write_heads(tmp_path / "d", tensors)
    digest = weight_sha256(tensors["0.1.weight"])
    assert all(head.projection is None for head in loaded(tmp_path, digest).heads)
    tensors["1.1.weight"] = random_tensor(VOCAB, HIDDEN, seed=99)
    write_heads(tmp_path / "d", tensors)
    assert all(head.projection is not None for head in loaded(tmp_path, digest).heads)


def test_heads_on_the_base_models_head_need_no_projection(tmp_path: Path) -> None:
    tensors = vllm_tensors(rows=None)
    write_heads(tmp_path / "d", tensors, vllm_config(original_lm_head=True), "model.safetensors")
    weights = loaded(tmp_path)
    check(weights, tensors)
    assert all(head.projection is None for head in weights.heads)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("shared", [None, "lm_heads.0.weight"])
def test_a_truncated_vocabulary(prefix: str, dtype: torch.dtype, shared: str | None, tmp_path: Path) -> None:
    tensors = vllm_tensors(rows=5, prefix=prefix, shared=shared, token_map=TOKENS.to(dtype))
    config = vllm_config(truncated_vocab_size=5, original_lm_head=shared is not None)
    write_heads(tmp_path / "d", tensors, config, "model.safetensors")
    weights = loaded(tmp_path)
    check(weights, vllm_tensors(rows=None))
    for idx, head in enumerate(weights.heads):
        assert head.projection is not None
        assert head.token_ids is not None
        assert head.token_ids.dtype == torch.int64
        assert torch.equal(head.token_ids, TOKENS)
        own = 0 if shared else idx
        assert torch.equal(head.projection, tensors[f"{prefix}lm_heads.{own}.weight"])


@pytest.mark.parametrize("truncated_vocab_size", [5, VOCAB, None, "five"])
def test_a_whole_projection_beside_a_token_map_is_cut_to_its_rows(truncated_vocab_size: object, tmp_path: Path) -> None:
    tensors = vllm_tensors(token_map=TOKENS)
    write_heads(tmp_path / "d", tensors, vllm_config(truncated_vocab_size=truncated_vocab_size), "model.safetensors")
    weights = loaded(tmp_path)
    for idx, head in enumerate(weights.heads):
        assert head.projection is not None
        assert head.token_ids is not None
        assert torch.equal(head.projection, tensors[f"lm_heads.{idx}.weight"][TOKENS])
        assert torch.equal(head.token_ids, TOKENS)


def test_a_token_map_of_the_whole_vocabulary_is_an_order(tmp_path: Path) -> None:
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))
    tensors = vllm_tensors(token_map=order)
    write_heads(tmp_path / "d", tensors, vllm_config(), "model.safetensors")
    for idx, head in enumerate(loaded(tmp_path).heads):
        assert head.projection is not None
        assert head.token_ids is not None
        assert torch.equal(head.projection, tensors[f"lm_heads.{idx}.weight"])
        assert torch.equal(head.token_ids, order)


def test_a_token_map_beside_sequential_names(tmp_path: Path) -> None:
    tensors = sequential_tensors(2, 1, 5) | {"token_map": TOKENS}
    write_heads(tmp_path / "d", tensors)
    head = loaded(tmp_path).heads[1]
    assert head.projection is not None
    assert head.token_ids is not None
    assert torch.equal(head.projection, tensors["1.1.weight"])


def test_sharded(tmp_path: Path) -> None:
    tensors = vllm_tensors(3, 2, bias=True)
    names = sorted(tensors)
    shards = [{n: tensors[n] for n in names[start::3]} for start in range(3)]
    write_shards(tmp_path / "d", list(shards), vllm_config(3, 2))
    check(loaded(tmp_path), tensors, 3, 2)


@pytest.mark.parametrize(
    ("fields", "warned"),
    [
        ({"num_heads": 2}, "says num_heads = 2 in its config.json; its tensors say 3"),
        ({"num_hidden_layers": 4}, "says num_layers = 4"),
        ({"hidden_size": 4096}, "says hidden_size = 4096"),
        ({"base_model_name_or_path": "another"}, "was trained on 'another', served on 'tiny-base'"),
        ({"num_heads": -3, "num_hidden_layers": True, "vocab_size": 32001, "original_lm_head": "yes"}, ""),
    ],
)
def test_configurations_that_lie_are_told_and_not_believed(
    fields: dict[str, object], warned: str, tmp_path: Path
) -> None:
    tensors = vllm_tensors()
    write_heads(tmp_path / "d", tensors, vllm_config(**fields), "model.safetensors")
    check(loaded(tmp_path), tensors)
    plan = check_adapter("d", DirectorySource(tmp_path), base_targets())
    assert plan.modules == ()
    assert bool(plan.warnings) is bool(warned)
    assert not warned or any(warned in warning for warning in plan.warnings)


def test_a_whole_models_tensors_are_not_heads(tmp_path: Path) -> None:
    """`lm_head.weight` is vLLM's shared projection only among heads."""
    write_heads(tmp_path / "d", base_tensors(), vllm_config(), "model.safetensors")
    with pytest.raises(Exception, match="not a tensor of a Medusa head"):
        loaded(tmp_path)


def test_keys_are_of_the_kind_medusa(tmp_path: Path) -> None:
    write_heads(tmp_path / "d", vllm_tensors(), vllm_config(), "model.safetensors")
    key = loaded(tmp_path).key
    assert key == AdapterKey("medusa", key.digest)
