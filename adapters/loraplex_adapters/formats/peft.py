"""PEFT LoRA: plan against the base model, classifier, saved parameters, and bytes.

The plan is made of the configuration and the file's header. Every tensor of the file ends up in the plan, or the load
fails with its name; so does a module that the base model lacks, a wrong shape, a rank over the limit. Modules may have
ranks and scales of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from loraplex_adapters.formats.files import CONFIG_NAME, WEIGHTS_NAME
from loraplex_adapters.formats.peft_config import CLASSIFIER_NAMES, MAX_LABELS, PeftLoraConfig, path_ends
from loraplex_adapters.formats.peft_inits import Init, check_init, restored
from loraplex_adapters.formats.peft_loftq import LoftqConfig, quantized
from loraplex_adapters.formats.peft_patterns import Budget, match_budget
from loraplex_adapters.formats.peft_places import (
    LAYER,
    PREFIX,
    PathEnds,
    Places,
    is_of_media,
    media_refusal,
    no_such_module,
    renamed,
)
from loraplex_adapters.io.safetensors import (
    DTYPE_BYTES,
    DTYPES,
    PieceReader,
    PieceWriter,
    TensorInfo,
    check_float,
)
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.weights import (
    AdapterLayout,
    BaseTargets,
    ClassifierShape,
    FactorShape,
    SavedShape,
    TargetModule,
)
from loraplex_contracts.adapters import ClassifierInfo
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterUnsupported,
    NonFinite,
    RankLimit,
    ShapeMismatch,
)

Factor = Literal["a", "b", "magnitude", "lora_bias", "bias"]
# What a key says, and which tensor of a module that is. Embeddings have the second two in the place of the first two.
_LINEAR_FACTORS: Mapping[str, Factor] = {"lora_A": "a", "lora_B": "b"}
_EMBEDDING_FACTORS: Mapping[str, Factor] = {"lora_embedding_A": "a", "lora_embedding_B": "b"}
_FACTORS: Mapping[str, Factor] = {**_LINEAR_FACTORS, **_EMBEDDING_FACTORS, "lora_magnitude_vector": "magnitude"}
# Linears of single experts, before Transformers fused them, by the fused parameter: in the order of its rows.
_FUSED: Mapping[str, tuple[frozenset[str], ...]] = {
    "gate_up_proj": (frozenset({"gate_proj", "w1"}), frozenset({"up_proj", "w3"})),
    "down_proj": (frozenset({"down_proj", "w2"}),),
}
_REFUSED_PARTS: Mapping[str, str] = {
    "lora_diag": "a diagonal of KaSA",
    "lora_E": "AdaLoRA",
    "lora_ranknum": "AdaLoRA",
}


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
    made: Callable[[Callable[[TensorInfo], Tensor]], tuple[Tensor, Tensor]] | None = None


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
    made: Callable[[Callable[[TensorInfo], Tensor]], Tensor] | None = None
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


# The tensors of one module as they turn up.
_Found = dict[Factor, TensorInfo]


def plan_lora(config: PeftLoraConfig, tensors: Mapping[str, TensorInfo], targets: BaseTargets) -> LoraPlan:
    """Raises AdapterInvalid or one of its kinds (AdapterUnsupported, BaseMismatch, ShapeMismatch, RankLimit)."""
    found: dict[str, _Found] = {}
    others: list[TensorInfo] = []
    saved: dict[str, TensorInfo] = {}  # of a classifier
    for tensor in tensors.values():
        checkpoint()
        path, which = _parts(tensor)
        if which is not None:
            if found.setdefault(path, {}).setdefault(which, tensor) is not tensor:
                raise AdapterInvalid(f"{tensor.where} is a second {which} for the same module")
        elif config.classifies != "no" and (name := _name_in_classifier(tensor)):
            if saved.setdefault(name, tensor) is not tensor:
                raise AdapterInvalid(f"{tensor.where} is a second {name} of a classifier")
        else:
            others.append(tensor)
    places = Places(found, targets)
    if not found:
        raise AdapterInvalid(f"{WEIGHTS_NAME} has no LoRA tensors")
    own: list[PlannedSaved] = []
    originals: list[PlannedSaved] = []
    for tensor in others:
        path, wrapper, name = _saved_name(tensor)
        place = places.of(path)
        if wrapper == "original_module":
            originals.append(_saved(tensor, place, name, config, targets))
        elif name == "bias" and place in targets.modules:
            if found.setdefault(path, {}).setdefault("bias", tensor) is not tensor:
                raise AdapterInvalid(f"{tensor.where} is a second bias for the same module")
        else:
            own.append(_saved(tensor, place, name, config, targets))
    _check_originals(originals, own, targets)
    own = _tied(_with_rows(_without_doubles(own)), originals, config, targets)
    passed_over = _check_saved(own, saved, config, targets)
    budget = match_budget()
    experts, taken = _plan_experts(found, places, config, targets, budget)
    modules = [
        _module(path, places, entry, config, targets, budget) for path, entry in found.items() if path not in taken
    ]
    modules += experts
    _check_beside_experts(config, modules)
    if config.init is not None:
        num_decompositions = 1 if config.loftq is None else config.loftq.num_iterations - 1
        check_init(config.init, [one.target for one in modules if one.shape.rank], targets, num_decompositions)
        _check_beside_init(config.init, modules, own)
    if config.loftq is not None:
        own += _quantized(config.loftq, modules)
    elif config.init is not None:
        modules = [_with_init(config.init, module, targets.max_rank) for module in modules]
    if config.invocation:
        _check_activated(config, modules, own, targets)
    modules.sort(key=lambda module: module.shape)
    return LoraPlan(
        tuple(modules),
        tuple(sorted(own, key=lambda one: (one.shape.path, one.shape.name))),
        tuple(_warnings(config, targets, found, passed_over)),
        None if config.classifies == "no" else _classifier(config, saved, targets),
        config.invocation,
        ", ".join(config.options),
        config.base_model,
        config.init or "",
    )


def _check_activated(
    config: PeftLoraConfig, modules: list[PlannedModule], saved: list[PlannedSaved], targets: BaseTargets
) -> None:
    """Raises AdapterUnsupported where an activated LoRA changes tokens before it is active, AdapterInvalid for tokens
    that the base model lacks."""
    if (strange := max(config.invocation)) >= targets.vocab_size:
        raise AdapterInvalid(
            f"{CONFIG_NAME}: alora_invocation_tokens names token {strange}; {targets.model_id!a} has "
            f"{targets.vocab_size} tokens"
        )
    always = [one.tensor for one in saved] + [module.bias for module in modules if module.bias is not None]
    if always:
        raise AdapterUnsupported(
            f"{always[0].where} would change the tokens before alora_invocation_tokens too, which is not served"
        )
    other = next((module for module in modules if module.target.kind != "linear"), None)
    if other is not None:
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: alora_invocation_tokens with a LoRA on {other.shape.path!a} is not served: only linears "
            "can be activated"
        )


def _name_in_classifier(tensor: TensorInfo) -> str:
    """`weight` or `bias`; empty for a tensor that is not a classifier's."""
    module, _, name = tensor.name.removeprefix(PREFIX).partition(".")
    name = name.removeprefix("modules_to_save.").removeprefix("default.")
    return name if module in CLASSIFIER_NAMES and name in ("weight", "bias") else ""


