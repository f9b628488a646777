"""Every model family equals its own `generate()`, batched and chunked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.backends import PatchedBackend, ReferenceFused
from support.dense import dense_logits, generated_logits, greedy, make_dense
from support.drafting import erring_drafts
from support.driver import Job, make_rig, random_prompts
from support.zoo import BY_LENGTH, OWN_ATTENTION, SLOW, VOCAB_SIZE, ZOO, random_model

from loraplex_server.model.loader import adopt_model

NUM_TOKENS = 12
# Their routers or norms compute in float32, where a last bit may tip over.
TOLERANCE = {
    "deepseek_v2": 1e-5,
    "deepseek_v3": 1e-6,
    **dict.fromkeys(("llama4", "llama4-chunks", "gpt_oss", "mimo_v2_flash", *BY_LENGTH, *OWN_ATTENTION), 1e-5),
}
FAMILIES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ZOO]


# Attention in code of their own, as checkpoints have it that the zoo's are not like.
VARIED: list[tuple[str, dict[str, Any]]] = [
    ("falcon", {"alibi": True}),
    ("falcon", {"alibi": True, "num_kv_heads": 1, "num_attention_heads": 8}),
    ("falcon", {"new_decoder_architecture": False, "multi_query": True}),
    ("falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": True, "parallel_attn": False}),
    ("falcon", {"num_ln_in_parallel_attn": 1, "bias": True}),
    ("bloom", {"n_head": 1}),
    ("bloom", {"n_head": 16, "apply_residual_connection_post_layernorm": True}),
    ("mpt", {"n_heads": 16}),
    ("mpt", {"d_model": 48, "n_heads": 6}),  # no power of two, whose slopes are others
    ("bloom", {"hidden_size": 48, "n_head": 6}),
]


def check_family(
    family: str,
    seed: int,
    *,
    num_prompts: int = 7,
    longest: int = 19,
    as_on_cuda: bool = False,
    changes: dict[str, Any] | None = None,
) -> None:
    model = random_model(family, seed=seed, changes=changes)
    fused = ReferenceFused() if as_on_cuda else None
    backend = PatchedBackend(merges=as_on_cuda, fused=fused)
    rig = make_rig(adopt_model(copy.deepcopy(model), backend=backend), seed=seed)
    prompts = random_prompts(num_prompts, VOCAB_SIZE, seed=seed, longest=longest)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts]
    rig.run(jobs)
    want = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    assert [job.error for job in jobs] == [None] * len(jobs)
    assert [job.tokens for job in jobs] == want
    make_dense(model)
    tolerance = TOLERANCE.get(family, 1e-9)
    for job in jobs:
        if family in BY_LENGTH:
            logits = generated_logits(model, job.prompt, NUM_TOKENS)
        else:
            logits = dense_logits(model, job.prompt, job.tokens)
        torch.testing.assert_close(rig.logits(job), logits, rtol=tolerance, atol=tolerance)
    # The test is worth something only where the model says different things.
    assert len({tuple(tokens) for tokens in want}) > num_prompts // 2
    assert max(len(set(tokens)) for tokens in want) > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_generate(family: str) -> None:
    check_family(family, seed=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_generate_as_on_cuda(family: str) -> None:
    """Linears that read one input are computed at once, and norms and rotary embeddings by fused operations."""
    check_family(family, seed=6, num_prompts=3, longest=9, as_on_cuda=True)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), VARIED, ids=str)
def test_other_configurations_equal_generate(family: str, changes: dict[str, Any]) -> None:
    check_family(family, seed=5, longest=60, changes=changes)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10, 11, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(12, 16))])
@pytest.mark.parametrize("family", ZOO)
def test_equals_generate_on_other_dice(family: str, seed: int) -> None:
    check_family(family, seed, num_prompts=12, longest=60)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2", "opt", "mixtral"])
def test_drafts_change_nothing(family: str) -> None:
    """Right, wrong and half-right drafts, of several lengths, beside rows without any."""
    model = random_model(family)
    prompts = random_prompts(6, VOCAB_SIZE, seed=1)
    want = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    rig = make_rig(adopt_model(copy.deepcopy(model)), seed=2)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts]
    for i, (job, tokens) in enumerate(zip(jobs[:5], want, strict=False)):
        job.propose = erring_drafts(job.prompt + tokens, VOCAB_SIZE, error_rate=i / 4, seed=i)
    rig.run(jobs)
    assert [job.tokens for job in jobs] == want
    assert jobs[0].num_accepted > NUM_TOKENS // 2  # always right
    assert jobs[4].num_accepted == jobs[5].num_accepted == 0
