"""Merges of LoRAs into one, by the functions of PEFT's `add_weighted_adapter`.

The factors of each module are merged, not their products: A with A and B with B, each with the square root of weight
times scale, the sign with A. PEFT merges in float32 where the model has half precision, and so does this; the weights
are float32 in any case, as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode

from loraplex_adapters.io.safetensors import DTYPES, PieceWriter, WriteFn, bytes_of
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.weights import AdapterLayout, FactorShape, PlacedFactors, place_adapter
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import AdapterNotMixed, NonFinite
from loraplex_contracts.mixtures import Merge, Recipe

Put = Callable[[AdapterLayout, Callable[[WriteFn], None]], AdapterKey]
Payload = NDArray[np.uint8]  # an adapter's bytes


def merge_loras(
    recipe: Recipe, members: Sequence[tuple[AdapterLayout, Payload]], order: Sequence[str], put: Put
) -> tuple[AdapterKey, AdapterLayout]:
    """Stores the merged adapter by `put`. `order`: paths of modules as the model has them, in which PEFT draws at
    random. Raises AdapterNotMixed for members of different ranks in a module, and NonFinite."""
    placed = [{one.shape.path: one for one in layout.factors} for layout, _ in members]
    paths = [path for path in order if any(path in factors for factors in placed)]
    _check_ranks(recipe, paths, placed)
    first = [next(factors[path].shape for factors in placed if path in factors) for path in paths]
    dtype = members[0][0].dtype
    shapes = [FactorShape(one.path, one.rank, one.in_features, one.out_features, 1.0) for one in first]
    layout = place_adapter(dtype, shapes)
    payload = np.zeros(layout.num_bytes, dtype=np.uint8)
    target = {one.shape.path: one for one in layout.factors}
    with _SeededDraws(recipe.seed):
        for path in paths:
            checkpoint()
            given = [
                (factors[path], data, weight)
                for factors, (_, data), weight in zip(placed, members, recipe.mixture.weights, strict=True)
                if path in factors
            ]
            scaled = [weight * one.shape.scale for one, _, weight in given]
            roots = [math.sqrt(abs(one)) for one in scaled]
            signed = [root if one >= 0 else -root for root, one in zip(roots, scaled, strict=True)]
            parts = [(_a(data, one, dtype), _b(data, one, dtype)) for one, data, _ in given]
            a = _merged(recipe.merge, len(members), [part for part, _ in parts], signed)
            b = _merged(recipe.merge, len(members), [part for _, part in parts], roots)
            place = target[path]
            for offset, merged in ((place.a_offset, a), (place.b_offset, b)):
                if not bool(merged.isfinite().all()):
                    raise NonFinite(f"merged weights of {path} are not finite", resource=_names(recipe))
                data = np.frombuffer(bytes_of(merged.to(DTYPES[dtype]).contiguous()), dtype=np.uint8)
                payload[offset : offset + data.size] = data

    def fill(write: WriteFn) -> None:
        PieceWriter(write).write(torch.from_numpy(payload))

    return put(layout, fill), layout


def _check_ranks(recipe: Recipe, paths: Sequence[str], placed: Sequence[Mapping[str, PlacedFactors]]) -> None:
    for path in paths:
        # A list: two revisions of an adapter have one name.
        ranks = [
            (name, factors[path].shape.rank)
            for name, factors in zip(recipe.mixture.adapter_ids, placed, strict=True)
            if path in factors
        ]
        if len({rank for _, rank in ranks}) > 1:
            described = ", ".join(f"{rank} in {name!a}" for name, rank in ranks)
            raise AdapterNotMixed(
                f"{recipe.merge.strategy} merges adapters whose ranks are equal in each module, and {path} has rank "
                f"{described}; their exact sum is a mixture without `merge` (`cat` in `merged_adapters`)",
                field="adapters",
                resource=_names(recipe),
            )


def _names(recipe: Recipe) -> str:
    return "+".join(recipe.mixture.adapter_ids)


def _a(data: Payload, one: PlacedFactors, dtype: str) -> Tensor:
    return _tensor(data, one.a_offset, (one.shape.rank, one.shape.in_features), dtype)


def _b(data: Payload, one: PlacedFactors, dtype: str) -> Tensor:
    return _tensor(data, one.b_offset, (one.shape.out_features, one.shape.rank), dtype)


def _tensor(data: Payload, offset: int, sizes: tuple[int, int], dtype: str) -> Tensor:
    """A matrix of an adapter as a copy, at least in float32."""
    num_bytes = math.prod(sizes) * DTYPES[dtype].itemsize
    found = torch.from_numpy(data[offset : offset + num_bytes].copy()).view(DTYPES[dtype]).view(sizes)
    return found.to(torch.promote_types(found.dtype, torch.float32))


def _merged(merge: Merge, num_members: int, tensors: list[Tensor], weights: list[float]) -> Tensor:
    from peft.utils import merge_utils  # takes seconds, and few servers merge

    by = torch.tensor(weights, dtype=torch.float32)
    if merge.strategy == "linear" or num_members == 1:  # PEFT's rule
        return merge_utils.task_arithmetic(tensors, by)
    if merge.strategy == "ties":
        return merge_utils.ties(tensors, by, merge.density, merge.majority_sign)
    if merge.strategy == "dare_ties":
        return merge_utils.dare_ties(tensors, by, merge.density, merge.majority_sign)
    if merge.strategy == "dare_linear":
        return merge_utils.dare_linear(tensors, by, merge.density)
    return merge_utils.magnitude_prune(tensors, by, merge.density)


class _SeededDraws(TorchFunctionMode):
    """Has `torch.bernoulli` draw from a generator of its own on this thread: PEFT's functions take none."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        more = dict(kwargs or {})
        if func is torch.bernoulli:
            more["generator"] = self._generator
        return func(*args, **more)
