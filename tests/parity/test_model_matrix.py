"""Every family equals its own `generate()`: greedy, batched with others, prompts cut into chunks."""

from __future__ import annotations

import copy

import pytest
import torch
from support.driver import Job, make_rig, random_prompts
from support.zoo import VOCAB_SIZE, ZOO, random_model

from loraplex_server.model.loader import adopt_model

NUM_TOKENS = 12


def generated(model: torch.nn.Module, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ZOO)
def test_equals_generate(family: str) -> None:
    model = random_model(family)
    prompts = random_prompts(7, VOCAB_SIZE, seed=3)
    want = [generated(model, prompt) for prompt in prompts]
    rig = make_rig(adopt_model(copy.deepcopy(model)), seed=5)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts]
    rig.run(jobs)
    assert [job.error for job in jobs] == [None] * len(jobs)
    assert [job.tokens for job in jobs] == want
    # The test is worth something only where the model says different things.
    assert len({tuple(tokens) for tokens in want}) > 4
    assert max(len(set(tokens)) for tokens in want) > 3