def _classifier(config: PeftLoraConfig, saved: Mapping[str, TensorInfo], targets: BaseTargets) -> PlannedClassifier:
    weight, bias = saved.get("weight"), saved.get("bias")
    if weight is None:
        raise AdapterInvalid(
            f"{CONFIG_NAME} says that the adapter classifies {config.classifies}, but {WEIGHTS_NAME} has no "
            f"{' or '.join(f'{name}.weight' for name in CLASSIFIER_NAMES)}: save it with modules_to_save"
        )
    num_labels = weight.shape[0] if len(weight.shape) == 2 else 0
    if not 1 <= num_labels <= MAX_LABELS:
        raise ShapeMismatch(f"{weight.where} has shape {list(weight.shape)}; a classifier has 1 to {MAX_LABELS} labels")
    check_shape(weight, (num_labels, targets.hidden_size))
    check_float(weight)
    if bias is not None:
        check_shape(bias, (num_labels,))
        check_float(bias)
    labels = config.labels or tuple(f"LABEL_{number}" for number in range(num_labels))
    if len(labels) != num_labels:
        raise AdapterInvalid(f"{CONFIG_NAME}: id2label has {len(labels)} labels; {weight.where} has {num_labels} rows")
    info = ClassifierInfo(labels, config.classifies == "tokens")
    return PlannedClassifier(ClassifierShape(info, targets.hidden_size, bias is not None), weight, bias)


def _parts(tensor: TensorInfo) -> tuple[str, Factor | None]:
    """Module path and which of its tensors a key such as `base_model.model.<path>.lora_A[.<adapter name>][.weight]`
    names; None when the key is not of that form."""
    name = tensor.name.removeprefix(PREFIX)
    words = name.split(".")
    # The part is the last word but three at most: `lora_A`, `.name`, `.weight`. A module's own name may say lora_A too.
    for idx in range(len(words) - 1, max(len(words) - 4, 0), -1):
        if words[idx] in _FACTORS:
            return ".".join(words[:idx]), _factor(tensor, words[idx], words[idx + 1 :])
    return name, None


def _factor(tensor: TensorInfo, part: str, words: list[str]) -> Factor:
    """Of a key's part and the words behind it, an adapter's name among them or not."""
    kind = words.pop() if words and words[-1] in ("weight", "bias") else ""
    if part == "lora_B" and kind == "bias" and len(words) <= 1:
        return "lora_bias"
    is_wrong = (part in _LINEAR_FACTORS and not kind) or (part in _EMBEDDING_FACTORS and kind)
    if len(words) > 1 or kind == "bias" or is_wrong:
        raise AdapterInvalid(f"{tensor.where} is not named as PEFT names its tensors")
    return _FACTORS[part]


_TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"


# What PEFT has around a module whose parameters it saves. With embeddings that were resized, or that the user wants to
# be saved, it writes what it has of them: what it computes with twice, and the original, which it does not use.
_WRAPPER = re.compile(r"\.(?:token_adapter\.)?(base_layer|modules_to_save|original_module)(?:\.default)?$")


