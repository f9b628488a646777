"""Answers of `loraplex doctor --model`, from configurations alone."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import transformers as tf
from support.multimodal import multimodal_config
from support.native_kernels import library_or_skip
from support.native_models import SIZES
from support.sweep import FAMILIES, REASONS, REFUSED, default_config
from support.zoo import HYBRIDS, MIXTURES, ZOO
from transformers import AutoModelForCausalLM, PreTrainedConfig

from loraplex.cli.main import main
from loraplex_contracts.errors import InvalidArgument, UnsupportedModel
from loraplex_server.cli import examine
from loraplex_server.cli.examine import EXIT_CODES, examine_model
from loraplex_server.model.loader import load_model

Capture = pytest.CaptureFixture[str]
_SMALL: dict[str, Any] = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def examined(config: PreTrainedConfig, folder: Path, **options: Any) -> dict[str, Any]:
    config.save_pretrained(str(folder))
    return dict(examine_model(str(folder), **({"device": "cpu"} | options)))


@pytest.mark.parametrize(
    "config",
    [
        tf.T5Config(d_model=32),  # of the configuration
        tf.OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4),  # of the class
        tf.DiffLlamaConfig(**_SMALL, **_HEADS),  # of the probe
        tf.XLMRobertaConfig(**_SMALL, num_attention_heads=4, is_decoder=True),
    ],
    ids=lambda config: config.model_type,
)
def test_refuses_with_the_sentence_of_loading(config: PreTrainedConfig, tmp_path: Path) -> None:
    report = examined(config, tmp_path)
    if not config.is_encoder_decoder:
        AutoModelForCausalLM.from_config(copy.deepcopy(config)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel) as caught:
        load_model(str(tmp_path), device="cpu")
    assert (report["verdict"], report["reason"]) == ("refused", caught.value.message)


def test_says_how_a_model_is_served(tmp_path: Path) -> None:
    config = tf.LlamaConfig(hidden_size=4096, num_key_value_heads=8, intermediate_size=14336, dtype="bfloat16")
    report = examined(config, tmp_path)
    assert (report["verdict"], report["reason"], report["architecture"]) == ("served", "", "LlamaForCausalLM")
    assert report["parameters"] == 7_241_732_096  # by Mistral 7B's card, which has the same sizes
    assert (report["bytes"], report["dtype"]) == (2 * 7_241_732_096, "bfloat16")
    assert (report["weights"], report["max_context_tokens"]) == ("none in this directory yet", 2048)
    assert (report["attention"], report["mixers"], report["not_loaded"]) == (["full attention"], [], [])
    assert {"q_proj", "down_proj", "lm_head (head)", "embed_tokens (embedding)"} <= set(report["adapters_on"])
    assert report["graphs"] == "none: not on this device (cpu)"


def test_says_what_native_kernels_compute(tmp_path: Path) -> None:
    library_or_skip()
    report = examined(tf.LlamaConfig(), tmp_path / "llama")
    assert (report["layers"], report["attention_kernel"]) == ("all layers in one native call", "native")
    report = examined(tf.MixtralConfig(**SIZES, num_local_experts=2), tmp_path / "mixtral")
    assert report["layers"] == "native calls around each layer's `mlp`"
    report = examined(ZOO["falcon"](), tmp_path / "falcon")
    assert report["layers"].startswith("Transformers' layers, with native linears")
    assert "layers are run one operation at a time: they are of another kind" in report["notes"]


def test_says_what_is_special(tmp_path: Path) -> None:
    hybrid = examined(HYBRIDS["qwen3_next"](), tmp_path / "hybrid")
    assert hybrid["mixers"] == ["Qwen3NextGatedDeltaNet"]
    assert {"in_proj_qkvz", "gate (router)", "down_proj (experts)"} <= set(hybrid["adapters_on"])
    states_alone = examined(HYBRIDS["mamba"](), tmp_path / "states")
    assert (states_alone["attention"], states_alone["attention_kernel"]) == ([], "")
    assert states_alone["mixers"] == ["MambaMixer"]
    text = examined(multimodal_config("qwen2_vl"), tmp_path / "text")
    assert (text["verdict"], text["not_loaded"]) == ("served", ["model.visual"])
    window = examined(ZOO["gemma3"](), tmp_path / "window")
    assert window["attention"] == ["a window of 6 tokens", "full attention"]


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama4-chunks", ["chunks of 7 tokens", "full attention"]),
        ("gpt_oss", ["a window of 6 tokens, sinks", "full attention, sinks"]),
        ("bloom", ["full attention, biases by the position of the key (ALiBi)"]),
    ],
)
def test_names_kinds_of_attention(family: str, kinds: list[str], tmp_path: Path) -> None:
    assert examined(ZOO[family](), tmp_path)["attention"] == kinds


def test_routers_that_read_the_weights_of_linears_are_served(tmp_path: Path) -> None:
    """LongCat's router reads the weight of a linear that is never called."""
    assert examined(default_config("longcat_flash"), tmp_path, dtype="float32")["verdict"] == "served"


