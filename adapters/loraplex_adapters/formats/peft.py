"""PEFT LoRA: plan against the base model.

The plan is made of the configuration and the file's header. Every tensor of the file ends up in the plan, or the load
fails with its name; so does a module that the base model lacks, a wrong shape, a rank over the limit. Modules may have
ranks and scales of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from loraplex_adapters.formats.files import CONFIG_NAME, WEIGHTS_NAME
from loraplex_adapters.formats.peft_config import CLASSIFIER_NAMES, MAX_LABELS, PeftLoraConfig
from loraplex_adapters.formats.peft_experts import check_beside_experts, plan_experts
from loraplex_adapters.formats.peft_inits import Init, check_init, restored
from loraplex_adapters.formats.peft_loftq import LoftqConfig, quantized
from loraplex_adapters.formats.peft_patterns import Budget, match_budget
from loraplex_adapters.formats.peft_places import PREFIX, Places, no_such_module, renamed
from loraplex_adapters.formats.peft_plan import (
    Factor,
    Found,
    LoraPlan,
    PlannedClassifier,
    PlannedModule,
    PlannedSaved,
    check_bias,
    check_rank,
    check_shape,
    check_vocabulary,
    not_named,
    not_together,
    rank_limit,
)
from loraplex_adapters.formats.peft_saved import ORIGINAL, is_tied, plan_saved, saved_name
from loraplex_adapters.formats.peft_targets import path_ends
from loraplex_adapters.io.safetensors import TensorInfo, check_float
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.weights import BaseTargets, ClassifierShape, FactorShape, SavedShape
from loraplex_contracts.adapters import ClassifierInfo
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported, ShapeMismatch

# The tensor of a module by the part of a key that names it. Embeddings have names of their own.
_LINEAR_FACTORS: Mapping[str, Factor] = {"lora_A": "a", "lora_B": "b"}
_EMBEDDING_FACTORS: Mapping[str, Factor] = {"lora_embedding_A": "a", "lora_embedding_B": "b"}
_FACTORS: Mapping[str, Factor] = {**_LINEAR_FACTORS, **_EMBEDDING_FACTORS, "lora_magnitude_vector": "magnitude"}


def plan_lora(config: PeftLoraConfig, tensors: Mapping[str, TensorInfo], targets: BaseTargets) -> LoraPlan:
    """The plan of a LoRA. Raises AdapterInvalid or one of its kinds (AdapterUnsupported, BaseMismatch, ShapeMismatch,
    RankLimit)."""
    found: dict[str, Found] = {}
    others: list[TensorInfo] = []
    saved: dict[str, TensorInfo] = {}  # of a classifier
    doubles: list[tuple[TensorInfo, TensorInfo]] = []
    for tensor in tensors.values():
        checkpoint()
        path, which = _parts(tensor)
        if which is not None:
            if found.setdefault(path, {}).setdefault(which, tensor) is not tensor:
                name = {"a": "lora_A", "b": "lora_B"}.get(which, which)
                raise AdapterInvalid(f"{tensor.where} is a second {name} for the same module")
        elif config.classifies != "no" and (name := _name_in_classifier(tensor)):
            if saved_name(tensor)[1] != ORIGINAL:
                _keep(saved, name, tensor, doubles, "of a classifier")
        else:
            others.append(tensor)
    places = Places(found, targets)
    if not found:
        raise AdapterInvalid(f"{WEIGHTS_NAME} has no LoRA tensors")
    parameters: list[TensorInfo] = []
    originals: list[TensorInfo] = []
    for tensor in others:
        path, wrapper, name = saved_name(tensor)
        if name != "bias" or places.of(path) not in targets.modules:
            parameters.append(tensor)
        elif wrapper == ORIGINAL:
            originals.append(tensor)
        else:
            _keep(found.setdefault(path, {}), "bias", tensor, doubles, "for the same module")
    parameters += (one for one in originals if "bias" not in found.get(saved_name(one)[0], {}))  # which is refused
    own, passed_over = plan_saved(parameters, places, saved, config, targets)
    budget = match_budget()
    experts, taken = plan_experts(found, places, config, targets, budget)
    modules = [
        _module(path, places, entry, config, targets, budget) for path, entry in found.items() if path not in taken
    ]
    modules += experts
    check_beside_experts(config, modules)
    if config.init is not None:
        num_decompositions = 1 if config.loftq is None else config.loftq.num_iterations - 1
        check_init(config.init, [one.target for one in modules if one.shape.rank], targets, num_decompositions)
        _check_beside_init(config.init, modules, own)
    if config.loftq is not None:
        own += _quantized(config.loftq, modules)
    elif config.init is not None:
        modules = [_with_init(config.init, module, targets.max_rank) for module in modules]
    copies: tuple[PlannedSaved, ...] = ()
    if config.invocation:
        # Only as copies of the base model's may weights lie beside a LoRA on the head.
        copies = tuple(one for one in own if one.weight_sha256 and one.rows is None and one.same_as is None)
        own = [one for one in own if one not in copies]
        _check_activated(config, modules, own, targets)
    modules.sort(key=lambda module: module.shape)
    return LoraPlan(
        modules=tuple(modules),
        saved=tuple(sorted(own, key=lambda one: (one.shape.path, one.shape.name))),
        warnings=tuple(_warnings(config, targets, found, passed_over)),
        classifier=None if config.classifies == "no" else _classifier(config, saved, targets),
        invocation=config.invocation,
        format=", ".join(config.options),
        base_model=config.base_model,
        init=config.init or "",
        doubles=tuple(doubles),
        copies=copies,
    )


def _keep(
    kept: MutableMapping[Any, TensorInfo],
    name: str,
    tensor: TensorInfo,
    doubles: list[tuple[TensorInfo, TensorInfo]],
    whose: str,
) -> None:
    """Keeps the first of a pair that PEFT writes as a module's own and as `modules_to_save`. Raises AdapterInvalid for
    any other second one."""
    first = kept.setdefault(name, tensor)
    if first is tensor:
        return
    if {saved_name(one)[1] for one in (first, tensor)} != {"", "modules_to_save"}:
        raise AdapterInvalid(f"{tensor.where} is a second {name} {whose}")
    doubles.append((first, tensor))


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
    """The part of a classifier that a tensor is, `weight` or `bias`; empty for a tensor that is not a classifier's."""
    module, _, name = saved_name(tensor)
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
    """The factor that a key names: by its part and the words behind it, an adapter's name among them or not."""
    kind = words.pop() if words and words[-1] in ("weight", "bias") else ""
    if part == "lora_B" and kind == "bias" and len(words) <= 1:
        return "lora_bias"
    is_wrong = (part in _LINEAR_FACTORS and not kind) or (part in _EMBEDDING_FACTORS and kind)
    if len(words) > 1 or kind == "bias" or is_wrong:
        raise AdapterInvalid(f"{tensor.where} is not named as PEFT names its tensors")
    return _FACTORS[part]


