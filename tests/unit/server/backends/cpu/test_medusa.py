"""Native Medusa guesses equal those of one head after the other."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch
from support.medusa_cases import expected_draft, head_logits, head_weights, random_head
from support.native_kernels import isas, native_kernels, using
from support.native_models import SIZES, native_model
from torch import Tensor, nn

from loraplex_adapters.weights import LoraFactors, MedusaHead, ResidualLayer
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cpu.linear import NativeLinear
from loraplex_server.backends.cpu.lora import MAX_DENSE_ROWS, NativeDense, NativeOps
from loraplex_server.backends.cpu.medusa import GuessPlan, NativeGuesser, native_guesser
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.linear import AdaptedHead
from loraplex_server.model.loader import adopt_model
from loraplex_server.speculation.medusa import HeadAsk, HeadSlots

HIDDEN = SIZES["hidden_size"]
NUM_SLOTS = 4


@pytest.fixture(params=isas())
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    with using(request.param):
        torch.manual_seed(5)
        random.seed(5)
        yield native_kernels()


class Bench:
    """Heads of a model in the kernels' sizes, with a count of native guesses."""

    def __init__(self, kernels: NativeKernels, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.model = native_model("llama", dtype)
        loaded = adopt_model(copy.deepcopy(self.model), backend=CpuBackend(kernels))
        self.adapters: AdapterSlots = loaded.adapter_slots(NativeOps(kernels), NUM_SLOTS)
        head = cast(AdaptedHead, loaded.model.get_output_embeddings())
        self.guesser = CountingGuesser(kernels, cast(NativeLinear, head.base), loaded.dtype)
        self.slots = HeadSlots(loaded, self.adapters, NativeDense(kernels), guesser=self.guesser)

    @property
    def lm_head(self) -> nn.Module:
        head = self.model.get_output_embeddings()
        assert head is not None
        return head

    def install(self, slot: int, *blocks: int, has_bias: bool = True) -> list[MedusaHead]:
        heads = [random_head(HIDDEN, num, dtype=self.dtype, has_bias=has_bias) for num in blocks]
        self.slots.install(slot, head_weights(str(slot), heads))
        return heads

    def states(self, num: int) -> Tensor:
        return torch.randn(num, HIDDEN).to(self.dtype)


class CountingGuesser(NativeGuesser):
    num_runs = 0

    def run(self, hidden: Tensor, plan: GuessPlan) -> tuple[list[float], list[int]]:
        self.num_runs += 1
        return super().run(hidden, plan)


def test_every_set_guesses_what_its_heads_would_alone(kernels: NativeKernels) -> None:
    """Sets of different sizes and depths, with and without bias, in every order, again and again."""
    bench = Bench(kernels, torch.float32)
    sets = [bench.install(0, 1, 1, 1), bench.install(1, 2, 0, 1, has_bias=False), bench.install(2, 0)]
    for num_asks in (1, 9, 3, 9):
        asks = [HeadAsk(random.randrange(3), random.randint(1, 4)) for _ in range(num_asks)]
        hidden = bench.states(num_asks)
        for _ in range(2):
            got = bench.slots.guess(hidden, asks)
            for row, ask in enumerate(asks):
                assert got[row] == expected_draft(sets[ask.adapter_slot], bench.lm_head, hidden[row], ask.num_tokens)
            hidden = hidden.flip(0).clone()
    assert bench.guesser.num_runs == 8


def test_bfloat16(kernels: NativeKernels) -> None:
    """The guessed token's exact logit is the largest but for rounding."""
    bench = Bench(kernels, torch.bfloat16)
    heads = bench.install(0, 1, 2, 1)
    exact = copy.deepcopy(bench.lm_head).requires_grad_(False).double()
    hidden = bench.states(6)
    for row, guess in enumerate(bench.slots.guess(hidden, [HeadAsk(0, 3)] * 6)):
        assert len(guess) == 3
        for head, token in zip(heads, guess, strict=True):
            logits = head_logits(_double(head), exact, hidden[row].double())
            assert float(logits[token]) >= float(logits.max()) - 0.125 * float(logits.abs().max())
    assert bench.guesser.num_runs == 1


def _double(head: MedusaHead) -> MedusaHead:
    return MedusaHead(
        tuple(ResidualLayer(b.weight.double(), b.bias.double() if b.bias is not None else None) for b in head.layers)
    )


def test_heads_that_compute_nan_guess_nothing(kernels: NativeKernels) -> None:
    bench = Bench(kernels, torch.float32)
    bench.install(0, 1, 1)
    hidden = bench.states(2)
    hidden[1, 3] = torch.nan
    first, second = bench.slots.guess(hidden, [HeadAsk(0, 2)] * 2)
    assert len(first) == 2
    assert second == ()


def test_what_is_not_plain_goes_another_way(kernels: NativeKernels) -> None:
    """Projections of their own, a LoRA in the model's head, and many rows of one head."""
    bench = Bench(kernels, torch.float32)
    plain = bench.install(0, 1)
    own = [random_head(HIDDEN, num_rows=7, vocab_size=20, dtype=torch.float32)]
    bench.slots.install(1, head_weights("1", own))
    hidden = bench.states(MAX_DENSE_ROWS + 1)

    def check(asks: Sequence[HeadAsk], heads: Sequence[Sequence[MedusaHead]]) -> None:
        got = bench.slots.guess(hidden[: len(asks)], asks)
        assert got == [expected_draft(one, bench.lm_head, hidden[row], 1) for row, one in enumerate(heads)]

    check([HeadAsk(1, 1), HeadAsk(0, 1)], [own, plain])
    check([HeadAsk(0, 1)] * len(hidden), [plain] * len(hidden))
    assert bench.guesser.num_runs == 0
    vocab_size = bench.model.config.vocab_size
    factors = LoraFactors(torch.zeros(2, HIDDEN), torch.zeros(vocab_size, 2), 1.0)
    check([HeadAsk(0, 1, 2)], [plain])
    assert bench.guesser.num_runs == 1
    bench.adapters.install(2, head_weights("2", (), {"lm_head": factors}))
    check([HeadAsk(0, 1, 2)], [plain])
    assert bench.guesser.num_runs == 1
    check([HeadAsk(0, 1)], [plain])
    assert bench.guesser.num_runs == 2


def test_only_heads_of_the_kernels_kind(kernels: NativeKernels) -> None:
    narrow = adopt_model(native_model("llama"), backend=CpuBackend(kernels))
    assert isinstance(native_guesser(kernels, narrow.head, narrow.dtype), NativeGuesser)
    assert native_guesser(None, narrow.head, narrow.dtype) is None
    wide = adopt_model(native_model("llama", torch.float64), backend=CpuBackend(kernels))
    assert native_guesser(kernels, wide.head, wide.dtype) is None
