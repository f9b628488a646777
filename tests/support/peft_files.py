"""PEFT adapters for the zoo's models."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, LoraModel, PeftConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex_adapters.formats.adapter import plan_adapter
from loraplex_adapters.formats.peft_write import write_lora, write_saved
from loraplex_adapters.io.safetensors import PieceReader, PieceWriter
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.weights import AdapterWeights, BaseTargets, weights_at
from loraplex_contracts.adapters import AdapterKey


@dataclass(frozen=True)
class LoraSpec:
    """One adapter. `targets` chooses among the model's linears by their last names."""

    name: str
    rank: int
    alpha: float
    targets: str = "all"  # all, attention, mlp, head, embedding
    fields: dict[str, Any] = field(default_factory=dict[str, Any], hash=False)


SPECS = (
    LoraSpec("r1-attention", 1, 2, "attention"),
    LoraSpec("r4-all", 4, 6),
    LoraSpec("r8-mlp-rslora", 8, 3, "mlp", {"use_rslora": True}),
    LoraSpec("r13-head", 13, 10, "head"),
    LoraSpec("r16-embedding", 16, 8, "embedding"),
    LoraSpec("patterns", 8, 8, "all", {"rank_pattern": {}, "alpha_pattern": {}}),  # filled in per family
)
# More than low-rank terms.
RICH_SPECS = (
    LoraSpec("dora", 4, 6, "all", {"use_dora": True}),
    LoraSpec("plain", 4, 6),
    LoraSpec("dora-embedding", 5, 3, "embedding", {"use_dora": True, "use_rslora": True}),
    LoraSpec("dora-head", 5, 3, "head", {"use_dora": True}),
    LoraSpec("lora-bias", 3, 4, "all", {"lora_bias": True}),
    LoraSpec("all-biases", 3, 4, "attention", {"bias": "all"}),
    LoraSpec("saved-head", 3, 4, "mlp", {"modules_to_save": ["head"]}),
    LoraSpec("saved-embedding", 3, 4, "attention", {"modules_to_save": ["embedding"]}),
    LoraSpec("saved-norms", 3, 4, "attention", {"modules_to_save": ["norms"]}),
    LoraSpec("token-rows", 3, 4, "attention", {"trainable_token_indices": [3, 5, 17, 20, 40, 41]}),
    LoraSpec("dora-biases", 3, 4, "all", {"use_dora": True, "bias": "lora_only"}),
)
_SAVED_BIASES: dict[str, tuple[str, ...]] = {"none": (), "all": ("bias",), "lora_only": ("base_layer.bias",)}
ATTENTION_WORDS = ("attn", "attention")
# PEFT takes these for its fused experts' wherever they are, refuses them, or they change nothing.
NOT_BY_PEFT = {
    **dict.fromkeys(("afmoe", "deepseek_v2", "deepseek_v3"), ("gate", "gate_proj", "up_proj", "down_proj")),
    **dict.fromkeys(("mamba2", "nemotron_h", "falcon_h1"), ("out_proj",)),
    **dict.fromkeys(("mamba", "falcon_mamba"), ("out_proj", "dt_proj")),
    "jamba": ("dt_proj",),
    "zamba2": ("0", "1"),  # layers have these names too
    "gemma3n_text": ("0", "1", "2"),
    **dict.fromkeys(("llama4_text", "phimoe"), ("router",)),
}


def linear_names(model: PreTrainedModel) -> tuple[list[str], list[str], str, str]:
    """Last names of the linears: (attention, others), and the paths' ends of head and embedding."""
    attention: set[str] = set()
    others: set[str] = set()
    head, embedding = "", ""
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        if module is model.get_output_embeddings():
            head = last
        elif module is model.get_input_embeddings():
            embedding = last
        elif last in NOT_BY_PEFT.get(model.config.model_type, ()):
            continue
        elif isinstance(module, nn.Linear | Conv1D):
            (attention if any(word in path for word in ATTENTION_WORDS) else others).add(last)
    return sorted(attention), sorted(others), head, embedding


