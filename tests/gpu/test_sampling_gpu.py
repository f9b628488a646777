"""Sampling on a CUDA device: the same noise and tokens as on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.draw_cases import rows_of, scores_of
from support.sampling_oracle import noise_field, sequence

from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.backends.cuda.backend import CudaBackend
from loraplex_server.sampling.draw import NoiseField, draw_dense, row_keys
from loraplex_server.sampling.sampler import Sampler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

VOCAB = 5000
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, top_k=50),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=1.3, min_p=0.05),
    SamplingParams(temperature=1.0, bad_words=((3,), *((a, 4) for a in range(VOCAB)))),
    SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(0, VOCAB, 7))),
    SamplingParams(temperature=1.0, top_k=100, typical_p=0.6),
    SamplingParams(temperature=1.1, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.4),
    SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, logit_bias=((3, 5.0), (4, -100.0))),
] * 4


def make_sampler(device: str) -> Sampler:
    """A sampler with the device's own functions; on a CPU, with the plain definitions."""
    if device == "cpu":
        return Sampler(len(PARAMS), VOCAB, device)
    backend = CudaBackend()
    return Sampler(len(PARAMS), VOCAB, device, argmax=backend.argmax(), noisy_argmax=backend.noisy_argmax())


def test_noise_is_bit_identical() -> None:
    keys = row_keys(torch.arange(64), torch.arange(64) * 5)
    on_device = NoiseField(VOCAB, "cuda").dense(keys.cuda())
    assert torch.equal(on_device.cpu(), noise_field(VOCAB).dense(keys))
    assert torch.equal(row_keys(torch.arange(64, device="cuda"), torch.arange(64, device="cuda") * 5).cpu(), keys)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_tokens_equal_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Both devices draw the same tokens, with logprobs that agree; in float32, CUDA draws by its kernel."""
    logits = torch.randn(len(PARAMS), VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    logits = logits.to(dtype)
    tokens = torch.randint(0, VOCAB, (len(PARAMS), 64), generator=torch.Generator().manual_seed(1))
    rows, positions = list(range(len(PARAMS))), [20 + row for row in range(len(PARAMS))]
    found = []
    for device in ("cpu", "cuda"):
        sampler = make_sampler(device)
        for row, params in enumerate(PARAMS):
            new = sequence([1] * 10, replace(params, seed=row), row=row, output=OutputParams(True, row % 3))
            sampler.set_row(row, replace(new, min_tokens=30, banned_until_min=frozenset({2})))
        found.append(sampler.sample(logits.to(device), rows, positions, tokens.to(device)).to_host())
    assert found[0].token_ids == found[1].token_ids
    for one, other in zip(found[0].logprobs, found[1].logprobs, strict=True):
        assert one is not None
        assert other is not None
        assert one.logprob == pytest.approx(other.logprob, abs=1e-9 if dtype == torch.float64 else 1e-4)
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


def test_a_step_does_not_wait() -> None:
    logits = torch.randn(len(PARAMS), VOCAB, device="cuda", dtype=torch.bfloat16)
    tokens = torch.zeros(len(PARAMS), 64, dtype=torch.int64, device="cuda")
    sampler = make_sampler("cuda")
    for row, params in enumerate(PARAMS):
        new = sequence([1] * 10, params, row=row, output=OutputParams(True, 2), min_tokens=30, banned=frozenset({2}))
        sampler.set_row(row, new)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.sample(logits, range(len(PARAMS)), [20] * len(PARAMS), tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("vocab_size", [700, 9000])
def test_a_row_of_nothing_but_nan_disturbs_no_other(vocab_size: int) -> None:
    noisy_argmax = CudaBackend().noisy_argmax()
    assert noisy_argmax is not None
    scores, rows = scores_of("normal", vocab_size, torch.float32), rows_of([0], [1.0], [0.0], torch.float32)
    expected = draw_dense(scores, rows, noise_field(vocab_size), truncates=False)[0]
    scores[3], scores[5] = float("nan"), float("inf")
    on_device = replace(
        rows, **{name: getattr(rows, name).cuda() for name in ("keys", "temperature", "top_k", "top_p", "log_min_p")}
    )
    noise = NoiseField(vocab_size, "cuda")
    found = draw_dense(scores.cuda(), on_device, noise, truncates=False, noisy_argmax=noisy_argmax)[0].cpu()
    assert ((found >= 0) & (found < vocab_size)).all()
    others = torch.tensor([row for row in range(len(scores)) if row not in (3, 5)])
    assert torch.equal(found[others], expected[others])
