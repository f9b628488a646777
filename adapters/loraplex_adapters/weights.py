"""Weights of one adapter: one flat allocation, its layout, and views.

A single allocation makes a move between tiers one copy, and its size the number that budgets count. The layout is the
same on disk, host and device: LoRA factors, then Medusa heads, then a classifier. Offsets follow from the shapes, so
only shapes and scales are written down. Everything lies at multiples of 64 bytes, row-major, in the base model's dtype
(token ids apart).

LoRA: modules in the order of their paths; of each, A [rank, in], B [out, rank], then where it has them gain [out] and
shift [out]. The layout of a plain LoRA is written down as it always was, so old stores stay readable. Of the fused
weights of experts: A [experts, rank, in], B [experts, out, rank].

Heads: the same tensor of all heads is one region, so a set of heads is also one stacked matrix: for each layer the
weights [num_heads, hidden, hidden] and the biases [num_heads, hidden], then the token ids [num_rows] (int64), then the
projections [num_projections, num_rows, hidden].

Classifier: the weight [num_labels, hidden], then the bias [num_labels].

Saved parameters, in the order of their modules and names: as the base model has them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from loraplex_adapters.io.safetensors import DTYPES
from loraplex_adapters.io.throttle import checkpoint
from loraplex_contracts.adapters import AdapterKey, AdapterKind, AdapterTemplates, ClassifierInfo


@dataclass(frozen=True, slots=True)
class TargetModule:
    """One module of the base model. `path` is its name in `named_modules()` of the causal language model.

    A router is any module that multiplies its input with one weight [out, in] and chooses experts of the product; of
    `experts`, `path` is the name of a parameter that holds one weight for each.
    """

    path: str
    kind: Literal["linear", "embedding", "router", "experts"]
    in_features: int  # of an embedding: the vocabulary
    out_features: int
    is_conv1d: bool = False  # GPT-2's Conv1D keeps its weight transposed (fan_in_fan_out)
    has_bias: bool = False
    is_shared: bool = False  # whether other modules have the same weight
    is_lookup: bool = True  # of an embedding: it gives rows of its weight, perhaps scaled, and does no more with them
    # Gives W [out, in] and its bias, perhaps copies, to adapters that are made with them. Of an embedding [out, vocab].
    weights: Callable[[], tuple[Tensor, Tensor | None]] | None = field(default=None, compare=False, repr=False)
    # SHA-256 of the weight's bytes in BaseTargets.dtype, row-major as the module keeps it; '' when it is not known. For
    # embeddings and lm_head: PEFT saves copies of those weights, which are dropped when they are the base's own.
    weight_sha256: str = ""
    num_experts: int = 0  # 0 except for `experts`
    swaps_features: bool = False  # of `experts`: PEFT takes its inputs for outputs (Llama 4)

    def facts(self) -> dict[str, Any]:
        """Values by name, as a part of the base model's digest. Those at their default are left out: a new field
        changes the digest of no model that does not have it."""
        given = ((one, getattr(self, one.name)) for one in fields(self) if one.compare)
        return {one.name: value for one, value in given if value != one.default}


@dataclass(frozen=True, slots=True)
class BaseTargets:
    """The facts about the base model that formats need."""

    modules: Mapping[str, TargetModule]
    model_id: str
    dtype: str  # of the kernel-ready weights: "float64", "float32", "bfloat16", "float16"
    max_rank: int
    hidden_size: int  # at the language modelling head's input, where Medusa heads read
    vocab_size: int  # the head's rows: token ids that may come out
    backbone: str = ""  # path of the model without its head: adapters of that model leave it out of their names
    # Of modules other than `modules` (norms) the parameters that an adapter may bring: shapes by path and name.
    parameters: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    embedding: str = ""  # path of the input embedding
    head: str = ""  # path of the language model's head
    tied_head: str = ""  # path of the head, where its weight is the input embedding's
    other_modules: frozenset[str] = frozenset()  # paths of further modules with parameters
    absent_parts: tuple[str, ...] = ()  # paths of parts for images and audio, which are not loaded
    # Parameters of modules with fused experts, in their order, by the module's path.
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Ids by token of the model's tokenizer; None where there is none that can be read.
    tokens: Callable[[], Mapping[str, int]] | None = field(default=None, compare=False, repr=False)
    weight_format: str = ""  # of few bits, to which weights are rounded: contents made with them depend on it

    def is_called(self, name: str) -> bool:
        """True for another way to write the base model's id: one folder has many paths."""
        if name == self.model_id:
            return True
        return os.path.abspath(name) in (os.path.abspath(self.model_id), os.path.realpath(self.model_id))

    @property
    def digest(self) -> str:
        """SHA-256: contents prepared for equal ones may be served again, as far as shapes and known weights tell. The
        same in later releases: a new fact is left out where it is the usual one."""
        facts = {
            "model_id": self.model_id,
            "dtype": self.dtype,
            "max_rank": self.max_rank,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "tied_head": self.tied_head,
            "modules": [self.modules[path].facts() for path in sorted(self.modules)],
            "parameters": {path: dict(shapes) for path, shapes in self.parameters.items()},
        }
        if self.weight_format:
            facts["weight_format"] = self.weight_format
        return hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """A parameter in the place of the base model's, or of some rows of it."""

    values: Tensor  # as the base model's, or its rows [num_ids, hidden]
    token_ids: tuple[int, ...] | None = None  # the rows that it replaces; None: all


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The terms of one adapter at one module: gain * (W x + bias + scale * B A x) + shift.

    All tensors are contiguous, of one dtype and on one device. For an embedding, `in` is the vocabulary. Of fused
    experts, A and B have a first dimension more.
    """

    a: Tensor  # [rank, in]; rank 0: no low-rank term. Or [experts, rank, in]
    b: Tensor  # [out, rank], or [experts, out, rank]
    scale: float  # alpha / rank, or alpha / sqrt(rank)
    gain: Tensor | None = None  # [out], of DoRA; None: 1
    shift: Tensor | None = None  # [out], of biases; None: 0

    @property
    def rank(self) -> int:
        return self.a.shape[-2]

    @property
    def has_experts(self) -> bool:
        """True if there is one term for each expert."""
        return self.a.dim() == 3

    @property
    def is_plain(self) -> bool:
        """True if the terms have neither gain nor shift."""
        return self.gain is None and self.shift is None


@dataclass(frozen=True, slots=True)
class ResidualLayer:
    """Residual layer of Medusa (arXiv 2401.10774): x -> x + silu(x @ weight.T + bias)."""

    weight: Tensor  # [hidden, hidden]
    bias: Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """Medusa head: head i guesses token t + 2 + i from the post-norm hidden state of position t."""

    layers: tuple[ResidualLayer, ...]  # one after the other; without any, the hidden state itself
    projection: Tensor | None = None  # [num_rows, hidden]; None: the base model's own head
    token_ids: Tensor | None = None  # [num_rows] int64: the token of each row; None: row i is token i


@dataclass(frozen=True, slots=True)
class Classifier:
    """A linear from the post-norm hidden state of a position to a logit for each label."""

    info: ClassifierInfo
    weight: Tensor  # [num_labels, hidden]
    bias: Tensor | None  # [num_labels]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """One adapter's weights. All tensors are views into `storage`, of the base model's dtype (token ids apart)."""

    key: AdapterKey
    storage: Tensor  # uint8 [num_bytes]
    factors: Mapping[str, LoraFactors]  # by module path (TargetModule.path); empty of heads alone
    heads: tuple[MedusaHead, ...] = ()  # empty of a LoRA alone
    classifier: Classifier | None = None
    saved: Mapping[str, Mapping[str, SavedParameter]] = field(default_factory=dict)  # by module path and name

    @property
    def num_bytes(self) -> int:
        return self.storage.numel()

    @property
    def is_plain(self) -> bool:
        """True if low-rank terms are all that it has in the model, and none is of experts."""
        return not self.saved and all(one.is_plain and not one.has_experts for one in self.factors.values())

    @property
    def max_rank(self) -> int:
        return max((f.rank for f in self.factors.values()), default=0)


_LAYOUT_KEYS = frozenset(
    ("dtype", "factors", "medusa", "classifier", "saved", "templates", "pooling", "invocation", "peft_type")
)
ALIGN_BYTES = 64
TOKEN_ID_BYTES = 8
MAX_DIM = 1 << 32


@dataclass(frozen=True, slots=True, order=True)
class FactorShape:
    """Shape of one module's factors."""

    path: str
    rank: int
    in_features: int
    out_features: int
    scale: float
    has_gain: bool = False
    has_shift: bool = False
    num_experts: int = 0  # of fused experts, which have neither gain nor shift; 0: a module with one weight

    @property
    def is_plain(self) -> bool:
        """True if the module has neither gain nor shift."""
        return not self.has_gain and not self.has_shift

    @property
    def num_terms(self) -> int:
        return self.num_experts or 1

    def to_json(self) -> list[Any]:
        """The shape in a canonical form, which is part of the adapter's digest. The scale is in hexadecimal, so that
        nothing is rounded."""
        found = [self.path, self.rank, self.in_features, self.out_features, self.scale.hex()]
        if self.num_experts:
            return [*found, "experts", self.num_experts]
        return found if self.is_plain else [*found, "gain" * self.has_gain + "shift" * self.has_shift]

    @staticmethod
    def from_json(value: Any) -> FactorShape:
        """The shape that `to_json` wrote. Raises ValueError on anything else."""
        path, rank, in_features, out_features, scale, *more = value
        sizes = (rank, in_features, out_features)
        num_experts = 0
        if len(more) == 2 and more[0] == "experts" and type(more[1]) is int and 0 < more[1] < MAX_DIM:
            num_experts, more = more[1], []
        if more not in ([], ["gain"], ["shift"], ["gainshift"]):
            raise ValueError("not the layout of a LoRA")
        extra = "".join(more)
        shape = FactorShape(path, *sizes, float.fromhex(scale), "gain" in extra, "shift" in extra, num_experts)
        is_shape = isinstance(path, str) and all(type(size) is int and size >= 0 for size in sizes)
        if not is_shape or not in_features or not out_features or not (rank or extra) or not math.isfinite(shape.scale):
            raise ValueError("not the layout of a LoRA")
        return shape


