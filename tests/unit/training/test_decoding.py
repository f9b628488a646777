"""Decoding of held-out prompts on the engine, with the heads that were trained."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from support.multimodal import whole_model
from support.world import TinyWorld, byte_tokenizer

from loraplex_contracts.errors import FailedPrecondition, LoraplexError
from loraplex_training.decoding import MAX_PROMPTS, MAX_TEXT_PROMPT, Decoded, decode, prompts_of
from loraplex_training.fitting import FitRecipe
from loraplex_training.heads import MedusaHeads, write_heads
from loraplex_training.medusa import MedusaRecipe, train_medusa
from loraplex_training.progress import quiet_transformers
from loraplex_training.target import Example, load_target

CPU = torch.device("cpu")


def heads_of(folder: Path, hidden_size: int) -> Path:
    folder.mkdir()
    write_heads(folder, MedusaHeads(3, 1, hidden_size, CPU), base_name="b", dtype=torch.float32)
    return folder


def run(world: TinyWorld, heads: Path, adapter: str | None = None) -> Decoded:
    path = None if adapter is None else world.adapters / adapter
    prompts = [[5, 6, 7], [8, 9]]
    return decode(
        str(world.model),
        heads,
        prompts,
        adapter=path,
        max_new_tokens=20,
        dtype="float32",
        device="cpu",
        advance=lambda detail="", steps=1: None,
    )


@pytest.mark.parametrize("adapter", [None, "a001"])
def test_tokens_and_steps(tiny_world: TinyWorld, tmp_path: Path, adapter: str | None) -> None:
    """Untrained heads repeat the next token, which a random model soon does too."""
    found = run(tiny_world, heads_of(tmp_path / "heads", 32), adapter)
    assert found.num_prompts == 2
    assert 2 <= found.num_tokens <= 40
    assert 1 <= found.tokens_per_step <= 4
    assert found.num_steps == round(found.num_tokens / found.tokens_per_step)


def test_heads_of_a_checkpoint_with_parts_for_images(tmp_path: Path) -> None:
    base, recipe = tmp_path / "base", MedusaRecipe(2, 1, FitRecipe(epochs=60, lr=0.02), max_new_tokens=24)
    whole_model("qwen2_vl").float().save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    with quiet_transformers():
        target = load_target(str(base), None, dtype=torch.float32, device=CPU)
        examples = target.generate([[5, 6, 7]] * 12, 24)  # which the heads learn by heart
        options = {"out": tmp_path / "heads", "base_name": "b", "progress": Progress(disable=True)}
        report = train_medusa(target, examples, recipe, **options)
    found = decode(
        str(base), tmp_path / "heads", prompts_of(report.heldout), adapter=None, max_new_tokens=24, dtype="float32",
        device="cpu", advance=lambda detail="", steps=1: None,
    )  # fmt: skip
    assert found.num_tokens == 24 * found.num_prompts
    assert found.tokens_per_step > 1.5


def test_other_things_beside_an_adapter_do_not_count(
    tiny_world: TinyWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = Path(shutil.copytree(tiny_world.adapters / "a001", tmp_path / "adapter"))
    (adapter / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(adapter / "fifo")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "other"}))
    assert run(tiny_world, heads_of(tmp_path / "heads", 32), str(adapter)).num_prompts == 2
    assert [record.message for record in caplog.records] == [], "was trained on another base"


def test_a_temporary_folder_without_room_is_an_error(
    tiny_world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    heads = heads_of(tmp_path / "heads", 32)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(FailedPrecondition, match="the temporary folder cannot be used: No space left"):
        run(tiny_world, heads)


def test_heads_that_do_not_fit_are_an_error(tiny_world: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(LoraplexError):
        run(tiny_world, heads_of(tmp_path / "heads", 16))


def test_prompts_are_those_given_or_beginnings() -> None:
    assert prompts_of([Example([1, 2, 3, 4], 2), Example([1, 2, 3, 4, 5, 6, 7, 8], 0)]) == [[1, 2], [1, 2]]
    assert prompts_of([Example([1], 0), Example([], 0)]) == [[1]]
    assert prompts_of([Example(list(range(1000)), 0)]) == [list(range(MAX_TEXT_PROMPT))]
    assert len(prompts_of([Example([1, 2], 1)] * 100)) == MAX_PROMPTS
