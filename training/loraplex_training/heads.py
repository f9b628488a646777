"""Trainable Medusa heads and their files.

Owns the stacked parameters of one set of heads and their names on disk: `{i}.{j}.linear.weight` and `.bias` of head i
and block j. The base model's output head serves all of them. Head i predicts token t + 2 + i from the post-norm hidden
state of position t.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor, nn

from loraplex_adapters.formats.files import MEDUSA_WEIGHTS_NAME, MODEL_CONFIG_NAME
from loraplex_training.output import write_bytes


class MedusaHeads(nn.Module):
    """x -> x + silu(W x + b), `num_layers` times for each head. Initialised to zeros: every head is the identity."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int, device: torch.device | None = None) -> None:
        super().__init__()
        shape = (num_layers, num_heads, hidden_size)
        self.weight = nn.Parameter(torch.zeros(*shape, hidden_size, device=device))  # [layers, heads, hidden, hidden]
        self.bias = nn.Parameter(torch.zeros(*shape, device=device))  # [layers, heads, hidden]

    @property
    def num_layers(self) -> int:
        return self.weight.shape[0]

    @property
    def num_heads(self) -> int:
        return self.weight.shape[1]

    def forward(self, hidden: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [heads, num_tokens, hidden], in the parameters' dtype."""
        x = hidden.to(self.weight.dtype).expand(self.num_heads, *hidden.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            x = x + F.silu(torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)))
        return x

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Tensors by their names on disk."""
        named: dict[str, Tensor] = {}
        for i in range(self.num_heads):
            for j in range(self.num_layers):
                named[f"{i}.{j}.linear.weight"] = self.weight.detach()[j, i].to("cpu", dtype).contiguous()
                named[f"{i}.{j}.linear.bias"] = self.bias.detach()[j, i].to("cpu", dtype).contiguous()
        return named


def write_heads(folder: Path, heads: MedusaHeads, *, base_name: str, dtype: torch.dtype) -> None:
    """Writes both files of a set of heads. Raises InvalidArgument and DiskFull."""
    config = {
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "base_model_name_or_path": base_name,
        "version": "2",
    }
    write_bytes(folder / MEDUSA_WEIGHTS_NAME, save(heads.tensors(dtype), metadata={"format": "pt"}))
    write_bytes(folder / MODEL_CONFIG_NAME, (json.dumps(config, indent=2) + "\n").encode())


def read_heads(folder: Path) -> MedusaHeads:
    """Reads the files of `write_heads`, in their dtype."""
    tensors = load_file(folder / MEDUSA_WEIGHTS_NAME)
    config = json.loads((folder / MODEL_CONFIG_NAME).read_text(encoding="utf-8"))
    num_heads, num_layers = config["medusa_num_heads"], config["medusa_num_layers"]
    first = tensors["0.0.linear.weight"]
    heads = MedusaHeads(num_heads, num_layers, first.shape[0]).to(first.dtype)
    with torch.no_grad():
        for i in range(num_heads):
            for j in range(num_layers):
                heads.weight[j, i] = tensors[f"{i}.{j}.linear.weight"]
                heads.bias[j, i] = tensors[f"{i}.{j}.linear.bias"]
    return heads