@dataclass(frozen=True, slots=True)
class PlacedFactors:
    """A module's factors and their places, in bytes from the beginning."""

    shape: FactorShape
    a_offset: int
    b_offset: int
    gain_offset: int
    shift_offset: int


@dataclass(frozen=True, slots=True)
class HeadsShape:
    """Shape of a set of heads. All heads of a set have the same parts."""

    num_heads: int
    num_layers: int  # residual layers of each head
    hidden_size: int
    has_bias: bool = False
    num_projections: int = 0  # 0: the base model's own head; 1: one for all; or one for each
    num_rows: int = 0  # of a projection
    has_token_ids: bool = False  # the rows are some of the vocabulary

    def to_json(self) -> dict[str, Any]:
        """The shape in a canonical form, which is part of the adapter's digest."""
        return {
            "heads": self.num_heads,
            "layers": self.num_layers,
            "hidden": self.hidden_size,
            "bias": self.has_bias,
            "projections": self.num_projections,
            "rows": self.num_rows,
            "token_ids": self.has_token_ids,
        }

    @staticmethod
    def from_json(value: Any) -> HeadsShape:
        """The shape that `to_json` wrote. Raises ValueError on anything else."""
        if not isinstance(value, dict):
            raise ValueError("not the layout of Medusa heads")
        numbers = [value.get(name) for name in ("heads", "layers", "hidden", "projections", "rows")]
        flags = [value.get(name) for name in ("bias", "token_ids")]
        if not all(type(n) is int and 0 <= n < MAX_DIM for n in numbers) or not all(type(f) is bool for f in flags):
            raise ValueError("not the layout of Medusa heads")
        num_heads, num_layers, hidden_size, num_projections, num_rows = (int(n or 0) for n in numbers)
        shape = HeadsShape(
            num_heads, num_layers, hidden_size, bool(flags[0]), num_projections, num_rows, bool(flags[1])
        )
        is_whole = num_heads > 0 and hidden_size > 0 and num_projections in (0, 1, num_heads)
        if not is_whole or (num_rows > 0) is not (num_projections > 0) or (shape.has_token_ids and num_rows == 0):
            raise ValueError("not the layout of Medusa heads")
        if value.keys() - shape.to_json().keys():
            raise ValueError("not the layout of Medusa heads of this release")
        return shape