def _saved_name(tensor: TensorInfo) -> tuple[str, str, str]:
    """Module path, PEFT's wrapper and name of a parameter that is not part of a LoRA; of rows for some tokens the name
    is empty."""
    name = tensor.name.removeprefix(PREFIX)
    if name.endswith(_TOKEN_ROWS):
        return name.removesuffix(_TOKEN_ROWS), "", ""
    path, _, last = name.rpartition(".")
    wrapper = _WRAPPER.search(path)
    return (path, "", last) if wrapper is None else (path[: wrapper.start()], wrapper[1], last)


def _check_originals(originals: list[PlannedSaved], saved: list[PlannedSaved], targets: BaseTargets) -> None:
    """Raises AdapterUnsupported for an original that nothing takes the place of."""
    places = {(one.shape.path, one.shape.name) for one in saved}
    stranger = next((one for one in originals if (one.shape.path, one.shape.name) not in places), None)
    if stranger is not None:
        raise AdapterUnsupported(
            f"{stranger.tensor.where} is a parameter of {targets.model_id!a} itself, without the adapter's own beside "
            "it, and no tensor is left out silently"
        )


def _without_doubles(saved: list[PlannedSaved]) -> list[PlannedSaved]:
    """One of each pair that PEFT writes as a module's own and as `modules_to_save`."""
    kept: dict[tuple[str, str, bool], PlannedSaved] = {}
    doubles: list[PlannedSaved] = []
    for one in saved:
        place = (one.shape.path, one.shape.name, one.shape.token_ids is None)
        first = kept.setdefault(place, one)
        if first is not one:
            is_pair = {_saved_name(each.tensor)[1] for each in (first, one)} == {"", "modules_to_save"}
            if is_pair and first.same_as is None:
                kept[place] = replace(first, same_as=one.tensor)
            else:
                doubles.append(one)
    return [*kept.values(), *doubles]


def _with_rows(saved: list[PlannedSaved]) -> list[PlannedSaved]:
    """Rows for some tokens in the whole weight, where the file has that as well."""
    rows = {one.shape.path: one for one in saved if one.shape.token_ids is not None}
    whole = {
        one.shape.path: _in_rows(one, rows[one.shape.path])
        for one in saved
        if one.shape.path in rows and one.shape.name == "weight" and one.shape.token_ids is None
    }
    left = [one for one in saved if one.shape.path not in whole or one.shape.name != "weight"]
    return [*left, *whole.values()]


def _in_rows(whole: PlannedSaved, rows: PlannedSaved) -> PlannedSaved:
    def make(read: Callable[[TensorInfo], Tensor]) -> Tensor:
        token_ids = torch.tensor(rows.shape.token_ids)
        return read(whole.tensor).index_copy_(0, token_ids, read(rows.tensor))

    return replace(whole, made=make, rows=rows)


def _saved(tensor: TensorInfo, path: str, name: str, config: PeftLoraConfig, targets: BaseTargets) -> PlannedSaved:
    """Raises AdapterUnsupported for a tensor that has no place in the model."""
    for word in tensor.name.split("."):
        if word in _REFUSED_PARTS:
            raise AdapterUnsupported(f"{tensor.where} is {_REFUSED_PARTS[word]}, which is not served")
    check_float(tensor)
    module = targets.modules.get(path)
    if module is not None and module.kind in ("linear", "embedding") and name in ("weight", ""):
        is_transposed = module.kind == "embedding" or module.is_conv1d
        rows, columns = module.out_features, module.in_features
        shape = (columns, rows) if is_transposed else (rows, columns)
        if not name:
            token_ids = config.token_rows(path, targets)
            if any(token_id >= shape[0] for token_id in token_ids) or module.is_conv1d:
                raise ShapeMismatch(f"{tensor.where} has rows for tokens that {targets.model_id!a} does not have")
            shape = (len(token_ids), shape[1])
            check_shape(tensor, shape)
            return PlannedSaved(SavedShape(path, "weight", shape, token_ids), tensor)
        _check_vocabulary(tensor, 0, module, targets)
        check_shape(tensor, shape)
        is_kept = not module.weight_sha256 or config.names_saved(path)
        return PlannedSaved(SavedShape(path, name, shape), tensor, "" if is_kept else module.weight_sha256)
    found = targets.parameters.get(path, {}).get(name)
    if found is None and is_of_media(path, targets):
        raise media_refusal(tensor, targets)
    if found is None:
        raise AdapterUnsupported(
            f"{tensor.where} is not a parameter of {targets.model_id!a} that an adapter can bring, and no tensor is "
            "left out silently"
        )
    check_shape(tensor, found)
    return PlannedSaved(SavedShape(path, name, found), tensor)


