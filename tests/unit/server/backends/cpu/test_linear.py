"""Packed linears equal plain ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from support.backends import PatchedBackend
from support.driver import Job, make_rig
from support.lora_cases import bits
from support.native_kernels import isas, native_kernels, using
from support.native_models import native_model
from support.zoo import random_model
from torch import Tensor, nn

from loraplex_adapters.weights import AdapterWeights, LoraFactors, SavedParameter
from loraplex_contracts.adapters import AdapterKey
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cpu.decoder.weights import StackLinear, StackPair
from loraplex_server.backends.cpu.linear import (
    MAX_MEMBERS,
    NativeLinear,
    NativeLinears,
    PackedLinear,
    can_pack,
    native_linears,
    native_merge,
    packed_linear,
)
from loraplex_server.backends.cpu.lora import NativeOps
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import AbsorbedLinear, AdaptedHead, AdaptedLinear, PlainLinear
from loraplex_server.layers.lora import Segment
from loraplex_server.layers.quantization import INT8
from loraplex_server.model.loader import adopt_model


@pytest.fixture(params=isas())
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    with using(request.param):
        yield native_kernels()


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (1, 7, 64), (2, 3, 64), (0, 64), (1, 0, 64)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_product_is_the_plain_one(
    kernels: NativeKernels, shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(80, 64).to(dtype), torch.randn(shape).to(dtype)
    bias = torch.randn(80).to(dtype) if has_bias else None
    linear = native_linears(kernels)(weight, bias)
    assert isinstance(linear, NativeLinear)
    assert linear.is_copy
    out = linear(x)
    assert out.shape == (*shape[:-1], 80)
    torch.testing.assert_close(out, PlainLinear(weight, bias)(x), rtol=tolerance, atol=tolerance)
    out.add_(1)  # the caller may write to it
    x.zero_()


def test_the_weight_is_a_copy_and_the_bias_may_be_a_view(kernels: NativeKernels) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(64, 48).t(), torch.randn(96)[::2], torch.randn(3, 64)
    linear = NativeLinear(kernels, weight, bias)
    want = x @ weight.t() + bias
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-5)
    weight.zero_()
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 4, dtype=torch.float64),
        torch.zeros(4, 4, dtype=torch.float16),
        torch.zeros(4, 33, dtype=torch.bfloat16),
    ],
    ids=lambda w: str(w.dtype),
)
def test_what_the_kernels_do_not_know_is_made_otherwise(kernels: NativeKernels, weight: torch.Tensor) -> None:
    assert isinstance(native_linears(kernels, PlainLinear)(weight, None), PlainLinear)


def test_absorbed_linears_are_computed_by_nobody(kernels: NativeKernels) -> None:
    first, second = torch.randn(8, 64), torch.randn(8, 64)
    absorbed, own = (
        AdaptedLinear(nn.Parameter(weight, False), None, StepContext(), make_base=native_linears(kernels)).base
        for weight in (first.to("meta"), second)
    )
    assert isinstance(absorbed, AbsorbedLinear)
    assert isinstance(own, NativeLinear)
    with pytest.raises(AssertionError, match="stack"):
        absorbed(torch.zeros(1, 64))


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_no_weight_is_kept_twice(kernels: NativeKernels, family: str) -> None:
    """Weights are kept once, where a model's layers became a stack and where they did not."""
    loaded = adopt_model(native_model(family, torch.bfloat16), backend=CpuBackend(kernels))
    linears = [module for module in loaded.targets.values() if isinstance(module, AdaptedLinear)]
    assert len(linears) == 2 * 7 + 1
    kept = [module for module in linears if module.weight.device.type != "meta"]
    assert [type(module) for module in kept] == [AdaptedHead]
    for module in linears:
        is_absorbed = loaded.decoder is not None and not isinstance(module, AdaptedHead)
        assert isinstance(module.base, StackLinear | StackPair if is_absorbed else NativeLinear)


def test_a_model_of_which_no_weight_packs_is_right(kernels: NativeKernels) -> None:
    """48 features are no multiple of 32, in bfloat16."""
    model = native_model("llama", torch.bfloat16, hidden_size=48)
    loaded = adopt_model(copy.deepcopy(model), backend=CpuBackend(kernels))
    modules = [module for _, module in loaded.named_modules()]
    packed = [m for m in modules if isinstance(m, AdaptedLinear) and isinstance(m.base, NativeLinear)]
    assert loaded.decoder is not None
    assert [call.path for call in loaded.decoder.weights[0].own_parts] == ["self_attn", "mlp"]
    assert {module.in_features for module in packed} == {96, 128}  # down and o
    rig = make_rig(loaded, ops=NativeOps(kernels))
    job = Job([3, 4, 5, 6], 4)
    rig.run([job])
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([[*job.prompt, *job.tokens]]), use_cache=False).logits[0, 3:-1]
    torch.testing.assert_close(rig.logits(job), want, rtol=0, atol=0.05 * float(want.abs().max()))