@dataclass(frozen=True, slots=True)
class ClassifierShape:
    """Shape of a classifier, and its labels."""

    info: ClassifierInfo
    hidden_size: int
    has_bias: bool = False

    @property
    def num_labels(self) -> int:
        return len(self.info.labels)

    def to_json(self) -> dict[str, Any]:
        """The shape in a canonical form, which is part of the adapter's digest."""
        return {
            "labels": list(self.info.labels),
            "per_token": self.info.per_token,
            "hidden": self.hidden_size,
            "bias": self.has_bias,
        }

    @staticmethod
    def from_json(value: Any) -> ClassifierShape:
        """The shape that `to_json` wrote. Raises ValueError on anything else."""
        if not isinstance(value, dict):
            raise ValueError("not the layout of a classifier")
        labels: Any = value.get("labels")
        hidden_size: Any = value.get("hidden")
        flags: tuple[Any, Any] = (value.get("per_token"), value.get("bias"))
        is_list = isinstance(labels, list) and labels and all(isinstance(one, str) for one in labels)
        is_size = type(hidden_size) is int and 0 < hidden_size < MAX_DIM
        if not is_list or not is_size or not all(type(flag) is bool for flag in flags):
            raise ValueError("not the layout of a classifier")
        shape = ClassifierShape(ClassifierInfo(tuple(labels), flags[0]), hidden_size, flags[1])
        if value.keys() - shape.to_json().keys():
            raise ValueError("not the layout of a classifier of this release")
        return shape