def test_layers_of_several_head_widths_are_served(tmp_path: Path) -> None:
    assert examined(default_config("gemma4"), tmp_path, dtype="float32")["verdict"] == "served"


def test_reads_no_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    report = examined(ZOO["llama"](), tmp_path)
    assert (report["verdict"], report["weights"]) == ("served", "1 files, 0.0 GB")


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x07")
    report = examined(tf.LlamaConfig(**_SMALL, **_HEADS), tmp_path)
    assert report["verdict"] == "refused"
    assert "pip install sentencepiece" in report["reason"]


def test_damaged_configurations_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1")
    report = examine_model(str(tmp_path), device="cpu")
    assert report["verdict"] == "refused"
    assert "cannot be loaded" in report["reason"]


def test_only_loading_tells_of_sizes_that_no_copy_can_have(tmp_path: Path) -> None:
    report = examined(tf.XmodConfig(**_SMALL, num_attention_heads=4, is_decoder=True), tmp_path)
    assert report["verdict"] == "decided at load"
    assert "Input language unknown" in report["reason"]


def test_says_why_no_copy_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an error whose first line only introduces the second, both."""
    error = ValueError("Class validation error for validator 'validate_layers':\n    ValueError: 8 + 2 is not 36")
    monkeypatch.setattr(examine, "tiny_config", Mock(side_effect=error))
    report = examined(ZOO["llama"](), tmp_path)
    assert report["verdict"] == "decided at load"
    assert report["reason"] == f"no tiny copy of it can be made to be tried: {' '.join(str(error).split())}"


@pytest.mark.parametrize(("options", "field"), [({"dtype": "int3"}, "--dtype"), ({"device": "tpu"}, "--device")])
def test_wrong_options_are_named(options: dict[str, str], field: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        examined(ZOO["llama"](), tmp_path, **options)
    assert caught.value.field == field


def test_the_command_and_its_exit_codes(tmp_path: Path, capsys: Capture) -> None:
    ZOO["llama"]().save_pretrained(str(tmp_path / "good"))
    ZOO["llama"]().save_pretrained(str(tmp_path / "bad"))
    tf.T5Config(d_model=32).save_pretrained(str(tmp_path / "bad"))
    assert main(["doctor", "--model", str(tmp_path / "good"), "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "served"
    assert main(["doctor", "--model", str(tmp_path / "good"), "--device", "cpu"]) == 0
    assert "verdict\tserved" in capsys.readouterr().out
    assert main(["doctor", "--model", str(tmp_path / "bad")]) == 1
    assert "only decoders are served" in capsys.readouterr().out
    assert main(["doctor", "--model", str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'} is not a directory" in capsys.readouterr().err
    assert set(EXIT_CODES.values()) == {0, 1, 3}


@pytest.mark.slow
@pytest.mark.parametrize("family", [*ZOO, *HYBRIDS, *MIXTURES])
def test_families_that_are_served(family: str, tmp_path: Path) -> None:
    report = examined((ZOO | HYBRIDS | MIXTURES)[family](), tmp_path, dtype="float32")
    assert report["verdict"] == "served", report["reason"]


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_says_what_the_sweep_finds(family: str, tmp_path: Path) -> None:
    report = examined(default_config(family), tmp_path, dtype="float32")
    if report["verdict"] != "served":
        assert re.search(REASONS[REFUSED[family]], report["reason"])


def test_doctor_refuses_a_device_before_it_imports_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from loraplex.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "doctor", "--model", "/nowhere", "--device", "cuda:300"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "error: --device must be auto, cpu, cuda or cuda:N, with N from 0 to 127" in ended.stderr
