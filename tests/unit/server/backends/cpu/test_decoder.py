"""Native decoder: models that get it, cache, adapters and bounds of its arguments.

That it computes what the layers computed, alone and in any batch, is in tests/parity/test_native.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.driver import Job, make_rig
from support.guarded_memory import at_end, at_start
from support.lora_cases import bits, random_factors
from support.native_kernels import best_first, library_or_skip, native_kernels, using
from support.native_models import NOT_STACKED, SIZES, STACKED, native_model, native_rig
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    OlmoeConfig,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.llama import modeling_llama

from loraplex_adapters.weights import AdapterWeights, LoraFactors, SavedParameter
from loraplex_contracts.adapters import AdapterKey
from loraplex_server.backends.cpu.attention import NativePagedAttention
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cpu.decoder import find
from loraplex_server.backends.cpu.decoder.find import find_stack
from loraplex_server.backends.cpu.decoder.stack import ComputedLayer, NativeNorm, NativeStack, StackPart
from loraplex_server.backends.cpu.lora import NativeOps
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.reference import ReferenceOps
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, KvCache, LayerKv
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.lora import Segment
from loraplex_server.layers.quantization import FORMATS, WeightFormat
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.probe import CACHE
from loraplex_server.model.rounding import round_weights

BLOCK_SIZE = 4
NUM_BLOCKS = 40
HIDDEN = 128
DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


@pytest.fixture(params=best_first())
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    torch.manual_seed(sum(map(ord, request.node.name)))
    with using(request.param):
        yield native_kernels()


def adapter(factors: Mapping[str, LoraFactors]) -> AdapterWeights:
    """An adapter whose tensors lie anywhere."""
    return AdapterWeights(AdapterKey("lora", "0" * 64), torch.empty(0, dtype=torch.uint8), factors)


class Bench:
    """A stack whose steps are made by hand: one sequence per step, from its first token on."""

    def __init__(
        self,
        kernels: NativeKernels,
        dtype: torch.dtype,
        family: str = "llama",
        num_slots: int = 4,
        ffn_size: int = SIZES["intermediate_size"],
    ) -> None:
        model = native_model(family, dtype, intermediate_size=ffn_size)
        self.loaded: LoadedModel = adopt_model(model, backend=CpuBackend(kernels))
        self.dtype = dtype
        self.ops = NativeOps(kernels)
        self.slots: AdapterSlots = self.loaded.adapter_slots(self.ops, num_slots)
        self.backend = NativePagedAttention(kernels)
        self.bind(self.pages())

    def pages(self) -> list[LayerKv]:
        shape = (NUM_BLOCKS, BLOCK_SIZE, 2, self.loaded.spec.layers[0].k_dim)
        return [LayerKv(*(torch.full(shape, float("nan")).to(self.dtype) for _ in range(2))) for _ in range(2)]

    def bind(self, pages: list[LayerKv]) -> None:
        cache = KvCache(self.loaded.spec, NUM_BLOCKS, BLOCK_SIZE, self.dtype, CPU)
        cache.layers = tuple(pages)
        self.loaded.bind_kv(cache, self.backend)

    def install(self, slot: int, rank: int, parts: tuple[str, ...] = ("",)) -> AdapterWeights:
        """Random factors for the modules whose paths hold one of `parts`; rank 0 clears the slot."""
        factors = {
            path: random_factors(rank, module.in_features, module.out_features, self.dtype, scale=0.5)
            for path, module in self.loaded.targets.items()
            if "layers" in path and any(part in path for part in parts)
        }
        weights = adapter(factors)
        self.slots.install(slot, weights if rank else None)
        return weights

    def run(
        self,
        states: Tensor,
        segments: list[Segment] | None = None,
        num_turned: int = 32,
        lens: tuple[int, ...] = (),
        head_rows: list[int] | None = None,
    ) -> Tensor:
        """states [num_tokens, hidden], which are overwritten. `lens`: of sequences, if there are several."""
        context, stack = self.loaded.context, self.loaded.decoder
        assert stack is not None
        num_tokens = states.shape[0]
        angles = torch.outer(torch.arange(num_tokens) + 1.0, torch.linspace(0.1, 1.0, num_turned // 2)).repeat(1, 2)
        cos, sin = at_end(angles.cos().to(self.dtype)), at_end(angles.sin().to(self.dtype))
        sizes = np.array(lens or [num_tokens], dtype=np.int64)
        per_span = NUM_BLOCKS // len(sizes)
        blocks = np.arange(per_span * len(sizes), dtype=np.int64)[::-1].reshape(len(sizes), per_span)
        slots = torch.cat(
            [
                torch.from_numpy(table.copy())[torch.arange(size) // BLOCK_SIZE] * BLOCK_SIZE
                + torch.arange(size) % BLOCK_SIZE
                for table, size in zip(blocks, sizes, strict=True)
            ]
        )
        batch = AttentionBatch(sizes, sizes, blocks, BLOCK_SIZE, slots)
        context.attention = self.backend.plan(batch, self.dtype, CPU)
        context.head_rows = None if head_rows is None else np.array(head_rows, dtype=np.int64)
        if segments is not None:
            context.token_segments = self.ops.prepare(segments, num_tokens, self.slots.num_slots, CPU)
        try:
            return stack(states[None], position_embeddings=(cos[None], sin[None]))[0]
        finally:
            context.clear()

    def states(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, HIDDEN).to(self.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "olmo2", "phi3"])
@pytest.mark.parametrize("place", [at_end, at_start], ids=lambda f: f.__name__)
def test_nothing_beyond_the_arguments_is_touched(
    kernels: NativeKernels, dtype: torch.dtype, family: str, place: object
) -> None:
    """Hidden states, rotary tables, pages and factors between walls."""
    bench = Bench(kernels, dtype, family)
    for slot, rank in enumerate((5, 16, 33)):
        weights = bench.install(slot, rank)
        walled = {
            path: LoraFactors(place(factors.a), place(factors.b), factors.scale)  # type: ignore[operator]
            for path, factors in weights.factors.items()
        }
        bench.slots.install(slot, adapter(walled))
    segments = [Segment(0, 1, 0), Segment(1, 2, 1), Segment(2, 40, 2), Segment(30, 36, 0, 0.5), Segment(50, 70, 1)]
    for num_tokens in (1, 2, 17, 70, 131):
        own = [
            Segment(s.start, min(s.end, num_tokens), s.adapter_slot, s.weight) for s in segments if s.start < num_tokens
        ]
        states = bench.states(num_tokens)
        bench.bind(bench.pages())
        want = bench.run(states.clone(), own)
        bench.bind([LayerKv(place(kv.k), place(kv.v)) for kv in bench.pages()])  # type: ignore[operator]
        got = bench.run(place(states), own)  # type: ignore[operator]
        assert torch.equal(bits(got), bits(want))
        assert got.isfinite().all()


def test_states_are_overwritten_in_place(kernels: NativeKernels) -> None:
    bench = Bench(kernels, torch.float32)
    states = bench.states(5)
    got = bench.run(states)
    assert got.data_ptr() == states.data_ptr()


def test_states_that_are_not_contiguous(kernels: NativeKernels) -> None:
    bench = Bench(kernels, torch.float32)
    states = bench.states(5)
    wide = torch.zeros(5, 2 * HIDDEN)
    wide[:, ::2] = states
    assert torch.equal(bits(bench.run(wide[:, ::2])), bits(bench.run(states)))


def test_it_follows_the_cache_that_is_bound(kernels: NativeKernels) -> None:
    bench = Bench(kernels, torch.float32)
    states = bench.states(9)
    want = bench.run(states.clone())
    first, second = bench.pages(), bench.pages()
    for pages in (first, second, first):
        bench.bind(pages)
        assert torch.equal(bits(bench.run(states.clone())), bits(want))
        assert all(int(kv.k.isfinite().sum()) == 9 * 2 * 32 for kv in pages)
    assert all(torch.equal(a.k.nan_to_num(), b.k.nan_to_num()) for a, b in zip(first, second, strict=True))


def test_without_a_cache_it_says_so(kernels: NativeKernels) -> None:
    bench = Bench(kernels, torch.float32)
    bench.loaded.unbind_kv()
    with pytest.raises(AssertionError, match="no KV cache is bound"):
        bench.run(bench.states(1))


def test_segments_of_another_implementation_are_refused(kernels: NativeKernels) -> None:
    bench = Bench(kernels, torch.float32)
    bench.install(0, 4)
    bench.ops = ReferenceOps()  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="native segments"):
        bench.run(bench.states(2), [Segment(0, 1, 0)])


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_rows", [[], [69], [0, 9, 10, 14, 15, 40, 68], [68, 3, 3, 15, 14]], ids=str)
def test_rows_whose_output_is_read_have_every_bit(
    kernels: NativeKernels, dtype: torch.dtype, head_rows: list[int]
) -> None:
    """Others end with their keys and values. Rows side by side, ends of sequences, some twice, none at all."""
    bench = Bench(kernels, dtype)
    for slot, rank in enumerate((5, 16, 33)):
        bench.install(slot, rank)
    segments = [Segment(0, 1, 0), Segment(1, 10, 1), Segment(11, 40, 2), Segment(30, 36, 0, 0.5), Segment(50, 70, 1)]
    states, lens = bench.states(70), (15, 5, 50)
    bench.bind(all_pages := bench.pages())
    want = bench.run(states.clone(), segments, lens=lens)
    bench.bind(pages := bench.pages())
    got = bench.run(states.clone(), segments, lens=lens, head_rows=head_rows)
    assert torch.equal(bits(got[head_rows]), bits(want[head_rows]))
    for one, other in zip(pages, all_pages, strict=True):
        assert torch.equal(bits(one.k), bits(other.k))
        assert torch.equal(bits(one.v), bits(other.v))
    rest = [row for row in range(70) if row not in head_rows]
    assert not torch.equal(bits(got[rest]), bits(want[rest])), "the last layer computed rows that nobody reads"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scratch_grows_with_tokens_and_ranks(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Numbers of tokens and ranks come in any order: each step equals that of a fresh stack."""
    bench = Bench(kernels, dtype)
    for num_tokens, rank in ((1, 1), (3, 64), (1, 256), (150, 8), (2, 0), (131, 100), (60, 256), (7, 3)):
        weights = bench.install(0, rank)
        states, segments = bench.states(num_tokens), [Segment(0, num_tokens, 0), Segment(0, num_tokens, 0, 0.5)]
        got = bench.run(states.clone(), segments)
        fresh = Bench(kernels, dtype)
        fresh.slots.install(0, weights if rank else None)
        assert bench.slots.max_rank == fresh.slots.max_rank == rank
        assert torch.equal(bits(got), bits(fresh.run(states.clone(), segments)))


PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Linears of several parts, and products whose sums are normed or scaled.
OTHER_PARTS = (("phi3", "qkv_proj"), ("phi3", "gate_up_proj"), ("gemma2", "o_proj"), ("granite", "down_proj"))
FAMILIES_AND_PARTS = (*(("llama", part) for part in PARTS), *OTHER_PARTS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "part"), FAMILIES_AND_PARTS)
def test_every_linear_gets_its_own_factors(kernels: NativeKernels, dtype: torch.dtype, family: str, part: str) -> None:
    """An adapter of one linear is the same as that linear with the product added to its weight."""
    bench = Bench(kernels, dtype, family)
    weights = bench.install(1, 7, (f"0.self_attn.{part}", f"0.mlp.{part}"))
    assert len(weights.factors) == 1
    model = native_model(family, dtype)
    for path, factors in weights.factors.items():
        weight = model.get_parameter(f"{path}.weight")
        update = factors.scale * (factors.b.double() @ factors.a.double())
        weight.data = (weight.double() + update).to(dtype)
    merged = Bench(kernels, dtype, family)
    merged.loaded = adopt_model(model, backend=CpuBackend(kernels))
    merged.slots = merged.loaded.adapter_slots(merged.ops, 4)
    merged.bind(merged.pages())
    states = bench.states(12)
    plain = bench.run(states.clone())
    got, want = bench.run(states.clone(), [Segment(0, 12, 1)]), merged.run(states.clone())
    scale = float((want - states).norm())
    assert float((got - want).norm()) < (1e-5 if dtype == torch.float32 else 4e-2) * scale
    assert float((got - plain).norm()) > 0.05 * scale, "an adapter that changes nothing would prove nothing"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("family", "part"), FAMILIES_AND_PARTS)
