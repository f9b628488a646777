"""LoRA files in PEFT's format, made without PEFT, and merged weights in float64."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class RandomLora:
    """One adapter's factors by module path, in float64 on the CPU."""

    name: str
    alpha: float
    rank: int
    a: dict[str, Tensor]  # [rank, in]
    b: dict[str, Tensor]  # [out, rank]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def merged_into(self, model: PreTrainedModel) -> PreTrainedModel:
        """A copy of `model` that computes what the adapter means."""
        merged = copy.deepcopy(model)
        with torch.no_grad():
            for path, a in self.a.items():
                weight = merged.get_submodule(path).weight
                assert isinstance(weight, Tensor)
                weight.add_((self.scale * self.b[path] @ a).to(weight.dtype))
        return merged

    def rounded(self, dtype: torch.dtype) -> RandomLora:
        """The same after a way through `dtype`: what a server that computes in it has been given."""
        a = {path: value.to(dtype).double() for path, value in self.a.items()}
        b = {path: value.to(dtype).double() for path, value in self.b.items()}
        return RandomLora(self.name, self.alpha, self.rank, a, b)

    def write(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for path in self.a:
            tensors[f"base_model.model.{path}.lora_A.weight"] = self.a[path]
            tensors[f"base_model.model.{path}.lora_B.weight"] = self.b[path]
        folder.mkdir(parents=True)
        save_file(tensors, str(folder / "adapter_model.safetensors"))
        targets = sorted({path.rpartition(".")[2] for path in self.a})
        fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.rank, "lora_alpha": self.alpha}
        (folder / "adapter_config.json").write_text(json.dumps({**fields, "target_modules": targets, "bias": "none"}))


def random_lora(model: PreTrainedModel, name: str, rank: int, seed: int, size: float) -> RandomLora:
    """Strong enough that a text changes."""
    generator = torch.Generator().manual_seed(seed)
    a: dict[str, Tensor] = {}
    b: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and path.endswith(LINEARS):
            num_out, num_in = module.weight.shape
            a[path] = torch.randn(rank, num_in, generator=generator, dtype=torch.float64) * size
            b[path] = torch.randn(num_out, rank, generator=generator, dtype=torch.float64) * size
    return RandomLora(name, 2.0 * rank**0.5, rank, a, b)
