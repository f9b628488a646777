"""Adapted modules by themselves, and slots over them."""

from __future__ import annotations

import pytest
import torch
from support.backends import PatchedBackend
from support.zoo import random_model
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from loraplex_adapters.weights import AdapterWeights, LoraFactors
from loraplex_contracts.adapters import AdapterKey
from loraplex_server.backends.reference.lora import ReferenceOps
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import AdaptedEmbedding, AdaptedHead, AdaptedLinear, BaseLinear
from loraplex_server.layers.lora import FactorTable, Segment
from loraplex_server.model.loader import adopt_model

OPS = ReferenceOps()


def factors(in_features: int, out_features: int, rank: int = 2, scale: float = 0.5) -> LoraFactors:
    return LoraFactors(torch.randn(rank, in_features), torch.randn(out_features, rank), scale)


def with_table(module: AdaptedLinear | AdaptedEmbedding, lora: LoraFactors) -> None:
    module.table = FactorTable(2, module.in_features, module.out_features, "cpu")
    module.table.set(1, lora)
    module.num_installed = 1
    if isinstance(module, AdaptedLinear):
        module.ops = OPS


@pytest.mark.parametrize("is_conv1d", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_adds_its_term_to_the_segments_rows_only(is_conv1d: bool, has_bias: bool) -> None:
    torch.manual_seed(0)
    plain: nn.Module = Conv1D(6, 4) if is_conv1d else nn.Linear(4, 6, bias=has_bias)
    context = StepContext()
    linear = AdaptedLinear(plain.weight, plain.bias, context, is_conv1d=is_conv1d)  # type: ignore[arg-type]
    lora = factors(4, 6)
    with_table(linear, lora)
    x = torch.randn(1, 5, 4)
    with torch.inference_mode():
        want = plain(x)
        # The same product in two operations may round differently from one fused one.
        torch.testing.assert_close(linear(x), want, rtol=1e-6, atol=1e-6)
        without = linear(x)
        context.token_segments = OPS.prepare([Segment(1, 3, 1, 2.0)], 5, 2, torch.device("cpu"))
        got = linear(x)
        term = 2.0 * 0.5 * x[0, 1:3] @ lora.a.T @ lora.b.T
    assert torch.equal(got[0, [0, 3, 4]], without[0, [0, 3, 4]])
    torch.testing.assert_close(got[0, 1:3], want[0, 1:3] + term, rtol=1e-5, atol=1e-5)


def test_embedding_keeps_its_own_class_and_attributes() -> None:
    class Scaled(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(9, 4)
            self.register_buffer("embed_scale", torch.tensor(3.0))

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * self.embed_scale

    torch.manual_seed(0)
    plain = Scaled()
    context = StepContext()
    embedding = AdaptedEmbedding(plain, context)
    assert embedding.weight is plain.weight
    assert embedding.embed_scale is plain.embed_scale
    with pytest.raises(AttributeError):
        _ = embedding.nonsense
    lora = factors(9, 4)
    with_table(embedding, lora)
    context.token_segments = OPS.prepare([Segment(0, 1, 1), Segment(0, 2, 1)], 3, 2, torch.device("cpu"))
    ids = torch.tensor([[4, 7, 4]])
    with torch.inference_mode():
        got = embedding(ids)
        term = 0.5 * 3.0 * (lora.b @ lora.a).T[ids[0]]
        want = plain(ids)[0] + term * torch.tensor([[2.0], [1.0], [0.0]])
    torch.testing.assert_close(got[0], want)


def test_the_head_reads_segments_of_its_own_rows() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 6, bias=False)
    context = StepContext()
    head = AdaptedHead(plain.weight, None, context)
    with_table(head, factors(4, 6))
    context.token_segments = OPS.prepare([Segment(0, 7, 1)], 7, 2, torch.device("cpu"))
    x = torch.randn(1, 2, 4)
    with torch.inference_mode():
        assert torch.equal(head(x), plain(x))
        context.head_segments = OPS.prepare([Segment(1, 2, 1)], 2, 2, torch.device("cpu"))
        assert (head(x) != plain(x)).any(-1).tolist() == [[False, True]]


def test_another_base_product_can_take_the_place() -> None:
    """What prepacked or fused weights will use."""
    seen: list[tuple[int, ...]] = []

    class Twice:
        is_copy = False

        def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
            seen.append(tuple(weight.shape))
            self.weight = weight

        def __call__(self, x: Tensor) -> Tensor:
            return 2 * (x @ self.weight.T)

    def make_base(weight: Tensor, bias: Tensor | None) -> BaseLinear:
        return Twice(weight, bias)

    loaded = adopt_model(
        random_model("gpt2", torch.float32), backend=PatchedBackend(make_linear=make_base), verify=False
    )
    assert (96, 32) in seen  # [out, in], of a Conv1D too
    module = loaded.targets["transformer.h.0.attn.c_attn"]
    x = torch.randn(1, 3, 32)
    with torch.inference_mode():
        torch.testing.assert_close(module(x), 2 * x @ module.weight)


class Derived:
    """What an implementation would have made of a table; nothing of it stays."""

    def __init__(self) -> None:
        self.changed: list[int] = []

    def without(self, slot: int) -> None:
        self.changed.append(slot)


def test_slots_show_kernels_what_is_installed() -> None:
    loaded = adopt_model(random_model("llama", torch.float32))
    slots = loaded.adapter_slots(OPS, 3)
    path = "model.layers.1.mlp.up_proj"
    lora = factors(32, 48, rank=5, scale=0.25)
    table = loaded.targets[path].table
    assert table is not None
    table.derived = derived = Derived()
    slots.install(2, AdapterWeights(AdapterKey("lora", "0" * 64), torch.zeros(0, dtype=torch.uint8), {path: lora}))
    assert derived.changed == [2]
    assert table.derived is None
    assert table.factors == [None, None, lora]
    assert table.ranks.tolist() == [0, 0, 5]
    assert table.scales.tolist() == [0.0, 0.0, 0.25]
    assert table.a_ptrs.tolist() == [0, 0, lora.a.data_ptr()]
    assert table.b_ptrs.tolist() == [0, 0, lora.b.data_ptr()]
    assert [p for p, module in loaded.targets.items() if module.num_installed] == [path]
    address = table.a_ptrs.data_ptr()
    slots.install(2, None)
    assert table.factors == [None] * 3
    assert table.ranks.tolist() == [0, 0, 0]
    assert table.a_ptrs.data_ptr() == address
    assert not any(module.num_installed for module in loaded.targets.values())


def test_slots_refuse_what_the_model_lacks() -> None:
    loaded = adopt_model(random_model("llama", torch.float32))
    slots = loaded.adapter_slots(OPS, 2)
    weights = AdapterWeights(AdapterKey("lora", "0" * 64), torch.zeros(0, dtype=torch.uint8), {"x.y": factors(4, 4)})
    with pytest.raises(ValueError, match=r"x\.y"):
        slots.install(0, weights)
    assert not any(module.num_installed for module in loaded.targets.values())