def _check_saved(
    own: list[PlannedSaved], classifier: Mapping[str, TensorInfo], config: PeftLoraConfig, targets: BaseTargets
) -> list[str]:
    """Names in the configuration that the base model does not have, which PEFT passes over. Raises AdapterInvalid where
    a parameter comes twice, or the configuration names what the base model has and the file does not."""
    seen: set[tuple[str, str]] = set()
    for one in own:
        if (place := (one.shape.path, one.shape.name)) in seen:
            raise AdapterInvalid(f"{one.tensor.where} is a second {one.shape.name} for the same module")
        seen.add(place)
    saved = PathEnds(one.shape.path for one in own)
    names = {name for name in config.modules_to_save if name not in saved}
    if classifier:
        names -= set(CLASSIFIER_NAMES)
    known = PathEnds((*targets.modules, *targets.experts, *targets.parameters, *targets.other_modules) if names else ())
    if missing := sorted(name for name in names if name in known):
        raise AdapterInvalid(f"{CONFIG_NAME}: modules_to_save names {ascii(missing)[:200]}, which is not there")
    if config.token_indices and not any(one.shape.token_ids is not None or one.rows for one in own):
        raise AdapterInvalid(f"{CONFIG_NAME} has trainable_token_indices, but {WEIGHTS_NAME} has no rows for them")
    return sorted(names)


# Last names of the modules whose saved weights PEFT ties where the configuration says so.
_TIED_BY_PEFT = ("embed_tokens", "lm_head")


def _tied(
    saved: list[PlannedSaved], originals: list[PlannedSaved], config: PeftLoraConfig, targets: BaseTargets
) -> list[PlannedSaved]:
    """With the parameters that stand for two, because the base model ties its head to its embedding: rows of tokens,
    where the configuration says so (ensure_weight_tying) whole weights, and the original of a saved one, which is the
    other's own."""
    if not targets.tied_head:
        return saved
    by_path = {one.shape.path: one for one in saved if one.shape.name == "weight"}
    ends = (targets.embedding, targets.tied_head)
    for here, there in (ends, ends[::-1]):
        one, other = by_path.get(here), by_path.get(there)
        if one is None:
            continue
        has_rows = one.shape.token_ids is not None or one.rows is not None
        is_tied = config.ties_weights and here.rpartition(".")[2] in _TIED_BY_PEFT
        if other is None and (has_rows or is_tied):
            saved = [*saved, _moved(one, there)]
        elif other is None:
            found = [_moved(each, there) for each in originals if each.shape.path == here]
            saved += [replace(each, weight_sha256=targets.modules[there].weight_sha256) for each in found]
        elif has_rows and other.shape.token_ids is None and other.rows is None:
            rows = one.rows or one
            saved = [each for each in saved if each is not other]
            saved.append(_in_rows(other, _moved(rows, there)))
    return saved


def _moved(one: PlannedSaved, path: str) -> PlannedSaved:
    rows = None if one.rows is None else _moved(one.rows, path)
    return replace(one, shape=replace(one.shape, path=path), rows=rows)


def _module(
    path: str, places: Places, entry: _Found, config: PeftLoraConfig, targets: BaseTargets, budget: Budget
) -> PlannedModule:
    tensor = next(iter(entry.values()))
    a, b, magnitude = entry.get("a"), entry.get("b"), entry.get("magnitude")
    if (a is None) is not (b is None) or (a is None and "bias" not in entry):
        missing = "A" if a is None else "B"
        raise AdapterInvalid(f"{tensor.where} has no lora_{missing} beside it")
    place = places.of(path)
    module = targets.modules.get(place) or targets.modules.get(renamed(place))
    if module is None:
        raise no_such_module(path, tensor, targets)
    rank, scale = 0, 1.0
    made = None
    if a is not None and b is not None:
        is_embedding = "lora_embedding_A" in a.name
        is_parameter = not is_embedding and config.names_parameter(f"{path}.weight")
        # Of a parameter, PEFT's factors make up its weight as it is kept: of these [in, out].
        is_transposed = is_parameter and (module.is_conv1d or module.kind == "embedding")
        if is_embedding is not (module.kind == "embedding") and not is_transposed:
            raise ShapeMismatch(f"{a.where} does not fit: {path!a} is of kind {module.kind}")
        if not is_parameter and not config.names_target(path):
            raise _not_named(a, "target_modules")
        rank, scale = config.rank_and_scale(f"{path}.weight" if is_parameter else path, budget)
        _check_rank(max(rank, a.shape[0] if a.shape else 0), a, targets)
        if is_transposed:
            made = partial(_transposed, a=a, b=b)
        of_inputs, of_outputs = (b, a) if is_transposed else (a, b)
        is_vocabulary = module.kind == "embedding"
        _check_vocabulary(of_inputs if is_vocabulary else of_outputs, is_vocabulary != is_transposed, module, targets)
        sizes = module.in_features, module.out_features
        num_inputs, num_outputs = sizes[::-1] if is_transposed else sizes
        check_shape(a, (rank, num_inputs))
        check_shape(b, (num_outputs, rank))
        for name, is_wanted, which in (
            ("use_dora", config.use_dora, "magnitude"),
            ("lora_bias", config.lora_bias and module.kind == "linear", "lora_bias"),
        ):
            if is_wanted is not (which in entry):
                raise AdapterInvalid(
                    f"{a.where} has {'no' if is_wanted else 'a'} {which.replace('_', ' ')} beside it, but {name} in "
                    f"{CONFIG_NAME} is {str(is_wanted).lower()}: the two files do not belong together"
                )
    for which in ("magnitude", "lora_bias", "bias"):
        if which in entry and module.kind == "router":
            raise AdapterUnsupported(f"{entry[which].where} belongs to a router, of which A and B are served")
        if which in entry:
            check_shape(entry[which], (module.out_features,))
    if "bias" in entry and not module.has_bias:
        raise AdapterInvalid(f"{entry['bias'].where} is a bias, which {path!a} of {targets.model_id!a} does not have")
    for one in entry.values():
        check_float(one)
    has_shift = "bias" in entry or "lora_bias" in entry or (magnitude is not None and module.has_bias)
    shape = FactorShape(
        module.path, rank, module.in_features, module.out_features, scale, magnitude is not None, has_shift
    )
    a, b = (a, b) if made is None else (None, None)
    return PlannedModule(shape, module, a, b, magnitude, entry.get("lora_bias"), entry.get("bias"), made=made)


