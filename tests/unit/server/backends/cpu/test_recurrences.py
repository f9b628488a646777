"""Native recurrences equal those of tensors, from places to places."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.native_kernels import isas, native_kernels, using
from torch import Tensor

from loraplex_contracts.plan import Span, StateUse
from loraplex_server.backends.cpu.recurrences import NativeRecurrences
from loraplex_server.layers.recurrences import (
    NO_PLACE,
    Convolution,
    Gates,
    LinearAttention,
    Places,
    Recurrence,
    SelectiveScan,
    StateOps,
    TimeSteps,
)
from loraplex_server.model.states import StateMemory, StateSpec

# Lengths of spans: decode, drafts, a short prompt, one of several chunks.
LENGTHS = (1, 1, 1, 4, 3, 1, 70, 9)
Case = tuple[Recurrence, Callable[[int], list[Tensor]], tuple[int, ...], torch.dtype]


def _linear(
    dtype: torch.dtype, k_dim: int, v_dim: int, *, heads: int = 4, keys: int = 2, by_channel: bool = False, **form: bool
) -> Case:
    def inputs(num_tokens: int) -> list[Tensor]:
        qkv = torch.randn(num_tokens, 2 * keys * k_dim + heads * v_dim).to(dtype)
        q, k, v = qkv.split([keys * k_dim, keys * k_dim, heads * v_dim], dim=1)
        decay = -torch.rand(num_tokens, heads, *([k_dim] if by_channel else ())) * 2
        found = [
            q.unflatten(1, (keys, k_dim)),
            k.unflatten(1, (keys, k_dim)) / 4,
            v.unflatten(1, (heads, v_dim)),
            decay,
        ]
        return [*found, torch.rand(num_tokens, heads)] if form.get("has_beta", True) else found

    recurrence = LinearAttention(k_dim**-0.5, form.get("normalizes", False), form.get("is_delta", False))
    return recurrence, inputs, (heads, k_dim, v_dim), torch.float32


def _gated_delta(dtype: torch.dtype, k_dim: int, v_dim: int, *, heads: int, keys: int) -> Case:
    plain, inputs, shape, state_dtype = _linear(dtype, k_dim, v_dim, heads=heads, keys=keys)
    assert isinstance(plain, LinearAttention)
    gates = Gates(-torch.rand(heads) * 4, torch.randn(heads))

    def gated(num_tokens: int) -> list[Tensor]:
        a, b = 8 * torch.randn(2, num_tokens, heads)
        a[0] = 21.0  # where softplus is its input
        return [*inputs(num_tokens)[:3], a.to(dtype), b.to(dtype)]

    return replace(plain, normalizes=True, is_delta=True, gates=gates, rounds=True), gated, shape, state_dtype


def _time_steps(dtype: torch.dtype, limits: tuple[float, float], **sizes: int) -> Case:
    """Mamba 2 from what its projection gives."""
    heads = sizes["heads"]
    plain, inputs, shape, state_dtype = _linear(dtype, 128, 64, **sizes)
    assert isinstance(plain, LinearAttention)
    gates = TimeSteps(-torch.rand(heads) * 4, torch.randn(heads).to(dtype).float(), limits)

    def gated(num_tokens: int) -> list[Tensor]:
        dt = torch.randn(num_tokens, heads)
        dt[0] = 21.0
        return [*inputs(num_tokens)[:3], dt.to(dtype)]

    return replace(plain, gates=gates, skips=torch.randn(heads)), gated, shape, state_dtype


def _convolution(dtype: torch.dtype, width: int, channels: int, *, has_bias: bool, is_activated: bool) -> Case:
    weight = torch.randn(channels, width).to(dtype)
    bias = torch.randn(channels).to(dtype) if has_bias else None
    recurrence = Convolution(weight, bias, is_activated)
    return recurrence, lambda count: [torch.randn(count, channels).to(dtype)], (width - 1, channels), dtype


def _scan(channels: int, n: int) -> Case:
    def inputs(num_tokens: int) -> list[Tensor]:
        x, step = torch.randn(num_tokens, channels), torch.rand(num_tokens, channels)
        return [x, step, torch.randn(num_tokens, n), torch.randn(num_tokens, n)]

    return SelectiveScan(-torch.rand(channels, n)), inputs, (channels, n), torch.float32


CASES: dict[str, Callable[[], Case]] = {
    "delta rule": lambda: _linear(torch.bfloat16, 128, 128, is_delta=True, normalizes=True),
    "delta rule, odd shapes": lambda: _linear(torch.float32, 33, 80, heads=3, keys=1, is_delta=True, normalizes=True),
    "delta rule by channel": lambda: _linear(
        torch.bfloat16, 48, 48, keys=4, by_channel=True, is_delta=True, normalizes=True
    ),
    "gated delta rule": lambda: _gated_delta(torch.bfloat16, 128, 128, heads=4, keys=2),
    "gated delta rule, odd shapes": lambda: _gated_delta(torch.float32, 33, 80, heads=3, keys=1),
    "gated delta rule, more odd shapes": lambda: _gated_delta(torch.bfloat16, 40, 48, heads=2, keys=2),
    "time steps": lambda: _time_steps(torch.bfloat16, (0.0, math.inf), heads=6, keys=1),
    "time steps within limits": lambda: _time_steps(torch.float32, (0.5, 1.0), heads=4, keys=2),
    "mamba2": lambda: _linear(torch.bfloat16, 128, 64, heads=6, keys=1),
    "lightning": lambda: _linear(torch.float32, 32, 32, keys=4, has_beta=False),
    "convolution": lambda: _convolution(torch.bfloat16, 4, 520, has_bias=True, is_activated=True),
    "short convolution": lambda: _convolution(torch.float32, 3, 37, has_bias=False, is_activated=False),
    "wide convolution": lambda: _convolution(torch.bfloat16, 7, 64, has_bias=False, is_activated=False),
    "selective scan": lambda: _scan(100, 16),
    "selective scan, odd states": lambda: _scan(70, 9),
}


def _run(
    memory: StateMemory, run: Recurrence, inputs: Sequence[Tensor], spans: Sequence[Span], kept: dict[str, int]
) -> Tensor:
    step = memory.begin(spans)
    out = step.run(0, run, inputs)
    step.replay(kept)
    step.commit()
    step.settle()
    return out


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", CASES)
def test_equals_tensors(name: str, isa: str) -> None:
    """Two steps: prompts with snapshots on the way, then single tokens, and drafts that are accepted in part."""
    torch.manual_seed(0)
    run, make, shape, dtype = CASES[name]()
    num_slots = 2 * len(LENGTHS)
    first = [Span(str(i), i, 0, n, 1, state=StateUse(0, i + 1)) for i, n in enumerate(LENGTHS)]
    first[6] = Span("6", 6, 0, 70, 0, state=StateUse(0, 7, ((16, 9), (64, 10), (64, 11), (70, 12))))
    drafts = {1: 3, 3: 2, 4: 4}
    second = [
        Span(str(i), i, n, 1 + drafts.get(i, 0), 1, draft=(7,) * drafts.get(i, 0), state=StateUse(i + 1, i + 1))
        for i, n in enumerate(LENGTHS)
    ]
    kept = {str(i): count for i, count in ((0, 1), (1, 4), (3, 2), (4, 0), (5, 1))}
    inputs = [make(sum(LENGTHS)), make(sum(span.num_tokens for span in second))]
    with using(isa):
        ops = NativeRecurrences(native_kernels())
        found: list[tuple[list[Tensor], Tensor]] = []
        for own in (None, ops):
            memory = StateMemory([StateSpec(shape, dtype)], num_slots, torch.device("cpu"), ops=own)
            outs = [_run(memory, run, x, spans, kept) for x, spans in zip(inputs, (first, second), strict=True)]
            states = torch.stack([memory.tensors[0][memory.place_of(slot)] for slot in range(13)])
            found.append((outs, states))
    (want, want_states), (got, got_states) = found
    tolerance = 1e-5 if inputs[0][0].dtype == torch.float32 else 2e-2 if want[0].dtype == torch.bfloat16 else 1e-4
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(got_states, want_states, rtol=1e-4, atol=1e-5)
    assert not got_states[0].any()


def test_bits_do_not_depend_on_cuts() -> None:
    torch.manual_seed(1)
    ops: StateOps = NativeRecurrences(native_kernels())
    for make in CASES.values():
        run, inputs, shape, dtype = make()
        x = inputs(40)
        whole, cut = torch.zeros(4, *shape, dtype=dtype), torch.zeros(4, *shape, dtype=dtype)
        out = ops.run(run, x, whole, _places([(0, 40, 0, 1)]))
        assert out is not None
        outs = [
            ops.run(run, [one[start:end] for one in x], cut, _places([(0, end - start, source, target)]))
            for start, end, source, target in ((0, 13, 0, 1), (13, 14, 1, 2), (14, 40, 2, 3))
        ]
        assert torch.equal(torch.cat([one for one in outs if one is not None]), out)
        assert torch.equal(cut[3], whole[1])


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_company(name: str, isa: str) -> None:
    """Twelve texts at once and each by itself. Together, states of some cases exceed kStreamedBytes."""
    torch.manual_seed(2)
    run, make, shape, dtype = CASES[name]()
    lengths, num_texts = [1, 17, 8, 9] * 3, 12
    starts = np.cumsum([0, *lengths])
    x = make(int(starts[-1]))
    before = torch.randn(num_texts, *shape).to(dtype)
    alone, together = (torch.cat((before, torch.zeros_like(before))) for _ in range(2))
    rows = [(int(start), n, i, num_texts + i) for i, (start, n) in enumerate(zip(starts, lengths, strict=False))]
    with using(isa):
        ops = NativeRecurrences(native_kernels())
        out = ops.run(run, x, together, _places(rows))
        assert out is not None
        for start, n, source, target in rows:
            own = [one[start : start + n] for one in x]
            of_text = ops.run(run, own, alone, _places([(0, n, source, target)]))
            assert of_text is not None
            assert torch.equal(of_text, out[start : start + n])
    assert torch.equal(alone, together)


def test_what_the_kernels_do_not_know() -> None:
    """Nothing is written; tensors do it."""
    ops = NativeRecurrences(native_kernels())
    for case, change in (
        ("lightning", torch.float64),
        ("convolution", torch.float64),
        ("selective scan", torch.float64),
    ):
        run, inputs, shape, _ = CASES[case]()
        states = torch.zeros(2, *shape, dtype=change)
        wide = [one.to(change) for one in inputs(3)]
        assert ops.run(run, wide, states, _places([(0, 3, 0, 1)])) is None
        assert not states.any()
    run, inputs, shape, dtype = _linear(torch.float32, 8, 6)
    assert ops.run(run, inputs(3), torch.zeros(2, *shape, dtype=dtype), _places([(0, 3, 0, NO_PLACE)])) is None


def test_a_state_that_nobody_keeps() -> None:
    ops = NativeRecurrences(native_kernels())
    for make in CASES.values():
        run, inputs, shape, dtype = make()
        states, x = torch.zeros(2, *shape, dtype=dtype), inputs(5)
        out = ops.run(run, x, states, _places([(0, 5, 0, NO_PLACE)]))
        assert not states.any()
        same = ops.run(run, x, states, _places([(0, 5, 0, 1)]))
        assert out is not None
        assert same is not None
        assert torch.equal(out, same)


def _places(rows: Sequence[tuple[int, int, int, int]]) -> Places:
    return Places(np.array(rows, dtype=np.int64), np.arange(len(rows) + 1, dtype=np.int32))
