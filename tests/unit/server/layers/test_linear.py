"""Adapted modules, slots over them, merged linears."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.backends import PatchedBackend
from support.zoo import random_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex_adapters.weights import AdapterWeights, LoraFactors
from loraplex_contracts.adapters import AdapterKey
from loraplex_server.backends.reference import ReferenceOps
from loraplex_server.layers import adapter_slots
from loraplex_server.layers import linear as module
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.attention import register_attention
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import (
    AbsorbedLinear,
    AdaptedEmbedding,
    AdaptedHead,
    AdaptedLinear,
    BaseLinear,
    JointLinear,
    OwnRows,
    merge_linears,
    product_by_row,
)
from loraplex_server.layers.lora import FactorTable, PreparedSegments, Segment
from loraplex_server.model.adapt import adapt_modules, merge_modules
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.probe import inputs_recorded, probe_model

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


@pytest.mark.parametrize("is_conv1d", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_own_weights_take_the_place_of_the_bases(is_conv1d: bool, has_bias: bool) -> None:
    """Weights of all outputs or of some. Where each row has its own, the base makes no product."""
    torch.manual_seed(0)
    plain: nn.Module = Conv1D(6, 4) if is_conv1d else nn.Linear(4, 6, bias=has_bias)
    context = StepContext()
    linear = AdaptedLinear(plain.weight, plain.bias, context, is_conv1d=is_conv1d)  # type: ignore[arg-type]
    linear.ops = OPS
    own, x = torch.randn_like(plain.weight), torch.randn(1, 5, 4)
    some = torch.tensor([4, 1])
    linear.saved = {0: OwnRows(own), 1: OwnRows(own[:, some] if is_conv1d else own[some], some)}
    bias = torch.zeros(6) if linear.bias is None else linear.bias
    want_all = x[0] @ (own if is_conv1d else own.T) + bias
    with torch.inference_mode():
        base = linear(x)[0]
        context.token_segments = OPS.prepare([Segment(1, 3, 0), Segment(3, 4, 1)], 5, 2, torch.device("cpu"))
        got = linear(x)[0]
        assert torch.equal(got[[0, 4]], base[[0, 4]])
        torch.testing.assert_close(got[1:3], want_all[1:3])
        torch.testing.assert_close(got[3, some], want_all[3, some])
        assert torch.equal(got[3, [0, 2, 3, 5]], base[3, [0, 2, 3, 5]])
        linear.base = AbsorbedLinear()
        context.token_segments = OPS.prepare([Segment(0, 2, 0), Segment(2, 5, 0)], 5, 2, torch.device("cpu"))
        torch.testing.assert_close(linear(x)[0], want_all)
        context.token_segments = OPS.prepare([Segment(0, 4, 0), Segment(4, 5, 1)], 5, 2, torch.device("cpu"))
        with pytest.raises(AssertionError, match="the stack of layers that took its weight"):
            linear(x)


@pytest.mark.parametrize("scale", [3.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_embedding_may_have_a_number_as_its_scale(scale: float, dtype: torch.dtype) -> None:
    """PEFT rounds it to the dtype first."""
    torch.manual_seed(0)
    plain = nn.Embedding(9, 4, dtype=dtype)
    got = list[Tensor]()
    for given in (scale, torch.tensor(scale)):
        embedding = AdaptedEmbedding(plain, context := StepContext())
        plain.embed_scale = given  # type: ignore[assignment]
        torch.manual_seed(1)
        with_table(embedding, LoraFactors(torch.randn(2, 9).to(dtype), torch.randn(4, 2).to(dtype), 0.5))
        context.token_segments = OPS.prepare([Segment(0, 3, 1)], 3, 2, torch.device("cpu"))
        with torch.inference_mode():
            got.append(embedding(torch.tensor([[4, 7, 4]])))
    assert torch.equal(*got)
    assert not torch.equal(got[0][0], plain(torch.tensor([4, 7, 4])))


def test_an_embedding_that_norms_its_rows_is_no_lookup() -> None:
    class Normed(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.normalize(super().forward(input), dim=-1)

    torch.manual_seed(0)
    assert AdaptedEmbedding(nn.Embedding(9, 4), StepContext()).is_lookup()
    assert not AdaptedEmbedding(Normed(9, 4), StepContext()).is_lookup()


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
    assert embedding.is_lookup()
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rank", "out"), [(1, 33), (8, 1), (16, 1000), (17, 64), (200, 100)])
def test_a_rows_product_has_the_same_bits_in_any_batch(
    rank: int, out: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rank, 70), (out, rank)))
    down = a.t()  # as it is looked up
    found = product_by_row(down, b)
    torch.testing.assert_close(found, (down.double() @ b.double().t()).to(dtype))
    assert torch.equal(found, product_by_row(down.contiguous(), b))
    for num_rows in (1, 2, 7):
        for start in (0, 1, 33, 69):
            rows = slice(start, start + num_rows)
            assert torch.equal(found[rows], product_by_row(a[:, rows].contiguous().t(), b))
    monkeypatch.setattr(module, "_MAX_TERMS", 3 * b.numel())
    assert torch.equal(found, product_by_row(down, b))
    assert product_by_row(down[:0], b).shape == (0, out)


def test_another_base_product_can_take_the_place() -> None:
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
    """A table's derived values, as an implementation may keep them; records which slots were dropped."""

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


