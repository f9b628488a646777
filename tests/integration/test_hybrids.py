"""Hybrids under load: a worker with adapters, and slots of states under churn."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from peft import LoraConfig
from support.dense import make_dense
from support.exact_states import whole_text_greedy
from support.peft_files import SPECS
from support.speculation import World, make_bench, request
from support.worker_parity import NUM_TOKENS, check_worker
from support.world import byte_tokenizer
from support.zoo import VOCAB_SIZE, random_model

from loraplex_contracts.errors import Cancelled
from loraplex_contracts.request import SpeculationParams
from loraplex_server.engine.pipe import Cancel

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
PROMPTS = ("Ask me anything", "dddddxxxdddxx xd", "Ask me anything, or nothing at all, as long as it is said twice")
TARGETS = {"lfm2": ["in_proj", "out_proj"], "qwen3_5": ["in_proj_qkv", "out_proj", "q_proj"]}


@pytest.mark.parametrize("family", TARGETS)
def test_through_a_worker_equals_peft(family: str, tmp_path: Path) -> None:
    """Adapters of the mixers' linears."""
    base = make_dense(random_model(family, changes={"vocab_size": len(byte_tokenizer())}))
    adapters = {
        f"r{rank}": LoraConfig(r=rank, target_modules=TARGETS[family], task_type="CAUSAL_LM") for rank in (2, 4, 13)
    }
    check_worker(base, adapters, tmp_path, PROMPTS, partial(whole_text_greedy, num_tokens=NUM_TOKENS))


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_5", marks=pytest.mark.nightly)])
def test_churn_leaks_no_slot(family: str, tmp_path: Path) -> None:
    """2,000 requests of mixed length on 8 slots: with adapters, forks, drafts, cancellations and preemptions."""
    world = World(make_dense(random_model(family)), tmp_path)
    world.add_lora("lora", SPECS[1], seed=1)
    dice = random.Random(5)
    shared = [dice.randrange(2, VOCAB_SIZE) for _ in range(40)]
    kinds = [
        request(
            f"kind-{i}",
            [*shared[: dice.choice((0, 3, 11, 28, 40))], *(dice.randrange(2, VOCAB_SIZE) for _ in range(1 + i % 7))],
            dice.choice((1, 4, 9, 24)),
            adapter_id=dice.choice(("", "lora")),
            n=dice.choice((1, 1, 1, 2, 3)),
        )
        for i in range(40)
    ]
    bench = make_bench(world.model, world.root, num_blocks=40, max_running=10, max_step_tokens=24, num_states=8)
    bench.load("lora")
    seen: Counter[str] = Counter()
    num_sent = num_cancelled = 0
    while num_sent < 2000 or not all(outcome.is_over for outcome in bench.outcomes.values()):
        while num_sent < 2000 and dice.random() < 0.6:
            one = dice.choice(kinds)
            way = SpeculationParams("prompt_lookup", min_ngram=1) if dice.random() < 0.4 else one.speculation
            bench.submit(replace(one, request_id=f"{one.request_id}/{num_sent}", speculation=way))
            num_sent += 1
        if dice.random() < 0.05:
            running = [seq.request.request.request_id for seq in bench.running()]
            if running:
                bench.engine.handle(Cancel(dice.choice(running), Cancelled("for the test")))
                num_cancelled += 1
        bench.turn()
        seen["steps"] += 1
        if seen["steps"] % 50 == 0:
            bench.engine._scheduler.check_integrity()  # pyright: ignore[reportPrivateUsage]
    bench.check_idle()
    for outcome in bench.outcomes.values():
        if outcome.error is None:
            outcome.check(world.twin(replace(outcome.request, request_id="")))
        else:
            assert isinstance(outcome.error, Cancelled)
    assert num_cancelled > 30
    assert bench.num_preemptions > 10
    bench.close()
    world.close()
