"""A model under everything at once: adapters, shared prompts, forks, preemption, each proposer."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import PreTrainedModel

from loraplex_contracts.request import Request, SamplingParams, SpeculationParams
from loraplex_server.speculation.proposer import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP
from support.dense import make_dense
from support.peft_files import SPECS, save_adapter
from support.speculation import BLOCK_SIZE, World, draft_proposer, make_bench, request
from support.zoo import ON_DEVICES, VOCAB_SIZE, random_model

NUM_TOKENS = 10
LORAS = {"r4": SPECS[1], "r13": SPECS[3]}
QUICK = ("qwen3_5", "bamba", "gemma3")
# Prompts come in several chunks. Too few blocks for all that may run, and few state slots beyond those. Lookup finds
# what others have said.
LIMITS: dict[str, Any] = {
    "max_step_tokens": 11,
    "max_running": 6,
    "num_blocks": 20,
    "num_states": 9,
    "lookup_history": 1 << 12,
}
WAYS = (
    SpeculationParams("off"),
    SpeculationParams("prompt_lookup", min_ngram=1, fixed_length=True),
    SpeculationParams("medusa", medusa_id="heads", fixed_length=True),
    SpeculationParams("draft_model", draft_name="same", max_draft_tokens=3),
    SpeculationParams("draft_model", draft_name="other", max_draft_tokens=3, fixed_length=True),
)
FIRST = 20  # before it, checkpoints with parts for images have the tokens that stand for these
# Where these alone may come, texts repeat themselves, which lookup lives by.
ALLOWED = (25, 26, 27, 28)
BEGINNING = (25, 26, 27)
Oracle = Callable[[nn.Module, Sequence[int], int, Sequence[int]], list[int]]


def slowly(families: Iterable[str]) -> list[Any]:
    """Families as parameters: one for each way of computing attention and states, and the others at night."""
    return [pytest.param(name, marks=_marks(name)) for name in families]


def _marks(name: str) -> Any:
    if name in QUICK:
        return ()
    return pytest.mark.slow if name in ON_DEVICES else pytest.mark.nightly


def check_mixed_batches(model: PreTrainedModel, oracle: Oracle, tmp_path: Path) -> None:
    """Every text is that of PEFT."""
    base = make_dense(model)
    world = World(base, tmp_path)
    models = {name: save_adapter(base, spec, tmp_path / name, seed=2) for name, spec in LORAS.items()} | {"": base}
    plain = _requests(oracle(base, BEGINNING, 12, range(FIRST, VOCAB_SIZE)))
    want = {
        (adapter_id, one.request_id): oracle(model, one.prompt_token_ids, NUM_TOKENS, one.sampling.allowed_token_ids)
        for adapter_id, model in models.items()
        for one in plain
    }
    world.add_heads("heads", plain, 3, has_own=False)
    requests = [
        replace(one, request_id=f"{one.request_id} of {adapter_id}: {way}", adapter_id=adapter_id, speculation=way, n=n)
        for adapter_id, n in (("", 1), ("r4", 2), ("r13", 1))
        for one in plain
        for way in WAYS
    ]
    random.Random(1).shuffle(requests)
    other = random_model("lfm2", seed=9)
    drafts = {name: draft_proposer(one, num_target_ids=VOCAB_SIZE) for name, one in (("same", base), ("other", other))}
    bench = make_bench(base, tmp_path, drafts=drafts, **LIMITS)
    bench.load("heads", *LORAS)
    outcomes = bench.run(requests, random.Random(2))
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for outcome in outcomes.values():
        own = outcome.request
        assert outcome.error is None, outcome.error
        for tokens in outcome.tokens.values():
            assert tokens == want[own.adapter_id, own.request_id.partition(" of ")[0]], own
        drafted += outcome.drafted
        accepted += outcome.accepted
    # What this is about has happened.
    assert len({tuple(tokens) for tokens in want.values()}) > len(plain)
    for name in (PROMPT_LOOKUP, MEDUSA, DRAFT_MODEL):
        assert drafted[name] > accepted[name] > 0, (drafted, accepted)
    assert bench.num_preemptions > 0
    assert any(not span.num_samples for plan in bench.plans for span in plan.spans), "no prompt was cut"
    assert any(end.num_cached_tokens for outcome in outcomes.values() for end in outcome.ends.values())
    bench.close()
    world.close()


def _requests(said: Sequence[int]) -> list[Request]:
    """Some that begin alike, for several blocks; one of them long; and a short one."""
    shared = (*BEGINNING, *said[: 2 * BLOCK_SIZE])
    prompts = ((*shared, 31, 32), (*shared, 25, 26, 28), (*shared, *said, 26, 25), (29,))
    return [
        request(f"{idx}", prompt, NUM_TOKENS, sampling=SamplingParams(allowed_token_ids=ALLOWED if idx % 2 else ()))
        for idx, prompt in enumerate(prompts)
    ]
