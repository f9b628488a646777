"""Speculation never changes a text.

Every request is compared, token for token and with all that is reported beside the tokens, with its twin: the same
request without speculation, alone. Models are tiny and in float64, so that equal means equal.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dense import make_dense
from support.peft_files import SPECS
from support.speculation import Outcome, World, draft_proposer, loopy, make_bench, request
from support.zoo import VOCAB_SIZE, random_model

from loraplex_contracts.errors import Cancelled
from loraplex_contracts.request import OutputParams, Request, SamplingParams, SpeculationParams, StoppingParams
from loraplex_server.engine.pipe import AdapterCommand, Cancel
from loraplex_server.speculation.proposer import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP, Proposer

EOS = 48  # one that the models like
NUM_TOKENS = 14

SAMPLINGS = {
    "greedy": SamplingParams(),
    "seeded": SamplingParams(temperature=0.8),
    "nucleus": SamplingParams(temperature=1.3, top_p=0.8, top_k=30, min_p=0.01),
    "bad words": SamplingParams(bad_words=tuple((a, b) for a in range(99) for b in range(a % 2, 99, 2))),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(5, 90, 4))),
    "typical": SamplingParams(temperature=1.1, typical_p=0.7, top_p=0.95),
    "min-p": SamplingParams(temperature=1.5, min_p=0.1),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.3, logit_bias=((5, 3.0),)
    ),
    "greedy penalties": SamplingParams(repetition_penalty=1.4, frequency_penalty=0.5, logit_bias=((5, 3.0), (9, -50))),
    "repeating": SamplingParams(temperature=0.5, frequency_penalty=-1.5),
}
STOPPINGS = {
    "length": StoppingParams(NUM_TOKENS, ignore_eos=True),
    "eos": StoppingParams(NUM_TOKENS),
    "min tokens": StoppingParams(NUM_TOKENS, min_tokens=6, stop_token_ids=frozenset({39, 61})),
    "stop ids": StoppingParams(NUM_TOKENS, stop_token_ids=frozenset({39, 83, 61}), ignore_eos=True, include_stop=True),
}
# How a request speculates, and with which adapter.
KINDS = (
    ("", SpeculationParams("medusa", medusa_id="heads-own")),
    ("", SpeculationParams("prompt_lookup", min_ngram=1, max_ngram=3, fixed_length=True)),
    ("", SpeculationParams("draft_model", draft_name="same", max_draft_tokens=3)),
    ("", SpeculationParams("draft_model", draft_name="other")),
    ("", SpeculationParams("auto")),
    ("", SpeculationParams("auto", medusa_id="heads-base", fixed_length=True, max_draft_tokens=5)),
    ("", SpeculationParams("off")),
    ("lora", SpeculationParams("medusa", medusa_id="heads-own")),
    ("lora", SpeculationParams("prompt_lookup")),
    ("lora", SpeculationParams("draft_model", draft_name="same")),
    ("lora", SpeculationParams("auto", medusa_id="heads-lora")),
    ("both", SpeculationParams()),
    ("both", SpeculationParams("medusa", fixed_length=True)),
    ("both", SpeculationParams("medusa", medusa_id="heads-base")),
    ("both", SpeculationParams("auto", max_draft_tokens=2)),
)
ADAPTERS = ("heads-own", "heads-base", "lora", "heads-lora", "both")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A Llama, a LoRA, heads for each of them, and a LoRA of the model's head with heads in one directory."""
    model = make_dense(loopy(random_model("llama"), 0.2))
    model.generation_config.eos_token_id = EOS
    made = World(model, tmp_path_factory.mktemp("world"))
    made.add_lora("lora", SPECS[1], seed=1)
    made.add_lora("both", SPECS[3], seed=2)
    texts = {name: known_requests(made, name) for name in ("", "lora", "both")}
    made.add_heads("heads-own", texts[""], 3)
    made.add_heads("heads-base", texts[""][:3], 4, has_own=False, num_layers=2)
    made.add_heads("heads-lora", texts["lora"], 2, has_own=False)
    made.add_heads("both", texts["both"], 5)
    yield made
    made.close()


