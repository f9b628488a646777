"""MXFP4 checkpoints served dequantised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.dense import greedy
from support.driver import Job, make_rig, random_prompts
from support.zoo import VOCAB_SIZE, random_model
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.model.loader import load_model
from loraplex_server.model.mxfp4 import weight_bytes
from loraplex_server.model.refusals import refuse_config

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 32}  # blocks are of 32


def save_in_mxfp4(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """A checkpoint with random experts, as gpt-oss has them; returns what these are."""
    model.save_pretrained(folder)
    tensors, experts = model.state_dict(), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([*MAGNITUDES, *(-one for one in MAGNITUDES)])
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        size = (num_experts, num_outputs, num_inputs // 32)
        blocks = torch.randint(0, 256, (*size, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 125, size, dtype=torch.uint8, generator=generator)
        pairs = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1)
        scaled = pairs.flatten(-2) * torch.exp2(scales.float() - 127)[..., None]
        experts[name] = scaled.flatten(-2).mT  # [experts, in, out]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    (folder / "model.safetensors").unlink()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    path = folder / "config.json"
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    return experts


@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_is_served_as_what_it_holds(dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model("gpt_oss", torch.bfloat16, changes=SIZES)
    experts = save_in_mxfp4(model, tmp_path)
    with caplog.at_level("WARNING", "loraplex_server.model.mxfp4"):
        loaded = load_model(str(tmp_path), device="cpu", dtype=dtype)
    for name, want in experts.items():
        assert torch.equal(loaded.model.state_dict()[name.replace(".experts.", ".experts.base.")].float(), want)
    served = torch.bfloat16 if dtype == "auto" else torch.float64
    num_bytes = sum(parameter.numel() for parameter in model.parameters()) * served.itemsize
    assert weight_bytes(model.config, served) == num_bytes
    assert f"served in {str(served)[6:]}: the weights take {num_bytes / 1e9:.1f} GB" in caplog.text
    if dtype == "float64":
        model = model.double()
        model.load_state_dict(model.state_dict() | {name: want.double() for name, want in experts.items()})
        model.set_experts_implementation("eager")
        jobs = [Job(prompt, 8) for prompt in random_prompts(4, VOCAB_SIZE, seed=2)]
        make_rig(loaded).run(jobs)
        assert [job.tokens for job in jobs] == [greedy(model, job.prompt, 8) for job in jobs]


def test_others_in_it_are_refused() -> None:
    """Transformers reads no other family's weights so."""
    config = LlamaConfig.from_dict({"quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(UnsupportedModel, match="quantised"):
        refuse_config(config, "x")