def test_a_slot_is_cleared_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was filled in part, when the memory was full."""
    three = Three()
    paths = tuple(three.slots.targets)
    for num_uploads in range(4):
        left = num_uploads

        def upload(host: Tensor, device: torch.device) -> Tensor:
            nonlocal left
            left -= 1
            if left < 0:
                raise torch.OutOfMemoryError
            return host

        monkeypatch.setattr(adapter_slots, "upload", upload)
        with pytest.raises(torch.OutOfMemoryError):
            three.install(*paths)
        three.slots.install(1, None)
        assert three.slots.max_rank == 0
        for target in three.slots.targets.values():
            assert target.num_installed == 0
            assert target.table is not None
            assert target.table.factors[1] is None
            assert not target.table.a_ptrs.any()
            assert not target.table.ranks.any()


def test_slots_refuse_what_the_model_lacks() -> None:
    loaded = adopt_model(random_model("llama", torch.float32))
    slots = loaded.adapter_slots(OPS, 2)
    weights = AdapterWeights(AdapterKey("lora", "0" * 64), torch.zeros(0, dtype=torch.uint8), {"x.y": factors(4, 4)})
    with pytest.raises(ValueError, match=r"x\.y"):
        slots.install(0, weights)
    assert not any(module.num_installed for module in loaded.targets.values())


CPU = torch.device("cpu")
NAMES = ("q", "k", "v")
SIZES = (6, 3, 2)


class SiblingReference(ReferenceOps):
    """Counts merged calls."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def apply_merged(self, y: Tensor, x: Tensor, tables: Sequence[FactorTable], prepared: PreparedSegments) -> None:
        self.calls.append(len(tables))
        start = 0
        for table in tables:
            self.apply(y[:, start : start + table.out_features], x, table, prepared)
            start += table.out_features


class Three:
    """Three joined linears, the same ones apart, and slots over the former."""

    def __init__(self, has_bias: bool = True, ops: ReferenceOps | None = None) -> None:
        torch.manual_seed(0)
        self.context = StepContext()
        self.plain = [nn.Linear(4, size, bias=has_bias).requires_grad_(False) for size in SIZES]
        self.joined = [
            AdaptedLinear(nn.Parameter(p.weight.clone(), False), copy_of(p.bias), self.context) for p in self.plain
        ]
        self.model = nn.ModuleDict(dict(zip(NAMES, self.joined, strict=True)))
        self.groups = merge_linears(self.model, [list(NAMES)], dict(self.model.named_children()), self.context)
        targets = dict(zip(NAMES[::-1], self.joined[::-1], strict=True))
        self.ops = ops or SiblingReference()
        self.slots = AdapterSlots(targets, self.ops, 2, CPU)  # type: ignore[arg-type]

    def install(self, *paths: str) -> dict[str, LoraFactors]:
        sizes = dict(zip(NAMES, SIZES, strict=True))
        factors = {path: LoraFactors(torch.randn(2, 4), torch.randn(sizes[path], 2), 0.5) for path in paths}
        self.slots.install(1, AdapterWeights(AdapterKey("lora", "0" * 64), torch.zeros(0, dtype=torch.uint8), factors))
        self.context.token_segments = self.ops.prepare([Segment(1, 3, 1)], 5, 2, CPU)
        return factors