def test_tied_weights_stay_tied(kernels: NativeKernels) -> None:
    model = native_model("qwen2")
    assert model.config.tie_word_embeddings
    embedding = model.get_parameter("model.embed_tokens.weight")
    loaded = adopt_model(model, backend=CpuBackend(kernels))
    head = loaded.model.get_output_embeddings()
    assert isinstance(head, AdaptedHead)
    assert head.weight is embedding
    x = torch.randn(3, 128)
    assert torch.equal(bits(head.base(x)), bits(NativeLinear(kernels, embedding, None)(x)))


# --- several with adapters, in one call -------------------------------------------------------------------------------

SIZES = {"q": 96, "k": 40, "b": 7, "a": 64}
NUM_INPUTS, NUM_SLOTS = 64, 6


class Group:
    """Merged linears, and adapters of all kinds in slots: low-rank ones of a few members, a gain and a shift, a weight
    and rows of a weight of their own."""

    def __init__(self, kernels: NativeKernels, dtype: torch.dtype, *, has_bias: bool = True) -> None:
        torch.manual_seed(0)
        self.context = StepContext()
        self.members: dict[str, AdaptedLinear] = {}
        self.plain: dict[str, nn.Linear] = {}
        for name, size in SIZES.items():
            self.plain[name] = plain = nn.Linear(NUM_INPUTS, size, bias=has_bias).requires_grad_(False).to(dtype)
            self.members[name] = AdaptedLinear(
                plain.weight, plain.bias, self.context, make_base=native_linears(kernels)
            )
        self.group = native_merge(kernels)([*self.members.values()], self.context)
        assert isinstance(self.group, NativeLinears)
        self.ops = NativeOps(kernels)
        self.slots = AdapterSlots(dict(self.members), self.ops, NUM_SLOTS, torch.device("cpu"))  # type: ignore[arg-type]
        self.adapters = [
            self._adapter({"q": 16, "b": 3}),
            self._adapter({"k": 40}),
            self._adapter({"q": 4, "k": 4, "b": 4, "a": 4}, is_rescaled=True),
            self._adapter({}, {"a": SavedParameter(torch.randn(64, NUM_INPUTS).to(dtype) / 8)}),
            self._adapter({"q": 8}, {"q": SavedParameter(torch.randn(2, NUM_INPUTS).to(dtype) / 8, (3, 90))}),
        ]
        for slot, weights in enumerate(self.adapters):
            self.slots.install(slot, weights)

    def _adapter(
        self, ranks: dict[str, int], saved: dict[str, SavedParameter] | None = None, *, is_rescaled: bool = False
    ) -> AdapterWeights:
        dtype = self.members["q"].weight.dtype
        factors: dict[str, LoraFactors] = {}
        for name, rank in ranks.items():
            a, b = torch.randn(rank, NUM_INPUTS) / 8, torch.randn(SIZES[name], rank) / rank
            more = (1 + torch.randn(SIZES[name]) / 4, torch.randn(SIZES[name])) if is_rescaled else ()
            factors[name] = LoraFactors(a.to(dtype), b.to(dtype), 0.5, *(one.to(dtype) for one in more))
        own = {name: {"weight": one} for name, one in (saved or {}).items()}
        return AdapterWeights(AdapterKey("lora", "0" * 64), torch.zeros(0, dtype=torch.uint8), factors, saved=own)

    def run(self, x: Tensor, segments: list[Segment]) -> dict[str, Tensor]:
        self.context.clear()
        self.context.token_segments = self.ops.prepare(segments, len(x), NUM_SLOTS, x.device) if segments else None
        given = x.unsqueeze(0)  # members look for the very tensor
        return {name: member(given)[0] for name, member in self.members.items()}

    def want(self, name: str, x: Tensor, segments: list[Segment]) -> Tensor:
        """The same in float64."""
        plain = self.plain[name]
        wide = x.double()
        y = wide @ plain.weight.double().t() + (0 if plain.bias is None else plain.bias.double())
        for segment in segments:
            rows, weights = slice(segment.start, segment.end), self.adapters[segment.adapter_slot]
            if (own := weights.saved.get(name)) is not None:
                values, ids = own["weight"].values.double(), own["weight"].token_ids
                columns = slice(None) if ids is None else list(ids)
                bias = 0 if plain.bias is None else plain.bias.double()[columns]
                y[rows, columns] = wide[rows] @ values.t() + bias
        for segment in segments:
            rows, factors = slice(segment.start, segment.end), self.adapters[segment.adapter_slot].factors.get(name)
            if factors is None:
                continue
            y[rows] += segment.weight * factors.scale * (wide[rows] @ factors.a.double().t() @ factors.b.double().t())
            if factors.gain is not None and factors.shift is not None:
                y[rows] = factors.gain.double() * y[rows] + factors.shift.double()
        return y


