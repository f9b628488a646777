"""Frozen model with an adapter: checked as by a server, loaded by PEFT.

PEFT makes terms for every module that a configuration names, and looks for tensors by the names that the model's
modules have now. A server goes by the tensors, and finds modules by the names that they had earlier too. Names and
configuration are therefore brought into PEFT's form first.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel, PeftModelForCausalLM, PeftType, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from loraplex_adapters.cache.storage import check_adapter as plan_of
from loraplex_adapters.formats.files import CONFIG_NAME, WEIGHTS_NAME
from loraplex_adapters.formats.peft_config import MAX_RANK, parse_lora_config, parse_peft_fields
from loraplex_adapters.formats.peft_patterns import match_budget
from loraplex_adapters.formats.peft_places import PREFIX, Places
from loraplex_adapters.sources.directory import FolderSource
from loraplex_adapters.weights import BaseTargets
from loraplex_contracts.errors import AdapterInvalid, AdapterNotFound, AdapterUnsupported, UnsafeFormat
from loraplex_server.backends.backend import Backend
from loraplex_server.library_errors import error_line
from loraplex_server.model.loader import adopt_model, reading

_FACTORS = (".lora_A.", ".lora_embedding_A")


def check_files(adapter: Path) -> None:
    """Checks that the adapter's files are there. Raises AdapterNotFound, UnsafeFormat or AdapterInvalid."""
    if not adapter.is_dir():
        raise AdapterNotFound(f"there is no adapter in {adapter}; give a directory that PEFT has saved")
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if (adapter / name).is_file():
            continue
        if any(adapter.glob("adapter_model.*")) and name == WEIGHTS_NAME:
            raise UnsafeFormat(f"{adapter} has no {WEIGHTS_NAME}; other formats can run code, save it as safetensors")
        raise AdapterInvalid(f"{adapter} has no {name}; give a directory that PEFT has saved")


def with_adapter(model: PreTrainedModel, base: str, adapter: Path) -> PeftModel:
    """The model with the adapter, which changes it in place. `base`: its name in errors. Raises UnsupportedModel,
    AdapterInvalid or one of its kinds, as a server that loads both."""
    targets = _targets(model, base)
    plan = plan_of(adapter.resolve().name, FolderSource(adapter.resolve().name, adapter), targets)
    if plan.lora is None or plan.lora.classifier is not None:
        what = "has Medusa heads alone" if plan.lora is None else "classifies and writes no text"
        raise AdapterUnsupported(f"{adapter} {what}: there is nothing to train heads for")
    try:
        tensors = load_file(adapter / WEIGHTS_NAME)
        is_lora = {name: plan.heads is None or name.startswith(PREFIX) for name in tensors}  # heads may lie among them
        names = _names([name for name in tensors if is_lora[name]], targets)
        config: Any = PeftConfig.from_pretrained(str(adapter))
        config.task_type, config.inference_mode = "CAUSAL_LM", True
        if config.peft_type == "LORA":
            _name_what_is_there(config, adapter, names, targets)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = PeftModelForCausalLM(model, config)
            result: Any = set_peft_model_state_dict(loaded, {new: tensors[old] for old, new in names.items()})
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError, SafetensorError) as error:
        raise AdapterUnsupported(
            f"a server takes {adapter}, but PEFT, which is trained with, cannot load it: {error_line(error)}"
        ) from error
    # PEFT leaves out tensors that it has no place for, and makes terms up where it finds no tensors.
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING[PeftType(config.peft_type)]
    for keys, where in ((result.unexpected_keys, "in the file"), (result.missing_keys, "in PEFT's model")):
        if lost := next((key for key in keys if prefix in key), ""):
            raise AdapterUnsupported(
                f"a server takes {adapter}, but PEFT, which is trained with, loads another adapter: {lost} is {where} "
                "alone"
            )
    return loaded


def _targets(model: PreTrainedModel, base: str) -> BaseTargets:
    """The base model as formats of adapters see it. A server changes the model that it serves: here that is a copy with
    the same weights."""
    weights = {id(parameter): parameter for parameter in model.parameters()}
    as_served = copy.deepcopy(model, weights)
    with reading(base):
        served = adopt_model(
            as_served, model_id=base, backend=Backend(model.device), replaces_decoder=False, verify=False
        )
        return served.base_targets(MAX_RANK)


def _names(names: Sequence[str], targets: BaseTargets) -> dict[str, str]:
    """The tensors' names with the paths that their modules have in the base model, by their own names."""
    paths = [name.removeprefix(PREFIX) for name in names]
    places = Places({start for path in paths for start in _starts(path)}, targets)
    known = {*targets.modules, *targets.experts, *targets.parameters}
    found: dict[str, str] = {}
    for name, path in zip(names, paths, strict=True):
        start = next((start for start in _starts(path) if places.of(start) in known), None)
        found[name] = name if start is None else PREFIX + places.of(start) + path.removeprefix(start)
    return found


def _starts(path: str) -> Iterator[str]:
    """'a.b.c', 'a.b' and 'a' of 'a.b.c'."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _name_what_is_there(config: Any, adapter: Path, names: Mapping[str, str], targets: BaseTargets) -> None:
    """Has a LoRA's configuration name the modules that the file has tensors of, with their ranks and alphas."""
    own = parse_lora_config(parse_peft_fields((adapter / CONFIG_NAME).read_bytes()))
    modules: list[str] = []
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    budget = match_budget()
    for old, new in names.items():
        factor = next((one for one in _FACTORS if one in new), None)
        if factor is None:
            continue
        path, old_path = (name.removeprefix(PREFIX).rpartition(factor)[0] for name in (new, old))
        if path in targets.experts or own.names_parameter(f"{old_path}.weight"):
            continue
        if path not in targets.modules:
            return  # of single experts: PEFT knows what they are called now
        rank, scale = own.rank_and_scale(old_path, budget)
        modules.append(path)
        ranks[re.escape(path)] = rank
        alphas[re.escape(path)] = scale * (math.sqrt(rank) if own.use_rslora else rank)
    if not modules:
        return  # they are all parameters
    config.target_modules, config.exclude_modules = set(modules), None
    config.layers_to_transform = config.layers_pattern = None
    config.rank_pattern = ranks | config.rank_pattern  # the first that matches counts; others are of parameters
    config.alpha_pattern = alphas | config.alpha_pattern
