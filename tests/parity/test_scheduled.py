"""Texts are unchanged by prefix hits, forks, preemption and drafts."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.backends import PatchedBackend
from support.dense import greedy, make_dense
from support.driver import make_rig
from support.exact_states import whole_text_greedy
from support.peft_files import SPECS, LoraSpec, load_lora, save_adapter
from support.replay import ReplayableReference, ReplayableTorch, calls_again
from support.scheduler_fakes import adapter
from support.zoo import VOCAB_SIZE, random_model
from torch import nn

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.plan import Draft, StepPlan
from loraplex_contracts.request import CompletionEnd, Request, RequestFailed, StoppingParams, Tokens
from loraplex_server.backends.cpu.torch_lora import CpuOps
from loraplex_server.backends.cuda.graphs import graph_shapes
from loraplex_server.engine.engine import start_of_last
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.kv.states import StatePool
from loraplex_server.model.isolation import StepHandle
from loraplex_server.model.loader import adopt_model
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.scheduler import Scheduler

NUM_BLOCKS = 22  # of 4 tokens: not enough for all rows at once
NUM_TOKENS = 14
NUM_STATES = 8  # fewer than running sequences, siblings that wait and snapshots want
ADAPTERS = (0, 1, 4)  # of SPECS
ACTIVATED = 3  # the slot of one that is activated by INVOCATION
INVOCATION = [9, 7]


Oracle = Callable[[nn.Module, Sequence[int], int], list[int]]


class Resident:
    """Every adapter is on the device, in the slot of its number."""

    num_slots = len(SPECS)

    def __init__(self) -> None:
        self.keys: dict[AdapterKey, int] = {adapter(SPECS[idx].name): idx for idx in (*ADAPTERS, ACTIVATED)}

    def put_first(self, wants: Sequence[AdapterKey | tuple[AdapterKey, ...]]) -> None:
        pass

    def acquire(self, key: AdapterKey) -> int | None:
        return self.keys[key]

    def acquire_all(self, keys: tuple[AdapterKey, ...]) -> tuple[int, ...] | None:
        return tuple(self.keys[key] for key in keys)

    def release(self, key: AdapterKey) -> None:
        assert key in self.keys

    def failure(self, *keys: AdapterKey) -> Exception | None:
        return None


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead, replayed"])
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma2", "phi3-longrope"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama-dynamic", "gpt_oss")),
    ],
)
def test_texts_survive_scheduling(family: str, ahead: bool, tmp_path: Path) -> None:
    # Where `generate()` computes a text anew, PEFT loses where an activated LoRA begins; the whole text gives the same.
    check_scheduling(family, ahead, tmp_path, whole_text_greedy if family == "phi3-longrope" else greedy)


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
@pytest.mark.parametrize(
    "family", ["lfm2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_5", "olmo_hybrid", "bamba"))]
)
def test_texts_of_hybrids_survive_scheduling(family: str, ahead: bool, tmp_path: Path) -> None:
    check_scheduling(family, ahead, tmp_path, whole_text_greedy, StatePool(NUM_STATES))


def check_scheduling(family: str, ahead: bool, tmp_path: Path, oracle: Oracle, states: StatePool | None = None) -> None:
    base = make_dense(random_model(family))
    loaded = adopt_model(copy.deepcopy(base), backend=PatchedBackend(capture=calls_again))
    references: dict[int | None, nn.Module] = {None: base}
    ops, attention = (ReplayableReference(), ReplayableTorch()) if ahead else (CpuOps(), "auto")
    rig = make_rig(loaded, num_blocks=NUM_BLOCKS, max_rows=5, ops=ops, attention=attention, num_states=NUM_STATES)
    if ahead:
        rig.runner.overlaps = True
        rig.runner.capture(graph_shapes(5, 4, 64), lambda text: None)
    for idx in ADAPTERS:
        references[idx] = save_adapter(base, SPECS[idx], tmp_path / SPECS[idx].name, seed=idx)
        rig.slots.install(idx, load_lora(tmp_path, SPECS[idx].name, loaded.base_targets(16)))
    spec = LoraSpec("activated", 5, 8, "all", {"alora_invocation_tokens": INVOCATION})
    references[ACTIVATED] = save_adapter(base, spec, tmp_path / spec.name)
    rig.slots.install(ACTIVATED, load_lora(tmp_path, spec.name, loaded.base_targets(16)))

    dice = random.Random(0)
    shared = [dice.randrange(2, VOCAB_SIZE) for _ in range(13)]  # prompts begin alike
    owners: list[int | None] = [None, 0, 1, None, 4, 0, None, 1, 4, None]
    prompts = [[*shared[: dice.randint(0, 13)], dice.randrange(2, VOCAB_SIZE)] for _ in owners]
    owners += [ACTIVATED] * 6  # in the middle of a block, at its beginning, twice, at once, at the end, never
    prompts += [[*shared[:6], *INVOCATION, 3, 4, 5], [*shared[:8], *INVOCATION, 3], [*shared[:6], *INVOCATION, 3, 4]]
    prompts[-1] += [*INVOCATION, 8]
    prompts += [[*INVOCATION, *shared], [*shared[:11], *INVOCATION], [*shared[:10], INVOCATION[0]]]
    starts = dict(enumerate([6, 8, 10, 0, 11, None], start=len(owners) - 6))
    want = [oracle(references[owner], prompt, NUM_TOKENS) for owner, prompt in zip(owners, prompts, strict=True)]
    known = {f"r{i}": prompt + tokens for i, (prompt, tokens) in enumerate(zip(prompts, want, strict=True))}

    config = SchedulerConfig(5, max_step_tokens=9, max_context_tokens=126, rope=loaded.spec.rope)
    scheduler = Scheduler(config, BlockPool(NUM_BLOCKS, rig.cache.block_size), Resident(), (), states)
    got: dict[tuple[str, int], list[int]] = defaultdict(list)
    ended: set[tuple[str, int]] = set()
    names: dict[tuple[str, int], str] = {}  # sequence ids
    num_steps = num_accepted = num_copies = num_cached = num_ahead = 0
    under_way: tuple[StepPlan, StepHandle] | None = None
    to_add = list(enumerate(owners))
    num_expected = len(owners) + sum(i % 3 == 0 for i in range(len(owners)))
    while len(ended) < num_expected:
        assert num_steps < 2000
        if to_add and dice.random() < 0.5:
            i, owner = to_add.pop(0)
            stopping = StoppingParams(NUM_TOKENS, ignore_eos=True)
            request = Request(f"r{i}", tuple(prompts[i]), stopping, n=2 if i % 3 == 0 else 1)
            key = None if owner is None else adapter(SPECS[owner].name)
            scheduler.add(request, key, 0.0, adapted_from=starts.get(i, 0))
        plan = scheduler.schedule(0.0, _drafts(names, got, known, prompts, dice))
        events = scheduler.take_events()
        if plan is not None:
            num_steps += 1
            num_copies += len(plan.copies)
            for sequence in plan.entered:
                request_id, _, rest = sequence.sequence_id.partition("#")
                names[request_id, int(rest.partition("@")[0])] = sequence.sequence_id
        following = (plan, rig.runner.execute(plan)) if plan is not None else None
        if not ahead:
            under_way = following
        if under_way is not None:
            num_ahead += following is not None and ahead
            events += scheduler.apply(under_way[0], under_way[1].result(), 0.0)
        under_way = following if ahead else None
        for event in events:
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, Tokens):
                got[event.request_id, event.index] += event.token_ids
                num_accepted += event.num_accepted
            elif isinstance(event, CompletionEnd):
                ended.add((event.request_id, event.index))
                num_cached += event.num_cached_tokens
    # What this is about has happened.
    assert num_ahead > 30 or not ahead
    assert scheduler.load().num_preemptions > 0
    assert num_copies > 0, "no completion forked off in the middle of a block"
    assert states is None or states.num_evictions > 0, "no state was evicted"
    assert num_cached > 0, "no prompt began with another's blocks"
    assert num_accepted > 10
    assert [start_of_last(INVOCATION, prompts[i]) for i in starts] == list(starts.values())
    base_texts = [oracle(base, prompts[i], NUM_TOKENS) for i in starts]
    assert [want[i] == text for i, text in zip(starts, base_texts, strict=True)] == [False] * 5 + [True]
    for (request_id, _), tokens in got.items():
        assert tokens == want[int(request_id[1:])], request_id
    scheduler.check_integrity()


def _drafts(
    names: dict[tuple[str, int], str],
    got: dict[tuple[str, int], list[int]],
    known: dict[str, list[int]],
    prompts: list[list[int]],
    dice: random.Random,
) -> dict[str, Draft]:
    """Drafts that are sometimes the truth, sometimes not."""
    drafts: dict[str, Draft] = {}
    for (request_id, index), known_tokens in got.items():
        place = len(prompts[int(request_id[1:])]) + len(known_tokens)
        truth = known[request_id][place : place + dice.randint(0, 3)]
        tokens = tuple(token if dice.random() < 0.7 else (token + 1) % VOCAB_SIZE for token in truth)
        drafts[names[request_id, index]] = Draft(tokens, "test")
    return drafts
