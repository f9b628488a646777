"""Places in the base model of the modules that PEFT's keys name.

Keys name modules as the class of model did that the adapter was trained on: with its head or without, with parts for
images or without, in Transformers 4 or 5.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable
from typing import Final

from loraplex_adapters.io.safetensors import TensorInfo
from loraplex_adapters.weights import BaseTargets
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported, BaseMismatch

PREFIX: Final = "base_model.model."
# PEFT wraps a module once for each of its parameters that an adapter has terms for, and names the tensors by the layer.
LAYER: Final = ".base_layer"
# Words in paths that a whole checkpoint's class has and its language model's has not. The first is in another place in
# Transformers 4: `language_model.model.layers` for `model.language_model.layers`. Models that speak have a thinker.
_WHOLE: Final = frozenset({"language_model", "thinker"})
# Words in the paths of what Transformers' models have for images, audio and video, to read them and to make them.
_MEDIA: Final = re.compile(r"vision|visual|image|img_|audio|speech|video|multi_?modal|mm_|talker|token2wav|code2wav")
# Words that wrappers of training leave in paths: torch.compile, FSDP and activation checkpointing.
_TRAINING: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class Places:
    """Places of the modules of one adapter."""

    def __init__(self, paths: Collection[str], targets: BaseTargets) -> None:
        """`paths`: that the adapter has low-rank terms or the like for."""
        self._known = {*targets.modules, *targets.experts, *targets.parameters}
        # An adapter of a model without a head (FEATURE_EXTRACTION) leaves out where that is in the one with its head.
        backbone = f"{targets.backbone}."
        self._paths = paths = {path.replace(LAYER, "") for path in paths}
        is_backbone = paths.isdisjoint(self._known) and any(backbone + path in self._known for path in paths)
        self._above = backbone if is_backbone else ""
        self._by_end: dict[str, list[str]] = {}
        for path in self._known:
            self._by_end.setdefault(_below(path), []).append(path)

    def of(self, path: str) -> str:
        """The module's path in the base model; the same path where the base model has it, or has nothing like it."""
        if path in self._known or self._above:
            return self._above + path
        ends = self._by_end.get(_below(path), [])
        differs = len(ends) == 1 and any(not _WHOLE.isdisjoint(one.split(".")) for one in (path, ends[0]))
        return ends[0] if differs else path

    def name_of(self, place: str) -> str:
        """The path by which the adapter names a module of the base model; the module's own where it has no terms for
        it."""
        return next((path for path in self._paths if self.of(path) == place), place)


def _below(path: str) -> str:
    words = path.split(".")
    start = next((idx for idx, word in enumerate(words) if word not in ("model", *_WHOLE)), len(words))
    return ".".join(words[start:])


class PathEnds:
    """Ends of paths and of what is above them, as PEFT matches `modules_to_save`: letters, not whole words."""

    def __init__(self, paths: Iterable[str]) -> None:
        modules: set[str] = set()
        for path in paths:
            while path and path not in modules:
                modules.add(path)
                path = path.rpartition(".")[0]
        self._backwards = sorted(path[::-1] for path in modules)

    def __contains__(self, end: str) -> bool:
        """True if a path ends so. In logarithmic time, as the number of names is an adapter's own."""
        idx = bisect_left(self._backwards, end[::-1])
        return idx < len(self._backwards) and self._backwards[idx].startswith(end[::-1])


def renamed(path: str) -> str:
    """Transformers 4's path of a part of Mixtral's mixtures, in Transformers 5."""
    return path.replace(".block_sparse_moe.", ".mlp.")


def no_such_module(path: str, tensor: TensorInfo, targets: BaseTargets) -> AdapterInvalid:
    """The error about a tensor of a module that takes no adapters or is not there."""
    if is_of_media(path, targets):
        return media_refusal(tensor, targets)
    if "experts" in path.split("."):
        return AdapterUnsupported(
            f"{tensor.where} adapts experts in a way that is not served with {targets.model_id!a}"
        )
    if path in targets.other_modules:
        return AdapterUnsupported(f"{tensor.where} adapts a module of {targets.model_id!a} that takes no adapters here")
    known = {*targets.modules, *targets.experts}
    words = [word for word in path.split(".") if word not in _TRAINING]
    meant = next((end for idx in range(len(words)) if (end := ".".join(words[idx:])) in known), "")
    if meant:  # of a wrapper, or with a prefix twice
        return AdapterInvalid(
            f"{tensor.where} is not named as PEFT names its tensors: where it means {meant!a} of {targets.model_id!a}, "
            f"{PREFIX + meant!a} comes before lora_A and the like"
        )
    return BaseMismatch(
        f"{tensor.where} adapts a module that {targets.model_id!a} does not have; the adapter was "
        "made for another base model"
    )


def is_of_media(path: str, targets: BaseTargets) -> bool:
    parts = {part.rpartition(".")[2] for part in targets.absent_parts}
    return _MEDIA.search(path) is not None or not parts.isdisjoint(path.split("."))


def media_refusal(tensor: TensorInfo, targets: BaseTargets) -> AdapterUnsupported:
    return AdapterUnsupported(
        f"{tensor.where} belongs to a part for images, audio or video; {targets.model_id!a} is served for texts alone"
    )