@dataclass(frozen=True, slots=True, order=True)
class SavedShape:
    """Shape of a saved parameter."""

    path: str  # of its module
    name: str
    shape: tuple[int, ...]
    token_ids: tuple[int, ...] | None = None

    def to_json(self) -> list[Any]:
        """The shape in a canonical form, which is part of the adapter's digest."""
        return [self.path, self.name, list(self.shape), None if self.token_ids is None else list(self.token_ids)]

    @staticmethod
    def from_json(value: Any) -> SavedShape:
        """The shape that `to_json` wrote. Raises ValueError on anything else."""
        path, name, sizes, token_ids = value
        numbers = [sizes] if token_ids is None else [sizes, token_ids]
        is_list = all(
            isinstance(one, list) and all(type(n) is int and 0 <= n < MAX_DIM for n in one) for one in numbers
        )
        if not isinstance(path, str) or not isinstance(name, str) or not is_list:
            raise ValueError("not the layout of a saved parameter")
        return SavedShape(path, name, tuple(sizes), None if token_ids is None else tuple(token_ids))


@dataclass(frozen=True, slots=True)
class PlacedSaved:
    """A saved parameter and its place, in bytes from the beginning."""

    shape: SavedShape
    offset: int


@dataclass(frozen=True, slots=True)
class PlacedClassifier:
    """A classifier and the places of its tensors, in bytes from the beginning."""

    shape: ClassifierShape
    weight: int
    bias: int


