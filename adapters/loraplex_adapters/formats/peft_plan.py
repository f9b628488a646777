"""Plan of a PEFT adapter, and checks that its parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from loraplex_adapters.formats.files import CONFIG_NAME
from loraplex_adapters.io.safetensors import TensorInfo
from loraplex_adapters.weights import BaseTargets, ClassifierShape, FactorShape, SavedShape, TargetModule
from loraplex_contracts.errors import AdapterInvalid, RankLimit, ShapeMismatch

Read = Callable[[TensorInfo], Tensor]
Factor = Literal["a", "b", "magnitude", "lora_bias", "bias"]


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """One module's tensors in the file, checked."""

    shape: FactorShape
    target: TargetModule
    a: TensorInfo | None  # both or none
    b: TensorInfo | None
    magnitude: TensorInfo | None = None  # of DoRA [out]
    lora_bias: TensorInfo | None = None  # of B [out]
    bias: TensorInfo | None = None  # in the place of the base model's [out]
    gain: TensorInfo | None = None  # of IA3 and BOFT [out, 1]
    # Makes A [rank, in] and B [out, rank] of an adapter that has them in another form, from tensors that it reads.
    made: Callable[[Read], tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True, slots=True)
class PlannedClassifier:
    """A classifier's tensors in the file, checked."""

    shape: ClassifierShape
    weight: TensorInfo
    bias: TensorInfo | None


@dataclass(frozen=True, slots=True)
class PlannedSaved:
    """A parameter in the file that takes the place of the base model's."""

    shape: SavedShape
    tensor: TensorInfo
    weight_sha256: str = ""  # of the base model's: a mere copy of it is left out
    # Makes it of the tensor, from tensors that it reads, where the file has another form of it.
    made: Callable[[Read], Tensor] | None = None
    rows: PlannedSaved | None = None  # for some tokens, in the place of its own, which are left of a mere copy
    same_as: TensorInfo | None = None  # the file has it twice


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The tensors to read. `modules` are in the layout's order."""

    modules: tuple[PlannedModule, ...]
    saved: tuple[PlannedSaved, ...]
    warnings: tuple[str, ...]
    classifier: PlannedClassifier | None = None
    invocation: tuple[int, ...] = ()  # tokens that activate it; empty: it always is
    format: str = ""  # peft_type, and what in the configuration makes it more than that
    base_model: str = ""  # that it says it was trained on
    init: str = ""  # that took a part out of the base model
    doubles: tuple[tuple[TensorInfo, TensorInfo], ...] = ()  # pairs of which the first is read; they have to be equal
    copies: tuple[PlannedSaved, ...] = ()  # that have to be mere ones


# The tensors of one module as they turn up.
Found = dict[Factor, TensorInfo]


def check_shape(tensor: TensorInfo, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ShapeMismatch(
            f"{tensor.where} has shape {list(tensor.shape)}; base model and {CONFIG_NAME} make it {list(expected)}"
        )


def check_bias(bias: TensorInfo, module: TargetModule, targets: BaseTargets) -> None:
    if not module.has_bias:
        raise AdapterInvalid(f"{bias.where} is a bias, which {module.path!a} of {targets.model_id!a} does not have")


def check_rank(rank: int, tensor: TensorInfo, targets: BaseTargets) -> None:
    if rank > targets.max_rank:
        raise rank_limit(f"{tensor.shown} has", rank, targets.max_rank)


def rank_limit(what: str, rank: int, max_rank: int) -> RankLimit:
    return RankLimit(f"{what} rank {rank}; this server takes ranks up to {max_rank}")


def check_vocabulary(tensor: TensorInfo, dim: int, module: TargetModule, targets: BaseTargets) -> None:
    """Raises ShapeMismatch for a tensor of embedding or head that has more tokens in dimension `dim` than the base."""
    num_tokens = module.in_features if module.kind == "embedding" else module.out_features
    is_of_tokens = module.kind == "embedding" or num_tokens == targets.vocab_size
    if is_of_tokens and len(tensor.shape) == 2 and tensor.shape[dim] > num_tokens:
        raise ShapeMismatch(
            f"{tensor.where} has {tensor.shape[dim]} tokens, {targets.model_id!a} has {num_tokens}: an adapter that "
            "adds tokens is not served; use a base model with as many token embeddings"
        )


def not_named(tensor: TensorInfo, field: str) -> AdapterInvalid:
    says = "leaves its module out" if field == "exclude_modules" else "does not name its module"
    return not_together(f"{tensor.where} is there, but {field} in {CONFIG_NAME} {says}")


def not_together(why: str) -> AdapterInvalid:
    """The error of weights and a configuration of two adapters."""
    return AdapterInvalid(f"{why}: the two files do not belong together")
