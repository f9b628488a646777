"""Saved parameters of PEFT files: modules_to_save, trainable tokens, embeddings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from loraplex_adapters.formats.files import CONFIG_NAME, WEIGHTS_NAME
from loraplex_adapters.formats.peft_config import CLASSIFIER_NAMES, PeftLoraConfig
from loraplex_adapters.formats.peft_places import PREFIX, PathEnds, Places, is_of_media, media_refusal
from loraplex_adapters.formats.peft_plan import LoraPlan, PlannedSaved, check_shape, check_vocabulary
from loraplex_adapters.io.safetensors import PieceReader, TensorInfo, check_float
from loraplex_adapters.weights import BaseTargets, SavedShape
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported, ShapeMismatch

# The wrapper of a parameter as it was, which PEFT does not compute with.
ORIGINAL = "original_module"
_TOKEN_ROWS = ".token_adapter.trainable_tokens_delta"
# The wrapper that PEFT puts around a module whose parameters it saves. With embeddings that were resized, or that the
# user wants to be saved, it writes all it has of them: twice the weight that it computes with, and the original, which
# it does not use.
_WRAPPER = re.compile(r"\.(?:token_adapter\.)?(base_layer|modules_to_save|original_module)(?:\.default)?$")
_REFUSED_PARTS: Mapping[str, str] = {
    "lora_diag": "a diagonal of KaSA",
    "lora_E": "AdaLoRA",
    "lora_ranknum": "AdaLoRA",
}
# Last names of embeddings and heads that PEFT ties where the configuration says so.
_TIED_BY_PEFT = ("embed_tokens", "lm_head")


def is_tied(path: str, config: PeftLoraConfig, targets: BaseTargets) -> bool:
    """True for a head whose factors are the embedding's: then PEFT has the embedding alone in `target_modules`."""
    return path == targets.tied_head and _ties(targets.embedding, config)


def saved_name(tensor: TensorInfo) -> tuple[str, str, str]:
    """Module path, PEFT's wrapper and name of a parameter that is not part of a LoRA; of rows for some tokens the name
    is empty."""
    name = tensor.name.removeprefix(PREFIX)
    if name.endswith(_TOKEN_ROWS):
        return name.removesuffix(_TOKEN_ROWS), "", ""
    path, _, last = name.rpartition(".")
    wrapper = _WRAPPER.search(path)
    return (path, "", last) if wrapper is None else (path[: wrapper.start()], wrapper[1], last)


def plan_saved(
    tensors: Iterable[TensorInfo],
    places: Places,
    classifier: Mapping[str, TensorInfo],
    config: PeftLoraConfig,
    targets: BaseTargets,
) -> tuple[list[PlannedSaved], list[str]]:
    """The parameters of these tensors, and names in the configuration that the base model does not have. `classifier`:
    the tensors of one, by name. Raises AdapterInvalid or one of its kinds."""
    own: list[PlannedSaved] = []
    originals: list[PlannedSaved] = []
    for tensor in tensors:
        path, wrapper, name = saved_name(tensor)
        one = _saved(tensor, places.of(path), name, config, targets)
        (originals if wrapper == ORIGINAL else own).append(one)
    _check_originals(originals, own, targets)
    own = _tied(_with_rows(_without_doubles(own)), originals, config, targets)
    return own, _check_saved(own, classifier, config, targets)


def _saved(tensor: TensorInfo, path: str, name: str, config: PeftLoraConfig, targets: BaseTargets) -> PlannedSaved:
    """The planned saved parameter of a tensor. Raises AdapterUnsupported for one that has no place in the model."""
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
            if module.kind == "linear" and module.has_bias:
                raise AdapterUnsupported(
                    f"{tensor.where} has rows for tokens of a linear with a bias, which PEFT leaves out then; that is "
                    "not served"
                )
            if not module.is_lookup:
                raise AdapterUnsupported(
                    f"{tensor.where} has rows for tokens of an embedding that does more than look rows up, which PEFT "
                    "leaves out then; that is not served"
                )
            token_ids = config.token_rows(path, targets)
            if any(token_id >= shape[0] for token_id in token_ids) or module.is_conv1d:
                raise ShapeMismatch(f"{tensor.where} has rows for tokens that {targets.model_id!a} does not have")
            shape = (len(token_ids), shape[1])
            check_shape(tensor, shape)
            return PlannedSaved(SavedShape(path, "weight", shape, token_ids), tensor)
        check_vocabulary(tensor, 0, module, targets)
        check_shape(tensor, shape)
        is_kept = not module.weight_sha256 or config.names_saved(path)
        return PlannedSaved(SavedShape(path, name, shape), tensor, "" if is_kept else module.weight_sha256)
    return plan_parameter(tensor, path, name, targets)