@dataclass(frozen=True, slots=True)
class PlacedHeads:
    """A set of heads and the places of its regions, in bytes from the beginning."""

    shape: HeadsShape
    weights: tuple[int, ...]  # by layer
    biases: tuple[int, ...]  # by layer; empty without biases
    token_ids: int
    projections: int


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The places of all tensors: `factors` in the order of their shapes, empty of heads alone; then the heads. And the
    adapter's own templates, where they are used."""

    dtype: str
    factors: tuple[PlacedFactors, ...]
    heads: PlacedHeads | None
    num_bytes: int
    classifier: PlacedClassifier | None = None
    saved: tuple[PlacedSaved, ...] = ()
    templates: AdapterTemplates | None = None
    pooling: str = ""  # as `formats.pooling.read_pooling` says it
    # Of an activated LoRA (aLoRA): it changes tokens from the start of their last occurrence in the prompt on.
    invocation: tuple[int, ...] = ()
    peft_type: str = "LORA"  # of the terms before they became low-rank ones

    @property
    def not_mixed(self) -> str:
        """The reason that it cannot be a member of a mixture; empty for a plain LoRA, whose heads are left aside."""
        if not self.factors and self.heads is not None:
            return "it is Medusa heads without a LoRA"
        if self.peft_type != "LORA":
            return f"it is made by PEFT's {self.peft_type}"
        if self.classifier is not None:
            return "it has a classifier"
        if self.saved:
            saved = self.saved[0].shape
            return f"it brings {saved.path}.{saved.name} of its own (modules_to_save, token rows)"
        if self.invocation:
            return "it is active from its own tokens on (alora_invocation_tokens)"
        for placed in self.factors:
            if placed.shape.num_experts:
                return f"it adapts the experts of {placed.shape.path} (target_parameters)"
            if placed.shape.has_gain:
                return f"it scales the outputs of {placed.shape.path} (use_dora)"
            if placed.shape.has_shift:
                return f"it adds a bias at {placed.shape.path} (bias, lora_bias)"
        return ""

    @property
    def max_rank(self) -> int:
        return max((placed.shape.rank for placed in self.factors), default=0)

    @property
    def num_heads(self) -> int:
        return 0 if self.heads is None else self.heads.shape.num_heads

    @property
    def kind(self) -> AdapterKind:
        if self.heads is None:
            return "lora"
        return "combined" if self.factors else "medusa"

    def to_json(self) -> dict[str, Any]:
        """The layout in a canonical form, which is part of the adapter's digest."""
        found: dict[str, Any] = {
            "dtype": self.dtype,
            "factors": [placed.shape.to_json() for placed in self.factors],
        }
        if self.heads is not None:
            found["medusa"] = self.heads.shape.to_json()
        if self.classifier is not None:
            found["classifier"] = self.classifier.shape.to_json()
        if self.saved:
            found["saved"] = [placed.shape.to_json() for placed in self.saved]
        if self.templates is not None:
            found["templates"] = asdict(self.templates)
        if self.pooling:
            found["pooling"] = self.pooling
        if self.invocation:
            found["invocation"] = list(self.invocation)
        if self.peft_type != "LORA":
            found["peft_type"] = self.peft_type
        return found

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> AdapterLayout:
        """The layout that `to_json` wrote. Raises ValueError on anything else."""
        factors, medusa = value.get("factors"), value.get("medusa")
        if value.get("dtype") not in DTYPES or not isinstance(factors, list):
            raise ValueError("not the layout of a LoRA")
        if unknown := value.keys() - _LAYOUT_KEYS:
            raise ValueError(f"a layout of another release, with {min(unknown)}")
        heads = None if medusa is None else HeadsShape.from_json(medusa)
        classifier = None if value.get("classifier") is None else ClassifierShape.from_json(value["classifier"])
        saved = map(SavedShape.from_json, value.get("saved", ()))
        layout = place_adapter(value["dtype"], map(FactorShape.from_json, factors), heads, classifier, saved)
        templates, invocation = value.get("templates"), value.get("invocation", [])
        if not isinstance(invocation, list) or not all(type(one) is int and 0 <= one < MAX_DIM for one in invocation):
            raise ValueError("not the tokens of an activated LoRA")
        if not isinstance(pooling := value.get("pooling", ""), str):
            raise ValueError("not the pooling of an adapter")
        return replace(
            layout,
            templates=None if templates is None else _templates(templates),
            pooling=pooling,
            invocation=tuple(invocation),
            peft_type=str(value.get("peft_type", "LORA")),
        )