def _transposed(read: Callable[[TensorInfo], Tensor], a: TensorInfo, b: TensorInfo) -> tuple[Tensor, Tensor]:
    return read(b).mT, read(a).mT


def _with_init(init: Init, module: PlannedModule, max_rank: int) -> PlannedModule:
    """With what PEFT takes out of the base model at load as further ranks. Raises RankLimit or ShapeMismatch."""
    a, b, shape = module.a, module.b, module.shape
    if a is None or b is None:
        return module
    if shape.rank > min(shape.in_features, shape.out_features):
        raise ShapeMismatch(f"{a.where} has rank {shape.rank}, more than its module's weight")
    if 2 * shape.rank > max_rank:
        raise RankLimit(
            f"{a.where} has rank {shape.rank} and makes with init_lora_weights {init!a} a term of rank "
            f"{2 * shape.rank}; this server takes ranks up to {max_rank}"
        )
    made = restored(init, module.target, a, b, shape.scale)
    return replace(module, shape=replace(shape, rank=2 * shape.rank), a=None, b=None, made=made)


def _quantized(config: LoftqConfig, modules: Sequence[PlannedModule]) -> list[PlannedSaved]:
    """The weights that replace the base's in modules with a low-rank term."""
    return [
        PlannedSaved(
            SavedShape(one.shape.path, "weight", (one.shape.out_features, one.shape.in_features)),
            one.a,
            made=quantized(config, one.target, one.shape.rank),
        )
        for one in modules
        if one.a is not None
    ]


def _check_beside_init(init: Init, modules: Sequence[PlannedModule], saved: Sequence[PlannedSaved]) -> None:
    """Raises AdapterUnsupported for what does not go together with an initialisation that changes the base model."""
    whole = {one.shape.path for one in saved}
    for one in modules:
        if one.made is not None:
            what = "target_parameters on"
        elif one.a is not None and one.shape.path in whole:
            what = "a saved parameter of"
        else:
            continue
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: init_lora_weights {init!a} together with {what} {one.shape.path!a} is not served"
        )


def _not_named(tensor: TensorInfo, field: str) -> AdapterInvalid:
    return AdapterInvalid(
        f"{tensor.where} is there, but {field} in {CONFIG_NAME} does not name its module: the two files do not belong "
        "together"
    )


def _check_rank(rank: int, tensor: TensorInfo, targets: BaseTargets) -> None:
    if rank > targets.max_rank:
        raise RankLimit(f"{tensor.shown} has rank {rank}; this server takes ranks up to {targets.max_rank}")


# --- experts ----------------------------------------------------------------------------------------------------------


def _check_beside_experts(config: PeftLoraConfig, modules: Sequence[PlannedModule]) -> None:
    """Raises AdapterUnsupported for what does not go together with terms of experts and routers, as in PEFT."""
    one = next((module.shape.path for module in modules if module.target.kind in ("router", "experts")), "")
    name = "alora_invocation_tokens" if config.invocation else "init_lora_weights" if config.init else ""
    if one and name:
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: {name} together with LoRA on {one!a} is not served; PEFT refuses it too"
        )