def known_requests(world: World, adapter_id: str, num_tokens: int = 20) -> list[Request]:
    """Requests whose texts the world's heads know, greedy and seeded. Half of the prompts hold what the model likes to
    say, and begin to say it once more."""
    dice = random.Random(f"prompts of {adapter_id}")
    found: list[Request] = []
    for idx in range(4):
        prompt = [dice.randrange(2, VOCAB_SIZE) for _ in range(dice.randint(1, 9))]
        if idx % 2:
            said = world.text(request("said", prompt, 24, adapter_id=adapter_id))
            prompt += [*said, *said[: 5 + idx]]
        sampling = SamplingParams(temperature=0.7 * (idx > 1), seed=idx)
        found.append(request(f"known {adapter_id} {idx}", prompt, num_tokens, sampling=sampling, adapter_id=adapter_id))
    return found


def proposers(world: World, max_rows: int = 8) -> dict[str, Proposer]:
    """A draft model that is the target itself, and one that is another."""
    other = loopy(random_model("gpt2", seed=5), 0.2)
    return {
        name: draft_proposer(model, num_target_ids=VOCAB_SIZE, max_rows=max_rows)
        for name, model in (("same", world.model), ("other", other))
    }


def sums(outcomes: Sequence[Outcome]) -> tuple[Counter[str], Counter[str]]:
    drafted = sum((outcome.drafted for outcome in outcomes), Counter[str]())
    return drafted, sum((outcome.accepted for outcome in outcomes), Counter[str]())


def matrix(num_kinds: int, seed: int) -> list[Request]:
    """Every sampling with every stopping, each under so many ways of speculating. Prompts begin alike."""
    dice = random.Random(seed)
    opening = [dice.randrange(2, VOCAB_SIZE) for _ in range(10)]
    found: list[Request] = []
    for name, sampling in SAMPLINGS.items():
        for stop_name, stopping in STOPPINGS.items():
            prompt = [*opening[: dice.randint(0, 10)], dice.randrange(2, VOCAB_SIZE)]
            wants_logprobs = dice.random() < 0.6
            one = Request(
                f"{name}, {stop_name}",
                tuple(prompt),
                stopping,
                replace(sampling, seed=dice.randrange(1 << 64)),
                OutputParams(wants_logprobs, 2 * wants_logprobs, dice.random() < 0.3),
                n=dice.choice((1, 1, 1, 2)),
            )
            found += [
                replace(
                    one, request_id=f"{one.request_id}: {adapter_id} {kind}", adapter_id=adapter_id, speculation=kind
                )
                for adapter_id, kind in dice.sample(KINDS, num_kinds)
            ]
    dice.shuffle(found)
    return found


def check_matrix(world: World, requests: Sequence[Request], seed: int, **limits: Any) -> None:
    """Runs all requests in one batch that is short of blocks, of rows and of step tokens, with prefixes that are
    shared, and checks their texts."""
    bench = make_bench(world.model, world.root, drafts=proposers(world), **limits)
    bench.load(*ADAPTERS)
    outcomes = bench.run(requests, random.Random(seed))
    world.check(outcomes)
    drafted, accepted = sums(list(outcomes.values()))
    # Heads know other texts than these by heart.
    for name, least in ((MEDUSA, 0), (PROMPT_LOOKUP, 100), (DRAFT_MODEL, 50)):
        assert drafted[name] > accepted[name] > least, (name, drafted, accepted)
    assert (bench.num_preemptions > 0) == (limits["num_blocks"] < 50)
    assert any(not span.num_samples for plan in bench.plans for span in plan.spans)  # pieces of prompts
    ends = [end for outcome in outcomes.values() for end in outcome.ends.values()]
    assert {end.reason.value for end in ends} == {"length", "eos", "stop"}
    assert any(end.num_cached_tokens for end in ends)
    bench.close()


