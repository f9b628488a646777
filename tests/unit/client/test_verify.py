"""Command `loraplex adapters verify`: equal to what a server accepts."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig
from safetensors.torch import load_file, save_file
from support.medusa_files import medusa_config, sequential_tensors, write_heads
from support.peft_files import save_variant
from support.world import TARGETS, TinyWorld
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from loraplex.cli.main import main

Capture = pytest.CaptureFixture[str]
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def adapter(tiny_world: TinyWorld, tmp_path: Path) -> Path:
    """A copy that the test may spoil."""
    torch.set_num_threads(1)
    return Path(shutil.copytree(tiny_world.adapters / tiny_world.names[0], tmp_path / "my-adapter"))


def verify(folder: Path, world: TinyWorld, capsys: Capture, *more: str) -> tuple[int, dict[str, Any]]:
    code = main(["adapters", "verify", str(folder), "--base", str(world.model), "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def test_a_good_adapter(adapter: Path, tiny_world: TinyWorld, capsys: Capture) -> None:
    code, report = verify(adapter, tiny_world, capsys)
    assert code == 0
    assert report["valid"]
    assert (report["kind"], report["rank"], report["modules"], report["dtype"]) == ("lora", 2, 14, "float32")
    assert len(report["digest"]) == 64
    assert report["warnings"] == []
    assert (report["format"], report["tasks"], report["saved"]) == ("LORA", ["text"], [])
    assert report["base"] == str(tiny_world.model) or report["base"] == ""
    assert report["fits"] == f"{tiny_world.model} (llama)"
    assert report["targets"] == sorted(TARGETS)


def test_the_folders_name_is_not_the_content(adapter: Path, tiny_world: TinyWorld, capsys: Capture) -> None:
    _, first = verify(adapter, tiny_world, capsys)
    renamed = adapter.rename(adapter.with_name("my adapter."))
    code, second = verify(renamed, tiny_world, capsys)
    assert code == 0
    assert second["digest"] == first["digest"]
    assert "folder's name" in second["warnings"][0]


def without_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def as_pickle(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def cut_short(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[: len(raw) // 2])


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    next(iter(tensors.values())).view(-1)[-1] = math.nan
    save_file(tensors, folder / WEIGHTS)


def for_another_base(folder: Path) -> None:
    tensors = {name.replace("q_proj", "query_proj"): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_config, "ADAPTER_INVALID"),
        (as_pickle, "UNSAFE_FORMAT"),
        (cut_short, "ADAPTER_INVALID"),
        (with_nan, "NON_FINITE"),
        (for_another_base, "BASE_MISMATCH"),
    ],
)
def test_a_bad_one_gets_the_servers_reason(
    adapter: Path, tiny_world: TinyWorld, capsys: Capture, spoil: Callable[[Path], None], reason: str
) -> None:
    spoil(adapter)
    code, report = verify(adapter, tiny_world, capsys)
    assert code == 1
    assert (report["valid"], report["reason"]) == (False, reason)
    assert report["message"]


def test_the_servers_rank_limit(tiny_world: TinyWorld, capsys: Capture) -> None:
    folder = tiny_world.adapters / tiny_world.names[2]
    assert verify(folder, tiny_world, capsys, "--max-lora-rank", "8")[0] == 0
    assert verify(folder, tiny_world, capsys, "--max-lora-rank", "7")[1]["reason"] == "RANK_LIMIT"


def test_in_words(adapter: Path, tiny_world: TinyWorld, tmp_path: Path, capsys: Capture) -> None:
    assert main(["adapters", "verify", str(adapter), "--base", str(tiny_world.model)]) == 0
    assert "valid\tyes" in capsys.readouterr().out
    as_pickle(adapter)
    assert main(["adapters", "verify", str(adapter), "--base", str(tiny_world.model)]) == 1
    assert "error: adapter_model.bin is a pickle" in capsys.readouterr().err
    assert main(["adapters", "verify", str(tmp_path / "none"), "--base", str(tiny_world.model)]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["adapters", "verify", str(tiny_world.adapters / "a001"), "--base", str(tmp_path / "none")]) == 1
    assert "cannot be loaded" in capsys.readouterr().err


def test_links_are_followed_and_told(adapter: Path, tiny_world: TinyWorld, capsys: Capture) -> None:
    elsewhere = (adapter / WEIGHTS).rename(adapter.parent / "elsewhere.safetensors")
    (adapter / WEIGHTS).symlink_to(elsewhere)
    code, report = verify(adapter, tiny_world, capsys)
    assert (code, report["valid"]) == (0, True)
    assert any("a server follows only those that stay inside" in warning for warning in report["warnings"])


def save(folder: Path, world: TinyWorld, config: LoraConfig) -> Path:
    save_variant(AutoModelForCausalLM.from_pretrained(world.model), config, folder)
    return folder


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LoraConfig(r=3, target_modules=["q_proj"], use_dora=True, modules_to_save=["lm_head"]), "LORA, use_dora"),
        (LoraConfig(r=3, target_modules=["down_proj"], init_lora_weights="pissa"), "LORA, init_lora_weights pissa"),
        (
            LoraConfig(r=3, target_modules=TARGETS, task_type="CAUSAL_LM", alora_invocation_tokens=[7, 8]),
            "LORA, alora_invocation_tokens",
        ),
        (IA3Config(target_modules=["v_proj"], feedforward_modules=[]), "IA3"),
    ],
)
def test_against_peft(config: LoraConfig, words: str, tiny_world: TinyWorld, tmp_path: Path, capsys: Capture) -> None:
    folder = save(tmp_path / "one", tiny_world, config)
    code, report = verify(folder, tiny_world, capsys, "--against-peft")
    assert (code, report["format"]) == (0, words)
    assert report["peft"]["same_text"]
    assert report["peft"]["compared_tokens"] == 48
    assert 0 <= report["peft"]["largest_difference"] < 1e-3


def test_another_result_than_pefts_is_told(
    adapter: Path, tiny_world: TinyWorld, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peft.tuners.lora.layer.Linear.forward", lambda self, x: self.base_layer(x))
    code, report = verify(adapter, tiny_world, capsys, "--against-peft")
    assert (code, report["valid"], report["peft"]["equal"]) == (1, True, False)
    assert report["peft"]["largest_difference"] > 0.01
    assert main(["adapters", "verify", str(adapter), "--base", str(tiny_world.model), "--against-peft"]) == 1
    assert "equal: no; largest difference: " in capsys.readouterr().out


def test_medusa_heads(tiny_world: TinyWorld, tmp_path: Path, capsys: Capture) -> None:
    folder = write_heads(tmp_path / "heads", sequential_tensors(3, 1, hidden=32), medusa_config(3, 1))
    code, report = verify(folder, tiny_world, capsys)
    assert (code, report["kind"], report["format"], report["tasks"]) == (0, "medusa", "Medusa, 3 heads", ["drafts"])
    code, report = verify(folder, tiny_world, capsys, "--against-peft")
    assert code == 2
    assert "PEFT does not know" in report["message"]


def test_what_peft_cannot_load_is_told(tiny_world: TinyWorld, tmp_path: Path, capsys: Capture) -> None:
    """PEFT takes no part out of a base model in float64."""
    folder = save(tmp_path / "one", tiny_world, LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights="pissa"))
    code, report = verify(folder, tiny_world, capsys, "--against-peft", "--dtype", "float64")
    assert code == 1
    assert report["message"].startswith("PEFT cannot load it, so nothing can be compared: Please initialize PiSSA")


def test_weights_for_images_of_a_base_that_is_served_as_text(tmp_path: Path, capsys: Capture) -> None:
    text = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=60,
        boi_token_index=61,
        eoi_token_index=62,
    )
    base = Gemma3ForConditionalGeneration(config)
    base.save_pretrained(tmp_path / "model")
    world = TinyWorld(tmp_path / "model", tmp_path, ())
    save_variant(base, LoraConfig(r=2, target_modules=r".*language_model.*q_proj"), tmp_path / "texts")
    code, report = verify(tmp_path / "texts", world, capsys, "--against-peft")
    assert (code, report["peft"]["equal"]) == (0, True)
    save_variant(base, LoraConfig(r=2, target_modules=["q_proj"]), tmp_path / "both")
    code, report = verify(tmp_path / "both", world, capsys)
    assert (code, report["reason"]) == (1, "ADAPTER_UNSUPPORTED")
    assert "vision_tower" in report["message"]
    assert report["message"].endswith("is served for texts alone")
