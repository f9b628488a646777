"""Files that make a folder an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.adapter_files import safetensors_bytes

from loraplex_adapters.formats.files import check_files, detect_kind
from loraplex_adapters.sources.directory import open_folder
from loraplex_contracts.errors import AdapterInvalid, UnsafeFormat


def test_kinds() -> None:
    lora = {"adapter_config.json", "adapter_model.safetensors"}
    assert detect_kind(lora | {"adapter_model.bin", "optimizer.pt"}) == "lora"
    assert detect_kind(lora | {"medusa_lm_head.safetensors"}) == "combined"
    assert detect_kind({"medusa_lm_head.safetensors", "config.json"}) == "medusa"
    assert detect_kind({"config.json", "model.safetensors"}) == "model"
    with pytest.raises(UnsafeFormat, match=r"adapter_model\.bin is a pickle"):
        detect_kind({"adapter_config.json", "adapter_model.bin"})


@pytest.mark.parametrize(
    "name", ["adapters.safetensors", "pytorch_lora_weights.safetensors", "adapter_model.safetensors.index.json"]
)
def test_other_names_are_named(name: str) -> None:
    with pytest.raises(AdapterInvalid, match=rf"no adapter_model\.safetensors.*'{name}' is not a name that PEFT gives"):
        detect_kind({"adapter_config.json", name})
    with pytest.raises(AdapterInvalid, match=r"no medusa_lm_head\.safetensors; save a LoRA"):
        detect_kind({"adapter_config.json"})


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("adapter_config.json", b"{", "adapter_config.json is not valid JSON"),
        ("adapter_model.safetensors", b"", "adapter_model.safetensors is cut short"),
        ("adapter_model.safetensors", b"\x08" + bytes(7), "adapter_model.safetensors is cut short"),
        ("config.json", b"[]", "config.json is not a JSON object"),
    ],
)
def test_files_of_no_adapter(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors_bytes({}, b""))
    with open_folder(tmp_path) as files:
        check_files(files)
    (tmp_path / name).write_bytes(data)
    with open_folder(tmp_path) as files, pytest.raises(AdapterInvalid, match=says):
        check_files(files)
