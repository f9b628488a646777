"""The committed demo world: complete, small, and as accurate as reported."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex_contracts.errors import FailedPrecondition
from loraplex_demo.evaluation import greedy_answers
from loraplex_demo.formats import FORMATS
from loraplex_demo.world import World, committed_world, exact_match, open_world, write_json

MAX_WEIGHT_BYTES = 12 * 2**20


@pytest.fixture(scope="module")
def world() -> World:
    return committed_world()


def files(world: World) -> list[Path]:
    return [path for path in world.root.rglob("*") if path.is_file()]


def test_it_is_small_and_plain(world: World) -> None:
    assert sum(path.stat().st_size for path in files(world) if path.suffix == ".safetensors") <= MAX_WEIGHT_BYTES
    assert {path.suffix for path in files(world)} <= {".safetensors", ".json", ".md", ".jinja"}


def test_it_mentions_no_path_of_the_machine_that_made_it(world: World) -> None:
    for path in files(world):
        content = path.read_bytes()
        for trace in (b"/work", b"/tmp", b"/home", b"/root", b"/Users"):
            assert trace not in content, path


def test_adapters_differ_as_those_of_users_do(world: World) -> None:
    configs = [
        json.loads((world.adapter_path(each.name) / "adapter_config.json").read_text()) for each in world.adapters
    ]
    assert len(configs) >= 6
    assert {fields["r"] for fields in configs} >= {4, 8, 16}
    assert any(fields["use_rslora"] for fields in configs)
    assert any(fields["rank_pattern"] for fields in configs)
    assert len({tuple(sorted(fields["target_modules"])) for fields in configs}) >= 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_report_meets_the_bar(world: World, dtype: str) -> None:
    report = json.loads((world.root / "report.json").read_text())
    assert report["num_heldout_records"] >= 100
    matrix = report["exact_match"][dtype]
    assert set(matrix) == {"", *(adapter.name for adapter in world.adapters)}
    for name, shares in matrix.items():
        own = world.format_of(name)
        assert shares[own] >= 0.95, (name, shares)
        assert all(share < 0.05 for format_name, share in shares.items() if format_name != own), (name, shares)


def test_every_adapter_answers_fresh_records_as_reported(world: World) -> None:
    cases = world.cases(32, stream="unit test")
    tokenizer = AutoTokenizer.from_pretrained(world.base_path)
    model = AutoModelForCausalLM.from_pretrained(world.base_path, dtype=torch.float32).eval()
    prompts = [case.prompt for case in cases]
    right = {
        "": sum(
            world.is_right(text, case, None)
            for text, case in zip(greedy_answers(model, tokenizer, prompts), cases, strict=True)
        )
    }
    for adapter in world.adapters:
        path = str(world.adapter_path(adapter.name))
        if isinstance(model, PeftModel):
            model.load_adapter(path, adapter_name=adapter.name)
        else:
            model = PeftModel.from_pretrained(model, path, adapter_name=adapter.name).eval()
        model.set_adapter(adapter.name)
        answers = greedy_answers(model, tokenizer, prompts)
        right[adapter.name] = sum(
            world.is_right(text, case, adapter.name) for text, case in zip(answers, cases, strict=True)
        )
    assert all(count >= 28 for count in right.values()), right


def test_answers_are_compared_to_the_byte(world: World) -> None:
    (case,) = world.cases(1)
    assert world.is_right(case.expected("json"), case, "json")
    assert not world.is_right(case.expected("json"), case, "yaml")
    assert not world.is_right(case.expected("json") + "\n", case, "json")
    assert world.is_right(case.expected(), case, None)
    assert exact_match("a", "a")
    assert not exact_match("a", "A")


def test_another_stream_gives_other_cases(world: World) -> None:
    assert world.cases(5) == world.cases(5)
    assert world.cases(5) != world.cases(5, stream="other")
    assert {world.manifest.base_format, *(adapter.format for adapter in world.adapters)} <= set(FORMATS)


def test_the_showcase_is_held_out_and_bounded(world: World) -> None:
    shown = world.showcase(6)
    assert all(case in world.cases(64) for case in shown)
    with pytest.raises(FailedPrecondition, match="cases to show"):
        world.showcase(10_000)


def test_every_adapter_is_good_and_alone_in_its_format(world: World) -> None:
    report = json.loads((world.root / "report.json").read_text())
    assert len(world.adapters) >= 6
    for matrix in report["exact_match"].values():
        for adapter in world.adapters:
            shares = matrix[adapter.name]
            assert shares[adapter.format] >= 0.95
            assert all(share < 0.05 for name, share in shares.items() if name != adapter.format)


def test_heads_foresee_what_their_own_adapter_writes(world: World) -> None:
    assert {(heads.adapter, heads.is_combined) for heads in world.heads} == {
        ("", False),
        ("json", False),
        ("sql", True),
    }
    found = json.loads((world.root / "report.json").read_text())["speculation"]
    assert found["num_heldout_records"] >= 50
    for heads in world.heads:
        row = found["tokens_per_step"][heads.name]
        assert row[heads.adapter] >= 2.2, (heads.name, row)
        assert row[heads.adapter] == max(row.values()), (heads.name, row)


def test_drafts_foresee_what_every_adapter_writes(world: World) -> None:
    found = json.loads((world.root / "report.json").read_text())["speculation"]["tokens_per_step"]
    assert {each.has_own_tokenizer for each in world.drafts} == {True, False}
    for draft in world.drafts:
        assert set(found[draft.name]) == {"", *(adapter.name for adapter in world.adapters)}
        assert min(found[draft.name].values()) > 1.2, (draft.name, found[draft.name])
        tokenizer = AutoTokenizer.from_pretrained(world.draft_path(draft.name))
        is_other = tokenizer.get_vocab() != AutoTokenizer.from_pretrained(world.base_path).get_vocab()
        assert is_other == draft.has_own_tokenizer


def test_no_world_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="holds no demo world"):
        open_world(tmp_path)
    (tmp_path / "world.json").write_text("{}")
    with pytest.raises(FailedPrecondition, match="holds no demo world"):
        open_world(tmp_path)


def test_a_world_of_other_records_is_refused(world: World, tmp_path: Path) -> None:
    write_json(tmp_path / "world.json", {**asdict(world.manifest), "digest": "0" * 64})
    with pytest.raises(FailedPrecondition, match="other records"):
        open_world(tmp_path)
