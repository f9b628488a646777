"""Mixtures of LoRAs against PEFT's add_weighted_adapter, in mixed batches with few slots and blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftModel, VeraConfig
from support.dense import dense_logits, greedy, make_dense
from support.peft_files import SPECS, LoraSpec, save_adapter, save_variant, weighted
from support.speculation import Bench, World, draft_proposer, make_bench, request
from support.zoo import random_model
from torch import Tensor
from transformers import PreTrainedModel

from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.errors import AdapterMemoryFull, AdapterNotFound, AdapterNotMixed, FailedPrecondition
from loraplex_contracts.mixtures import Member, Merge, Mixture
from loraplex_contracts.request import OutputParams, Request, SpeculationParams
from loraplex_server.speculation.proposer import MEDUSA

NUM_TOKENS = 12
NAMES = [spec.name for spec in SPECS]
ATTENTION, ALL, RSLORA, HEAD, EMBEDDING, PATTERNS = NAMES
SUMS: dict[str, Sequence[tuple[str, float]]] = {
    "two": ((ATTENTION, 0.7), (ALL, -1.3)),
    "two, other weights": ((ATTENTION, 0.7), (ALL, 0.4)),
    "three": ((ALL, 1.0), (RSLORA, 0.4), (PATTERNS, 2.0)),
    "head and embedding": ((HEAD, 0.5), (EMBEDDING, 1.5)),
    "twice": ((ALL, 0.5), (RSLORA, 1.0), (ALL, 0.25)),
    "one": ((PATTERNS, 0.25),),
}


def mixture(members: Sequence[tuple[str, float]]) -> Mixture:
    return Mixture(tuple(Member(AdapterId(name), weight) for name, weight in members))


def check_texts(bench: Bench, asked: dict[str, tuple[Request, PeftModel | PreTrainedModel]], seed: int) -> None:
    """Checks requests in one batch, coming one after the other: texts and logprobs are those of the models alone."""
    found = bench.run([one for one, _ in asked.values()], random.Random(seed))
    for name, (one, model) in asked.items():
        outcome = found[name]
        assert outcome.error is None, f"{name}: {outcome.error}"
        want = greedy(model, one.prompt_token_ids, NUM_TOKENS)
        logprobs = torch.log_softmax(dense_logits(model, one.prompt_token_ids, want), -1)
        for index in range(one.n):
            assert outcome.tokens[index] == want, name
            got = torch.tensor([entry.logprob for entry in outcome.logprobs[index]], dtype=torch.float64)
            # PEFT takes square roots of weights in float32 where there is one adapter only.
            tolerance = 1e-5 if one.mixture is not None and len(one.mixture.members) == 1 else 1e-9
            wanted = logprobs[range(len(want)), want]
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_sums_are_pefts_cat(family: str, tmp_path: Path) -> None:
    base = make_dense(random_model(family))
    plain = {spec.name: save_adapter(base, spec, tmp_path / spec.name, seed=idx) for idx, spec in enumerate(SPECS)}
    sums = {name: weighted(base, tmp_path, members, "cat") for name, members in SUMS.items()}
    dice = random.Random(1)
    vocab_size = cast(Tensor, base.get_input_embeddings().weight).shape[0]
    shared = [dice.randrange(2, vocab_size) for _ in range(9)]  # prompts begin alike
    asked: dict[str, tuple[Request, PeftModel | PreTrainedModel]] = {}
    for turn in range(2):
        for name, model in (sums | plain | {"": base}).items():
            one = request(
                f"{turn} {name}",
                [*shared[: dice.randint(4, 9)], dice.randrange(2, vocab_size)],
                NUM_TOKENS,
                "prompt_lookup" if dice.random() < 0.5 else "off",
                speculation={"fixed_length": True},
                output=OutputParams(True, 0),
                n=2 if name in ("two", ALL) else 1,
            )
            if name in SUMS:
                asked[one.request_id] = replace(one, mixture=mixture(SUMS[name])), model
            else:
                asked[one.request_id] = replace(one, adapter_id=AdapterId(name)), model
    # Three slots for six adapters, and not enough blocks for all rows at once.
    bench = make_bench(base, tmp_path, num_slots=3, num_blocks=20, max_running=5, max_step_tokens=24)
    check_texts(bench, asked, 2)
    assert bench.num_preemptions > 0
    assert bench.engine._cache.usage().device_evictions > 0  # pyright: ignore[reportPrivateUsage]
    assert any(outcome.drafted for outcome in bench.outcomes.values())
    cached = [end.num_cached_tokens for outcome in bench.outcomes.values() for end in outcome.ends.values()]
    assert any(cached), "no prompt began with another's blocks"
    # The order of members does not matter; the answer's digest says what was mixed.
    digests = {
        bench.run([replace(asked["0 two"][0], request_id=f"d{i}", mixture=mixture(members))])[f"d{i}"].adapter_digest
        for i, members in enumerate((SUMS["two"], SUMS["two"][::-1]))
    }
    assert len(digests) == 1
    assert all(len(digest) == 64 for digest in digests)
    bench.close()


REFUSED: dict[str, tuple[LoraSpec, str]] = {
    "dora": (LoraSpec("dora", 4, 6, "attention", {"use_dora": True}), "use_dora"),
    "biases": (LoraSpec("biases", 3, 4, "attention", {"lora_bias": True}), "lora_bias"),
    "saved": (LoraSpec("saved", 3, 4, "mlp", {"modules_to_save": ["head"]}), "modules_to_save"),
    "rows": (LoraSpec("rows", 3, 4, "attention", {"trainable_token_indices": [3, 5]}), "token rows"),
}


def test_what_is_more_than_a_plain_lora_is_refused_by_name(tmp_path: Path) -> None:
    base = random_model("llama")
    save_adapter(base, SPECS[0], tmp_path / ATTENTION)
    for name, (spec, _) in REFUSED.items():
        save_adapter(base, spec, tmp_path / name)
    variants = {
        "ia3": IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj"], feedforward_modules=[]),
        "loha": LoHaConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2),
        "vera": VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], r=2),
    }
    for name, config in variants.items():
        save_variant(base, config, tmp_path / name)
    reasons = {name: reason for name, (_, reason) in REFUSED.items()}
    reasons |= {"ia3": "IA3", "loha": "LOHA", "vera": "VERA"}
    bench = make_bench(base, tmp_path, num_slots=2)
    asked = {name: ((ATTENTION, 1.0), (name, 0.5)) for name in reasons}
    found = bench.run(
        [replace(request(name, [5, 6, 7], 2), mixture=mixture(members)) for name, members in asked.items()]
    )
    for name, reason in reasons.items():
        error = found[name].error
        assert isinstance(error, AdapterNotMixed), name
        assert error.resource == name
        assert f"adapter '{name}' cannot be in a mixture" in error.message
        assert reason in error.message
    bench.close()


def test_mixtures_that_are_unknown_or_too_large(tmp_path: Path) -> None:
    base = random_model("llama")
    for spec in SPECS[:3]:
        save_adapter(base, spec, tmp_path / spec.name)
    bench = make_bench(base, tmp_path, num_slots=2)
    asked = {
        "unknown": ((ATTENTION, 1.0), ("nowhere", 1.0)),
        "large": ((ATTENTION, 1.0), (ALL, 1.0), (RSLORA, 1.0)),
        "fits": ((ATTENTION, 1.0), (ALL, 1.0), (ATTENTION, 1.0)),
    }
    found = bench.run(
        [replace(request(name, [5, 6, 7], 2), mixture=mixture(members)) for name, members in asked.items()]
    )
    assert isinstance(found["unknown"].error, AdapterNotFound)
    assert "nowhere" in found["unknown"].error.message
    assert isinstance(found["large"].error, AdapterMemoryFull)
    assert "3 adapters of the mixture" in found["large"].error.message
    assert found["fits"].error is None
    bench.close()


MERGES: dict[str, tuple[Merge, Sequence[tuple[str, float]]]] = {
    "linear": (Merge("linear"), ((ALL, 0.7), ("other", -0.3))),
    "linear, one": (Merge("linear"), ((ALL, 0.5),)),
    "ties": (Merge("ties", 0.5), ((ALL, 0.7), ("other", 1.3))),
    "ties by frequency": (Merge("ties", 0.6, "frequency"), ((ALL, 1.0), ("other", 1.0), (ALL, -0.5))),
    "dare": (Merge("dare_linear", 0.7, seed=5), ((ALL, 1.0), ("other", 0.5))),
    "dare and ties": (Merge("dare_ties", 0.8, seed=(1 << 64) - 1), ((ALL, 1.0), ("other", 0.5))),
    "pruned": (Merge("magnitude_prune", 0.5), ((ALL, -1.0), ("other", 0.5))),
}


def test_merges_are_pefts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_dense(random_model("llama"))
    spec = LoraSpec("other", 4, 3, "attention", {"use_rslora": True})
    save_adapter(base, SPECS[1], tmp_path / ALL, seed=1)
    save_adapter(base, spec, tmp_path / "other", seed=2)
    save_adapter(base, SPECS[0], tmp_path / ATTENTION)
    asked: dict[str, tuple[Request, PeftModel | PreTrainedModel]] = {"": (request("", [3, 4, 5], NUM_TOKENS), base)}
    for name, (merge, members) in MERGES.items():
        # PEFT draws from torch's own generator, behind what it draws for weights that it then replaces.
        monkeypatch.setattr(
            "peft.tuners.lora.model._freeze_adapter", lambda *_, seed=merge.seed: torch.manual_seed(seed or 0)
        )
        more = {"density": merge.density, "majority_sign_method": merge.majority_sign}
        model = weighted(base, tmp_path, members, merge.strategy, **more)
        one = request(name, [3, 4, 5, 6], NUM_TOKENS, output=OutputParams(True, 0))
        asked[name] = replace(one, mixture=replace(mixture(members), merge=merge)), model
    asked[""] = replace(asked[""][0], output=OutputParams(True, 0)), base
    bench = make_bench(base, tmp_path, num_slots=2)
    check_texts(bench, asked, 3)
    # Evicted and brought back, or made again: the same content.
    again = bench.run([replace(one, request_id=f"again {name}") for name, (one, _) in asked.items()])
    for name, (one, _) in asked.items():
        assert again[f"again {name}"].tokens == bench.outcomes[one.request_id].tokens
        assert again[f"again {name}"].adapter_digest == bench.outcomes[one.request_id].adapter_digest
    ranks = replace(mixture(((ALL, 1.0), (ATTENTION, 1.0))), merge=Merge("linear"))
    found = bench.run([replace(request("ranks", [3, 4], 2), mixture=ranks)])
    error = found["ranks"].error
    assert isinstance(error, AdapterNotMixed)
    assert "ranks are equal in each module" in error.message
    assert f"q_proj has rank 4 in '{ALL}', 1 in '{ATTENTION}'" in error.message
    bench.close()


def test_merges_of_other_ranks_in_other_modules_are_pefts(tmp_path: Path) -> None:
    base = make_dense(random_model("llama"))
    narrow = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], rank_pattern={"q_proj": 2})
    save_variant(base, narrow, tmp_path / "narrow", seed=1)
    save_variant(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["up_proj"]), tmp_path / "wide", seed=2)
    members = (("narrow", 1.5), ("wide", -0.5))
    one = request("apart", [3, 4, 5, 6], NUM_TOKENS, output=OutputParams(True, 0))
    bench = make_bench(base, tmp_path, num_slots=1)
    asked = replace(one, mixture=replace(mixture(members), merge=Merge("linear")))
    check_texts(bench, {"apart": (asked, weighted(base, tmp_path, members, "linear"))}, 3)
    bench.close()


def test_heads_of_members_are_not_used(tmp_path: Path) -> None:
    """Drafts come from the default heads, or from those that the request names; texts stay."""
    base = make_dense(random_model("llama"))
    world = World(base, tmp_path)
    world.add_lora(ALL, SPECS[1], 1)
    world.add_lora(ATTENTION, SPECS[0], 0)
    prompt = [5, 9, 3, 17]
    world.add_heads(ALL, [request("known", prompt, NUM_TOKENS, adapter_id=AdapterId(ALL))], 2)
    world.add_heads("heads", [request("base", prompt, NUM_TOKENS)], 2)
    members = ((ALL, 0.5), (ATTENTION, 1.0))
    want = greedy(weighted(base, tmp_path, members, "cat"), prompt, NUM_TOKENS)
    for default in ("", "heads"):
        bench = make_bench(base, tmp_path, num_slots=4, default_heads=default)
        asked = {
            "auto": SpeculationParams("auto", fixed_length=True, max_draft_tokens=2),
            "medusa": SpeculationParams("medusa", fixed_length=True),
            "named": SpeculationParams("medusa", medusa_id=AdapterId("heads"), fixed_length=True),
        }
        found = bench.run(
            [
                replace(request(name, prompt, NUM_TOKENS), mixture=mixture(members), speculation=speculation)
                for name, speculation in asked.items()
            ]
        )
        for name, outcome in found.items():
            if name == "medusa" and not default:
                assert isinstance(outcome.error, FailedPrecondition), "members' heads would have been used"
                continue
            assert outcome.error is None, outcome.error
            assert outcome.tokens[0] == want, name
            assert name == "auto" or outcome.drafted[MEDUSA], "nothing was drafted"
        bench.close()


def test_draft_models_guess_for_mixtures(tmp_path: Path) -> None:
    """Mixtures run beside requests of one adapter and of none; one model drafts what the base would write, the other
    anything."""
    base = make_dense(random_model("llama"))
    for idx, spec in enumerate(SPECS[:2]):
        save_adapter(base, spec, tmp_path / spec.name, seed=idx)
    members = ((ALL, 0.01), (ATTENTION, 0.02))  # near the base, so that drafts are accepted
    wide = ((ALL, 0.7), (ATTENTION, -1.3))
    models = {"near": weighted(base, tmp_path, members, "cat"), "wide": weighted(base, tmp_path, wide, "cat")}
    num_ids = cast(Tensor, base.get_input_embeddings().weight).shape[0]
    drafts = {
        "same": draft_proposer(base, num_target_ids=num_ids),
        "other": draft_proposer(make_dense(random_model("llama", seed=7)), num_target_ids=num_ids),
    }
    bench = make_bench(base, tmp_path, num_slots=4, drafts=drafts)
    asked: dict[str, tuple[Request, PeftModel | PreTrainedModel]] = {}
    for draft in drafts:
        speculation = SpeculationParams("draft_model", draft_name=draft, max_draft_tokens=3, fixed_length=True)
        for name, model in (models | {"": base}).items():
            one = request(f"{draft} {name}", [5, 9, 3, 17], NUM_TOKENS, output=OutputParams(True, 0))
            mixed = mixture(members if name == "near" else wide) if name else None
            asked[one.request_id] = replace(one, mixture=mixed, speculation=speculation), model
    check_texts(bench, asked, 3)
    for name, outcome in bench.outcomes.items():
        assert sum(outcome.drafted.values()), name
    assert sum(bench.outcomes["same near"].accepted.values()), "drafts for a mixture are never accepted"
    bench.close()