def copy_of(bias: nn.Parameter | None) -> nn.Parameter | None:
    return nn.Parameter(bias.clone(), False) if bias is not None else None


@pytest.mark.parametrize("has_bias", [False, True])
def test_they_answer_as_they_would_alone(has_bias: bool) -> None:
    three = Three(has_bias)
    x = torch.randn(1, 5, 4)
    for linear, plain in zip(three.joined, three.plain, strict=True):
        torch.testing.assert_close(linear(x), plain(x))
    assert three.context.merged is None, "nothing is kept behind the last"


def test_weights_are_rows_of_one() -> None:
    three = Three()
    (group,) = three.groups
    assert isinstance(group, JointLinear)
    assert group.weight.shape == (sum(SIZES), 4)
    start = 0
    for linear, plain in zip(three.joined, three.plain, strict=True):
        assert torch.equal(linear.weight, plain.weight)
        assert linear.weight.data_ptr() == group.weight[start].data_ptr()
        assert linear.base.weight is linear.weight  # type: ignore[attr-defined]
        start += linear.out_features


def test_out_of_turn_or_with_another_input_each_computes_alone() -> None:
    three = Three()
    x, other = torch.randn(2, 5, 4)
    first, second, third = three.joined
    want = dict(zip(three.joined, three.plain, strict=True))
    for calls in (
        [(second, x)],
        [(first, x), (third, x), (second, x)],
        [(first, x), (second, other), (second, x), (second, x), (third, x)],
        [(first, x), (first, other), (second, x), (second, other), (third, other)],
        [(first, x), (second, x.clone()), (third, x)],
    ):
        three.context.clear()
        for linear, given in calls:
            torch.testing.assert_close(linear(given), want[linear](given))


def test_what_a_caller_does_to_its_columns_is_its_own_affair() -> None:
    three = Three()
    x = torch.randn(5, 4)
    three.joined[0](x).zero_()
    torch.testing.assert_close(three.joined[1](x), three.plain[1](x))
    torch.testing.assert_close(three.joined[0](x), three.plain[0](x))


def test_a_step_that_raises_in_between_leaves_nothing() -> None:
    three = Three()
    three.joined[0](torch.randn(5, 4))
    assert three.context.merged is not None
    three.context.clear()
    assert three.context.merged is None


@pytest.mark.parametrize("installed", [("q", "k", "v"), ("k",), ("v", "q")])
@pytest.mark.parametrize("ops", [SiblingReference(), ReferenceOps()], ids=["at once", "one by one"])
def test_adapters_of_any_of_them(ops: ReferenceOps, installed: tuple[str, ...]) -> None:
    three = Three(ops=ops)
    factors = three.install(*installed)
    x = torch.randn(1, 5, 4)
    for name, linear, plain in zip(NAMES, three.joined, three.plain, strict=True):
        want = plain(x)
        if name in factors:
            want[0, 1:3] += 0.5 * x[0, 1:3] @ factors[name].a.T @ factors[name].b.T
        torch.testing.assert_close(linear(x), want)
    if isinstance(ops, SiblingReference):
        assert ops.calls.pop() == 3
        three.slots.install(1, None)
        three.joined[0](x)
        assert not ops.calls, "with no adapter in any of them nobody is asked"


def test_tables_lie_one_below_the_other_as_they_are_called() -> None:
    tables = [linear.table for linear in Three().joined]
    starts = [table.a_ptrs.data_ptr() for table in tables if table is not None]
    assert starts == sorted(starts)
    assert starts[1] - starts[0] == starts[2] - starts[1] == 2 * 8


