"""PEFT LoRA: its plan against the base model, and its bytes.

The plan is made of the file's header and the configuration. Every tensor of the file ends up in it, or the load fails
with its name; so does a module that the base model lacks, a wrong shape, a rank over the limit. Modules may have ranks
and scales of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from loraplex_adapters.formats.files import CONFIG_NAME, WEIGHTS_NAME
from loraplex_adapters.formats.peft_config import Budget, PeftLoraConfig, match_budget, path_ends
from loraplex_adapters.io.safetensors import (
    DTYPE_BYTES,
    DTYPES,
    PieceReader,
    PieceWriter,
    TensorInfo,
    WriteFn,
    check_float,
)
from loraplex_adapters.io.source_files import SourceFile
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.targets import BaseTargets, TargetModule
from loraplex_adapters.weights import FactorShape, LoraLayout, place_factors
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterUnsupported,
    BaseMismatch,
    NonFinite,
    RankLimit,
    ShapeMismatch,
)

_PREFIX = "base_model.model."
_FACTORS: Mapping[str, tuple[str, bool]] = {  # what the key says -> (which factor, of an embedding)
    "lora_A": ("a", False),
    "lora_B": ("b", False),
    "lora_embedding_A": ("a", True),
    "lora_embedding_B": ("b", True),
}
_REFUSED_PARTS: Mapping[str, str] = {
    "lora_magnitude_vector": "a magnitude of DoRA",
    "lora_diag": "a diagonal of KaSA",
    "lora_E": "AdaLoRA",
    "lora_ranknum": "AdaLoRA",
    "token_adapter": "token rows trained with the adapter (trainable_token_indices)",
    "modules_to_save": "a whole module saved with the adapter (modules_to_save)",
}


@dataclass(frozen=True, slots=True)
class PlannedModule:
    """One module's tensors in the file, checked."""

    shape: FactorShape
    a: TensorInfo
    b: TensorInfo


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The tensors to read and their places. `modules` are in the layout's order."""

    layout: LoraLayout
    modules: tuple[PlannedModule, ...]
    base_copies: tuple[tuple[TensorInfo, TargetModule], ...]  # must equal the base model's own weight
    warnings: tuple[str, ...]

    @property
    def file(self) -> str:
        """The one that has all the tensors."""
        return self.modules[0].a.file


@dataclass(slots=True)
class _Found:
    """The tensors of one module as they turn up."""

    is_embedding: bool
    a: TensorInfo | None = None
    b: TensorInfo | None = None


def plan_lora(config: PeftLoraConfig, tensors: Mapping[str, TensorInfo], targets: BaseTargets) -> LoraPlan:
    """Raises AdapterInvalid or one of its kinds (AdapterUnsupported, BaseMismatch, ShapeMismatch, RankLimit)."""
    found: dict[str, _Found] = {}
    base_copies: list[tuple[TensorInfo, TargetModule]] = []
    for tensor in tensors.values():
        checkpoint()
        path, part, rest = _parts(tensor)
        if part in _FACTORS and rest != "bias":
            _take(found, path, part, tensor)
        else:
            base_copies.append((tensor, _base_copy(tensor, targets)))
    if not found:
        raise AdapterInvalid(f"{WEIGHTS_NAME} has no LoRA tensors")
    budget = match_budget()
    modules = [_module(path, entry, config, targets, budget) for path, entry in found.items()]
    modules.sort(key=lambda module: module.shape)
    layout = place_factors(targets.dtype, [module.shape for module in modules])
    return LoraPlan(layout, tuple(modules), tuple(base_copies), tuple(_warnings(config, targets, found)))


