"""Incomplete or unsuitable Medusa heads, refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapter_files import HIDDEN, VOCAB, base_targets
from support.medusa_files import (
    load,
    medusa_config,
    random_tensor,
    sequential_tensors,
    vllm_config,
    vllm_tensors,
    write_heads,
)
from torch import Tensor

from loraplex_adapters.cache.storage import check_adapter
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterUnsupported,
    LoraplexError,
    NonFinite,
    ShapeMismatch,
    UnsafeFormat,
)


def without(tensors: Mapping[str, Tensor], *parts: str) -> dict[str, Tensor]:
    """The tensors except those whose names begin with one of `parts`."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(parts)}


def spoiled(tensors: dict[str, Tensor], name: str, value: float) -> dict[str, Tensor]:
    """The tensors with another number at the end of one of them."""
    tensors[name].view(-1)[-1] = value
    return tensors


A = sequential_tensors(3, 2, VOCAB)
B = sequential_tensors(3, 2)
D = vllm_tensors(3, 2, bias=True)
NO_BLOCK = torch.zeros(HIDDEN, HIDDEN)
Case = tuple[Mapping[str, Tensor], type[LoraplexError], str]

FROM_HEADERS: dict[str, Case] = {
    "a head is missing": (without(B, "1."), AdapterInvalid, "head 1 is missing, though there is a head 2"),
    "the first head is missing": (without(B, "0."), AdapterInvalid, "head 0 is missing"),
    "vLLM's head is missing": (without(D, "blocks.1.", "lm_heads.1."), AdapterInvalid, "head 1 is missing"),
    "only vLLM's blocks of a head are missing": (
        without(D, "blocks.2."),
        AdapterInvalid,
        "'lm_heads.2.weight' is the projection of a head that is not there",
    ),
    "a first layer is missing": (without(B, "1.0."), AdapterInvalid, "the weight of head 1, layer 0 is missing"),
    "a last layer is missing": (without(B, "1.1."), AdapterInvalid, "the weight of head 1, layer 1 is missing"),
    "layers were dropped because they shared memory": (
        without(A, *[f"{head}.1." for head in range(3)]),
        AdapterInvalid,
        "layers that share their memory must be cloned",
    ),
    "a weight without its block": (
        without(B, "2.1.linear.weight"),
        AdapterInvalid,
        "the weight of head 2, layer 1 is missing",
    ),
    "a bias is missing": (without(B, "2.1.linear.bias"), AdapterInvalid, "the bias of head 2, layer 1 is missing"),
    "vLLM's bias is missing": (without(D, "blocks.0.layers.1.bias"), AdapterInvalid, "the bias of head 0, layer 1"),
    "a projection is missing": (without(A, "2.2.weight"), AdapterInvalid, "the projection of head 2 is missing"),
    "vLLM's projection is missing": (without(D, "lm_heads.1."), AdapterInvalid, "the projection of head 1 is missing"),
    "vLLM's only projection, and nothing says it is for all": (
        without(D, "lm_heads.1.", "lm_heads.2."),
        AdapterInvalid,
        "original_lm_head",
    ),
    "a projection between the blocks": (
        without(A, "2.2.weight") | {"2.1.weight": random_tensor(VOCAB, HIDDEN, seed=1)},
        AdapterInvalid,
        "the projection of head 2 stands before layer 1",
    ),
    "two projections of one head": (
        A | {"2.3.weight": random_tensor(VOCAB, HIDDEN, seed=1)},
        AdapterInvalid,
        "'2.3.weight' is there twice",
    ),
    "the same under two prefixes": (
        B | {"medusa_head.0.0.linear.weight": NO_BLOCK},
        AdapterInvalid,
        "'medusa_head.0.0.linear.weight' is there twice",
    ),
    "one projection for all and one for each": (
        D | {"lm_head.weight": random_tensor(VOCAB, HIDDEN, seed=1)},
        AdapterInvalid,
        "'lm_head.weight' is for all heads, but",
    ),
    "two families": (
        B | {"blocks.0.layers.0.weight": NO_BLOCK},
        AdapterInvalid,
        "'blocks.0.layers.0.weight' is named as vLLM names heads",
    ),
    "a tensor that is no head's": (
        B | {"0.0.norm.weight": torch.zeros(1)},
        AdapterUnsupported,
        "'0.0.norm.weight' is not",
    ),
    "a Hydra": (
        {"hydra_mlp.weight": torch.zeros(1)},
        AdapterUnsupported,
        "'hydra_mlp.weight' is not a tensor of a Medusa head",
    ),
    "a number with a zero before it": (
        B | {"00.0.linear.weight": NO_BLOCK},
        AdapterUnsupported,
        "'00.0.linear.weight'",
    ),
    "nothing": ({}, AdapterInvalid, "has no Medusa head"),
    "a token map alone": (
        {"token_map": torch.zeros(1, dtype=torch.int64)},
        AdapterUnsupported,
        "'token_map' is not a tensor of a Medusa head",
    ),
    "a bias of a projection": (A | {"0.2.bias": torch.zeros(VOCAB)}, AdapterUnsupported, "'0.2.bias' is a bias of a"),
    "vLLM's bias of a projection": (
        D | {"lm_heads.0.bias": torch.zeros(VOCAB)},
        AdapterUnsupported,
        "'lm_heads.0.bias' is a bias of a projection",
    ),
    "more heads than are served": (
        {f"{head}.0.linear.weight": torch.zeros(1) for head in range(65)},
        AdapterUnsupported,
        "'64.0.linear.weight': at most 64 heads",
    ),
    "an absurd layer": (B | {"0.999.linear.weight": NO_BLOCK}, AdapterUnsupported, "'0.999.linear.weight': at most"),
    "an absurd projection": (
        without(A, "0.2.") | {"0.9999.weight": torch.zeros(VOCAB, HIDDEN)},
        AdapterInvalid,
        "the weight of head 0, layer 2 is missing",
    ),
    "another hidden size": (
        sequential_tensors(3, hidden=HIDDEN + 8),
        ShapeMismatch,
        "'0.0.linear.weight' has shape [24, 24]; with 'tiny-base' it must be [16, 16]",
    ),
    "a bias of another size": (
        B | {"1.0.linear.bias": torch.zeros(HIDDEN + 1)},
        ShapeMismatch,
        "'1.0.linear.bias' has shape [17]",
    ),
    "a block of three dimensions": (
        B | {"1.0.linear.weight": torch.zeros(HIDDEN, HIDDEN, 1)},
        ShapeMismatch,
        "[16, 16, 1]",
    ),
    "a larger vocabulary": (sequential_tensors(3, 2, VOCAB + 1), ShapeMismatch, "'0.2.weight' has shape [25, 16]"),
    "a smaller vocabulary": (
        sequential_tensors(3, 2, VOCAB - 1),
        ShapeMismatch,
        "'0.2.weight' has 23 rows for the base model's vocabulary of 24, and there is no token_map",
    ),
    "a projection without dimensions": (
        A | {"0.2.weight": torch.tensor(1.0)},
        ShapeMismatch,
        "'0.2.weight' has shape []",
    ),
    "a token map of other rows": (
        vllm_tensors(rows=7, token_map=torch.arange(5)),
        ShapeMismatch,
        "'lm_heads.0.weight' has shape [7, 16]",
    ),
    "a token map longer than the vocabulary": (
        vllm_tensors(rows=VOCAB + 1, token_map=torch.arange(VOCAB + 1)),
        ShapeMismatch,
        "'token_map' has shape [25]",
    ),
    "an empty token map": (vllm_tensors(token_map=torch.zeros(0, dtype=torch.int64)), ShapeMismatch, "'token_map' has"),
    "a token map of two dimensions": (
        vllm_tensors(rows=5, token_map=torch.arange(5)[None]),
        ShapeMismatch,
        "'token_map' has shape [1, 5]",
    ),
    "a token map of floats": (
        vllm_tensors(rows=5, token_map=torch.arange(5.0)),
        AdapterUnsupported,
        "'token_map' has dtype F32",
    ),
    "a token map without projections": (
        vllm_tensors(rows=None, token_map=torch.arange(5)),
        AdapterUnsupported,
        "'token_map' is served only beside projections",
    ),
    "two token maps": (
        vllm_tensors(rows=5, token_map=torch.arange(5)) | {"medusa_heads.token_map": torch.arange(5)},
        AdapterInvalid,
        "token_map' is there twice",
    ),
    "blocks of integers": (B | {"0.0.linear.weight": NO_BLOCK.to(torch.int8)}, AdapterUnsupported, "has dtype I8"),
    "a projection in 8 bits": (
        A | {"0.2.weight": A["0.2.weight"].to(torch.float8_e4m3fn)},
        AdapterUnsupported,
        "'0.2.weight' has dtype F8_E4M3",
    ),
}
FROM_WEIGHTS: dict[str, Case] = {
    "NaN in a block": (
        spoiled(sequential_tensors(), "2.0.linear.weight", float("nan")),
        NonFinite,
        "2.0.linear.weight",
    ),
    "Inf in a bias": (spoiled(sequential_tensors(), "1.0.linear.bias", float("inf")), NonFinite, "1.0.linear.bias"),
    "Inf in a projection": (
        spoiled(sequential_tensors(rows=VOCAB), "1.1.weight", float("-inf")),
        NonFinite,
        "'1.1.weight' has NaN or Inf",
    ),
    "NaN in a row that a token map takes": (
        spoiled(vllm_tensors(token_map=torch.tensor([VOCAB - 1])), "lm_heads.2.weight", float("nan")),
        NonFinite,
        "'lm_heads.2.weight' has NaN or Inf",
    ),
    "a token outside the vocabulary": (
        vllm_tensors(rows=2, token_map=torch.tensor([0, VOCAB])),
        AdapterInvalid,
        "'token_map' names tokens outside the base model's vocabulary of 24",
    ),
    "a negative token": (
        vllm_tensors(rows=2, token_map=torch.tensor([-1, 0], dtype=torch.int32)),
        AdapterInvalid,
        "'token_map' names tokens outside",
    ),
    "a token twice": (
        vllm_tensors(rows=2, token_map=torch.tensor([3, 3])),
        AdapterInvalid,
        "'token_map' names a token twice",
    ),
}