def test_only_what_fits_together_is_joined() -> None:
    context = StepContext()

    def linear(*, dtype: torch.dtype = torch.float32, bias: bool = False) -> AdaptedLinear:
        plain = nn.Linear(4, 4, bias=bias, dtype=dtype)
        return AdaptedLinear(plain.weight, plain.bias, context)

    modules = {
        "a.x": linear(), "a.y": linear(bias=True), "b.x": linear(), "b.y": linear(dtype=torch.float64),
        "c.x": linear(), "d.x": linear(), "e.x": linear(), "e.y": linear(), "e.lone": linear(), "f.x": linear(),
    }  # fmt: skip
    runs = [["a.x", "a.y"], ["b.x", "b.y"], ["c.x", "d.x", "e.x", "e.y"], ["e.lone"], [], ["f.x", "f.no_target"]]
    (group,) = merge_linears(nn.ModuleList(modules.values()), runs, modules, context)
    assert group.members == (modules["e.x"], modules["e.y"])
    assert [path for path, module in modules.items() if module.merged is group] == ["e.x", "e.y"]


def test_separated_they_compute_alone() -> None:
    three = Three()
    three.groups[0].separate()
    assert not any(linear.merged for linear in three.joined)
    x = torch.randn(5, 4)
    for linear, plain in zip(three.joined, three.plain, strict=True):
        torch.testing.assert_close(linear(x), plain(x))


def test_a_model_whose_code_needs_whole_outputs_is_served_without(monkeypatch: pytest.MonkeyPatch) -> None:
    output = JointLinear.output

    def viewed(self: JointLinear, member: AdaptedLinear, x: Tensor) -> Tensor | None:
        y = output(self, member, x)
        return y if y is None else y.reshape(-1)

    monkeypatch.setattr(JointLinear, "output", viewed)
    loaded = adopt_model(
        random_model("llama"), backend=PatchedBackend(merges=True)
    )  # verified against Transformers' own attention
    assert not any(module.merged for module in loaded.targets.values() if isinstance(module, AdaptedLinear))


def rounded_model(num_layers: int = 24) -> PreTrainedModel:
    """Llama in bfloat16, deep enough for roundings to add up."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize(("error", "is_merged"), [(0.006, True), (0.03, False)])
def test_wide_products_may_round_otherwise_but_not_be_wrong(
    error: float, is_merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU adds up parts of a product in another order where it is wider, which a deep model amplifies."""
    base = JointLinear.base

    def perturbed(self: JointLinear, x: Tensor) -> Tensor:
        y = base(self, x)
        return y * (1 + error * torch.randn(y.shape, generator=torch.Generator().manual_seed(len(self.members))))

    monkeypatch.setattr(JointLinear, "base", lambda self, x: perturbed(self, x).to(x.dtype))
    loaded = adopt_model(rounded_model(), backend=PatchedBackend(merges=True), verify=False)
    found = {bool(module.merged) for path, module in loaded.targets.items() if path.endswith(("q_proj", "up_proj"))}
    assert found == {is_merged}


def test_a_module_that_is_called_twice_stays_alone() -> None:
    register_attention()
    context, model = StepContext(), random_model("llama")
    probe = probe_model(model, "x", 64, StepContext())
    assert any(run[-1].endswith("v_proj") and len(run) == 3 for run in probe.runs)
    probe.rows["model.layers.0.self_attn.k_proj"] *= 2
    targets = adapt_modules(model, probe, context, torch.float64)
    merge_modules(model, probe, targets, context)
    joined = {path for path, module in targets.items() if isinstance(module, AdaptedLinear) and module.merged}
    assert "model.layers.0.self_attn.q_proj" in joined
    assert "model.layers.0.self_attn.k_proj" not in joined


def test_inputs_that_are_changed_on_the_way_are_not_one() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.one(x)
            x += 1
            return y + self.two(x)

    runs: list[list[str]] = []
    module = Changing().requires_grad_(False)
    with inputs_recorded(module, {}, runs):
        module(torch.randn(3, 4))
    assert runs == [["one"], ["two"]]