def _parts(tensor: TensorInfo) -> tuple[str, str, str]:
    """(module path, part, 'weight' | 'bias' | '') of a key such as
    `base_model.model.<path>.lora_A[.<adapter name>][.weight]`. Part is '' when the key is not of that form."""
    name = tensor.name.removeprefix(_PREFIX)
    words = name.split(".")
    # The part is the last word but three at most: `lora_A`, `.name`, `.weight`. A module's own name may say lora_A too.
    for idx in range(len(words) - 1, max(len(words) - 4, 0), -1):
        if words[idx] in _FACTORS:
            return ".".join(words[:idx]), words[idx], _rest(tensor, words[idx], words[idx + 1 :])
    return name, "", ""


def _rest(tensor: TensorInfo, part: str, words: list[str]) -> str:
    """The words behind the part, without the adapter's name."""
    kind = words.pop() if words and words[-1] in ("weight", "bias") else ""
    is_embedding = _FACTORS[part][1]
    if len(words) > 1 or (kind == "") is not is_embedding:
        raise AdapterInvalid(f"{tensor.where} is not named as PEFT names its tensors")
    if kind == "bias":
        raise AdapterUnsupported(f"{tensor.where} is a bias on {part} (lora_bias), which is not served")
    return kind


def _take(found: dict[str, _Found], path: str, part: str, tensor: TensorInfo) -> None:
    which, is_embedding = _FACTORS[part]
    entry = found.setdefault(path, _Found(is_embedding))
    if entry.is_embedding is not is_embedding or (entry.a if which == "a" else entry.b) is not None:
        raise AdapterInvalid(f"{tensor.where} is a second {part} for the same module")
    if which == "a":
        entry.a = tensor
    else:
        entry.b = tensor


def _base_copy(tensor: TensorInfo, targets: BaseTargets) -> TargetModule:
    """The base model's module of a tensor that is not a factor. Such a tensor is served only where it is a copy of the
    module's own weight, which PEFT saves beside a LoRA on embeddings; that is checked when it is read."""
    name = tensor.name.removeprefix(_PREFIX)
    for word in name.split("."):
        if word in _REFUSED_PARTS:
            raise AdapterUnsupported(f"{tensor.where} is {_REFUSED_PARTS[word]}, which is not served")
    if name.endswith(".bias"):
        raise AdapterUnsupported(f"{tensor.where} is a bias saved with the adapter, which is not served")
    path, _, last = name.rpartition(".")
    module = targets.modules.get(path.removesuffix(".base_layer"))
    if last != "weight" or module is None:
        raise AdapterUnsupported(
            f"{tensor.where} is not part of a plain LoRA on {targets.model_id!a}, and no tensor is left out silently"
        )
    if not module.weight_sha256:
        raise AdapterUnsupported(
            f"{tensor.where} replaces a weight of the base model, which is not served; if it is a mere "
            "copy, save the adapter with save_embedding_layers=False"
        )
    is_transposed = module.kind == "embedding" or module.is_conv1d
    rows, columns = module.out_features, module.in_features
    _check_shape(tensor, (columns, rows) if is_transposed else (rows, columns))
    check_float(tensor)
    return module


def _module(path: str, entry: _Found, config: PeftLoraConfig, targets: BaseTargets, budget: Budget) -> PlannedModule:
    tensor = entry.a or entry.b
    assert tensor is not None
    if entry.a is None or entry.b is None:
        other = "B" if entry.b is None else "A"
        raise AdapterInvalid(f"{tensor.where} has no lora_{other} beside it")
    module = targets.modules.get(path)
    if module is None:
        raise _no_such_module(path, tensor, targets)
    if entry.is_embedding is not (module.kind == "embedding"):
        raise ShapeMismatch(f"{tensor.where} does not fit: {path!a} is of kind {module.kind}")
    if not config.names_target(path):
        raise AdapterInvalid(
            f"{tensor.where} is there, but target_modules in {CONFIG_NAME} does not name its module: the two "
            "files do not belong together"
        )
    rank, scale = config.rank_and_scale(path, budget)
    largest = max(rank, entry.a.shape[0] if entry.a.shape else 0)
    if largest > targets.max_rank:
        raise RankLimit(f"{entry.a.shown} has rank {largest}; this server takes ranks up to {targets.max_rank}")
    _check_shape(entry.a, (rank, module.in_features))
    _check_shape(entry.b, (module.out_features, rank))
    check_float(entry.a)
    check_float(entry.b)
    shape = FactorShape(path, rank, module.in_features, module.out_features, scale)
    return PlannedModule(shape, entry.a, entry.b)


