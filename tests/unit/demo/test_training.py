"""Datasets, training loop and steps of the demo, in seconds."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from loraplex_demo.builder import BASE_NAME
from loraplex_demo.datasets import Row, pad_rows, recall_batches, record_batches
from loraplex_demo.fitting import adapter_optimizers, fit
from loraplex_demo.hyperparameters import ADAPTERS, SCALES, DraftRecipe, HeadsRecipe
from loraplex_demo.speculation import speculation_table
from loraplex_demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, train_tokenizer
from loraplex_demo.train import make_world
from loraplex_demo.world import World, read_report
from loraplex_training.heads import read_heads

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
    num_polish_rounds=2,
    num_polish_steps=2,
    num_lookahead_steps=2,
    num_lookahead_tokens=3,
    num_adapter_steps=2,
    num_eval_records=2,
    num_rows=4,
    heads=(HeadsRecipe("base-heads", ""), HeadsRecipe("xml-with-heads", "xml", is_combined=True, num_heads=2)),
    num_heads_prompts=6,
    heads_epochs=1,
    drafts=(
        DraftRecipe("same", hidden_size=32, intermediate_size=32, num_layers=1, num_kv_heads=1),
        DraftRecipe("other", 280, hidden_size=32, intermediate_size=32, num_layers=1, num_kv_heads=1),
    ),
    num_draft_recall_steps=2,
    num_draft_steps=2,
    num_speculation_records=2,
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
    lora = ["toml", "xml"]
    assert sorted(path.name for path in world.adapters_root.iterdir()) == ["base-heads", *lora, "xml-with-heads"]
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
    report = json.loads((world.root / "report.json").read_text())
    assert report["num_heldout_records"] == 2
    assert set(report["exact_match"]) == {"float32", "bfloat16"}
    for matrix in report["exact_match"].values():
        assert set(matrix) == {"", "toml", "xml"}


def test_heads_lie_beside_the_adapters(world: World) -> None:
    assert [(each.name, each.adapter, each.num_heads, each.is_combined) for each in world.heads] == [
        ("base-heads", "", 4, False),
        ("xml-with-heads", "xml", 2, True),
    ]
    alone, combined = (world.adapter_path(each.name) for each in world.heads)
    assert sorted(path.name for path in alone.iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    assert json.loads((alone / "config.json").read_text())["base_model_name_or_path"] == BASE_NAME
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (combined / name).read_bytes() == (world.adapter_path("xml") / name).read_bytes()
    heads = read_heads(combined)
    assert (heads.num_heads, heads.weight.dtype) == (2, torch.bfloat16)
    assert heads.weight.abs().sum() > 0
    # Whose text a request with that id gets.
    assert [world.format_of(each.name) for each in world.heads] == ["prose", "xml"]
    assert [world.format_of(name) for name in (None, "toml")] == ["prose", "toml"]


def test_drafts_are_ordinary_checkpoints(world: World) -> None:
    assert [(each.name, each.has_own_tokenizer) for each in world.drafts] == [("same", False), ("other", True)]
    wanted = AutoTokenizer.from_pretrained(world.base_path).get_vocab()
    for draft in world.drafts:
        path = world.draft_path(draft.name)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path)
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == len(tokenizer) == (280 if draft.has_own_tokenizer else len(wanted))
        assert (tokenizer.get_vocab() == wanted) == (not draft.has_own_tokenizer)


def test_the_report_has_every_pair_of_who_drafts_and_for_whom(world: World) -> None:
    entry = read_report(world.root)["speculation"]
    assert entry["num_heldout_records"] == 2
    assert entry["num_drafted"] == {"base-heads": 4, "xml-with-heads": 2, "same": 4, "other": 4}
    assert set(entry["tokens_per_step"]) == {"base-heads", "xml-with-heads", "same", "other"}
    for name, row in entry["tokens_per_step"].items():
        assert set(row) == {"", "toml", "xml"}
        assert all(1 <= share <= 1 + entry["num_drafted"][name] for share in row.values())
    assert speculation_table(entry).count("\n") == 4


def test_one_step_is_repeated_alone_and_shown(world: World, tmp_path: Path) -> None:
    root = shutil.copytree(world.root, tmp_path / "world")
    base = (root / "base" / "model.safetensors").stat().st_mtime_ns
    before = (world.adapter_path("xml") / "adapter_model.safetensors").read_bytes()
    progress = Progress(disable=True)
    again = make_world(root, scale=TINY, seed=3, progress=progress, only="adapters")
    assert (root / "base" / "model.safetensors").stat().st_mtime_ns == base
    assert (again.adapter_path("xml") / "adapter_model.safetensors").read_bytes() == before
    assert [(task.description, task.finished) for task in progress.tasks] == [
        ("adapter xml", True),
        ("adapter toml", True),
    ]
    assert again.heads == ()  # they went with the adapters that they were made for
    assert again.drafts == world.drafts


def test_all_from_one_step_on_is_repeated(world: World, tmp_path: Path) -> None:
    root = shutil.copytree(world.root, tmp_path / "world")
    (root / "report.json").unlink()
    progress = Progress(disable=True)
    again = make_world(root, scale=TINY, seed=3, progress=progress, start="heads")
    assert [task.description for task in progress.tasks] == [
        "base-heads", "xml-with-heads", "same", "other", "speculation",
    ]  # fmt: skip
    assert all(task.finished for task in progress.tasks)
    for each in world.heads:
        made = (again.adapter_path(each.name) / "medusa_lm_head.safetensors").read_bytes()
        assert made == (world.adapter_path(each.name) / "medusa_lm_head.safetensors").read_bytes()
    assert set(read_report(root)) == {"speculation"}
    assert again.manifest == world.manifest


def test_training_leaves_the_random_state_of_its_caller(tmp_path: Path) -> None:
    torch.manual_seed(11)
    wanted = torch.rand(3)
    torch.manual_seed(11)
    make_world(tmp_path, scale=TINY, only="tokenizer")
    assert torch.equal(torch.rand(3), wanted)
