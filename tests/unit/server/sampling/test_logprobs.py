"""Logprobs of the prompt, their packing, and the single transfer of a step."""

from __future__ import annotations

import math

import pytest
import torch
from support.sampling_oracle import sequence

from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.sampling import logprobs as module
from loraplex_server.sampling.logprobs import compute_logprobs, prompt_logprobs
from loraplex_server.sampling.sampler import Sampler


def test_prompt_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    next_tokens = torch.arange(9, dtype=torch.int32) * 5
    reference = logits.log_softmax(-1)
    found = prompt_logprobs(logits, next_tokens, 3).to_host()
    for i, one in enumerate(found):
        assert one.token_id == 5 * i
        assert one.logprob == pytest.approx(float(reference[i, 5 * i]), abs=1e-12)
        assert [token_id for token_id, _ in one.top] == reference[i].topk(3).indices.tolist()
    monkeypatch.setattr(module, "_MAX_ELEMENTS", 120)
    assert prompt_logprobs(logits, next_tokens, 3).to_host() == found
    assert all(one.top == () for one in prompt_logprobs(logits, next_tokens, 0).to_host())
    assert prompt_logprobs(logits[:0], next_tokens[:0], 3).to_host() == ()


def test_low_precision_is_computed_in_float32() -> None:
    logits = (torch.randn(4, 3000, generator=torch.Generator().manual_seed(0)) * 8).bfloat16()
    ids = logits.argmax(1)
    found = compute_logprobs(logits, ids, [0] * 4).values
    assert found.dtype == torch.float32
    assert torch.allclose(found, logits.float().log_softmax(1).gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-6)
    certain = torch.full((1, 3000), -50.0)
    certain[0, 7] = 20.0
    assert prompt_logprobs(certain, torch.tensor([7]), 1).to_host()[0].logprob == 0.0


def test_alternatives_stop_at_the_vocabulary_and_ties_come_by_id() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
    (found,) = compute_logprobs(logits, torch.tensor([0]), [20]).to_host()
    assert [token_id for token_id, _ in found.top] == [1, 2, 3, 0]
    assert math.fsum(math.exp(value) for _, value in found.top) == pytest.approx(1.0)


def test_prompt_logprobs_travel_with_the_samples() -> None:
    sampler = Sampler(2, 12, "cpu")
    sampler.set_row(1, sequence([1], SamplingParams(temperature=1.0), output=OutputParams(True, 2)))
    logits = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))
    sampled = sampler.sample(logits, [0, 1], [1, 1], torch.ones(2, 4, dtype=torch.int64))
    first, second = prompt_logprobs(logits, torch.tensor([4, 5]), 3), prompt_logprobs(logits[:1], torch.tensor([0]), 0)
    together = sampled.to_host([first, second])
    assert together.others == (first.to_host(), second.to_host())
    alone = sampled.to_host()
    assert (together.token_ids, together.logprobs) == (alone.token_ids, alone.logprobs)
    assert together.logprobs[0] is None
    assert together.logprobs[1] is not None
    assert sampled.to_host([second]).others == (second.to_host(),)