def test_every_way_of_speculating_under_all_parameters(world: World) -> None:
    check_matrix(world, matrix(4, seed=1), 2, num_blocks=20, max_running=6, max_step_tokens=11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_blocks", "seed"),
    [
        pytest.param(*case, marks=() if case in ((14, 0), (150, 1)) else pytest.mark.nightly)
        for case in product((14, 150), range(6))
    ],
)
def test_every_way_of_speculating_at_length(world: World, num_blocks: int, seed: int) -> None:
    limits = {"num_blocks": num_blocks, "max_running": 4 + seed * 2, "max_step_tokens": 15 + 3 * seed}
    check_matrix(world, matrix(len(KINDS), seed=10 + seed), seed, **limits)


# --- other shapes -----------------------------------------------------------------------------------------------------


def few(world: World, adapter_id: str, *, num: int = 4, num_tokens: int = 12) -> list[Request]:
    """Greedy and seeded requests, with penalties now and then."""
    dice = random.Random(f"few of {adapter_id}")
    found: list[Request] = []
    for idx in range(num):
        prompt = [dice.randrange(2, VOCAB_SIZE) for _ in range(dice.randint(1, 11))]
        sampling = SamplingParams(
            temperature=0.8 * (idx % 2), repetition_penalty=1.2 if idx == 3 else 1.0, seed=7 * idx, top_k=40
        )
        output = OutputParams(True, 2)
        found.append(
            request(f"{adapter_id} {idx}", prompt, num_tokens, sampling=sampling, adapter_id=adapter_id, output=output)
        )
    return found


def speculating(requests: Sequence[Request], *kinds: SpeculationParams) -> list[Request]:
    """Each of the requests in each of these ways."""
    return [
        replace(one, request_id=f"{one.request_id}: {kind}", speculation=kind) for one in requests for kind in kinds
    ]


@pytest.mark.parametrize(
    "family", ["gemma", "mistral", "mixtral", "lfm2", pytest.param("bamba", marks=pytest.mark.slow)]
)
def test_heads_of_other_families(family: str, tmp_path: Path) -> None:
    """Heads draft for the base model, by default or by name, and for a LoRA, apart from it or with it."""
    world = World(make_dense(random_model(family)), tmp_path)
    world.add_lora("lora", SPECS[1], seed=1)
    world.add_lora("both", SPECS[0], seed=2)
    plain = {name: few(world, name) for name in ("", "lora", "both")}
    world.add_heads("default", plain[""][:2], 3)
    world.add_heads("base", plain[""][1:3], 2, has_own=False)
    world.add_heads("for-lora", plain["lora"][:3], 2, has_own=False)
    world.add_heads("both", plain["both"][:3], 3)
    bench = make_bench(
        world.model, world.root, num_blocks=16, max_running=5, max_step_tokens=9, default_heads="default"
    )
    bench.load("base", "lora", "for-lora", "both")
    medusa, fixed = SpeculationParams("medusa"), SpeculationParams("medusa", max_draft_tokens=3, fixed_length=True)
    requests = [
        *speculating(plain[""], medusa, replace(fixed, medusa_id="base"), SpeculationParams("auto")),
        *speculating(plain["lora"], SpeculationParams("medusa", medusa_id="for-lora"), fixed),
        *speculating(plain["both"], SpeculationParams(), fixed),
    ]
    random.Random(6).shuffle(requests)
    outcomes = bench.run(requests, random.Random(4))
    world.check(outcomes)
    for adapter_id, plain_ones in plain.items():
        drafted, accepted = sums([outcomes[one.request_id] for one in requests if one.adapter_id == adapter_id])
        assert drafted[MEDUSA] > accepted[MEDUSA] > 10, (adapter_id, drafted, accepted, len(plain_ones))
    assert bench.num_preemptions > 0
    bench.close()
    world.close()