def _templates(value: Any) -> AdapterTemplates:
    """The templates that `AdapterLayout.to_json` wrote. Raises ValueError on anything else."""
    try:
        found = AdapterTemplates(**value)
    except TypeError:
        raise ValueError("not the templates of an adapter") from None
    if not all(isinstance(text, str) for text in astuple(found)):
        raise ValueError("not the templates of an adapter")
    return found


def place_adapter(
    dtype: str,
    factors: Iterable[FactorShape],
    heads: HeadsShape | None = None,
    classifier: ClassifierShape | None = None,
    saved: Iterable[SavedShape] = (),
) -> AdapterLayout:
    """Gives every tensor its place."""
    layout = _place_lora_and_heads(dtype, factors, heads)
    itemsize = DTYPES[dtype].itemsize
    if classifier is not None:
        weight = _aligned(layout.num_bytes)
        bias = _aligned(weight + classifier.num_labels * classifier.hidden_size * itemsize)
        end = _aligned(bias + classifier.num_labels * itemsize) if classifier.has_bias else bias
        layout = replace(layout, num_bytes=end, classifier=PlacedClassifier(classifier, weight, bias))
    placed: list[PlacedSaved] = []
    position = layout.num_bytes
    for shape in sorted(saved, key=lambda one: (one.path, one.name)):
        placed.append(PlacedSaved(shape, position))
        position = _aligned(position + math.prod(shape.shape) * itemsize)
    return replace(layout, num_bytes=position, saved=tuple(placed))


