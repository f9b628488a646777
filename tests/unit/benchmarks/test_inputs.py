"""Inputs that PEFT, Transformers and our own engine take."""

from __future__ import annotations

import json
from pathlib import Path

import inputs
import pytest
import torch
from inprocess import EngineSystem
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from workloads import read_workload, workload_names


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("inputs") / "tiny"
    inputs.make_inputs(out, "tiny", num_adapters=32, rank=4, prompt_tokens=6, max_tokens=3)
    return out


def test_the_layout(made: Path) -> None:
    assert len(workload_names(made)) == 15
    assert len(read_workload(made, "distinct-32")) == 32
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"


def test_mixed_ranks_have_a_folder_of_their_own_with_the_same_model(made: Path) -> None:
    mixed = made / "mixed-ranks"
    ranks = [
        json.loads((path / "adapter_config.json").read_text())["r"] for path in sorted((mixed / "adapters").iterdir())
    ]
    assert ranks == [8, 8, 16, 32] * 8
    assert read_workload(mixed, "distinct-8") == read_workload(made, "distinct-8")
    assert (mixed / "model" / "config.json").samefile(made / "model" / "config.json")


def test_peft_loads_an_adapter_and_it_does_something(made: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32)
    ids = torch.arange(10, 20)[None]
    with torch.inference_mode():
        plain = base(ids).logits
        adapted = PeftModel.from_pretrained(base, made / "adapters" / "a001")
        assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 2 * 7, "layers and their linears"
        assert (adapted(ids).logits - plain).abs().max() > 1e-3
    assert adapted.peft_config["default"].r == 4


@pytest.mark.parametrize(("lora", "workload"), [(True, "distinct-8"), (True, "base-1"), (False, "base-8")])
def test_the_engine_runs_the_workloads(made: Path, tmp_path: Path, lora: bool, workload: str) -> None:
    flags = ["--threads", "1", "--kv-memory", "1MiB", "--cpu-kernels", "torch"]
    system = EngineSystem(made, tmp_path, lora=lora, flags=flags)
    try:
        run = system.prepare(workload)
        assert run() == 3 * len(read_workload(made, workload))
        assert run() == 3 * len(read_workload(made, workload)), "and once more"
    finally:
        system.close()
