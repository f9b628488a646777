"""Adapter files for tests without a model, valid and broken."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from loraplex_adapters.cache.listing import Listing
from loraplex_adapters.cache.manager import AdapterManager
from loraplex_adapters.cache.residency import AdapterCacheConfig
from loraplex_adapters.io.source_files import AdapterSource
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.weights import AdapterWeights, BaseTargets, TargetModule
from loraplex_contracts.adapters import PLAIN_LOAD, AdapterInfo, AdapterKey, LoadOptions
from loraplex_contracts.errors import AdapterInvalid

HIDDEN = 16
VOCAB = 24
Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN_PROJ = "model.layers.1.mlp.down_proj"
PREFIX = "base_model.model."

T = TypeVar("T")


def base_targets(dtype: str = "float32", max_rank: int = 16, weight_sha256: str = "") -> BaseTargets:
    """Two layers with q_proj [16 -> 16] and down_proj [32 -> 16], an embedding and a head."""
    modules: list[TargetModule] = []
    for layer in range(2):
        modules.append(TargetModule(f"model.layers.{layer}.self_attn.q_proj", "linear", HIDDEN, HIDDEN))
        modules.append(TargetModule(f"model.layers.{layer}.mlp.down_proj", "linear", 2 * HIDDEN, HIDDEN))
    modules.append(TargetModule("model.embed_tokens", "embedding", VOCAB, HIDDEN, weight_sha256=weight_sha256))
    modules.append(TargetModule("lm_head", "linear", HIDDEN, VOCAB, weight_sha256=weight_sha256))
    others = frozenset({"model.layers.0.self_attn.rotation"})
    return BaseTargets({m.path: m for m in modules}, "tiny-base", dtype, max_rank, HIDDEN, VOCAB, other_modules=others)


def lora_tensors(rank: int = 4, seed: int = 0, paths: Iterable[str] = (Q_PROJ, DOWN_PROJ)) -> dict[str, Tensor]:
    """Random factors under the names that PEFT gives them."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for path in paths:
        module = base_targets().modules[path]
        a = torch.randn(rank, module.in_features, generator=generator, dtype=torch.float64).float()
        b = torch.randn(module.out_features, rank, generator=generator, dtype=torch.float64).float()
        if module.kind == "embedding":
            tensors |= {f"{PREFIX}{path}.lora_embedding_A": a, f"{PREFIX}{path}.lora_embedding_B": b}
        else:
            tensors |= {f"{PREFIX}{path}.lora_A.weight": a, f"{PREFIX}{path}.lora_B.weight": b}
    return tensors


def lora_config(rank: int = 4, **fields: Any) -> dict[str, Any]:
    """The least that an adapter_config.json has, with `fields` over it."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-base",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"],
        "bias": "none",
    }
    return config | fields


def write_adapter(
    folder: Path, rank: int = 4, seed: int = 0, tensors: Mapping[str, Tensor] | None = None, **fields: Any
) -> Path:
    """A whole adapter; `fields` go over its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(lora_config(rank, **fields)))
    chosen = lora_tensors(rank, seed) if tensors is None else tensors
    save_file(dict(chosen), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


class BytesFile:
    """A file in memory, and where it was read."""

    def __init__(self, data: bytes, name: str = "f") -> None:
        self.data = data
        self.name = name
        self.reads: list[tuple[int, int]] = []  # offset, end

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self.reads.append((offset, offset + len(buffer)))
        piece = self.data[offset : offset + len(buffer)]
        if len(piece) < len(buffer):
            raise AdapterInvalid("cut short")
        buffer[:] = piece


def safetensors_bytes(header: Mapping[str, Any] | bytes, data: bytes, header_bytes: int | None = None) -> bytes:
    """A safetensors file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data


class Slots:
    """Stands in for the model's adapter slots: remembers what is installed where, and by which thread."""

    def __init__(self) -> None:
        self.installed: dict[int, AdapterWeights] = {}
        self.threads: set[int] = set()

    def install(self, slot: int, weights: AdapterWeights | None) -> None:
        self.threads.add(threading.get_ident())
        if weights is None:
            del self.installed[slot]
        else:
            assert slot not in self.installed, "a slot is cleared before it is filled again"
            self.installed[slot] = weights


class Engine:
    """Stands in for the engine's loop around a cache: it sleeps until it is notified, then turns once."""

    def __init__(
        self,
        source: AdapterSource,
        targets: BaseTargets | None = None,
        remote: AdapterSource | None = None,
        watched: DirectorySource | None = None,
        **options: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "host_bytes": 1 << 20,
            "device_bytes": 1 << 20,
            "num_device_slots": 3,
            "disk_bytes": 1 << 24,
        }
        self.slots = Slots()
        self.now = 100.0
        self._woken = threading.Event()
        self._listing = Listing()
        self.cache = AdapterManager(
            AdapterCacheConfig(**(settings | options)),
            source,
            targets or base_targets(),
            "cpu",
            self.slots.install,
            self._woken.set,
            remote,
            watched,
        )

    def listed(self) -> list[AdapterInfo]:
        """Rows of the cache's adapters as a front end lists them."""
        self._listing.apply_changes(self.cache.take_changes())
        return list(self._listing.rows())

    def turn(self, timeout_s: float = 5.0) -> bool:
        """Waits for a notification, as an idle engine does, and polls. False when none came."""
        is_woken = self._woken.wait(timeout_s)
        self._woken.clear()
        self.now += 0.001
        self.cache.poll(self.now)
        return is_woken

    def until(self, ask: Callable[[], T | None]) -> T:
        """Turns until `ask` has an answer. Fails when the cache forgets to wake the engine."""
        for _ in range(1000):
            answer = ask()
            if answer is not None:
                return answer
            assert self.turn(), "nobody woke the engine"
        raise AssertionError("no answer")

    def resolve(self, adapter_id: str) -> AdapterKey:
        return self.until(lambda: self.cache.resolve(adapter_id, self.now))

    def acquire(self, key: AdapterKey) -> int:
        return self.until(lambda: self.cache.acquire(key))

    def load(self, adapter_id: str, pin: bool = False, options: LoadOptions = PLAIN_LOAD) -> AdapterInfo:
        return self.until(lambda: self.cache.load(adapter_id, pin, self.now, options=options))

    def settle(self) -> None:
        """Turns until nobody wakes the engine any more."""
        while self.turn(0.02):
            pass

    def close(self) -> None:
        self.settle()
        self.cache.check_integrity()
        self.cache.close()