def test_gains_and_shifts_are_computed_in_the_stack(
    kernels: NativeKernels, dtype: torch.dtype, family: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains and shifts give the same as a gain in the weight with a shift alone beside it. Rows beside keep their bits,
    and so do rows in runs of any length."""
    bench = Bench(kernels, dtype, family)
    never_by_own_layers(bench, monkeypatch)
    plain = bench.install(0, 7)
    ((path, factors),) = bench.install(1, 7, (f"0.self_attn.{part}", f"0.mlp.{part}")).factors.items()
    num_outputs = factors.b.shape[0]
    gain = (1 + torch.rand(num_outputs)).to(dtype)
    shift = (0.5 * torch.randn(num_outputs)).to(dtype)
    model = native_model(family, dtype)
    weight = model.get_parameter(f"{path}.weight")
    update = factors.scale * (factors.b.double() @ factors.a.double())
    weight.data = (gain.double()[:, None] * (weight.double() + update)).to(dtype)
    merged = Bench(kernels, dtype, family)
    merged.loaded = adopt_model(model, backend=CpuBackend(kernels))
    merged.slots = merged.loaded.adapter_slots(merged.ops, 4)
    merged.bind(merged.pages())
    only_shift = LoraFactors(factors.a[:0], factors.b[:, :0], 1.0, shift=shift)
    merged.slots.install(1, adapter({path: only_shift}))
    for own, other in (
        (replace(factors, gain=gain), ()),
        (replace(factors, gain=gain, shift=shift), (Segment(0, 12, 1),)),
    ):
        bench.slots.install(1, adapter({path: own}))
        states = bench.states(12)
        got, want = bench.run(states.clone(), [Segment(0, 12, 1)]), merged.run(states.clone(), list(other) or None)
        scale = float((want - states).norm())
        assert float((got - want).norm()) < (1e-5 if dtype == torch.float32 else 4e-2) * scale
    unchanged = bench.run(states.clone())
    assert float((got - unchanged).norm()) > 0.05 * scale, "an adapter that changes nothing would prove nothing"
    bench.slots.install(2, plain)
    alone = bench.run(states.clone(), [Segment(0, 8, 2)])
    together = bench.run(states.clone(), [Segment(0, 8, 2), Segment(9, 12, 1)])
    assert torch.equal(bits(together[:9]), bits(alone[:9]))
    by_row = bench.run(states.clone(), [Segment(row, row + 1, 1) for row in range(12)])
    assert torch.equal(bits(by_row), bits(got))
    bench.slots.install(1, None)
    assert torch.equal(bits(bench.run(states.clone(), [Segment(0, 12, 1)])), bits(unchanged))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("family", "norm"),
    [
        *(("qwen3", norm) for norm in ("input_layernorm", "post_attention_layernorm")),
        *(("qwen3", norm) for norm in ("self_attn.q_norm", "self_attn.k_norm")),
        *(("gemma3", norm) for norm in ("post_attention_layernorm", "pre_feedforward_layernorm")),
        *(("gemma3", norm) for norm in ("post_feedforward_layernorm", "self_attn.k_norm")),
        *(("olmo2", norm) for norm in ("self_attn.q_norm", "self_attn.k_norm")),
    ],
)
def test_saved_norms_are_computed_in_the_stack(
    kernels: NativeKernels, dtype: torch.dtype, family: str, norm: str
) -> None:
    """Saved norms give the same bits as a model that has them. Rows beside keep their bits, and so do rows in runs of
    any length."""
    bench = Bench(kernels, dtype, family)
    plain = bench.install(0, 7)
    path = f"model.layers.1.{norm}"
    model = native_model(family, dtype)
    weight = model.get_parameter(f"{path}.weight")
    weight.data = weight + 0.5 * torch.randn_like(weight)
    other = Bench(kernels, dtype, family)
    other.loaded = adopt_model(model, backend=CpuBackend(kernels))
    other.slots = other.loaded.adapter_slots(other.ops, 4)
    other.bind(other.pages())
    own = at_end(weight.detach())
    saved = {path: {"weight": SavedParameter(own)}}
    bench.slots.install(1, replace(adapter({}), saved=saved))
    bench.slots.install(2, replace(plain, saved=saved))
    other.slots.install(2, plain)
    states = bench.states(12)
    alone = bench.run(states.clone(), [Segment(0, 8, 0)])
    together = bench.run(states.clone(), [Segment(0, 8, 0), Segment(9, 12, 1)])
    assert torch.equal(bits(together[:9]), bits(alone[:9]))
    assert not torch.equal(together[9:], alone[9:]), "a norm that changes nothing would prove nothing"
    for slot in (1, 2):
        want = bits(other.run(states.clone(), [Segment(0, 12, slot)]))
        assert torch.equal(bits(bench.run(states.clone(), [Segment(0, 12, slot)])), want)
        by_row = [Segment(row, row + 1, slot) for row in range(12)]
        assert torch.equal(bits(bench.run(states.clone(), by_row)), want)
    bench.slots.install(1, None)
    unchanged = bits(bench.run(states.clone()))
    assert torch.equal(bits(bench.run(states.clone(), [Segment(0, 12, 1)])), unchanged)


OWN_KINDS = ("weight", "gain", "rotation", "shared-rotation")


@pytest.mark.parametrize(
    ("kind", "family", "part", "dtype"),
    [
        # Every kind of every part in one dtype, and in the other in the long suite.
        pytest.param(kind, family, part, DTYPES[(i + j + k) % 2], marks=pytest.mark.slow if k else ())
        for i, kind in enumerate(OWN_KINDS)
        for j, (family, part) in enumerate(FAMILIES_AND_PARTS)
        for k in range(2)
    ],
    ids=str,
)
def test_own_products_are_computed_in_the_stack(
    kernels: NativeKernels, dtype: torch.dtype, family: str, part: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Own products give the same as a model with such a weight, with a low-rank term and a gain beside it. Other rows
    keep their bits, and so do rows in runs of any length."""
    bench = Bench(kernels, dtype, family)
    never_by_own_layers(bench, monkeypatch)
    plain = bench.install(0, 7)
    ((path, factors),) = bench.install(1, 7, (f"1.self_attn.{part}", f"1.mlp.{part}")).factors.items()
    richer = replace(factors, gain=(1 + torch.rand(len(factors.b))).to(dtype))
    model = native_model(family, dtype)
    weight = model.get_parameter(f"{path}.weight")
    saved, weight.data = own_product(kind, weight.detach())
    other = Bench(kernels, dtype, family)
    other.loaded = adopt_model(model, backend=CpuBackend(kernels))
    other.slots = other.loaded.adapter_slots(other.ops, 4)
    other.bind(other.pages())
    bench.slots.install(1, replace(adapter({path: richer}), saved={path: saved}))
    bench.slots.install(2, replace(adapter({}), saved={path: saved}))
    if kind == "weight":  # of rotated inputs, low-rank terms take those before
        other.slots.install(1, adapter({path: richer}))
    states = bench.states(70)
    base = bench.run(states.clone())
    alone = bench.run(states.clone(), [Segment(0, 20, 0)])
    for slot in (1, 2) if kind == "weight" else (2,):
        want = other.run(states.clone(), [Segment(0, 70, slot)])
        got = bench.run(states.clone(), [Segment(0, 70, slot)])
        scale = float((want - states).norm())
        assert float((got - want).norm()) < (1e-5 if dtype == torch.float32 else 4e-2) * scale
        assert float((got - base).norm()) > 0.05 * scale, "a product that changes nothing would prove nothing"
        together = bench.run(states.clone(), [Segment(0, 20, 0), Segment(30, 31, slot), Segment(33, 70, slot)])
        assert torch.equal(bits(together[:30]), bits(alone[:30]))
        by_row = bench.run(states.clone(), [Segment(row, row + 1, slot) for row in range(70)])
        assert torch.equal(bits(by_row), bits(got))
        some = bench.run(states[:9].clone(), [Segment(0, 3, slot), Segment(3, 9, slot)])
        assert torch.equal(bits(some), bits(got[:9]))
    bench.slots.install(2, plain)
    assert torch.equal(bits(bench.run(states.clone(), [Segment(0, 20, 2)])), bits(alone))
    bench.slots.install(1, None)
    assert torch.equal(bits(bench.run(states.clone(), [Segment(0, 70, 1)])), bits(base))


def own_product(kind: str, weight: Tensor) -> tuple[dict[str, SavedParameter], Tensor]:
    """Tensors of an adapter, and the weight [out, in] that has the same products."""
    num_inputs = weight.shape[1]
    if kind == "weight":
        own = at_end((weight + 0.5 * weight.std() * torch.randn_like(weight)).contiguous())
        return {"weight": SavedParameter(own)}, own.clone()
    if kind == "gain":
        gain = at_end((1 + torch.rand(num_inputs)).to(weight.dtype))
        return {"input_gain": SavedParameter(gain)}, (weight.double() * gain.double()).to(weight.dtype)
    blocks = torch.linalg.qr(torch.randn(1 if "shared" in kind else num_inputs // 8, 8, 8))[0]
    own = at_end(blocks.to(weight.dtype).contiguous())
    matrix = torch.block_diag(*own.double().expand(num_inputs // 8, 8, 8))
    return {"input_rotation": SavedParameter(own)}, (weight.double() @ matrix.T).to(weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
def test_own_products_beside_weights_in_few_bits(
    kernels: NativeKernels, dtype: torch.dtype, form: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model in few bits gives the bits of the rounded model, with adapters' own products."""
    model = native_model("llama", dtype)
    rounded = copy.deepcopy(model)
    round_weights(rounded, form)
    in_few_bits, plain = Bench(kernels, dtype), Bench(kernels, dtype)
    in_few_bits.loaded = adopt_model(model, backend=CpuBackend(kernels), form=form)
    plain.loaded = adopt_model(rounded, backend=CpuBackend(kernels))
    parts = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
    kinds = ("weight", "gain", "rotation", "weight", "gain")
    layer = plain.loaded.targets
    saved: dict[str, dict[str, SavedParameter]] = {}
    for part, kind in zip(parts, kinds, strict=True):
        path = next(path for path in layer if path.endswith(part))
        shape = layer[path].out_features, layer[path].in_features
        saved[path] = own_product(kind, 0.1 * torch.randn(shape).to(dtype))[0]
    got: list[Tensor] = []
    states = plain.states(40)
    for bench in (in_few_bits, plain):
        bench.slots = bench.loaded.adapter_slots(bench.ops, 4)
        bench.bind(bench.pages())
        never_by_own_layers(bench, monkeypatch)
        bench.slots.install(1, replace(adapter({}), saved=saved))
        got.append(bits(bench.run(states.clone(), [Segment(0, 5, 1), Segment(6, 40, 1)])))
    assert torch.equal(*got)


def never_by_own_layers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> Tensor:
        raise AssertionError("rows went through the model's own layers")

    assert bench.loaded.decoder is not None
    monkeypatch.setattr(bench.loaded.decoder, "_run_own_layers", refused)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [3, 16, 40, 256])
def test_rows_have_the_same_bits_in_runs_of_any_length(kernels: NativeKernels, dtype: torch.dtype, rank: int) -> None:
    """Up to some length of a run updates are kept, from then on they are not; steps of one token after the other write
    the same pages."""
    bench = Bench(kernels, dtype)
    for slot in range(3):
        bench.install(slot, rank)
    states = bench.states(140)
    for uses in ([(0, 1.0)], [(0, 0.5), (1, 1.0), (2, -0.3)]):
        by_row = [Segment(row, row + 1, slot, weight) for row in range(140) for slot, weight in uses]
        short = bench.run(states.clone(), by_row)
        for num_tokens in (1, 2, 4, 5, 16, 33, 64, 65, 128, 129, 140):
            segments = [Segment(0, num_tokens, slot, weight) for slot, weight in uses]
            got = bench.run(states[:num_tokens].clone(), segments)
            assert torch.equal(bits(got), bits(short[:num_tokens])), num_tokens


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_adapter_keep_every_bit(kernels: NativeKernels, dtype: torch.dtype) -> None:
    bench = Bench(kernels, dtype)
    bench.install(0, 16)
    bench.install(1, 0)
    states = bench.states(30)
    want = bench.run(states.clone())
    got = bench.run(states.clone(), [Segment(20, 25, 0), Segment(3, 5, 1)])
    assert torch.equal(bits(got[:20]), bits(want[:20]))  # those after it attend to it
    assert not torch.equal(got[20], want[20])


def test_what_is_cleared_is_gone(kernels: NativeKernels) -> None:
    bench = Bench(kernels, torch.float32)
    states, segments = bench.states(8), [Segment(0, 8, 2)]
    want = bench.run(states.clone())
    bench.install(2, 9)
    adapted = bench.run(states.clone(), segments)
    assert not torch.equal(adapted, want)
    bench.install(2, 0)
    assert torch.equal(bits(bench.run(states.clone(), segments)), bits(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_the_same_bits_where_activations_outgrow_the_caches(
    kernels: NativeKernels, dtype: torch.dtype
) -> None:
    bench = Bench(kernels, dtype, ffn_size=8224)
    bench.install(1, 8)
    states = bench.states(150)
    many = bench.run(states.clone(), [Segment(20, 100, 1)])
    few = bench.run(states[:40].clone(), [Segment(20, 40, 1)])
    assert torch.equal(bits(many[:40]), bits(few))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_adapter_that_overflows_harms_only_its_own_rows(kernels: NativeKernels, bad: float) -> None:
    """Other sequences' rows, that is: here a row before it in the same one, which cannot see it."""
    bench = Bench(kernels, torch.bfloat16)
    weights = bench.install(0, 8)
    states = bench.states(40)
    want = bench.run(states.clone())
    broken = copy.copy(dict(weights.factors))
    path = next(path for path in broken if "down_proj" in path)
    broken[path] = LoraFactors(torch.full_like(broken[path].a, bad), broken[path].b, 1.0)
    bench.slots.install(0, adapter(broken))
    got = bench.run(states.clone(), [Segment(32, 33, 0)])
    assert torch.equal(bits(got[:32]), bits(want[:32]))
    assert not got[32].isfinite().all()


@pytest.fixture(autouse=True)
def built(caplog: pytest.LogCaptureFixture) -> None:
    library_or_skip()
    caplog.set_level(logging.INFO, "loraplex_server.backends.cpu.decoder.find")


def adopted(model: PreTrainedModel, *, verify: bool = True) -> LoadedModel:
    return adopt_model(model, backend=CpuBackend(native_kernels()), verify=verify)


def said(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", STACKED)
def test_layers_of_the_common_kinds(family: str, dtype: torch.dtype) -> None:
    model = native_model(family, dtype)
    norm_names = {"gpt_neox": "final_layer_norm", "phi": "final_layernorm", "bamba": "final_layernorm"}
    norm_name = norm_names.get(family.partition("-")[0], "norm")
    layers, norm = model.base_model.layers, getattr(model.base_model, norm_name)
    loaded = adopted(model)
    own = loaded.model.base_model
    if family not in ("gemma3", "olmo3", "gemma4", "gemma4-keys"):
        assert list(own.layers) == [loaded.decoder]
    assert isinstance(getattr(own, norm_name), NativeNorm) is not loaded.decoder.shape.is_layer_norm
    assert getattr(own, norm_name).weight is norm.weight
    assert isinstance(loaded.decoder, NativeStack)
    assert loaded.decoder.shape.num_heads == 4
    assert len(layers) == len(loaded.decoder.weights) == model.config.num_hidden_layers
    assert len(loaded.attention) == sum(weights.attention is not None for weights in loaded.decoder.weights)


def test_layers_that_turn_in_several_ways() -> None:
    """Each run of layers with the same rotation is a call, and states pass the places of its other layers."""
    kinds = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 3
    model = native_model("gemma3", num_hidden_layers=6, layer_types=kinds)
    rig = native_rig(model, native_kernels())
    modules = list(rig.loaded.model.model.layers)
    assert [type(module) for module in modules] == [
        *(StackPart, ComputedLayer, StackPart),
        *(StackPart, ComputedLayer, ComputedLayer),
    ]
    assert rig.loaded.direct is not None
    check_logits(model, rig)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_that_change_far_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Up to some position their parts and what they compute are those of a layer of the common kind."""
    model = native_model("ministral3", dtype)
    rope = model.config.rope_parameters
    rope["original_max_position_embeddings"] = 40  # behind the tokens that a proof of the first ones sees
    assert adopted(copy.deepcopy(model)).decoder is not None
    monkeypatch.setattr(find, "_query_scale", lambda _: None)  # as if it could not be known
    has_own_attention(adopted(model), caplog, "layer 0 computes something else")


def test_a_scale_of_queries_that_a_layer_does_not_have_changes_nothing() -> None:
    """A configuration may have keys that the model's code does not read."""
    model = native_model("mistral")
    model.config.rope_parameters |= {"llama_4_scaling_beta": 1.0, "original_max_position_embeddings": 10}
    rig = native_rig(model, native_kernels())
    check_logits(model, rig)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", NOT_STACKED)
def test_layers_of_other_kinds(caplog: pytest.LogCaptureFixture, family: str, dtype: torch.dtype) -> None:
    assert adopted(native_model(family, dtype)).decoder is None
    assert "layers are run one operation at a time" in said(caplog)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, torch.float64, "not in float64"),
        ({}, torch.float16, "not in float16"),
    ],
    ids=lambda value: str(value),
)
def test_what_the_kernels_do_not_know(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], dtype: torch.dtype, reason: str
) -> None:
    assert adopted(native_model("llama", dtype, **changes)).decoder is None
    assert reason in said(caplog)


def has_own_attention(loaded: LoadedModel, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """The stack has all that is around attention."""
    assert loaded.decoder is not None
    assert [call.path for call in loaded.decoder.weights[0].own_parts] == ["self_attn"]
    assert reason in said(caplog)


# Families with recurrences in the place of attention: their changes, and what stays the model's own.
HYBRIDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "qwen3_5": ({}, set()),
    "qwen3_5-channels": ({}, {"linear_attn"}),
    "jamba": ({"num_experts": 1}, {"mamba"}),
    "granite4": ({}, set()),
    "granite4-experts": ({}, {"block_sparse_moe", "shared_mlp"}),
    "granite4-channels": ({}, {"mamba"}),
    "bamba": ({}, set()),
    "lfm2": ({}, {"conv"}),
}


@pytest.mark.parametrize("head_dim", [32, 16])
@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_with_recurrences(caplog: pytest.LogCaptureFixture, family: str, head_dim: int) -> None:
    """Beside native attention, and beside that of the model's own where the kernels do not know it."""
    own, mixers = HYBRIDS[family]
    model = native_model(family, head_dim=head_dim, num_attention_heads=HIDDEN // head_dim, **own)
    rig = native_rig(model, native_kernels())
    stack = rig.loaded.decoder
    assert isinstance(stack, NativeStack)
    assert len(stack.weights) == model.config.num_hidden_layers
    num_attending = sum(weights.attention is not None for weights in stack.weights)
    own_parts = {call.path for weights in stack.weights for call in weights.own_parts}
    if head_dim == 32:
        assert (num_attending, own_parts) == (1, mixers)
    else:
        assert (num_attending, own_parts) == (0, {*mixers, "self_attn"})
        assert "heads of 16" in said(caplog)
    check_logits(model, rig)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("family", "path"),
    [
        *(("qwen3_5", f"linear_attn.{part}") for part in ("in_proj_qkv", "in_proj_b", "norm")),
        *((family, f"mamba.{part}") for family in ("granite4", "bamba") for part in ("in_proj", "norm")),
    ],
)
def test_a_patched_recurrence_is_the_models_own(family: str, path: str, dtype: torch.dtype) -> None:
    model = native_model(family, dtype)
    scaled(model.get_submodule(f"model.layers.2.{path}"), 1.5)
    loaded = adopted(model, verify=False)
    assert loaded.decoder is not None
    own_parts = [[call.path for call in weights.own_parts] for weights in loaded.decoder.weights]
    mixer = path.partition(".")[0]
    assert own_parts == [[mixer], [], [mixer]]


def test_experts_beside_a_shared_one() -> None:
    """Both are the model's own modules, read the same states, and their outputs are added."""
    model = native_model("granite4-experts", layer_types=["full_attention"] * 3, position_embedding_type="rope")
    rig = native_rig(model, native_kernels())
    assert rig.loaded.decoder is not None
    own_parts = [[call.path for call in weights.own_parts] for weights in rig.loaded.decoder.weights]
    assert own_parts == [["block_sparse_moe", "shared_mlp"]] * 3
    check_logits(model, rig)


def test_attention_that_the_kernels_do_not_know(caplog: pytest.LogCaptureFixture) -> None:
    model = native_model("llama", head_dim=16)
    rig = native_rig(model, native_kernels())
    has_own_attention(rig.loaded, caplog, "LlamaAttention are the model's own modules: heads of 16")
    check_logits(model, rig)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"intermediate_size": 80}, torch.bfloat16, "a number of features"),
        ({"mlp_bias": True}, torch.float32, "biases in the feed-forward part"),
        ({"hidden_act": "relu"}, torch.float32, "the activation ReLU"),
        ({"hidden_act": "gelu"}, torch.float32, "the activation GELU"),
    ],
    ids=lambda value: str(value),
)
def test_feed_forward_parts_that_the_kernels_do_not_know(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], dtype: torch.dtype, reason: str
) -> None:
    """They stay the model's own modules, between native calls."""
    model = native_model("llama", dtype, **changes)
    rig = native_rig(model, native_kernels())
    assert isinstance(rig.loaded.decoder, NativeStack)
    assert f"LlamaMLP are the model's own modules: {reason}" in said(caplog)
    if dtype == torch.float32:
        check_logits(model, rig)


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"hidden_act": "gelu_pytorch_tanh"}, {"rms_norm_eps": 0.1}]
)
def test_what_they_do_know(changes: dict[str, Any]) -> None:
    model = native_model("llama", **changes)
    rig = native_rig(model, native_kernels())
    assert rig.loaded.decoder is not None
    check_logits(model, rig)