def _no_such_module(path: str, tensor: TensorInfo, targets: BaseTargets) -> AdapterInvalid:
    if "experts" in path.split("."):
        return AdapterUnsupported(f"{tensor.where} adapts the experts of a mixture, which is not served")
    return BaseMismatch(
        f"{tensor.where} adapts a module that {targets.model_id!a} does not have; the adapter was "
        "made for another base model"
    )


def _check_shape(tensor: TensorInfo, expected: tuple[int, int]) -> None:
    if tensor.shape != expected:
        raise ShapeMismatch(
            f"{tensor.where} has shape {list(tensor.shape)}; base model and {CONFIG_NAME} make it {list(expected)}"
        )


def _warnings(config: PeftLoraConfig, targets: BaseTargets, found: Mapping[str, _Found]) -> list[str]:
    """Oddities that do no harm."""
    warnings: list[str] = []
    if config.base_model and config.base_model != targets.model_id:
        warnings.append(f"was trained on {config.base_model!a}, served on {targets.model_id!a}")
    served = {end for path in found for end in path_ends(path)}
    missing = sorted((config.target_modules or frozenset()) - served)
    if missing:
        warnings.append(f"names the targets {ascii(missing)[:200]} but has no tensors for them")
    return warnings


def write_payload(plan: LoraPlan, file: SourceFile, write: WriteFn, reader: PieceReader) -> None:
    """Writes exactly `plan.layout.num_bytes` bytes. Raises NonFinite, or what the file raises."""
    out = PieceWriter(write)
    for run in _runs(plan):
        out.pad_to(run.target)
        try:
            for piece in reader.pieces(run.whole, file, plan.layout.dtype):
                out.write(piece)
        except NonFinite:
            for tensor in run.tensors:  # which one is it?
                for _ in reader.pieces(tensor, file, plan.layout.dtype):
                    pass
            raise
    out.pad_to(plan.layout.num_bytes)


def check_base_copies(plan: LoraPlan, file: SourceFile, reader: PieceReader) -> None:
    """Raises AdapterUnsupported when a saved weight is not the base model's own."""
    for tensor, module in plan.base_copies:
        if reader.sha256(tensor, file, plan.layout.dtype) != module.weight_sha256:
            raise AdapterUnsupported(
                f"{tensor.where} replaces a weight of the base model by another, which is not served"
            )


@dataclass(slots=True)
class _Run:
    """Tensors without a gap between them."""

    tensors: list[TensorInfo]
    target: int  # where their bytes begin in the layout

    @property
    def whole(self) -> TensorInfo:
        """As one tensor, with the first one's name."""
        return replace(self.tensors[0], num_bytes=sum(tensor.num_bytes for tensor in self.tensors))


def _runs(plan: LoraPlan) -> Iterator[_Run]:
    """In the layout's order."""
    itemsize = DTYPES[plan.layout.dtype].itemsize
    run: _Run | None = None
    source_end = target_end = -1
    for module, placed in zip(plan.modules, plan.layout.placed, strict=True):
        for tensor, target in ((module.a, placed.a_offset), (module.b, placed.b_offset)):
            if run and (tensor.offset, target, tensor.dtype) == (source_end, target_end, run.tensors[0].dtype):
                run.tensors.append(tensor)
            else:
                if run:
                    yield run
                run = _Run([tensor], target)
            source_end = tensor.offset + tensor.num_bytes
            target_end = target + tensor.num_bytes // DTYPE_BYTES[tensor.dtype] * itemsize
    if run:
        yield run
