"""Kinds of attention equal `generate()` in whole engines.

Sinks, chunks, rotations by length: texts longer than windows, chunks and the lengths of training, in mixed batches of
the base and of LoRAs with ranks 4 and 13, with prompts in pieces, prefix hits, forks, preemption and every proposer. In
float64, against Transformers and PEFT.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.dense import dense_logits, greedy
from support.driver import Job, make_rig, random_prompts
from support.peft_files import SPECS, LoraSpec
from support.speculation import World, draft_proposer, loopy, make_bench, request
from support.zoo import OWN_ATTENTION, VOCAB_SIZE, random_model

from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.request import Request, SpeculationParams
from loraplex_server.model.loader import adopt_model
from loraplex_server.speculation.proposer import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP

NUM_TOKENS = 14
HEADS = AdapterId("heads")
KINDS = (
    SpeculationParams("medusa", medusa_id=HEADS, fixed_length=True),
    SpeculationParams("prompt_lookup", min_ngram=1, max_ngram=3, fixed_length=True),
    SpeculationParams("draft_model", draft_name="same", max_draft_tokens=3),
    SpeculationParams("auto", medusa_id=HEADS),
    SpeculationParams("off"),
)
LORAS: dict[str, LoraSpec] = {"rank-4": SPECS[1], "rank-13": LoraSpec("r13", 13, 10, "attention")}
QUICK = ("gpt_oss", "phi3-longrope")
FAMILIES = (
    *(*QUICK, "llama-dynamic", "llama-longrope", "llama4-chunks", "granite_swa", "mimo_v2_flash"),
    *OWN_ATTENTION,
)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_equals_generate_in_an_engine(family: str, tmp_path: Path) -> None:
    world = World(loopy(random_model(family), 0.3), tmp_path)
    for seed, (name, spec) in enumerate(LORAS.items()):
        world.add_lora(name, spec, seed=seed + 1)
    dice = random.Random(3)
    opening = [dice.randrange(2, VOCAB_SIZE) for _ in range(31)]
    asked: list[Request] = []
    for number in range(3):
        for adapter_id in ("", *LORAS):
            for kind in KINDS if not adapter_id else dice.sample(KINDS, 2):
                prompt = [*opening[: dice.randint(0, 31)], dice.randrange(2, VOCAB_SIZE)]
                name = f"{number}: {adapter_id} {kind.kind}"
                one = request(name, prompt, NUM_TOKENS, adapter_id=adapter_id, n=1 + (number == 2))
                asked.append(replace(one, speculation=kind))
    world.add_heads("heads", [one for one in asked if not one.adapter_id][:3], 3)
    dice.shuffle(asked)
    drafts = {"same": draft_proposer(world.model, num_target_ids=VOCAB_SIZE)}
    bench = make_bench(world.model, tmp_path, drafts=drafts, num_blocks=26, max_running=6, max_step_tokens=13)
    bench.load(*LORAS, "heads")
    outcomes = bench.run(asked, dice)
    for outcome in outcomes.values():
        one = outcome.request
        assert outcome.error is None, outcome.error
        want = greedy(world.models[one.adapter_id], one.prompt_token_ids, NUM_TOKENS)
        assert dict(outcome.tokens) == dict.fromkeys(range(one.n), want), one.request_id
    assert bench.num_preemptions > 0
    assert any(end.num_cached_tokens for outcome in outcomes.values() for end in outcome.ends.values())
    drafted, accepted = bench.speculator.drafted, bench.speculator.accepted
    assert drafted[PROMPT_LOOKUP] > 0
    assert accepted[MEDUSA] > 0
    assert accepted[DRAFT_MODEL] > 0
    assert len({tuple(outcome.tokens[0]) for outcome in outcomes.values()}) > len(asked) // 2
    bench.close()
    world.close()


@pytest.mark.parametrize("family", ["falcon-alibi", "bloom", "mpt"])
def test_biases_are_those_of_the_family_far_out(family: str) -> None:
    """Beyond 256 tokens Falcon rounds a key's position to bfloat16, and where a bias is its neighbour's."""
    changes = {"max_seq_len": 512, "max_position_embeddings": 512}
    model = random_model(family, seed=2, changes=changes)
    rig = make_rig(adopt_model(copy.deepcopy(model)), seed=2, max_chunk=47, num_blocks=400)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in random_prompts(3, VOCAB_SIZE, seed=2, longest=30)]
    jobs.append(Job(random_prompts(1, VOCAB_SIZE, seed=3, longest=5)[0] * 60, NUM_TOKENS))
    jobs.append(Job([(7 * i + i // 9) % VOCAB_SIZE for i in range(390)], NUM_TOKENS))
    rig.run(jobs)
    for job in jobs:
        assert job.error is None
        assert job.tokens == greedy(model, job.prompt, NUM_TOKENS)
        want = dense_logits(model, job.prompt, job.tokens)
        torch.testing.assert_close(rig.logits(job), want, rtol=1e-5, atol=1e-5)