def _place_lora_and_heads(dtype: str, factors: Iterable[FactorShape], heads: HeadsShape | None) -> AdapterLayout:
    itemsize = DTYPES[dtype].itemsize
    placed: list[PlacedFactors] = []
    position = 0
    for shape in sorted(factors):
        a_offset = position
        num_ranks = shape.num_terms * shape.rank
        b_offset = _aligned(a_offset + num_ranks * shape.in_features * itemsize)
        gain_offset = _aligned(b_offset + num_ranks * shape.out_features * itemsize)
        shift_offset = _aligned(gain_offset + shape.has_gain * shape.out_features * itemsize)
        position = _aligned(shift_offset + shape.has_shift * shape.out_features * itemsize)
        placed.append(PlacedFactors(shape, a_offset, b_offset, gain_offset, shift_offset))
    if heads is None:
        return AdapterLayout(dtype, tuple(placed), None, position)
    weights: list[int] = []
    biases: list[int] = []
    for _ in range(heads.num_layers):
        weights.append(position)
        position = _aligned(position + heads.num_heads * heads.hidden_size**2 * itemsize)
        if heads.has_bias:
            biases.append(position)
            position = _aligned(position + heads.num_heads * heads.hidden_size * itemsize)
    token_ids = position
    if heads.has_token_ids:
        position = _aligned(position + heads.num_rows * TOKEN_ID_BYTES)
    end = _aligned(position + heads.num_projections * heads.num_rows * heads.hidden_size * itemsize)
    return AdapterLayout(
        dtype, tuple(placed), PlacedHeads(heads, tuple(weights), tuple(biases), token_ids, position), end
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def weights_at(key: AdapterKey, layout: AdapterLayout, storage: Tensor) -> AdapterWeights:
    """The adapter whose bytes are in `storage` (uint8 [num_bytes], contiguous, aligned). Copies nothing."""
    assert storage.numel() == layout.num_bytes, "an adapter's storage is exactly as large as its layout"
    heads = () if layout.heads is None else _heads_at(layout.heads, DTYPES[layout.dtype], storage)
    classifier = None if layout.classifier is None else _classifier_at(layout.classifier, DTYPES[layout.dtype], storage)
    return AdapterWeights(key, storage, _factors_at(layout, storage), heads, classifier, _saved_at(layout, storage))


def _factors_at(layout: AdapterLayout, storage: Tensor) -> dict[str, LoraFactors]:
    dtype = DTYPES[layout.dtype]
    flat = storage.view(dtype)
    itemsize = dtype.itemsize
    factors: dict[str, LoraFactors] = {}
    for placed in layout.factors:
        checkpoint()
        shape = placed.shape
        rank, in_features, num_terms = shape.rank, shape.in_features, shape.num_terms
        a = flat.as_strided((num_terms * rank, in_features), (in_features, 1), placed.a_offset // itemsize)
        b = flat.as_strided((num_terms * shape.out_features, rank), (rank, 1), placed.b_offset // itemsize)
        if shape.num_experts:
            a, b = a.view(num_terms, rank, in_features), b.view(num_terms, shape.out_features, rank)
        gain = flat[placed.gain_offset // itemsize :][: shape.out_features] if shape.has_gain else None
        shift = flat[placed.shift_offset // itemsize :][: shape.out_features] if shape.has_shift else None
        factors[shape.path] = LoraFactors(a, b, shape.scale, gain, shift)
    return factors


def _saved_at(layout: AdapterLayout, storage: Tensor) -> dict[str, dict[str, SavedParameter]]:
    flat = storage.view(DTYPES[layout.dtype])
    found: dict[str, dict[str, SavedParameter]] = {}
    for placed in layout.saved:
        shape, begin = placed.shape, placed.offset // flat.element_size()
        values = flat[begin : begin + math.prod(shape.shape)].view(shape.shape)
        found.setdefault(shape.path, {})[shape.name] = SavedParameter(values, shape.token_ids)
    return found


def _classifier_at(placed: PlacedClassifier, dtype: torch.dtype, storage: Tensor) -> Classifier:
    shape, flat = placed.shape, storage.view(dtype)
    first, size = placed.weight // dtype.itemsize, shape.num_labels * shape.hidden_size
    weight = flat[first : first + size].view(shape.num_labels, shape.hidden_size)
    first = placed.bias // dtype.itemsize
    return Classifier(shape.info, weight, flat[first : first + shape.num_labels] if shape.has_bias else None)


def _heads_at(placed: PlacedHeads, dtype: torch.dtype, storage: Tensor) -> tuple[MedusaHead, ...]:
    """The heads in `storage`. Heads that share a projection have the same tensor."""
    shape, hidden = placed.shape, placed.shape.hidden_size
    flat = storage.view(dtype)
    token_ids: Tensor | None = None
    if shape.has_token_ids:
        num_bytes = shape.num_rows * TOKEN_ID_BYTES
        token_ids = storage[placed.token_ids : placed.token_ids + num_bytes].view(torch.int64)  # [num_rows]

    def stack(offset: int, *sizes: int) -> Tensor:
        begin = offset // dtype.itemsize
        return flat[begin : begin + math.prod(sizes)].view(sizes)

    weights = [stack(offset, shape.num_heads, hidden, hidden) for offset in placed.weights]
    biases = [stack(offset, shape.num_heads, hidden) for offset in placed.biases]
    projections = stack(placed.projections, shape.num_projections, shape.num_rows, hidden)
    heads: list[MedusaHead] = []
    for head in range(shape.num_heads):
        layers = tuple(
            ResidualLayer(weight[head], biases[idx][head] if biases else None) for idx, weight in enumerate(weights)
        )
        own = min(head, shape.num_projections - 1)
        heads.append(MedusaHead(layers, projections[own] if own >= 0 else None, token_ids))
    return tuple(heads)
