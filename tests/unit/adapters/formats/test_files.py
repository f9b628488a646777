"""Files that make a folder an adapter."""

from __future__ import annotations

import pytest

from loraplex_adapters.formats.files import detect_kind
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
