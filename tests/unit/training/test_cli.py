"""Command `train-medusa`: output, refusals, and heads that load."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.world import TinyWorld

from loraplex.cli import main

SMALL = ["--num-heads", "2", "--max-new-tokens", "12", "--epochs", "1", "--device", "cpu"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"prompt {i}" for i in (*range(10), 3, 4)))
    return path


def test_heads_for_a_base(
    tiny_world: TinyWorld, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code = main.main(["train-medusa", str(tiny_world.model), "--out", str(out), "--prompts", str(prompts), *SMALL])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    assert "token +2" in captured.out
    assert "token +3" in captured.out
    assert re.search(r"tokens per step of the model, greedily, from \d+ tokens that the engine decoded", captured.out)
    assert "2 examples were left out because they were given before" in captured.out
    assert "training: " in captured.err
    config = json.loads((out / "config.json").read_text())
    assert config == {
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "base_model_name_or_path": str(tiny_world.model.resolve()),
        "version": "2",
    }


def test_one_json_object(
    tiny_world: TinyWorld, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    argv = ["train-medusa", str(tiny_world.model), "--out", str(out), "--texts", str(prompts), "--json", *SMALL]
    argv += ["--adapter", str(tiny_world.adapters / "a000"), "--combined"]
    assert main.main(argv) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["out"] == str(out)
    assert len(said["top1"]) == len(said["top5"]) == 2
    assert said["tokens_per_step"] >= 1
    assert said["num_decoded_prompts"] == 1
    assert said["num_decoded_tokens"] > 1
    assert said["num_duplicates"] == 2
    assert said["num_skipped"] == 0
    assert (out / "adapter_model.safetensors").exists()


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    assert main.main(["train-medusa", *argv]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


def test_what_is_wrong_is_said_in_a_sentence(
    tiny_world: TinyWorld, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(tiny_world.model), str(tmp_path / "out")
    given = [model, "--out", out, "--prompts", str(prompts)]
    assert "either --prompts or --texts" in refusal([model, "--out", out], capsys)
    assert "either --prompts or --texts" in refusal([*given, "--texts", str(prompts)], capsys)
    assert "--adapter; give one" in refusal([*given, "--combined"], capsys)
    assert "not a learning rate" in refusal([*given, "--lr", "0"], capsys)
    assert "--seed must fit in 64 bits" in refusal([*given, "--seed", "9" * 23], capsys)
    below_a_file = [model, "--out", str(prompts / "out"), "--prompts", str(prompts)]
    assert "cannot be written: Not a directory" in refusal(below_a_file, capsys)
    assert "cannot be read" in refusal([model, "--out", out, "--prompts", str(tmp_path / "none.txt")], capsys)
    assert "not a dtype" in refusal([*given, "--dtype", "int3"], capsys)
    assert "--device must be auto, cpu, cuda or cuda:N" in refusal([*given, "--device", "abacus"], capsys)
    assert "there is no adapter" in refusal([*given, "--adapter", str(tmp_path / "none")], capsys, 1)
    assert "exists already" in refusal([model, "--out", str(tmp_path), "--prompts", str(prompts)], capsys)
    assert "cannot be loaded" in refusal([str(tmp_path), "--out", out, "--prompts", str(prompts)], capsys, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.txt"]


def test_stopped_in_the_middle_it_leaves_nothing(tiny_world: TinyWorld, tmp_path: Path, prompts: Path) -> None:
    out = tmp_path / "out"
    argv = ["train-medusa", str(tiny_world.model), "--out", str(out), "--texts", str(prompts)]
    argv += ["--epochs", "1000000", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from loraplex.cli.main import main; raise SystemExit(main())", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out-states-*/train/0.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143, said
    assert b"Traceback" not in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.txt"]
