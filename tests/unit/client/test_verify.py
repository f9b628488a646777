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
from safetensors.torch import load_file, save_file
from support.world import TinyWorld

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
