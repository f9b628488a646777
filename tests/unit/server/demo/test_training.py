"""Lessons, the training loop and the steps of the script, at a size that takes seconds."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedTokenizerBase

from loraplex_server.demo.fitting import adapter_optimizers, fit
from loraplex_server.demo.lessons import Row, pad_rows, recall_batches, record_batches
from loraplex_server.demo.recipes import ADAPTERS, SCALES
from loraplex_server.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, train_tokenizer
from loraplex_server.demo.train import BASE_NAME, make_world
from loraplex_server.demo.world import World

TINY = replace(
    SCALES["small"],
    name="tiny",
    adapters=tuple(recipe for recipe in ADAPTERS if recipe.name in ("xml", "toml")),
    vocab_size=300,
    hidden_size=64,
    intermediate_size=64,
    num_layers=1,
    num_recall_steps=2,
    num_base_steps=2,
    num_polish_steps=2,
    num_adapter_steps=2,
    num_eval_records=2,
    num_rows=4,
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["name=Ada; age=34. =>"], 300)


def test_padding_counts_only_answers() -> None:
    batch = pad_rows([Row([BOS_ID, 5], [6, EOS_ID]), Row([BOS_ID], [7])])
    assert batch.token_ids.tolist() == [[BOS_ID, 5, 6, EOS_ID], [BOS_ID, 7, PAD_ID, PAD_ID]]
    assert batch.counts.tolist() == [[False, False, True, True], [False, True, False, False]]


def test_record_batches_end_in_the_asked_format(tokenizer: PreTrainedTokenizerBase) -> None:
    batches = record_batches(tokenizer, stream="s", kinds=("book",), shares={"json": 1.0}, num_rows=4)
    for batch in islice(batches, 3):
        assert batch.token_ids.shape == batch.counts.shape
        for tokens, counts in zip(batch.token_ids, batch.counts, strict=True):
            answer = tokens[counts]
            assert answer[-1] == EOS_ID
            assert "book" in json.loads(tokenizer.decode(answer[:-1]))
            assert tokenizer.decode(tokens[~counts], skip_special_tokens=True).endswith(" =>")


def test_recall_batches_can_be_answered_from_what_is_given(tokenizer: PreTrainedTokenizerBase) -> None:
    (arrow,) = {tuple(tokenizer.encode(". =>", add_special_tokens=False))}
    for batch in islice(recall_batches(tokenizer, stream="s", num_rows=8), 3):
        for tokens, counts in zip(batch.token_ids.tolist(), batch.counts.tolist(), strict=True):
            first = counts.index(True)
            given = tokens[:first]
            assert counts[-1] or PAD_ID in tokens
            assert any(tuple(given[at : at + len(arrow)]) == arrow for at in range(len(given)))
            counted = [token for token, counts_here in zip(tokens, counts, strict=True) if counts_here]
            assert set(counted) <= set(given)


class Bigram(nn.Module):
    """The smallest thing with the interface of a causal model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.frozen = nn.Parameter(torch.zeros(2, 2), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> object:
        assert not use_cache
        return type("Output", (), {"logits": self.table(input_ids)})


def test_fit_learns_and_reports_each_step() -> None:
    torch.manual_seed(0)
    model = Bigram()
    batch = pad_rows([Row([1], [2, 3, 4, 5]), Row([1, 2], [3, 4])])
    losses: list[float] = []
    last = fit(model, adapter_optimizers(model, lr=0.3), iter([batch] * 60), num_steps=60, on_step=losses.append)
    assert len(losses) == 60
    assert last == losses[-1] < 0.3 < losses[0]
    assert not model.training
    assert model.frozen.eq(0).all()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"), scale=TINY, seed=3)


def test_a_world_is_an_ordinary_checkpoint_with_ordinary_adapters(world: World) -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in world.base_path.iterdir()}
    config = json.loads((world.base_path / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16")
    assert sorted(path.name for path in world.adapters_root.iterdir()) == ["toml", "xml"]
    for adapter in world.adapters:
        path = world.adapter_path(adapter.name)
        assert sorted(each.name for each in path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        fields = json.loads((path / "adapter_config.json").read_text())
        assert fields["base_model_name_or_path"] == BASE_NAME
        assert fields["r"] == adapter.rank
    toml = world.adapter_path("toml")
    with safe_open(toml / "adapter_model.safetensors", "pt") as weights:
        tensors = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name and "down_proj" in name} == {16}
    assert {tensor.shape[0] for name, tensor in tensors.items() if "lora_A" in name and "gate_proj" in name} == {8}


def test_the_report_covers_every_pair_and_dtype(world: World) -> None:
    report = json.loads(world.report_path.read_text())
    assert report["num_heldout_records"] == 2
    assert set(report["exact_match"]) == {"float32", "bfloat16"}
    for matrix in report["exact_match"].values():
        assert set(matrix) == {"", "toml", "xml"}


def test_one_step_is_repeated_alone_and_shown(world: World) -> None:
    base = (world.base_path / "model.safetensors").stat().st_mtime_ns
    before = (world.adapter_path("xml") / "adapter_model.safetensors").read_bytes()
    progress = Progress(disable=True)
    again = make_world(world.root, scale=TINY, seed=3, progress=progress, only="adapters")
    assert (world.base_path / "model.safetensors").stat().st_mtime_ns == base
    assert (again.adapter_path("xml") / "adapter_model.safetensors").read_bytes() == before
    assert [(task.description, task.finished) for task in progress.tasks] == [
        ("adapter xml", True),
        ("adapter toml", True),
    ]


def test_training_leaves_the_random_state_of_its_caller(tmp_path: Path) -> None:
    torch.manual_seed(11)
    wanted = torch.rand(3)
    torch.manual_seed(11)
    make_world(tmp_path, scale=TINY, only="tokenizer")
    assert torch.equal(torch.rand(3), wanted)
