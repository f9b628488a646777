"""Medusa training: from prompts or texts to a directory that can be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file
from support.world import TinyWorld

from loraplex_contracts.errors import DiskFull, InvalidArgument
from loraplex_training import medusa
from loraplex_training.fitting import FitRecipe
from loraplex_training.heads import MedusaHeads, read_heads
from loraplex_training.medusa import MedusaRecipe, Report, examples_of_prompts, examples_of_texts, train_medusa
from loraplex_training.progress import quiet_transformers
from loraplex_training.target import Example, Target, load_target

RECIPE = MedusaRecipe(num_heads=2, fit=FitRecipe(epochs=30, lr=0.02, batch_rows=64), max_new_tokens=24, batch_size=3)


def load(world: TinyWorld, adapter: str | None = None) -> Target:
    with quiet_transformers():
        path = None if adapter is None else world.adapters / adapter
        return load_target(str(world.model), path, dtype=torch.float32, device=torch.device("cpu"))


def examples(target: Target) -> list[Example]:
    with quiet_transformers():
        return examples_of_prompts(target, [f"prompt {i}" for i in range(12)], RECIPE, Progress(disable=True))


def train(
    target: Target,
    out: Path,
    given: list[Example],
    combine_with: Path | None = None,
    dtype: torch.dtype | None = None,
) -> Report:
    return train_medusa(
        target,
        given,
        RECIPE,
        out=out,
        base_name="org/base",
        dtype=dtype,
        combine_with=combine_with,
        progress=Progress(disable=True),
    )


def test_heads_of_an_adapter_beside_its_copy(tiny_world: TinyWorld, tmp_path: Path) -> None:
    target = load(tiny_world, "a001")
    given = examples(target)
    out, lora = tmp_path / "out", tiny_world.adapters / "a001"
    report = train(target, out, given, combine_with=lora, dtype=torch.bfloat16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "config.json",
        "medusa_lm_head.safetensors",
    ]
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (out / name).read_bytes() == (lora / name).read_bytes()
    tensors = load_file(out / "medusa_lm_head.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["1.0.linear.weight"].shape == (32, 32)
    assert json.loads((out / "config.json").read_text())["base_model_name_or_path"] == "org/base"
    # A random model soon repeats itself: there is something to foresee.
    assert report.accuracy.tokens_per_step > 1.1
    assert report.num_train_positions > 5 * report.accuracy.num_positions > 0
    assert [each in given for each in report.heldout] == [True]
    assert report.num_skipped == 0


def test_a_combined_adapter_has_all_that_the_lora_brings(tiny_world: TinyWorld, tmp_path: Path) -> None:
    lora = Path(shutil.copytree(tiny_world.adapters / "a001", tmp_path / "lora"))
    brought = ("chat_template.jinja", "tokenizer_config.json", "tokenizer.json", "added_tokens.json")
    for name in (*brought, "1_Pooling/config.json", "config.json", "medusa_lm_head.safetensors", "optimizer.pt"):
        (lora / name).parent.mkdir(exist_ok=True)
        (lora / name).write_text(f"the LoRA's {name}")
    target = load(tiny_world)
    train(target, tmp_path / "out", examples_of_texts(target, ["one long text", "another text"]), combine_with=lora)
    for name in (*brought, "1_Pooling/config.json"):
        assert (tmp_path / "out" / name).read_text() == f"the LoRA's {name}"
    assert read_heads(tmp_path / "out").num_heads == 2
    assert not (tmp_path / "out" / "optimizer.pt").exists()


def test_texts_are_taken_as_they_are(tiny_world: TinyWorld, tmp_path: Path) -> None:
    target = load(tiny_world)
    texts = [*("ab" * length for length in range(8, 28)), "", "x" * 2000, "ababababababab" * 2]
    given = examples_of_texts(target, texts)
    assert len(given[-1].token_ids) == 512
    report = train(target, tmp_path / "out", given)
    assert report.num_skipped == 1  # the empty one
    assert report.accuracy.top1[0] > 0.9
    assert read_heads(tmp_path / "out").weight.dtype == torch.float32


def test_prompts_without_room_are_left_out(tiny_world: TinyWorld) -> None:
    target = load(tiny_world)
    with quiet_transformers():
        made = examples_of_prompts(target, ["fits", "x" * 500], RECIPE, Progress(disable=True))
        assert [target.tokenizer.decode(each.token_ids[: each.num_given]) for each in made] == ["fits"]
        with pytest.raises(InvalidArgument, match="leaves room"):
            examples_of_prompts(target, ["x" * 500], RECIPE, Progress(disable=True))


def test_too_little_is_said_so(tiny_world: TinyWorld, tmp_path: Path) -> None:
    target = load(tiny_world)
    with pytest.raises(InvalidArgument, match="at least two"):
        train(target, tmp_path / "out", examples_of_texts(target, ["one long text", "a"]))
    assert list(tmp_path.iterdir()) == []


def test_two_are_enough(tiny_world: TinyWorld, tmp_path: Path) -> None:
    target = load(tiny_world)
    report = train(target, tmp_path / "out", examples_of_texts(target, ["one long text", "another text"]))
    assert report.accuracy.num_positions > 0


def test_what_is_given_twice_counts_once(tiny_world: TinyWorld) -> None:
    target = load(tiny_world)
    assert len(examples_of_texts(target, ["one", "two", "one"])) == 2
    with quiet_transformers():
        assert len(examples_of_prompts(target, ["one", "two", "one"], RECIPE, Progress(disable=True))) == 2


def test_what_went_astray_is_not_written(
    tiny_world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(heads: MedusaHeads, *_: object) -> None:
        with torch.no_grad():
            heads.bias[0, 1, 3] = float("nan")

    monkeypatch.setattr(medusa, "fit_heads", spoil)
    target = load(tiny_world)
    with pytest.raises(InvalidArgument, match="lower one"):
        train(target, tmp_path / "out", examples_of_texts(target, ["one long text", "another text"]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_a_gpu_gives_the_same_heads(tiny_world: TinyWorld, tmp_path: Path) -> None:
    made: list[tuple[Report, MedusaHeads]] = []
    for device in ("cpu", "cuda"):
        with quiet_transformers():
            target = load_target(str(tiny_world.model), None, dtype=torch.float32, device=torch.device(device))
            given = examples_of_prompts(target, [f"prompt {i}" for i in range(6)], RECIPE, Progress(disable=True))
        made.append((train(target, tmp_path / device, given), read_heads(tmp_path / device)))
    (cpu_report, cpu), (gpu_report, gpu) = made
    assert gpu_report.num_train_positions == cpu_report.num_train_positions
    torch.testing.assert_close(gpu.weight, cpu.weight, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", ["fit_heads", "measure", "write_heads"])
def test_what_is_stopped_leaves_nothing(
    tiny_world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, error: type[BaseException]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise error

    target = load(tiny_world)
    monkeypatch.setattr(medusa, at, stop)
    with pytest.raises(error):
        train(target, tmp_path / "out", examples_of_texts(target, ["one long text", "another text"]))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_said_so_at_once(
    tiny_world: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)  # pyright: ignore[reportUnknownLambdaType]
    target = load(tiny_world)
    with pytest.raises(DiskFull, match="hidden states of 21 positions"):
        train(target, tmp_path / "out", examples_of_texts(target, ["one long text", "another text"]))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tiny_world: TinyWorld, tmp_path: Path) -> None:
    target = load(tiny_world)
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InvalidArgument, match="exists already"):
        train(target, tmp_path, examples_of_texts(target, ["one long text", "another text"]))
    assert (tmp_path / "mine").read_text() == "x"


def test_the_bars_say_how_far_it_is(tiny_world: TinyWorld, tmp_path: Path) -> None:
    target, progress = load(tiny_world), Progress(disable=True)
    with quiet_transformers():
        given = examples_of_prompts(target, ["one", "two", "three", "four"], RECIPE, progress)
    train_medusa(target, given, RECIPE, out=tmp_path / "out", base_name="b", progress=progress)
    assert [(each.description, each.total, each.finished) for each in progress.tasks] == [
        ("generating", 4, True),
        ("hidden states", 4, True),
        ("training", 60, True),
    ]
