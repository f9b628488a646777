"""Recurrences in pieces of any length equal one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from loraplex_server.layers.recurrences import attend_linearly, convolve, scan

NUM_TOKENS = 150
Run = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]


def _random(*shape: int) -> Tensor:
    return torch.randn(2, NUM_TOKENS, *shape, dtype=torch.float64)


def _linear(decay: str, *, delta: bool) -> tuple[Run, list[Tensor]]:
    keys = torch.nn.functional.normalize(_random(3, 8), dim=-1)
    rate = {"slow": 0.02, "fast": 4.0}[decay.partition(" ")[0]]
    decays = -rate * _random(3, 8).abs() if decay.endswith("channel") else -rate * _random(3).abs()
    inputs = [_random(3, 8), keys, _random(3, 6), decays, _random(3).sigmoid()]

    def run(parts: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, g, b = parts
        return attend_linearly(q, k, v, g, b if delta else None, state)

    return run, inputs


def _convolution(width: int, *, bias: bool) -> tuple[Run, list[Tensor]]:
    weight, added = torch.randn(6, width, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    def run(parts: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        return convolve(parts[0], state, weight, added if bias else None)

    return run, [_random(6)]


def _selective() -> tuple[Run, list[Tensor]]:
    a = -torch.rand(6, 4, dtype=torch.float64)

    def run(parts: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        x, step, b, c = parts
        return scan(x, step, a, b, c, state)

    return run, [_random(6), _random(6).abs(), _random(4), _random(4)]


CASES: dict[str, Callable[[], tuple[Run, list[Tensor]]]] = {
    "delta rule, slow decay": lambda: _linear("slow", delta=True),
    "delta rule, fast decay": lambda: _linear("fast", delta=True),
    "delta rule, slow decay by channel": lambda: _linear("slow channel", delta=True),
    "delta rule, fast decay by channel": lambda: _linear("fast channel", delta=True),
    "linear attention": lambda: _linear("slow", delta=False),
    "convolution": lambda: _convolution(4, bias=True),
    "short convolution": lambda: _convolution(3, bias=False),
    "selective scan": _selective,
}


@pytest.mark.parametrize("case", CASES)
def test_cuts_change_nothing(case: str) -> None:
    torch.manual_seed(0)
    run, inputs = CASES[case]()
    want, state = [], None
    for i in range(NUM_TOKENS):
        out, state = run([x[:, i : i + 1] for x in inputs], state)
        want.append(out)
    assert state is not None
    for cuts in ((), (64, 128), (1, 3, 4, 5, 70, 149), (63, 65, 100)):
        ends = (0, *cuts, NUM_TOKENS)
        outs, got = [], None
        for start, end in pairwise(ends):
            out, got = run([x[:, start:end] for x in inputs], got)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 1), torch.cat(want, 1), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(got, state, rtol=1e-9, atol=1e-10)


def test_delta_rule_by_its_definition() -> None:
    torch.manual_seed(1)
    run, (q, k, v, g, b) = _linear("slow", delta=True)
    out, last = run((q, k, v, g, b), None)
    for piece in range(2):
        for head in range(3):
            state = torch.zeros(8, 6, dtype=torch.float64)
            for i in range(NUM_TOKENS):
                state = state * g[piece, i, head].exp()
                key = k[piece, i, head]
                state = state + torch.outer(key, (v[piece, i, head] - key @ state) * b[piece, i, head])
                torch.testing.assert_close(out[piece, i, head], q[piece, i, head] @ state)
            torch.testing.assert_close(last[piece, head], state)


def test_convolution_is_torchs() -> None:
    torch.manual_seed(2)
    weight, bias, x = torch.randn(6, 4), torch.randn(6), torch.randn(1, 20, 6)
    out, state = convolve(x, None, weight, bias)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    want = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=6).transpose(1, 2)
    torch.testing.assert_close(out, want)
    assert torch.equal(state, x[:, -3:])


def test_selective_scan_by_its_definition() -> None:
    torch.manual_seed(3)
    x, step, b, c = torch.randn(1, 9, 2), torch.rand(1, 9, 2), torch.randn(1, 9, 3), torch.randn(1, 9, 3)
    a = -torch.rand(2, 3)
    out, _ = scan(x, step, a, b, c, None)
    state = torch.zeros(2, 3)
    for i in range(9):
        state = (a * step[0, i, :, None]).exp() * state + torch.outer(step[0, i] * x[0, i], b[0, i])
        torch.testing.assert_close(out[0, i], state @ c[0, i])