@pytest.mark.parametrize(
    ("family", "draft_family"),
    [
        ("opt", "opt"),
        ("gemma2", "llama"),
        ("mixtral", "gpt2"),
        ("lfm2", "bamba"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("bamba", "qwen3_5"), ("llama", "mamba2"))),
    ],
)
def test_draft_models_of_other_families(family: str, draft_family: str, tmp_path: Path) -> None:
    """One that is always wrong or nearly so, and one that is the target itself; with a LoRA neither knows of."""
    world = World(make_dense(random_model(family)), tmp_path)
    world.add_lora("lora", SPECS[0], seed=1)
    drafts = {"same": world.model, "other": random_model(draft_family, seed=3)}
    bench = make_bench(
        world.model,
        world.root,
        num_blocks=16,
        max_running=5,
        max_step_tokens=9,
        drafts={name: draft_proposer(model, num_target_ids=VOCAB_SIZE, max_rows=3) for name, model in drafts.items()},
    )
    kinds = [
        SpeculationParams("draft_model", draft_name=name, max_draft_tokens=4, fixed_length=is_fixed)
        for name in drafts
        for is_fixed in (False, True)
    ]
    requests = speculating([*few(world, ""), *few(world, "lora")], *kinds)
    random.Random(3).shuffle(requests)
    outcomes = bench.run(requests, random.Random(4))
    world.check(outcomes)
    for name in drafts:
        found = [outcome for outcome in outcomes.values() if outcome.request.speculation.draft_name == name]
        drafted, accepted = sums(found)
        assert drafted[DRAFT_MODEL] > accepted[DRAFT_MODEL], name
        assert name == "other" or accepted[DRAFT_MODEL] > 30
    assert bench.num_preemptions > 0
    bench.close()
    world.close()


# --- all of them at once ----------------------------------------------------------------------------------------------


def test_a_mixed_batch_of_32(world: World) -> None:
    """8 with heads of four adapters, 8 with lookup, 8 with a draft model and 8 without, in one loop of steps."""
    texts = {name: known_requests(world, name) for name in ("", "lora", "both")}
    repeating = [one for name in texts for one in texts[name][1::2]]
    medusa = [
        *(replace(one, speculation=SpeculationParams("medusa", medusa_id="heads-own")) for one in texts[""][:2]),
        *(replace(one, speculation=SpeculationParams("medusa", medusa_id="heads-base")) for one in texts[""][1:3]),
        *(replace(one, speculation=SpeculationParams("medusa", medusa_id="heads-lora")) for one in texts["lora"][:2]),
        *(replace(one, speculation=SpeculationParams("medusa")) for one in texts["both"][:2]),
    ]
    ways = {
        MEDUSA: medusa,
        PROMPT_LOOKUP: [replace(one, speculation=SpeculationParams("prompt_lookup")) for one in repeating],
        DRAFT_MODEL: [
            replace(one, speculation=SpeculationParams("draft_model", draft_name=name))
            for name, ones in (("same", texts[""]), ("other", texts["lora"]))
            for one in ones
        ],
        "": [*texts[""][:3], *texts["lora"][:3], *texts["both"][:2]],
    }
    ways[PROMPT_LOOKUP] += ways[PROMPT_LOOKUP][:2]
    requests = [replace(one, request_id=f"{name} {idx}") for name, ones in ways.items() for idx, one in enumerate(ones)]
    assert Counter(one.request_id.split()[0] for one in requests)
    assert len(requests) == 32
    bench = make_bench(
        world.model, world.root, max_running=32, max_step_tokens=256, drafts=proposers(world, max_rows=32)
    )
    bench.load(*ADAPTERS)
    outcomes = bench.run(requests)
    world.check(outcomes)
    for name, ones in ways.items():
        drafted, accepted = sums([outcomes[f"{name} {idx}"] for idx in range(len(ones))])
        assert set(drafted) == ({name} if name else set()), (name, drafted)
        assert not name or accepted[name] > 8, (name, drafted, accepted)
    fullest = max(bench.plans, key=lambda plan: (len({span.proposer for span in plan.spans}), len(plan.spans)))
    assert {span.proposer for span in fullest.spans} == {MEDUSA, PROMPT_LOOKUP, DRAFT_MODEL, ""}
    assert len(fullest.spans) == 32
    bench.close()