def lora_config(model: PreTrainedModel, spec: LoraSpec) -> LoraConfig:
    attention, others, head, embedding = linear_names(model)
    targets = {
        "all": attention + others,
        "attention": attention,
        "mlp": others or attention,
        "head": [*attention[:1], head],
        "embedding": [*attention[:1], embedding],
    }[spec.targets]
    fields = dict(spec.fields)
    if "rank_pattern" in fields:
        fields["rank_pattern"] = {targets[0]: 3, rf"\.1\..*{targets[-1]}": 11}
        fields["alpha_pattern"] = {targets[-1]: 5, targets[0]: 1}
    if "modules_to_save" in fields:
        norms = {
            path.rpartition(".")[2]
            for path, one in model.named_modules()
            if "norm" in type(one).__name__.lower() and next(one.parameters(), None) is not None
        }
        known = {"head": [head], "embedding": [embedding], "norms": sorted(norms), "linear": others[:1]}
        fields["modules_to_save"] = [name for key in fields["modules_to_save"] for name in known[key]]
    is_conv1d = any(isinstance(module, Conv1D) for module in model.modules())
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=targets,
        fan_in_fan_out=is_conv1d and spec.targets in ("all", "attention", "mlp"),
        init_lora_weights=False,
        **fields,
    )


def save_adapter(model: PreTrainedModel, spec: LoraSpec, folder: Path, seed: int = 0) -> PeftModel:
    """PEFT's model of `spec` over a copy of `model`; its files are in `folder` afterwards."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tied weights, Conv1D: what is served is exactly what PEFT computes
        peft = get_peft_model(copy.deepcopy(model), lora_config(model, spec))
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if "modules_to_save" in name or "trainable_tokens_delta" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                elif "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.25)
                elif name.endswith(_SAVED_BIASES[spec.fields.get("bias", "none")]):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        peft.save_pretrained(folder)
    return peft.eval()


def save_variant(model: PreTrainedModel, config: PeftConfig, folder: Path, seed: int = 0) -> PeftModel:
    """The same of an adapter of any kind, with random values."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # biases where the base has none
        peft = get_peft_model(copy.deepcopy(model), config)
        with torch.no_grad():
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.5)
        peft.save_pretrained(folder)
    return peft.eval()


def save_initialised(model: PreTrainedModel, config: LoraConfig, folder: Path, seed: int = 0) -> None:
    """An adapter whose factors moved away from those that PEFT initialised it with, as saved, and beside it (with
    `-converted`) as PEFT makes a plain LoRA of it where it took part of the base model."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(copy.deepcopy(model), copy.deepcopy(config))
        init = config.init_lora_weights
        peft.peft_config["default"].init_lora_weights = True
        start = folder.with_name(f"{folder.name}-start")
        peft.save_pretrained(start)
        with torch.no_grad():
            for parameter in peft.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        if not config.use_dora:
            converted = folder.with_name(f"{folder.name}-converted")
            peft.save_pretrained(converted, path_initial_model_for_weight_conversion=str(start))
        peft.peft_config["default"].init_lora_weights = init
        peft.save_pretrained(folder)


def weighted(
    model: PreTrainedModel, root: Path, members: Sequence[tuple[str, float]], how: Any, **more: Any
) -> PeftModel:
    """PEFT's own mixture of the adapters in `root`."""
    names = list(dict.fromkeys(name for name, _ in members))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = PeftModel.from_pretrained(copy.deepcopy(model), str(root / names[0]), adapter_name=_plain(names[0]))
        for name in names[1:]:
            peft.load_adapter(str(root / name), adapter_name=_plain(name))
        cast(LoraModel, peft.base_model).add_weighted_adapter(
            [_plain(name) for name, _ in members], [weight for _, weight in members], "mixed", how, **more
        )
        peft.set_adapter("mixed")
    return peft.eval()


def _plain(name: str) -> str:
    return name.replace("-", "_")


def load_lora(root: Path, name: str, targets: BaseTargets) -> AdapterWeights:
    """The server's own reading of an adapter directory, without cache or store."""
    source = DirectorySource(root)
    data = bytearray()
    with source.open(name) as files:
        reader = PieceReader(files.opened, targets.dtype)
        plan = plan_adapter(files, targets).without_base_copies(reader)
        assert plan.lora is not None
        out = PieceWriter(lambda piece: data.extend(piece))
        write_lora(plan.lora, plan.layout, out, reader)
        write_saved(plan.lora, plan.layout, out, reader)
        out.pad_to(plan.layout.num_bytes)
    storage: Tensor = torch.frombuffer(data, dtype=torch.uint8)
    return weights_at(AdapterKey("lora", f"{abs(hash(name)):064x}"[-64:]), plan.layout, storage)
