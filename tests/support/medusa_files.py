"""Medusa head files in all known layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from loraplex_adapters.cache.storage import HostCopy, Storage, import_adapter
from loraplex_adapters.io.source_files import AdapterSource
from loraplex_adapters.store import AdapterStore
from loraplex_adapters.weights import AdapterWeights, BaseTargets
from support.adapter_files import HIDDEN, VOCAB

HEADS_NAME = "medusa_lm_head.safetensors"


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def sequential_tensors(
    num_heads: int = 3,
    num_layers: int = 1,
    rows: int | None = None,
    prefix: str = "",
    seed: int = 0,
    hidden: int = HIDDEN,
) -> dict[str, Tensor]:
    """`{head}.{layer}.linear.*`; with `rows` a projection of that many rows behind the blocks of each head."""
    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            at = seed + 1000 * head + 10 * layer
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = random_tensor(hidden, hidden, seed=at)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = random_tensor(hidden, seed=at + 1)
        if rows is not None:
            at = seed + 1000 * head + 500
            tensors[f"{prefix}{head}.{num_layers}.weight"] = random_tensor(rows, hidden, seed=at)
    return tensors


def vllm_tensors(
    num_heads: int = 3,
    num_layers: int = 1,
    rows: int | None = VOCAB,
    prefix: str = "",
    bias: bool = False,
    shared: str | None = None,
    token_map: Tensor | None = None,
) -> dict[str, Tensor]:
    """The same numbers under vLLM's names. `shared` is the name of one projection for all heads."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in sequential_tensors(num_heads, num_layers, rows).items():
        head, layer, *last = name.split(".")
        if last == ["weight"]:
            if shared is None:
                tensors[f"{prefix}lm_heads.{head}.weight"] = tensor
            elif head == "0":
                tensors[prefix + shared] = tensor
        elif bias or last[-1] == "weight":
            tensors[f"{prefix}blocks.{head}.layers.{layer}.{last[-1]}"] = tensor
    if token_map is not None:
        tensors[f"{prefix}token_map"] = token_map
    return tensors


def medusa_config(num_heads: int = 3, num_layers: int = 1, **fields: Any) -> dict[str, Any]:
    """The configuration that the reference code writes beside its heads."""
    return {
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "base_model_name_or_path": "tiny-base",
        "transformers_version": "4.34.1",
    } | fields


def vllm_config(num_heads: int = 3, num_layers: int = 1, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "truncated_vocab_size": VOCAB,
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "max_paths": 64,
        "topk": 10,
    } | fields


def base_config(**fields: Any) -> dict[str, Any]:
    """Configuration of a whole model."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
    } | fields


def write_heads(
    folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None, name: str = HEADS_NAME
) -> Path:
    """One file of weights, and config.json where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / name, metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_shards(folder: Path, shards: list[Mapping[str, Tensor]], config: Mapping[str, Any]) -> Path:
    """A sharded model as Transformers saves it."""
    weight_map: dict[str, str] = {}
    for idx, tensors in enumerate(shards, start=1):
        name = f"model-{idx:05}-of-{len(shards):05}.safetensors"
        write_heads(folder, tensors, config, name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def base_tensors() -> dict[str, Tensor]:
    """A few of a whole model's own."""
    return {
        "model.embed_tokens.weight": random_tensor(VOCAB, HIDDEN, seed=7),
        "model.layers.0.self_attn.q_proj.weight": random_tensor(HIDDEN, HIDDEN, seed=8),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random_tensor(VOCAB, HIDDEN, seed=9),
    }


def load(source: AdapterSource, name: str, targets: BaseTargets, store_dir: Path) -> tuple[HostCopy, AdapterWeights]:
    """Loads an adapter by way of the store and the tiers, as the cache does."""
    store = AdapterStore(store_dir, 1 << 24, durable=False)
    try:
        imported = import_adapter(name, source, targets, store)
        tiers = Storage(store, torch.device("cpu"))
        host = tiers.stage(imported.key)
        assert host is not None
        return imported, tiers.promote(host)
    finally:
        store.close()
