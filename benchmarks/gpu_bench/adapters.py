"""Random adapters on the device, and who uses which."""

from __future__ import annotations

import random

import torch

from loraplex_adapters.weights import AdapterWeights, LoraFactors
from loraplex_contracts.adapters import AdapterKey
from loraplex_server.layers.linear import AdaptedHead, AdaptedLinear
from loraplex_server.model.loaded_model import LoadedModel

SKEW = 1.5  # each adapter is so many times as popular as the next, as in Punica's evaluation
SCALE = 0.02  # of the factors: terms much smaller than what they are added to


def linears(loaded: LoadedModel) -> dict[str, AdaptedLinear]:
    """All linears of the decoder layers, by path."""
    return {
        path: module
        for path, module in loaded.targets.items()
        if isinstance(module, AdaptedLinear) and not isinstance(module, AdaptedHead)
    }


def products(loaded: LoadedModel) -> list[tuple[AdaptedLinear, ...]]:
    """The linears by what is computed at once: siblings together, others alone."""
    found: dict[int, tuple[AdaptedLinear, ...]] = {}
    for module in linears(loaded).values():
        members = (module,) if module.merged is None else tuple(module.merged.members)
        found.setdefault(id(members[0]), members)
    return list(found.values())


def make_adapter(loaded: LoadedModel, rank: int, seed: int) -> AdapterWeights:
    """One allocation with factors for every linear, as the adapter cache would have made it."""
    modules = linears(loaded)
    num_elements = sum(rank * (module.in_features + module.out_features) for module in modules.values())
    generator = torch.Generator(loaded.device).manual_seed(seed)
    storage = torch.randn(num_elements, generator=generator, device=loaded.device).mul_(SCALE).to(loaded.dtype)
    factors: dict[str, LoraFactors] = {}
    start = 0
    for path, module in modules.items():
        num_a, num_b = rank * module.in_features, rank * module.out_features
        a = storage[start : start + num_a].view(rank, module.in_features)
        b = storage[start + num_a : start + num_a + num_b].view(module.out_features, rank)
        factors[path] = LoraFactors(a, b, 2.0)
        start += num_a + num_b
    return AdapterWeights(AdapterKey("lora", f"{seed:064x}"), storage.view(torch.uint8), factors)


def choose_slots(popularity: str, batch: int) -> list[int]:
    """The slot of each row: one for all, the square root of the batch's size equally often, fewer and fewer, each its
    own (Punica, arXiv 2310.18547)."""
    dice = random.Random(0)
    match popularity:
        case "identical":
            return [0] * batch
        case "distinct":
            return list(range(batch))
        case "uniform":
            num_adapters = max(1, round(batch**0.5))
            return [row % num_adapters for row in range(batch)]
        case "skewed":
            return dice.choices(range(batch), [SKEW**-slot for slot in range(batch)], k=batch)
        case _:
            raise ValueError(popularity)