def test_heads_that_come_and_go(world: World) -> None:
    """Five adapters and two slots: heads are lent one while nobody needs it, and drafts come when they can."""
    requests = [
        replace(one, speculation=kind, request_id=f"{one.request_id} {kind}")
        for name in ("", "lora", "both")
        for one in known_requests(world, name)
        for kind in (
            SpeculationParams("medusa", medusa_id="heads-own"),
            SpeculationParams("medusa", medusa_id="heads-base"),
            SpeculationParams("auto", medusa_id="heads-lora"),
        )
    ]
    random.Random(5).shuffle(requests)
    bench = make_bench(world.model, world.root, max_running=4, num_slots=3)
    outcomes = bench.run(requests, random.Random(6))
    world.check(outcomes)
    assert sums(list(outcomes.values()))[1][MEDUSA] > 0
    bench.close()


@pytest.mark.parametrize("num_slots", [1, 2])
def test_default_heads_that_take_the_only_slot(world: World, num_slots: int, caplog: pytest.LogCaptureFixture) -> None:
    make_bench(world.model, world.root, default_heads="heads-own", num_slots=num_slots).close()
    assert ("the only adapter slot" in caplog.text) == (num_slots == 1)


def test_default_heads_that_are_unloaded_while_serving(world: World) -> None:
    """A request for heads alone goes on without drafts, and one that arrives after that finishes without any."""
    plain = few(world, "")[:2]
    bench = make_bench(world.model, world.root, default_heads="heads-own")
    heads_only = SpeculationParams("medusa", fixed_length=True)
    submitted = [bench.submit(one) for one in speculating(plain, heads_only)]
    while not any(outcome.drafted[MEDUSA] for outcome in submitted):
        bench.turn()
    bench.engine.handle(AdapterCommand(1, "unload", "heads-own"))
    outcomes = bench.run([replace(one, request_id="later", speculation=heads_only) for one in plain[:1]])
    world.check({outcome.request.request_id: outcome for outcome in [*submitted, *outcomes.values()]})
    assert not any(outcome.drafted for outcome in outcomes.values())
    bench.close()


def test_default_heads_that_are_replaced_while_serving(world: World, tmp_path: Path) -> None:
    """Once their name has been loaded again, requests that arrive draft with the new heads, and in texts that began
    before nothing fails."""
    plain = few(world, "")[:2]
    for old, new in (("heads-own", "heads"), ("heads-base", "new")):
        shutil.copytree(world.root / old, tmp_path / new)
    bench = make_bench(world.model, tmp_path, default_heads="heads")
    heads_only = SpeculationParams("medusa", fixed_length=True)
    submitted = [bench.submit(one) for one in speculating(plain, heads_only)]
    while not any(outcome.drafted[MEDUSA] for outcome in submitted):
        bench.turn()
    shutil.rmtree(tmp_path / "heads")
    (tmp_path / "new").rename(tmp_path / "heads")
    cache = bench.engine._cache
    before = cache.get("heads").digest
    bench.engine.handle(AdapterCommand(1, "load", "heads"))
    while (info := cache.get("heads")).digest == before or info.tier != "device":
        bench.turn()
    later = [replace(one, request_id=f"later {idx}", speculation=heads_only) for idx, one in enumerate(plain)]
    outcomes = bench.run(later)
    world.check({outcome.request.request_id: outcome for outcome in [*submitted, *outcomes.values()]})
    assert all(outcome.drafted[MEDUSA] for outcome in outcomes.values())
    bench.close()


