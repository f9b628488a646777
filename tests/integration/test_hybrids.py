"""Hybrids under load: a worker with adapters, and slots of states under churn."""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig
from support.dense import make_dense
from support.exact_states import whole_text_greedy
from support.inline_worker import inline_worker
from support.peft_files import SPECS, save_variant
from support.speculation import World, make_bench, request
from support.world import byte_tokenizer
from support.zoo import VOCAB_SIZE, random_model

from loraplex import Client
from loraplex_contracts.errors import Cancelled
from loraplex_contracts.request import SpeculationParams
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig, WorkerConfig
from loraplex_server.engine.pipe import Cancel

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
NUM_TOKENS = 8
PROMPTS = ("Ask me anything", "dddddxxxdddxx xd", "Ask me anything, or nothing at all, as long as it is said twice")
TARGETS = {"lfm2": ["in_proj", "out_proj"], "qwen3_5": ["in_proj_qkv", "out_proj", "q_proj"]}


@pytest.mark.parametrize("family", TARGETS)
def test_through_a_worker_equals_peft(family: str, tmp_path: Path) -> None:
    """Adapters of the mixers' linears in mixed batches, several times over: with prefix hits and speculation."""
    tokenizer = byte_tokenizer()
    base = make_dense(random_model(family, changes={"vocab_size": len(tokenizer)}))
    base.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    root = tmp_path / "adapters"
    models = {
        f"r{rank}": save_variant(
            base, LoraConfig(r=rank, target_modules=TARGETS[family], task_type="CAUSAL_LM"), root / f"r{rank}", rank
        )
        for rank in (2, 4, 13)
    }
    engine = EngineConfig(
        ModelConfig(str(tmp_path / "model"), dtype="float64"),
        KvConfig(block_size=4, memory_bytes=4 << 20),
        BatchConfig(max_running=8, max_queued=64, max_step_tokens=16),
        AdaptersConfig(root=root, num_device_slots=2),
    )
    with inline_worker(WorkerConfig(engine, port=0)) as worker, Client(worker.address) as client:
        expected: dict[tuple[str, str], list[int]] = {}
        for name, model in {**models, "": base}.items():
            for prompt in PROMPTS:
                expected[name, prompt] = whole_text_greedy(model, client.tokenize(prompt).token_ids, NUM_TOKENS)
        assert len({tuple(found) for found in expected.values()}) > len(expected) - 3

        def tokens(name: str, prompt: str, speculation: str) -> list[list[int]]:
            found = client.generate(
                prompt, adapter_id=name, max_tokens=NUM_TOKENS, min_tokens=NUM_TOKENS, speculation=speculation, n=2
            )
            return [list(completion.token_ids) for completion in found.completions]

        for speculation in ("off", "prompt_lookup", "off"):
            with ThreadPoolExecutor(16) as threads:
                found = list(threads.map(lambda case: tokens(*case, speculation), expected))  # noqa: B023
            wrong = [case for case, got in zip(expected, found, strict=True) if got != [expected[case]] * 2]
            assert not wrong


@pytest.mark.parametrize("family", TARGETS)
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