def check_logits(model: PreTrainedModel, rig: Any) -> None:
    jobs = [Job([3, 4, 5, 6], 6), Job([9] * 20, 6)]
    rig.run(jobs)
    for job in jobs:
        with torch.inference_mode():
            ids = torch.tensor([[*job.prompt, *job.tokens]])
            want = model(input_ids=ids, use_cache=False).logits[0, len(job.prompt) - 1 : -1]
        torch.testing.assert_close(rig.logits(job), want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize("config", [Ernie4_5Config, Ernie4_5_MoeConfig, PhiConfig, PhimoeConfig, OlmoeConfig])
def test_families_of_other_kinds(config: Callable[..., PreTrainedConfig]) -> None:
    """Rotations of neighbours, parts side by side, layer norms, and experts."""
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_num_experts": 4, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32, "moe_k": 2}
    experts |= {"num_experts_per_tok": 2}
    ids = {"vocab_size": 101, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    torch.manual_seed(1)
    made = config(num_hidden_layers=2, initializer_range=0.2, partial_rotary_factor=1.0, **sizes, **experts, **ids)
    model = AutoModelForCausalLM.from_config(made).eval()
    rig = native_rig(model, native_kernels())
    assert rig.loaded.decoder is not None
    check_logits(model, rig)


def test_head_norms_without_weights(caplog: pytest.LogCaptureFixture) -> None:
    model = native_model("qwen3")
    for layer in model.model.layers:
        layer.self_attn.q_norm = nn.Identity()
    has_own_attention(adopted(model), caplog, "the norm Identity")


def test_factors_of_single_features(caplog: pytest.LogCaptureFixture) -> None:
    model = native_model("gemma4")
    for layer in model.model.layers:
        layer.layer_scalar = torch.linspace(0.5, 1.5, HIDDEN)
    assert adopted(model).decoder is None
    assert "factors of a layer's features" in said(caplog)


def test_fewer_types_than_layers(caplog: pytest.LogCaptureFixture) -> None:
    model = native_model("gemma3")
    attention = [
        (layer.self_attn, AttentionSpec(4, 2, 32, 32, layer.self_attn.scaling, None, None))
        for layer in model.model.layers
    ]
    model.config.layer_types = model.config.layer_types[:1]
    assert find_stack(model, attention, native_kernels(), StepContext()) is None
    assert "types of 1" in said(caplog)


def test_layers_may_differ_in_their_numbers() -> None:
    """Epsilons and windows are each layer's own."""
    model = native_model("qwen2-window")
    for norm in (model.model.layers[1].input_layernorm, model.model.layers[1].post_attention_layernorm):
        norm.variance_epsilon = 0.3
    rig = native_rig(model, native_kernels())
    assert rig.loaded.decoder is not None
    assert [layer.spec.window for layer in rig.loaded.attention] == [None, 6]
    check_logits(model, rig)


# --- layers that look like it -----------------------------------------------------------------------------------------


def scaled(module: nn.Module, factor: float) -> None:
    """Scales a module's output as a patch of a model does it: on the instance."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * factor

    module.forward = forward  # type: ignore[method-assign]


PATCHES: dict[str, Callable[[PreTrainedModel], None]] = {
    "a layer": lambda model: scaled(model.model.layers[1], 1.1),
    "a norm": lambda model: scaled(model.model.layers[1].input_layernorm, 0.5),
    "a linear": lambda model: scaled(model.model.layers[0].self_attn.k_proj, -1.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_forward_is_noticed(caplog: pytest.LogCaptureFixture, patch: str, dtype: torch.dtype) -> None:
    model = native_model("llama", dtype)
    PATCHES[patch](model)
    # A patched linear is replaced with its patch by every server's modules: that one is for the last check to refuse.
    loaded = adopted(model, verify=patch != "a linear")
    if patch == "a linear":
        has_own_attention(loaded, caplog, "layer 0 computes something else")
        return
    assert loaded.decoder is None
    assert "computes something else" in said(caplog) or "called in another way" in said(caplog)
    assert not any(isinstance(module, NativeStack | NativeNorm) for module in loaded.model.modules())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("module", ["mlp", "mlp.act_fn"])
def test_a_patched_feed_forward_part_is_the_models_own(
    caplog: pytest.LogCaptureFixture, module: str, dtype: torch.dtype
) -> None:
    model = native_model("llama", dtype)
    scaled(model.model.layers[1].get_submodule(module), 0.5)
    loaded = adopted(model)
    assert isinstance(loaded.decoder, NativeStack)
    assert loaded.decoder.shape.names.feed_forward == "mlp"
    assert "the model's own modules: layer 1 computes something else" in said(caplog)


@pytest.mark.parametrize("error", [AssertionError, IndexError, ZeroDivisionError])
def test_a_layer_that_raises_in_the_comparison_is_left_as_it_is(
    caplog: pytest.LogCaptureFixture, error: type[Exception]
) -> None:
    model = native_model("llama")
    layer = model.model.layers[1]
    original = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if CACHE not in kwargs:  # as the model itself never calls it
            raise error("no cache")
        return original(*args, **kwargs)

    layer.forward = forward  # type: ignore[method-assign]
    assert adopted(model).decoder is None
    assert "called in another way (no cache)" in said(caplog)


@pytest.mark.parametrize("patch", ["a layer", "a feed-forward part", "a norm"])
def test_a_patched_model_is_served_as_it_is(patch: str) -> None:
    patches = PATCHES | {"a feed-forward part": lambda model: scaled(model.model.layers[0].mlp, 0.9)}
    model = native_model("llama")
    patches[patch](model)
    patched = copy.deepcopy(native_model("llama"))
    patches[patch](patched)
    kernels = native_kernels()
    rig = make_rig(adopt_model(patched, backend=CpuBackend(kernels)), ops=NativeOps(kernels))
    assert (rig.loaded.decoder is None) is (patch != "a feed-forward part")
    check_logits(model, rig)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_without_positions_are_noticed_where_attention_hardly_matters(dtype: torch.dtype) -> None:
    """Small random weights attend to everything alike: what is missing there is less than bfloat16 rounds away."""
    changes = {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 0, 1], "layer_types": ["full_attention"] * 4}
    decoder = adopted(native_model("smollm3", dtype, initializer_range=0.02, **changes)).decoder
    assert decoder is not None
    assert [weights.turns for weights in decoder.weights] == [True, False, False, True]


def test_a_layer_that_differs_by_its_place_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers differ by code that no attribute shows, and by less than bfloat16 rounds away."""
    forward = modeling_llama.LlamaAttention.forward

    def half_turned(self: Any, position_embeddings: tuple[Tensor, Tensor], **options: Any) -> Any:
        cos, sin = position_embeddings
        if self.layer_idx:
            cos, sin = (cos + 1) / 2, sin / 2
        return forward(self, position_embeddings=(cos, sin), **options)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", half_turned)
    loaded = adopted(native_model("llama", torch.bfloat16, initializer_range=0.02))
    has_own_attention(loaded, caplog, "layer 1 computes something else")
    assert "in float32" in said(caplog)


def turn_some(monkeypatch: pytest.MonkeyPatch, num_features: int) -> None:
    """Llama, of whose heads positions turn the first features only."""
    apply = modeling_llama.apply_rotary_pos_emb
    forward = modeling_llama.LlamaRotaryEmbedding.forward

    def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        n = cos.shape[-1]
        turned = apply(q[..., :n], k[..., :n], cos, sin, **options)
        return torch.cat([turned[0], q[..., n:]], -1), torch.cat([turned[1], k[..., n:]], -1)

    def fewer(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = forward(self, x, position_ids)
        half = num_features // 2
        return torch.cat([cos[..., :half]] * 2, -1), torch.cat([sin[..., :half]] * 2, -1)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", partial)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", fewer)


@pytest.mark.parametrize(("head_dim", "num_features"), [(64, 32), (96, 64), (64, 16), (64, 2), (96, 38)])
def test_positions_that_turn_a_part_of_each_head(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, num_features: int
) -> None:
    turn_some(monkeypatch, num_features)
    model = native_model("llama", head_dim=head_dim)
    rig = native_rig(model, native_kernels())
    assert rig.loaded.decoder is not None
    check_logits(model, rig)


@pytest.mark.parametrize("form", [None, *FORMATS.values()], ids=lambda form: form.name if form else "plain")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_layers_before_one_that_differs_get_their_weights_back(family: str, form: WeightFormat | None) -> None:
    """The weights are the same bit for bit, though they are kept packed while the others are proven."""
    model = native_model(family, torch.bfloat16)
    kernels = native_kernels()
    if form is not None:
        round_weights(model, form)
    before = {name: value.clone() for name, value in model.model.layers.state_dict().items()}
    attention = [
        (layer.self_attn, AttentionSpec(4, 2, 32, 32, layer.self_attn.scaling, None, None))
        for layer in model.model.layers
    ]
    scaled(model.model.layers[1], 1.1)
    assert find_stack(model, attention, kernels, StepContext(), form=form) is None
    for name, value in model.model.layers.state_dict().items():
        assert torch.equal(bits(value), bits(before[name])), name


def test_the_comparison_leaves_nothing_behind() -> None:
    model = native_model("llama")
    PATCHES["a layer"](model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = adopted(model)
    assert loaded.decoder is None
    assert loaded.context.attention is None
    kept = {name: value for name, value in loaded.model.state_dict().items() if value.device.type != "meta"}
    assert kept
    for name, value in kept.items():
        assert torch.equal(value, before[name.replace(".base.", ".")]), name


@pytest.mark.parametrize("num_threads", [5, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_more_threads_than_cores(kernels: NativeKernels, dtype: torch.dtype, num_threads: int) -> None:
    """Every phase of a layer, with more threads than it has chunks: the barriers between phases hold, and bits stay."""
    benches: list[Bench] = []
    for num in (1, num_threads):
        torch.manual_seed(3)
        benches.append(Bench(native_kernels(num), dtype))
    one, many = benches
    for slot, rank in enumerate((5, 16)):
        weights = one.install(slot, rank)
        many.slots.install(slot, weights)
    segments = [Segment(0, 1, 0), Segment(1, 2, 1)]
    for num_tokens in (2, 5, 70):
        states = one.states(num_tokens)
        want = one.run(states.clone(), segments)
        for _ in range(5):
            assert torch.equal(bits(many.run(states.clone(), segments)), bits(want))