@pytest.mark.parametrize(("tensors", "expected", "says"), FROM_HEADERS.values(), ids=FROM_HEADERS)
@pytest.mark.parametrize("config", [medusa_config(), vllm_config()], ids=["reference", "vllm"])
def test_refused_from_the_header(
    tensors: Mapping[str, Tensor], expected: type[LoraplexError], says: str, config: dict[str, Any], tmp_path: Path
) -> None:
    write_heads(tmp_path / "x", tensors, config)
    with pytest.raises(LoraplexError) as raised:
        check_adapter("x", DirectorySource(tmp_path), base_targets())
    assert type(raised.value) is expected
    assert says in str(raised.value)
    assert "medusa_lm_head.safetensors" in str(raised.value)


@pytest.mark.parametrize(("tensors", "expected", "says"), FROM_WEIGHTS.values(), ids=FROM_WEIGHTS)
def test_refused_from_the_weights(
    tensors: Mapping[str, Tensor], expected: type[LoraplexError], says: str, tmp_path: Path
) -> None:
    write_heads(tmp_path / "x", tensors)
    assert check_adapter("x", DirectorySource(tmp_path), base_targets()).heads is not None
    with pytest.raises(LoraplexError) as raised:
        load(DirectorySource(tmp_path), "x", base_targets(), tmp_path / "store")
    assert type(raised.value) is expected
    assert says in str(raised.value)
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["lock"]


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.bin", "medusa_lm_head.pth"])
def test_pickles_are_refused_with_what_to_do(name: str, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / name).write_bytes(b"")
    with pytest.raises(UnsafeFormat, match="loraplex adapters convert DIR --out DIR") as raised:
        load(DirectorySource(tmp_path), "x", base_targets(), tmp_path / "store")
    assert name in str(raised.value)