def test_the_servers_own_settings(world: World) -> None:
    """Requests that do not say how to speculate, under a server that does, with the times that it has measured."""
    requests = [
        replace(one, speculation=SpeculationParams())
        for name in ("", "lora", "both")
        for one in known_requests(world, name)
    ]
    bench = make_bench(
        world.model,
        world.root,
        default_heads="heads-own",
        default_draft_tokens=3,
        step_costs=None,
        drafts=proposers(world),
    )
    outcomes = bench.run(requests, random.Random(6))
    world.check(outcomes)
    assert all(len(span.draft) <= 3 for plan in bench.plans for span in plan.spans)
    bench.close()


def test_cancelled_requests_take_nothing_with_them(world: World) -> None:
    """Requests are cancelled in the middle of their drafts; their texts are right as far as they came."""
    dice = random.Random(8)
    requests = matrix(4, seed=7)[:60]
    bench = make_bench(world.model, world.root, num_blocks=30, max_running=7, drafts=proposers(world))
    bench.load(*ADAPTERS)
    cancelled: set[str] = set()
    for one in requests:
        bench.submit(one)
    while not all(outcome.is_over for outcome in bench.outcomes.values()):
        bench.turn()
        for seq in bench.running() if dice.random() < 0.3 else ():
            if dice.random() < 0.3 and seq.request.request.request_id not in cancelled:
                cancelled.add(seq.request.request.request_id)
                bench.engine.handle(Cancel(seq.request.request.request_id, Cancelled("the client went away")))
    bench.turn()
    bench.turn()
    bench.check_idle()
    assert 10 < len(cancelled) < 50
    for outcome in bench.outcomes.values():
        twin = world.twin(outcome.request)
        if outcome.error is None:
            outcome.check(twin)
        assert (outcome.error is None) == (outcome.request.request_id not in cancelled)
        assert all(tokens == twin.tokens[index][: len(tokens)] for index, tokens in outcome.tokens.items())
    bench.close()


# --- K/V --------------------------------------------------------------------------------------------------------------


def test_kv_after_rejections_is_that_of_a_prefill(world: World) -> None:
    """K/V of every running sequence is compared every few steps with the same tokens run at one go by an engine of its
    own."""
    requests = [
        replace(one, request_id=f"{one.request_id} {kind.kind}", speculation=kind)
        for name in ("", "lora", "both")
        for one in known_requests(world, name)
        for kind in (
            SpeculationParams("medusa", medusa_id="heads-base", max_draft_tokens=4, fixed_length=True),
            SpeculationParams("draft_model", draft_name="other", fixed_length=True),
        )
    ]
    bench = make_bench(world.model, world.root, num_blocks=60, max_step_tokens=40, drafts=proposers(world))
    fresh = make_bench(world.model, world.root, max_step_tokens=128, prefix_caching=False)
    bench.load(*ADAPTERS)
    for one in requests:
        bench.submit(one)
    checked: set[str] = set()
    for step in range(1000):
        if all(outcome.is_over for outcome in bench.outcomes.values()):
            break
        bench.turn()
        for seq in bench.running() if step % 4 == 3 else ():
            if len(seq.token_ids) - seq.num_computed != 1:
                continue
            outcome = bench.outcomes[seq.request.request.request_id]
            if sum(outcome.accepted.values()) == sum(outcome.drafted.values()):
                continue
            fresh.submit(request("kv", seq.token_ids[:-1], 2, adapter_id=outcome.request.adapter_id))
            while not (fresh.running() and fresh.running()[0].num_computed == seq.num_computed):
                assert not fresh.outcomes["kv"].is_over
                fresh.turn()
            for found, wanted in zip(bench.kv(seq), fresh.kv(fresh.running()[0]), strict=True):
                for one_found, one_wanted in zip(found, wanted, strict=True):
                    torch.testing.assert_close(one_found, one_wanted, rtol=0, atol=1e-12)
            while not fresh.outcomes["kv"].is_over:
                fresh.turn()
            checked.add(outcome.request.request_id)
    assert len(checked) > len(requests) // 2
    world.check(bench.outcomes)
    bench.close()
    fresh.close()
