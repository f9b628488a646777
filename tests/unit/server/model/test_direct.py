"""Direct forward pass: models that get it, its bits, and the table of rotations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.native_kernels import isas, native_kernels, using
from support.native_models import STACKED, native_model
from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.model.direct import FIRST_POSITIONS, MAX_POSITIONS, RotaryTable, Scaling
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.self_test import Text, served_logits

IDS = (5, 17, 3, 8, 11, 2, 63, 9, 30)
DTYPES = [torch.float32, torch.bfloat16]


# They do more beside their layers.
OWN_PASS = ("gemma4",)


@pytest.fixture(autouse=True)
def best_kernels() -> Iterator[None]:
    with using(isas()[0]):
        yield


def adopted(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    return adopt_model(native_model(family, dtype, **changes), backend=CpuBackend(native_kernels()))


def logits(loaded: LoadedModel) -> Tensor:
    shape = torch.empty(len(IDS), loaded.spec.num_logits, dtype=loaded.dtype)
    return torch.cat(served_logits(loaded, [Text(IDS, 0, shape), Text(IDS[:4], 90, shape[:4])]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "family", [*(family for family in STACKED if family not in OWN_PASS), "lfm2", "granite4-channels"]
)
def test_bits_of_the_models_own_pass(family: str, dtype: torch.dtype) -> None:
    loaded = adopted(family, dtype)
    assert loaded.direct is not None
    got = logits(loaded)
    loaded.direct = None
    assert torch.equal(got, logits(loaded))


@pytest.mark.parametrize("changes", [{"logits_scaling": 2.0}, {"embedding_multiplier": 3.0}], ids=str)
def test_models_that_scale_beside_their_layers(changes: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"residual_multiplier": 1.0, "logits_scaling": 1.0, "embedding_multiplier": 1.0}
    scaled = adopted("granite", **(plain | changes))
    assert scaled.direct is not None
    assert not torch.equal(logits(scaled), logits(adopted("granite", **plain)))


@pytest.mark.parametrize("position_embedding_type", ["nope", "rope"])
def test_models_with_and_without_rotations(position_embedding_type: str) -> None:
    loaded = adopted("granite4", position_embedding_type=position_embedding_type)
    assert loaded.direct is not None
    got = logits(loaded)
    loaded.direct = None
    assert torch.equal(got, logits(loaded))


def test_a_hybrid_without_rotary_embedding() -> None:
    assert adopted("jamba", num_experts=1).direct is not None


def test_a_number_that_is_not_there_scales_nothing() -> None:
    model = native_model("llama")
    model.config.logits_scaling = None
    assert adopt_model(model, backend=CpuBackend(native_kernels())).direct is not None


def test_models_whose_code_does_more_keep_their_own_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scaling, "of", lambda *_: Scaling())  # as if what they do could not be known
    capped = adopted("gemma2")
    assert capped.decoder is not None
    assert capped.direct is None


def test_models_without_a_native_decoder_keep_their_own_pass() -> None:
    assert adopted("falcon").direct is None


class CountedRotary(LlamaRotaryEmbedding):
    calls = 0

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return super().forward(x, position_ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_table_grows_and_has_the_bits_of_the_module(dtype: torch.dtype) -> None:
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=1 << 17)
    rotary = CountedRotary(config)
    table = RotaryTable(rotary, torch.zeros(1, 1, 1, dtype=dtype))
    places = [[0, 5, 5], [FIRST_POSITIONS - 1], [FIRST_POSITIONS, 3], [MAX_POSITIONS - 1], [MAX_POSITIONS, 1]]
    for position_ids in map(torch.tensor, places):
        got = table(position_ids.unsqueeze(0))
        for own, expected in zip(got, rotary(torch.zeros(1, dtype=dtype), position_ids.unsqueeze(0)), strict=True):
            assert own.dtype == torch.float32
            assert torch.equal(own, expected.float())
    rotary.calls = 0
    table(torch.tensor([[MAX_POSITIONS - 1, 0, 77]]))
    assert rotary.calls == 0