def plan_parameter(tensor: TensorInfo, path: str, name: str, targets: BaseTargets) -> PlannedSaved:
    """The planned parameter of a module that is neither linear nor embedding. Raises AdapterUnsupported for one that
    has no place in the model."""
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


def _check_originals(originals: list[PlannedSaved], saved: list[PlannedSaved], targets: BaseTargets) -> None:
    """Raises AdapterUnsupported for an original that nothing takes the place of."""
    places = {(one.shape.path, one.shape.name) for one in saved}
    unpaired = next((one for one in originals if (one.shape.path, one.shape.name) not in places), None)
    if unpaired is not None:
        raise AdapterUnsupported(
            f"{unpaired.tensor.where} is a parameter of {targets.model_id!a} itself, without the adapter's own beside "
            "it, and no tensor is left out silently"
        )


def _without_doubles(saved: list[PlannedSaved]) -> list[PlannedSaved]:
    """The parameters with one of each pair that PEFT writes as a module's own and as `modules_to_save`."""
    kept: dict[tuple[str, str, bool], PlannedSaved] = {}
    doubles: list[PlannedSaved] = []
    for one in saved:
        place = (one.shape.path, one.shape.name, one.shape.token_ids is None)
        first = kept.setdefault(place, one)
        if first is not one:
            is_pair = {saved_name(each.tensor)[1] for each in (first, one)} == {"", "modules_to_save"}
            if is_pair and first.same_as is None:
                kept[place] = replace(first, same_as=one.tensor)
            else:
                doubles.append(one)
    return [*kept.values(), *doubles]


def _with_rows(saved: list[PlannedSaved]) -> list[PlannedSaved]:
    """The parameters with rows for some tokens put into the whole weight, where the file has that as well."""
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


def _tied(
    saved: list[PlannedSaved], originals: list[PlannedSaved], config: PeftLoraConfig, targets: BaseTargets
) -> list[PlannedSaved]:
    """The saved parameters, with those that stand for two because the base model ties its head to its embedding: rows
    of tokens, where the configuration says so (ensure_weight_tying) whole weights, those that PEFT loads into the base
    model, and the original of a saved one, which is the other's own."""
    if not targets.tied_head:
        return saved
    by_path = {one.shape.path: one for one in saved if one.shape.name == "weight"}
    ends = (targets.embedding, targets.tied_head)
    for here, there in (ends, ends[::-1]):
        one, other = by_path.get(here), by_path.get(there)
        if one is None:
            continue
        # PEFT ties rows where the embedding has them, not where the head alone does.
        has_rows = here == targets.embedding and (one.shape.token_ids is not None or one.rows is not None)
        if has_rows and targets.modules[there].has_bias:
            raise AdapterUnsupported(
                f"{(one.rows or one).tensor.where} has rows for tokens, of a weight that the model's head shares, "
                "whose bias PEFT leaves out then; that is not served"
            )
        is_whole = one.shape.token_ids is None
        if other is None and (has_rows or (is_whole and (_ties(here, config) or _is_of_base(one, config)))):
            saved = [*saved, _moved(one, there)]
        elif other is None:
            found = [_moved(each, there) for each in originals if each.shape.path == here]
            saved += [replace(each, weight_sha256=targets.modules[there].weight_sha256) for each in found]
        elif has_rows and other.shape.token_ids is None and other.rows is None:
            rows = one.rows or one
            saved = [each for each in saved if each is not other]
            saved.append(_in_rows(other, _moved(rows, there)))
    return saved


def _ties(path: str, config: PeftLoraConfig) -> bool:
    """True if PEFT ties the embedding or head at `path` to the other one."""
    return config.ties_weights and path.rpartition(".")[2] in _TIED_BY_PEFT


def _is_of_base(one: PlannedSaved, config: PeftLoraConfig) -> bool:
    """True if PEFT loads the weight into the base model's own, and not into a copy beside it."""
    wrapper = saved_name(one.tensor)[1]
    return wrapper == "base_layer" or (not wrapper and not config.names_saved(one.shape.path))


def _moved(one: PlannedSaved, path: str) -> PlannedSaved:
    rows = None if one.rows is None else _moved(one.rows, path)
    return replace(one, shape=replace(one.shape, path=path), rows=rows)


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


def without_base_copies(plan: LoraPlan, reader: PieceReader) -> LoraPlan:
    """The plan without parameters that are mere copies of the base model's, which PEFT saves beside a LoRA on
    embeddings. Raises AdapterInvalid where a parameter that comes twice has two values, AdapterUnsupported where
    what has to be a copy is none."""
    for one in plan.copies:
        if reader.sha256(one.tensor) != one.weight_sha256:
            raise AdapterUnsupported(
                f"{one.tensor.where} is another weight than the base model's, beside {plan.format}"
            )
    for first, second in plan.doubles:
        if reader.sha256(first) != reader.sha256(second):
            raise AdapterInvalid(f"{second.where} is a second {first.name} for the same module, with other values")
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
