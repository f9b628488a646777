"""Far positions checked at load."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as tf
from support.dense import greedy
from support.driver import Job, make_rig, random_prompts
from support.zoo import MAX_LEN, VOCAB_SIZE, random_model
from torch import Tensor, nn

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.model import probe as probe_module
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.probe import CACHE, MAX_THRESHOLDS, NUM_TOKENS, EmptyPast, far_rows, thresholds

FLOOR = 40  # far behind every token that a check of the first tokens sees


class ByRow(nn.Module):
    """A linear whose result grows from place FLOOR of the row on, whatever positions the tokens have."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.past = 0

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], dtype=x.dtype) + self.past
        return self.inner(x) * (1 + (places >= FLOOR)).view(1, -1, 1)


def by_row_model() -> Any:
    """A model that knows behind a past where it is, as models do that ask their cache."""
    model = random_model("llama")
    linear = model.model.layers[1].self_attn.q_proj = ByRow(model.model.layers[1].self_attn.q_proj)

    def ask(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        past = options.get(CACHE)
        length = past.get_seq_length() if past is not None else 0
        linear.past = length if isinstance(length, int) else 0

    model.register_forward_pre_hook(ask, with_kwargs=True)
    return model


def test_refuses_what_depends_on_the_place_in_the_row() -> None:
    with pytest.raises(UnsupportedModel, match=r"around position \d+ .* otherwise than `generate\(\)`"):
        adopt_model(by_row_model())


class Neighbours(nn.Module):
    """A linear that adds a part of the token before."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 0.5 * x.roll(1, dims=1))


def test_refuses_layers_that_mix_neighbours() -> None:
    model = random_model("llama")
    model.model.layers[1].mlp.up_proj = Neighbours(model.model.layers[1].mlp.up_proj)
    with pytest.raises(UnsupportedModel, match="layers other than attention mix neighbouring tokens"):
        adopt_model(model)


def test_refuses_positions_that_are_not_counted_from_0_on() -> None:
    model = random_model("llama")

    def count(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if options.get("position_ids") is None:
            options["position_ids"] = 2 + torch.arange(options["input_ids"].shape[1]).unsqueeze(0)
        return args, options

    model.register_forward_pre_hook(count, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="it does not count positions from 0 on"):
        adopt_model(model)


def test_a_model_runs_no_more_than_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run reads all weights: the first tokens with and without positions, a step far out, its two texts alone."""
    runs = list[Any]()
    trial_run = probe_module.trial_run

    def count(*args: Any, **options: Any) -> Any:
        runs.append(args)
        return trial_run(*args, **options)

    monkeypatch.setattr(probe_module, "trial_run", count)
    adopt_model(random_model("llama"), verify=False)
    assert len(runs) == 5


def test_the_comparison_with_transformers_looks_far_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison finds a difference where the probe has seen nothing (what it replaces at load comes later than
    it)."""
    seen = probe_module.check_far

    def blind(model: Any, plain: Any, place: int, rows: Any) -> Any:
        return seen(model, plain, place, far_rows((), NUM_TOKENS))

    monkeypatch.setattr(probe_module, "check_far", blind)
    with pytest.raises(UnsupportedModel, match=r"off by .*, from position \d{3} on"):
        adopt_model(by_row_model())


@pytest.mark.parametrize("max_context_tokens", [None, 90, 12])
@pytest.mark.parametrize("floor_scale", [10, 33, 200])
def test_a_temperature_by_the_caches_length(floor_scale: int, max_context_tokens: int | None) -> None:
    """Llama 4 counts positions by its cache, not by `position_ids`: in a step, by the place in the row."""
    model = random_model("llama4", changes={"floor_scale": floor_scale})
    loaded = adopt_model(copy.deepcopy(model), max_context_tokens=max_context_tokens)
    longest = loaded.spec.max_context_tokens
    prompts = [prompt[: longest - 4] for prompt in random_prompts(5, VOCAB_SIZE, seed=5, longest=100)]
    jobs = [Job(prompt, 4) for prompt in prompts]
    make_rig(loaded, seed=3).run(jobs)
    assert [job.tokens for job in jobs] == [greedy(model, prompt, 4) for prompt in prompts]


@pytest.mark.parametrize("max_context_tokens", [2, 5, 9, 10, 20])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_short_contexts_can_be_served(family: str, max_context_tokens: int) -> None:
    loaded = adopt_model(random_model(family), max_context_tokens=max_context_tokens)
    assert loaded.spec.max_context_tokens == max_context_tokens


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_no_position_behind_the_models_last_is_looked_at(family: str) -> None:
    changes = {"n_positions": NUM_TOKENS + 1, "max_position_embeddings": NUM_TOKENS + 1}
    assert adopt_model(random_model(family, changes=changes)).spec.max_context_tokens == NUM_TOKENS + 1


def test_thresholds_are_what_the_configuration_names() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
    config = tf.MistralConfig(sliding_window=1024, max_position_embeddings=16384, rope_parameters=rope)
    assert thresholds(config, 16384) == (1024, 4096)
    assert thresholds(config, 32768) == (1024, 4096, 16384)
    assert thresholds(config, 4096) == (1024,)
    assert 8192 in thresholds(tf.Llama4TextConfig(), 1 << 17)
    config.odd = {f"length_{i}": 100 * i for i in range(2, 20)} | {"window": float("inf"), "context": "long"}
    assert len(thresholds(config, 1 << 20)) == MAX_THRESHOLDS


@pytest.mark.parametrize("num_counts", range(7))
@pytest.mark.parametrize("limit", [2, NUM_TOKENS, MAX_LEN, 1 << 17])
def test_rows_hold_the_end_and_both_sides_of_each_threshold(limit: int, num_counts: int) -> None:
    counts = [count for count in range(NUM_TOKENS, NUM_TOKENS + num_counts) if count <= limit - NUM_TOKENS]
    rows = far_rows(counts, limit)
    pairs = [row.positions[place : place + 2] for row in rows for place in row.places]
    assert pairs[0] == (max(limit, NUM_TOKENS) - 2, max(limit, NUM_TOKENS) - 1)
    assert sorted(pairs[1:]) == [(count - 1, count) for count in counts]
    for row in rows:
        assert row.positions[:3] == (0, 1, 2)
        for place in row.places:  # the text that the pair is a part of
            start = row.positions[place] - place
            assert start >= 0
            assert start + NUM_TOKENS <= max(limit, NUM_TOKENS)


def test_an_empty_past_is_as_good_as_none_where_nothing_depends_on_it() -> None:
    model = random_model("gemma3").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode():
        behind = model(ids, use_cache=True, **{CACHE: EmptyPast(0)}).logits
        assert torch.equal(model(ids, use_cache=False).logits, behind)