def _module(
    path: str, places: Places, entry: Found, config: PeftLoraConfig, targets: BaseTargets, budget: Budget
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
        # PEFT's factors of a parameter make up its weight as it is kept: here [in, out].
        is_transposed = is_parameter and (module.is_conv1d or module.kind == "embedding")
        if is_embedding is not (module.kind == "embedding") and not is_transposed:
            raise ShapeMismatch(f"{a.where} does not fit: {path!a} is of kind {module.kind}")
        listed = places.name_of(targets.embedding) if is_tied(module.path, config, targets) else path
        if not is_parameter and (field := config.targets.field_against(listed)):
            raise not_named(a, field)
        rank, scale = config.rank_and_scale(f"{path}.weight" if is_parameter else path, budget)
        if config.init in ("pissa", "olora"):
            rank = min(rank, module.in_features, module.out_features)  # of what PEFT takes out of the weight
        check_rank(max(rank, a.shape[0] if a.shape else 0), a, targets)
        if is_transposed:
            made = partial(_transposed, a=a, b=b)
        of_inputs, of_outputs = (b, a) if is_transposed else (a, b)
        is_vocabulary = module.kind == "embedding"
        check_vocabulary(of_inputs if is_vocabulary else of_outputs, is_vocabulary != is_transposed, module, targets)
        sizes = module.in_features, module.out_features
        num_inputs, num_outputs = sizes[::-1] if is_transposed else sizes
        check_shape(a, (rank, num_inputs))
        check_shape(b, (num_outputs, rank))
        for name, is_wanted, which in (
            ("use_dora", config.use_dora, "magnitude"),
            ("lora_bias", config.lora_bias and module.kind == "linear", "lora_bias"),
        ):
            if is_wanted is not (which in entry):
                raise not_together(
                    f"{a.where} has {'no' if is_wanted else 'a'} {which.replace('_', ' ')} beside it, but {name} in "
                    f"{CONFIG_NAME} is {str(is_wanted).lower()}"
                )
    for which in ("magnitude", "lora_bias", "bias"):
        if which in entry and module.kind == "router":
            raise AdapterUnsupported(f"{entry[which].where} belongs to a router, of which A and B are served")
        if which in entry:
            check_shape(entry[which], (module.out_features,))
    if "bias" in entry:
        check_bias(entry["bias"], module, targets)
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
    """The module with what PEFT takes out of the base model at load as further ranks. Raises RankLimit."""
    a, b, shape = module.a, module.b, module.shape
    if a is None or b is None:
        return module
    if 2 * shape.rank > max_rank:
        what = f"{a.where} has rank {shape.rank} and makes with init_lora_weights {init!a} a term of"
        raise rank_limit(what, 2 * shape.rank, max_rank)
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


def _warnings(
    config: PeftLoraConfig, targets: BaseTargets, found: Mapping[str, Found], passed_over: Sequence[str]
) -> list[str]:
    """Warnings of oddities that do no harm."""
    warnings: list[str] = []
    if config.base_model and not targets.is_called(config.base_model):
        warnings.append(f"was trained on {config.base_model!a}, served on {targets.model_id!a}")
    served = {end for path in found for end in path_ends(path)}
    missing = sorted((config.target_modules or frozenset()) - served)
    if missing:
        warnings.append(f"names the targets {ascii(missing)[:200]} but has no tensors for them")
    if passed_over:
        warnings.append(f"names {ascii(passed_over)[:200]} in modules_to_save, which the base model does not have")
    return warnings
