"""Native decoder: cache, adapters and bounds of its arguments.

That it computes what the layers computed, alone and in any company, is in tests/parity/test_native.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from support.guarded_memory import at_end, at_start
from support.lora_cases import bits, random_factors
from support.native_kernels import isas, native_kernels, using
from support.native_models import SIZES, native_model
from torch import Tensor

from loraplex_adapters.weights import AdapterWeights, LoraFactors
from loraplex_contracts.adapters import AdapterKey
from loraplex_server.backends.cpu.attention import NativePagedAttention
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cpu.lora import NativeOps
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.reference.lora import ReferenceOps
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.attention import AttentionBatch
from loraplex_server.layers.kv_memory import KvCache, LayerKv
from loraplex_server.layers.lora import Segment
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import adopt_model

BLOCK_SIZE = 4
NUM_BLOCKS = 40
HIDDEN = 128
DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


@pytest.fixture(params=isas())
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    torch.manual_seed(sum(map(ord, request.node.name)))
    with using(request.param):
        yield native_kernels()


def adapter(factors: Mapping[str, LoraFactors]) -> AdapterWeights:
    """Of tensors that lie anywhere."""
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
        shape = (NUM_BLOCKS, BLOCK_SIZE, 2, 32)
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

    def run(self, states: Tensor, segments: list[Segment] | None = None, num_turned: int = 32) -> Tensor:
        """states [num_tokens, hidden], which are overwritten."""
        context, stack = self.loaded.context, self.loaded.decoder
        assert stack is not None
        num_tokens = states.shape[0]
        angles = torch.outer(torch.arange(num_tokens) + 1.0, torch.linspace(0.1, 1.0, num_turned // 2)).repeat(1, 2)
        cos, sin = at_end(angles.cos().to(self.dtype)), at_end(angles.sin().to(self.dtype))
        blocks = np.arange(NUM_BLOCKS, dtype=np.int64)[None, ::-1]
        lens = np.array([num_tokens], dtype=np.int64)
        positions = torch.arange(num_tokens)
        slots = (NUM_BLOCKS - 1 - positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
        context.attention = self.backend.plan(AttentionBatch(lens, lens, blocks, BLOCK_SIZE, slots), self.dtype, CPU)
        if segments is not None:
            context.token_segments = self.ops.prepare(segments, num_tokens, self.slots.num_slots, CPU)
        try:
            return stack(states[None], position_embeddings=(cos[None], sin[None]))[0]
        finally:
            context.clear()

    def states(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, HIDDEN).to(self.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
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
def test_scratch_grows_with_tokens_and_ranks(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """In any order: each step is what a fresh stack computes."""
    bench = Bench(kernels, dtype)
    for num_tokens, rank in ((1, 1), (3, 64), (1, 256), (150, 8), (2, 0), (131, 100), (60, 256), (7, 3)):
        weights = bench.install(0, rank)
        states, segments = bench.states(num_tokens), [Segment(0, num_tokens, 0), Segment(0, num_tokens, 0, 0.5)]
        got = bench.run(states.clone(), segments)
        fresh = Bench(kernels, dtype)
        fresh.slots.install(0, weights if rank else None)
        assert bench.slots.max_rank == fresh.slots.max_rank == rank
        assert torch.equal(bits(got), bits(fresh.run(states.clone(), segments)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
def test_every_linear_gets_its_own_factors(kernels: NativeKernels, dtype: torch.dtype, part: str) -> None:
    """An adapter of one linear is the same as that linear with the product added to its weight."""
    bench = Bench(kernels, dtype)
    weights = bench.install(1, 7, (f"0.self_attn.{part}", f"0.mlp.{part}"))
    assert len(weights.factors) == 1
    model = native_model("llama", dtype)
    for path, factors in weights.factors.items():
        weight = model.get_parameter(f"{path}.weight")
        update = factors.scale * (factors.b.double() @ factors.a.double())
        weight.data = (weight.double() + update).to(dtype)
    merged = Bench(kernels, dtype)
    merged.loaded = adopt_model(model, backend=CpuBackend(kernels))
    merged.slots = merged.loaded.adapter_slots(merged.ops, 4)
    merged.bind(merged.pages())
    states = bench.states(12)
    plain = bench.run(states.clone())
    got, want = bench.run(states.clone(), [Segment(0, 12, 1)]), merged.run(states.clone())
    scale = float((want - states).norm())
    assert float((got - want).norm()) < (1e-5 if dtype == torch.float32 else 2e-2) * scale
    assert float((got - plain).norm()) > 0.05 * scale, "an adapter that changes nothing would prove nothing"


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