SEGMENTS = [
    *(Segment(1, 2, 0), Segment(2, 9, 1), Segment(9, 12, 2), Segment(12, 14, 3), Segment(15, 20, 4)),
    *(Segment(22, 60, 0, 0.5), Segment(22, 60, 1, 2.0)),  # a mixture
]


@pytest.mark.parametrize("num_rows", [60, 61, 200])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_linears_with_adapters_of_all_kinds_in_one_call(
    kernels: NativeKernels, num_rows: int, has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    group = Group(kernels, dtype, has_bias=has_bias)
    x = torch.randn(num_rows, NUM_INPUTS).to(dtype)
    for name, y in group.run(x, SEGMENTS).items():
        want = group.want(name, x, SEGMENTS)
        torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    assert group.context.merged is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_have_the_bits_that_they_have_alone(kernels: NativeKernels, dtype: torch.dtype) -> None:
    group = Group(kernels, dtype)
    x = torch.randn(60, NUM_INPUTS).to(dtype)
    together = group.run(x, SEGMENTS)
    for row in range(60):
        own = [Segment(0, 1, one.adapter_slot, one.weight) for one in SEGMENTS if one.start <= row < one.end]
        if any(one.adapter_slot == 4 for one in own):
            continue  # torch multiplies with own rows of a weight, by the number of rows
        alone = group.run(x[row : row + 1], own)
        assert all(torch.equal(bits(together[name][row]), bits(alone[name][0])) for name in SIZES), row
    for name, member in group.members.items():
        assert torch.equal(bits(together[name][0]), bits(member.base(x[:1])[0])), "without an adapter: the base's bits"


def test_linears_that_do_not_fit_together_stay_alone(kernels: NativeKernels) -> None:
    context, merge = StepContext(), native_merge(kernels)

    def linear(*, form: object = None, **options: bool) -> AdaptedLinear:
        weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        return AdaptedLinear(weight, None, context, make_base=native_linears(kernels, form=form), **options)  # type: ignore[arg-type]

    assert merge([linear()], context) is not None
    assert merge([linear() for _ in range(MAX_MEMBERS)], context) is not None
    for members in (
        [linear() for _ in range(MAX_MEMBERS + 1)],
        [linear(), linear(form=INT8)],
        [linear(is_conv1d=True)],
        [AdaptedLinear(nn.Parameter(torch.randn(64, 64), requires_grad=False), None, context)],
    ):
        assert merge(members, context) is None
        assert not any(member.merged for member in members)


def test_this_torch_still_has_the_operators() -> None:
    """The operators are private to torch. When they go, serving on a CPU goes on, slower: see to it then."""
    assert can_pack(torch.zeros(4, 4))


@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (1, 7, 48), (2, 3, 48), (0, 48)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_prepacked_product_is_the_plain_one(
    shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    if not can_pack(torch.zeros(4, 4, dtype=dtype)):
        pytest.skip(f"this CPU multiplies {dtype} through another type")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(shape, generator=generator).to(dtype)
    packed = packed_linear(weight, bias)
    assert isinstance(packed, PackedLinear)
    out = packed(x)
    assert out.shape == (*shape[:-1], 80)
    torch.testing.assert_close(out, PlainLinear(weight, bias)(x), rtol=tolerance, atol=tolerance)


def test_a_transposed_weight_can_be_packed() -> None:
    """The transposed weight of a Conv1D can be packed."""
    weight = torch.randn(48, 80, generator=torch.Generator().manual_seed(0)).t()
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(packed_linear(weight, None)(x), x @ weight.t(), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_packed_stays_plain() -> None:
    assert isinstance(packed_linear(torch.zeros(4, 4, dtype=torch.float64), None), PlainLinear)


def test_packed_weights_are_not_kept_twice() -> None:
    loaded = adopt_model(random_model("llama", torch.float32), backend=PatchedBackend(make_linear=packed_linear))
    linears = [module for module in loaded.model.modules() if isinstance(module, AdaptedLinear)]
    kept = [module for module in linears if module.weight.device.type != "meta"]
    assert kept == [loaded.model.get_output_embeddings()]
    assert all(module.weight.shape == (module.out_features, module.in_features) for module in linears)