def _plan_experts(
    found: Mapping[str, _Found], places: Places, config: PeftLoraConfig, targets: BaseTargets, budget: Budget
) -> tuple[list[PlannedModule], set[str]]:
    """The modules of experts' tensors, and the paths that these have in `found`."""
    layers: dict[str, dict[int, str]] = {}  # paths by module and PEFT's layer around it, the outermost first
    single: dict[str, dict[tuple[str, int], str]] = {}  # paths by module, and a linear's name and expert
    for path in found if targets.experts else ():
        inner = path
        while inner.endswith(LAYER):
            inner = inner.removesuffix(LAYER)
        if (place := places.of(inner)) in targets.experts:
            layers.setdefault(place, {})[(len(path) - len(inner)) // len(LAYER)] = path
            continue
        rest, _, name = path.rpartition(".")
        module, _, number = rest.rpartition(".")
        module = renamed(places.of(module))
        if module in targets.experts and number.isdecimal() and number.isascii() and len(number) < 6:
            single.setdefault(module, {})[name, int(number)] = path
    modules = [
        one
        for module, paths in layers.items()
        for one in _plan_fused(
            module,
            min(paths.values(), key=len).removesuffix(LAYER),
            {at: found[path] for at, path in paths.items()},
            config,
            targets,
            budget,
        )
    ]
    for module, paths in single.items():
        modules += _plan_single(module, paths, found, config, targets, budget)
    seen: set[str] = set()
    for one in modules:
        if one.shape.path in seen:
            raise AdapterInvalid(f"{WEIGHTS_NAME} has terms of the experts {one.shape.path!a} twice")
        seen.add(one.shape.path)
    taken = [path for paths in (*layers.values(), *single.values()) for path in paths.values()]
    return modules, set(taken)


def _plan_fused(
    module: str,
    own: str,
    layers: Mapping[int, _Found],
    config: PeftLoraConfig,
    targets: BaseTargets,
    budget: Budget,
) -> Iterator[PlannedModule]:
    """Of a module's parameters that `target_parameters` names, PEFT wraps it for the first one first. A key says how
    many layers are outside, and not which parameter it is. `own`: the module's path in the adapter."""
    names = [name for name in targets.experts[module] if config.names_parameter(f"{own}.{name}")]
    first = next(iter(next(iter(layers.values())).values()))
    if not names:
        raise _not_named(first, "target_parameters")
    if sorted(layers) != list(range(len(names))):
        raise AdapterInvalid(
            f"{first.where}: {CONFIG_NAME} names the parameters {', '.join(names)} of {module!a}, and {WEIGHTS_NAME} "
            f"has tensors for {len(layers)}: the two files do not belong together"
        )
    for name, at in zip(names, sorted(layers, reverse=True), strict=True):
        a, b = _a_and_b(layers[at])
        target = targets.modules.get(f"{module}.{name}")
        if target is None:
            raise AdapterUnsupported(f"{a.where} adapts {name} of {module!a}, which is not served")
        rank, scale = config.rank_and_scale(f"{own}.{name}", budget)
        _check_rank(rank, a, targets)
        num_experts, num_inputs, num_outputs = target.num_experts, target.in_features, target.out_features
        if target.swaps_features:  # the weight is [experts, in, out], and the term that PEFT adds to it B @ A
            num_inputs, num_outputs = num_outputs, num_inputs
        check_shape(a, (num_experts * rank, num_inputs))
        check_shape(b, (num_outputs, rank * num_experts))
        shape = FactorShape(target.path, rank, target.in_features, target.out_features, scale, num_experts=num_experts)

        def make(
            read: Callable[[TensorInfo], Tensor],
            of: tuple[TensorInfo, TensorInfo] = (a, b),
            sizes: tuple[int, int, int] = (num_outputs, rank, num_experts),
            *,
            is_swapped: bool = target.swaps_features,
        ) -> tuple[Tensor, Tensor]:
            a, b = map(read, of)
            b = b.view(sizes).permute(2, 0, 1)  # [experts, out, rank]
            return (b.mT.flatten(0, 1), a.view(sizes[2], sizes[1], -1).mT) if is_swapped else (a, b)

        yield PlannedModule(shape, target, None, None, made=make)


def _plan_single(
    module: str,
    paths: Mapping[tuple[str, int], str],
    found: Mapping[str, _Found],
    config: PeftLoraConfig,
    targets: BaseTargets,
    budget: Budget,
) -> Iterator[PlannedModule]:
    """Linears of single experts (Transformers 4) as terms of the fused parameters: A's one below the other, B's on a
    diagonal, as PEFT converts them."""
    left = dict(paths)
    for parameter, parts in _FUSED.items():
        target = targets.modules.get(f"{module}.{parameter}")
        names = [next((name for name, _ in left if name in part), "") for part in parts]
        if target is None or not any(names):
            continue
        num_experts, num_outputs = target.num_experts, target.out_features // len(parts)
        wanted = [(name, expert) for expert in range(num_experts) for name in names]
        missing = next((one for one in wanted if one not in left), None)
        if missing is not None:
            raise AdapterInvalid(
                f"{WEIGHTS_NAME} has terms of some linears of {module!a}, but none of {missing[0] or 'its neighbour'} "
                f"of expert {missing[1]}: those that are fused are adapted together"
            )
        tensors: list[tuple[TensorInfo, TensorInfo]] = []
        ranks: set[tuple[int, float]] = set()
        for one in wanted:
            path = left.pop(one)
            a, b = _a_and_b(found[path])
            if not config.names_target(path):
                raise _not_named(a, "target_modules")
            rank, scale = config.rank_and_scale(path, budget)
            ranks.add((rank, scale))
            check_shape(a, (rank, target.in_features))
            check_shape(b, (num_outputs, rank))
            tensors.append((a, b))
        if len(ranks) > 1:
            raise AdapterUnsupported(
                f"{tensors[0][0].where}: the experts of {module!a} have several ranks or scales, which is not served"
            )
        ((rank, scale),) = ranks
        _check_rank(rank * len(parts), tensors[0][0], targets)
        shape = FactorShape(
            target.path, rank * len(parts), target.in_features, target.out_features, scale, num_experts=num_experts
        )

        def make(
            read: Callable[[TensorInfo], Tensor],
            of: Sequence[tuple[TensorInfo, TensorInfo]] = tensors,
            num_parts: int = len(parts),
        ) -> tuple[Tensor, Tensor]:
            b = [torch.block_diag(*(read(b) for _, b in of[i : i + num_parts])) for i in range(0, len(of), num_parts)]
            return torch.cat([read(a) for a, _ in of]), torch.stack(b)

        yield PlannedModule(shape, target, None, None, made=make)
    if left:
        path = next(iter(left.values()))
        tensor = next(iter(found[path].values()))
        raise AdapterUnsupported(f"{tensor.where} adapts a part of experts that is not served")


def _a_and_b(entry: _Found) -> tuple[TensorInfo, TensorInfo]:
    """Of experts, which have nothing else."""
    first = next(iter(entry.values()))
    for which, tensor in entry.items():
        check_float(tensor)
        if which not in ("a", "b"):
            raise AdapterUnsupported(f"{tensor.where} belongs to experts, of which A and B are served")
    if len(entry) < 2:
        raise AdapterInvalid(f"{first.where} has no lora_{'B' if 'a' in entry else 'A'} beside it")
    return entry["a"], entry["b"]


def _check_vocabulary(tensor: TensorInfo, dim: int, module: TargetModule, targets: BaseTargets) -> None:
    """Raises ShapeMismatch for a tensor of embedding or head that has more tokens in dimension `dim` than the base."""
    num_tokens = module.in_features if module.kind == "embedding" else module.out_features
    is_of_tokens = module.kind == "embedding" or num_tokens == targets.vocab_size
    if is_of_tokens and len(tensor.shape) == 2 and tensor.shape[dim] > num_tokens:
        raise ShapeMismatch(
            f"{tensor.where} has {tensor.shape[dim]} tokens, {targets.model_id!a} has {num_tokens}: an adapter that "
            "adds tokens is not served; use a base model with as many token embeddings"
        )


def check_shape(tensor: TensorInfo, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ShapeMismatch(
            f"{tensor.where} has shape {list(tensor.shape)}; base model and {CONFIG_NAME} make it {list(expected)}"
        )


def _warnings(
    config: PeftLoraConfig, targets: BaseTargets, found: Mapping[str, _Found], passed_over: Sequence[str]
) -> list[str]:
    """Oddities that do no harm."""
    warnings: list[str] = []
    if config.base_model and config.base_model != targets.model_id:
        warnings.append(f"was trained on {config.base_model!a}, served on {targets.model_id!a}")
    served = {end for path in found for end in path_ends(path)}
    missing = sorted((config.target_modules or frozenset()) - served)
    if missing:
        warnings.append(f"names the targets {ascii(missing)[:200]} but has no tensors for them")
    if passed_over:
        warnings.append(f"names {ascii(passed_over)[:200]} in modules_to_save, which the base model does not have")
    return warnings


def write_lora(plan: LoraPlan, layout: AdapterLayout, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the factors from the beginning of the layout on. Raises NonFinite, or what the file raises."""
    for run in _runs(plan, layout):
        if isinstance(run, PlannedModule):
            for place, tensor in _computed(run, layout, reader):
                out.pad_to(place)
                out.write(tensor)
            continue
        out.pad_to(run.target)
        try:
            for piece in reader.pieces(run.whole):
                out.write(piece)
        except NonFinite:
            for tensor in run.tensors:  # which one is it?
                for _ in reader.pieces(tensor):
                    pass
            raise


def write_classifier(plan: PlannedClassifier, layout: AdapterLayout, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the classifier at its place. Raises NonFinite, or what the file raises."""
    placed = layout.classifier
    assert placed is not None, "a classifier has its place in the layout"
    for tensor, place in ((plan.weight, placed.weight), (plan.bias, placed.bias)):
        if tensor is not None:
            out.pad_to(place)
            for piece in reader.pieces(tensor):
                out.write(piece)


def write_saved(plan: LoraPlan, layout: AdapterLayout, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the saved parameters at their places. Raises NonFinite, or what the file raises."""
    for saved, placed in zip(plan.saved, layout.saved, strict=True):
        out.pad_to(placed.offset)
        if saved.made is not None:
            made = saved.made(partial(_read, reader=reader, dtype=_wide(layout.dtype)))
            out.write(_narrow(made, layout.dtype, saved.shape.path))
            continue
        for piece in reader.pieces(saved.tensor):
            out.write(piece)


def without_base_copies(plan: LoraPlan, reader: PieceReader) -> LoraPlan:
    """The plan without parameters that are mere copies of the base model's, which PEFT saves beside a LoRA on
    embeddings. Raises AdapterInvalid where a parameter that comes twice has two values."""
    kept: list[PlannedSaved] = []
    for one in plan.saved:
        digest = reader.sha256(one.tensor) if one.weight_sha256 or one.same_as else ""
        if one.same_as is not None and reader.sha256(one.same_as) != digest:
            raise AdapterInvalid(
                f"{one.same_as.where} is a second {one.shape.name} for the same module, with other values"
            )
        if not digest or digest != one.weight_sha256:
            kept.append(one)
        elif one.rows is not None:
            kept.append(one.rows)
    return replace(plan, saved=tuple(kept))


@dataclass(slots=True)
class _Run:
    """Tensors without a gap between them."""

    tensors: list[TensorInfo]
    target: int  # where their bytes begin in the layout

    @property
    def whole(self) -> TensorInfo:
        """As one tensor, with the first one's name."""
        return replace(self.tensors[0], num_bytes=sum(tensor.num_bytes for tensor in self.tensors))


def _runs(plan: LoraPlan, layout: AdapterLayout) -> Iterator[_Run | PlannedModule]:
    """In the layout's order. A module comes by itself for what is computed of its tensors."""
    itemsize = DTYPES[layout.dtype].itemsize
    run: _Run | None = None
    source_end = target_end = -1
    for module, placed in zip(plan.modules, layout.factors, strict=True):
        for tensor, target in ((module.a, placed.a_offset), (module.b, placed.b_offset)):
            if tensor is None:
                continue
            if run and (tensor.offset, target, tensor.dtype) == (source_end, target_end, run.tensors[0].dtype):
                run.tensors.append(tensor)
            else:
                if run:
                    yield run
                run = _Run([tensor], target)
            source_end = tensor.offset + tensor.num_bytes
            target_end = target + tensor.num_bytes // DTYPE_BYTES[tensor.dtype] * itemsize
        if not module.shape.is_plain or module.made is not None:
            if run:
                yield run
            run = None
            yield module
    if run:
        yield run


def _computed(module: PlannedModule, layout: AdapterLayout, reader: PieceReader) -> Iterator[tuple[int, Tensor]]:
    """Places and values that are computed of a module's tensors, in the order of the places."""
    path = module.shape.path
    placed = next(placed for placed in layout.factors if placed.shape.path == path)
    made = None
    if module.made is not None:
        made = a, b = module.made(partial(_read, reader=reader, dtype=_wide(layout.dtype)))
        yield placed.a_offset, _narrow(a, layout.dtype, path)
        yield placed.b_offset, _narrow(b, layout.dtype, path)
    gain, shift = rescaling(module, layout.dtype, reader, made)
    if gain is not None:
        yield placed.gain_offset, _narrow(gain, layout.dtype, path)
    if shift is not None:
        yield placed.shift_offset, _narrow(shift, layout.dtype, path)


def _read(tensor: TensorInfo, reader: PieceReader, dtype: torch.dtype) -> Tensor:
    """A whole tensor, widened. Raises NonFinite, or what the file raises."""
    return torch.cat([piece.to(dtype) for piece in reader.pieces(tensor)]).view(tensor.shape)


def _wide(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32


# Of a base weight, that are compared with an adapter's at once.
_BLOCK_BYTES = 8 << 20


def rescaling(
    module: PlannedModule, dtype: str, reader: PieceReader, made: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """(gain [out], shift [out]) of y = gain * (W x + bias + scale * B A x) + shift, in float32 at least. `made`: A and
    B, where they are not the module's own tensors.

    DoRA (arXiv 2402.09353): gain is the magnitude over the norm of each row of W + scale * B A. Raises NonFinite, or
    what the file raises.
    """
    wide = _wide(dtype)
    gain = None if module.gain is None else _read(module.gain, reader, wide).flatten()
    if module.shape.is_plain or (gain is not None and not module.shape.has_shift):
        return gain, None
    assert module.target.weights is not None, "targets of a loaded model have their weights"
    weight, base_bias = module.target.weights()

    def read(tensor: TensorInfo | None) -> Tensor | None:
        return None if tensor is None else _read(tensor, reader, wide).to(weight.device)

    magnitude, lora_bias, bias = read(module.magnitude), read(module.lora_bias), read(module.bias)
    gain = None if gain is None else gain.to(weight.device)
    if magnitude is not None:
        a, b = (read(module.a), read(module.b)) if made is None else (one.to(weight.device) for one in made)
        assert a is not None, "a magnitude has its factors"
        assert b is not None
        norms: list[Tensor] = []
        num_rows = max(1, _BLOCK_BYTES // (weight.shape[1] * wide.itemsize))
        for start in range(0, weight.shape[0], num_rows):
            update = b[start : start + num_rows] @ a
            rows = weight[start : start + num_rows].to(wide) + module.shape.scale * update
            norms.append(torch.linalg.vector_norm(rows, dim=1))
            checkpoint()
        gain = magnitude / torch.cat(norms)
    if not module.shape.has_shift:
        return gain, None
    old = base_bias.to(wide) if base_bias is not None else torch.zeros_like(weight[:, 0], dtype=wide)
    shift = -old if gain is None else -gain * old
    shift += old if bias is None else bias
    if lora_bias is not None:
        shift += module.shape.scale * lora_bias
    return gain, shift


def _narrow(tensor: Tensor, dtype: str, path: str) -> Tensor:
    """As it is stored. Raises NonFinite."""
    found = tensor.to(DTYPES[dtype]).contiguous().cpu()
    if not bool(torch.isfinite(found).all()):
        raise NonFinite(f"{path!a}: what is computed of its tensors is not finite in the base model's dtype")
    return found
