"""PEFT's LoRA configuration (`adapter_config.json`).

Every field that changes the mathematics is either carried out or refused by name; an unknown field is refused too,
unless it is empty: it may belong to a new variant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, cast

from loraplex_adapters.formats.files import CONFIG_NAME, MAX_BASE_CHARS, MAX_CONFIG_BYTES
from loraplex_adapters.formats.peft_inits import HOW_TO_CONVERT, Init
from loraplex_adapters.formats.peft_loftq import LoftqConfig, parse_loftq
from loraplex_adapters.formats.peft_patterns import Budget, ModulePattern, compile_budget, compile_pattern
from loraplex_adapters.formats.peft_targets import TargetChoice, parse_targets, path_ends
from loraplex_adapters.io.source_files import parse_object
from loraplex_adapters.weights import BaseTargets
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported

MAX_PATTERNS = 4096
MAX_RANK = 1 << 16
PEFT_DEFAULT = 8  # of `r`, and of alpha as it is, where the configuration leaves them out
MAX_ALPHA = float(1 << 16)
MAX_TOKEN_ROWS = 1 << 14
MAX_INVOCATION_TOKENS = 1 << 10
MAX_LABELS = 4096
MAX_LABEL_CHARS = 256
# Names that Transformers gives a classifier on top of a model.
CLASSIFIER_NAMES = ("score", "classifier")
Classifies = Literal["no", "texts", "tokens"]
_CLASSIFIERS: Mapping[str, Classifies] = {"SEQ_CLS": "texts", "TOKEN_CLS": "tokens"}

# Empty (null, false, [], {}) is fine; anything else changes what the adapter computes.
_REFUSED: Mapping[str, str] = {
    "layer_replication": "layers repeated by the adapter",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "megatron_config": "a Megatron model",
    "router": "routing between adapters",
}
# Initialisations that left the base model as it was.
_CLEAN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
# Initialisations that changed the base model and cannot be repeated at load, by the beginning of their names.
_REFUSED_INITS: Mapping[str, str] = {
    "pissa_niter_": "took a part out of the base model that depends on random numbers",
    "corda": "took a part out of the base model that depends on data",
    "lora_ga": "took a part out of the base model that depends on gradients, and PEFT does not repeat that at load",
}
# Only training depends on these.
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying",
    "merge_weights",
    "lorap_lr_ratio", "lorap_emb_lr", "lora_dtype",  # learning rates and the dtype of training, which ms-swift writes
    # fan_in_fan_out says how the base stores its weight; the factors have one orientation in any case.
    "fan_in_fan_out",
    # Decided by the tensors.
    "bias",
})  # fmt: skip
_USED = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "base_model_name_or_path",
    "modules_to_save", "task_type", "id2label", "use_dora", "lora_bias",
    "trainable_token_indices", "alora_invocation_tokens", "target_parameters",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeftLoraConfig:
    """The part of the configuration that serving needs."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[ModulePattern, int], ...]
    alpha_pattern: tuple[tuple[ModulePattern, float], ...]
    targets: TargetChoice
    base_model: str  # informative only: shapes decide
    classifies: Classifies  # by a module that is saved with the adapter
    labels: tuple[str, ...]  # empty where the configuration has none
    use_dora: bool
    lora_bias: bool
    modules_to_save: frozenset[str]
    token_indices: Mapping[str, tuple[int, ...]]  # by module; "": of the embedding
    ties_weights: bool
    init: Init | None  # that PEFT repeats at load
    loftq: LoftqConfig | None  # where that is `init`
    invocation: tuple[int, ...]  # tokens that activate it; empty: it always is
    target_parameters: frozenset[str]

    @property
    def options(self) -> list[str]:
        """The options that make an adapter more than a plain LoRA, with its peft_type."""
        found = {
            "use_rslora": self.use_rslora,
            "use_dora": self.use_dora,
            "lora_bias": self.lora_bias,
            f"init_lora_weights {self.init}": self.init is not None,
            "alora_invocation_tokens": bool(self.invocation),
            "trainable_token_indices": bool(self.token_indices),
        }
        return ["LORA", *(name for name, is_used in found.items() if is_used)]

    def rank_and_scale(self, path: str, budget: Budget) -> tuple[int, float]:
        """Rank and scale of one module. As in PEFT: the first pattern that matches, else the common value; the scale
        comes from the module's own rank and alpha, never from a padded or a common rank."""
        r = next((value for pattern, value in self.rank_pattern if pattern.matches(path, budget)), self.r)
        own = next((value for pattern, value in self.alpha_pattern if pattern.matches(path, budget)), self.lora_alpha)
        return r, own / (math.sqrt(r) if self.use_rslora else r)

    def token_rows(self, path: str, targets: BaseTargets) -> tuple[int, ...]:
        """The tokens whose rows the adapter brings for this module. Raises AdapterInvalid."""
        tied = (targets.embedding, targets.tied_head) if targets.tied_head else ()
        paths = [path, *(tied if path in tied else ())]  # PEFT may save them for both
        ends = [end for one in paths for end in path_ends(one)] + ([""] if targets.embedding in paths else [])
        found = next((self.token_indices[end] for end in ends if end in self.token_indices), None)
        if found is None:
            found = next((ids for name, ids in self.token_indices.items() if name and _ends_with(paths, name)), None)
        if found is None:
            raise AdapterInvalid(f"{CONFIG_NAME}: trainable_token_indices does not name {path!a}, which has rows")
        return found

    def names_saved(self, path: str) -> bool:
        """True when `modules_to_save` lists the module: by the end of its name, as in PEFT, not by whole words."""
        return any(path.endswith(name) for name in self.modules_to_save)

    @property
    def target_modules(self) -> frozenset[str] | None:
        """The listed targets; None for a pattern or a shorthand."""
        return self.targets.names

    def names_parameter(self, path: str) -> bool:
        """True when `target_parameters` lists the parameter, by its name or by the end of it."""
        return not self.target_parameters.isdisjoint(path_ends(path))


def _ends_with(paths: Iterable[str], end: str) -> bool:
    return any(path.endswith(end) for path in paths)


def parse_peft_fields(data: bytes) -> dict[str, Any]:
    """The fields of a configuration. Raises AdapterInvalid."""
    return parse_object(data, CONFIG_NAME, MAX_CONFIG_BYTES)


def parse_lora_config(fields: Mapping[str, Any]) -> PeftLoraConfig:
    """The configuration of these fields, whose `peft_type` is LORA. Raises AdapterInvalid or AdapterUnsupported, naming
    the field."""
    _refuse_variants(fields)
    classifies = _CLASSIFIERS.get(str(fields.get("task_type")), "no")
    if fields.get("use_dora") and fields.get("lora_bias"):
        raise AdapterUnsupported(f"{CONFIG_NAME}: use_dora together with lora_bias is not served; PEFT refuses it too")
    init = _init(fields.get("init_lora_weights", True))
    if init is not None and fields.get("lora_bias"):
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: init_lora_weights {init!a} together with lora_bias is not served; PEFT refuses it too"
        )
    if init == "loftq" and fields.get("use_dora"):
        raise AdapterUnsupported(f"{CONFIG_NAME}: init_lora_weights 'loftq' together with use_dora is not served")
    budget = compile_budget()
    rank_pattern = compiled_patterns(fields, "rank_pattern", budget)
    alpha_pattern = compiled_patterns(fields, "alpha_pattern", budget)
    base_model = fields.get("base_model_name_or_path")
    target_parameters = parse_targets(fields.get("target_parameters") or [], "target_parameters")
    if target_parameters is None:
        raise AdapterInvalid(f"{CONFIG_NAME}: target_parameters must be a list of names")
    chosen = dict(fields)
    if target_parameters and fields.get("target_modules") is None:
        chosen["target_modules"] = []  # as in PEFT: parameters alone
    return PeftLoraConfig(
        r=rank(fields.get("r", PEFT_DEFAULT), "r"),
        lora_alpha=alpha(fields.get("lora_alpha", PEFT_DEFAULT), "lora_alpha"),
        use_rslora=_flag(fields, "use_rslora"),
        rank_pattern=tuple((pattern, rank(value, "rank_pattern")) for pattern, value in rank_pattern),
        alpha_pattern=tuple((pattern, alpha(value, "alpha_pattern")) for pattern, value in alpha_pattern),
        targets=TargetChoice(chosen),
        base_model=base_model[:MAX_BASE_CHARS] if isinstance(base_model, str) else "",
        classifies=classifies,
        labels=() if classifies == "no" else parse_labels(fields, CONFIG_NAME),
        use_dora=_flag(fields, "use_dora"),
        lora_bias=_flag(fields, "lora_bias"),
        modules_to_save=parse_targets(fields.get("modules_to_save") or [], "modules_to_save") or frozenset(),
        token_indices=_token_indices(fields.get("trainable_token_indices")),
        ties_weights=_flag(fields, "ensure_weight_tying"),
        init=init,
        loftq=parse_loftq(fields) if init == "loftq" else None,
        invocation=_invocation(fields, init),
        target_parameters=target_parameters,
    )


def parse_labels(fields: Mapping[str, Any], file_name: str) -> tuple[str, ...]:
    """The labels in `id2label`, in their order; none where there is no such field. Raises AdapterInvalid."""
    found: Any = fields.get("id2label")
    if not found:
        return ()
    numbers = {str(number) for number in range(len(found))} if isinstance(found, dict) else set[str]()
    is_whole = isinstance(found, dict) and found.keys() == numbers and len(found) <= MAX_LABELS
    if not is_whole or not all(isinstance(one, str) and 0 < len(one) <= MAX_LABEL_CHARS for one in found.values()):
        raise AdapterInvalid(
            f"{file_name}: id2label must give a name of at most {MAX_LABEL_CHARS} characters to each number from 0 on, "
            f"{MAX_LABELS} at most"
        )
    return tuple(found[str(number)] for number in range(len(found)))


def _refuse_variants(fields: Mapping[str, Any]) -> None:
    for name, what in _REFUSED.items():
        if fields.get(name):
            raise AdapterUnsupported(f"{CONFIG_NAME}: {name} ({what}) is not served")
    refuse_unknown(fields, _WITHOUT_EFFECT | _USED)


def refuse_unknown(fields: Mapping[str, Any], known: Set[str]) -> None:
    """Raises AdapterUnsupported for a field that is not known and not empty."""
    for name, value in fields.items():
        if value and name not in known:
            raise AdapterUnsupported(
                f"{CONFIG_NAME}: field {name[:80]!a} is not known and not empty, so it may change what the "
                "adapter computes; remove it if it does not"
            )


def _init(init: Any) -> Init | None:
    """The initialisation that PEFT repeats at load; None where the base model is as it was. Raises
    AdapterUnsupported."""
    if init is None or isinstance(init, bool) or (isinstance(init, str) and init in _CLEAN_INITS):
        return None
    if init == "pissa" or init == "loftq":
        return init
    if isinstance(init, str) and init.lower() == "olora":
        return "olora"
    why = next((why for name, why in _REFUSED_INITS.items() if isinstance(init, str) and init.startswith(name)), None)
    if why is None:
        raise AdapterUnsupported(f"{CONFIG_NAME}: init_lora_weights {_shown(init)} is not known")
    raise AdapterUnsupported(f"{CONFIG_NAME}: init_lora_weights {_shown(init)} {why}; {HOW_TO_CONVERT}")


def _invocation(fields: Mapping[str, Any], init: Init | None) -> tuple[int, ...]:
    """The tokens that activate the adapter; empty where it always is. Raises AdapterInvalid or AdapterUnsupported."""
    found: Any = fields.get("alora_invocation_tokens")
    if not found:
        return ()
    if (
        not isinstance(found, list)
        or len(found) > MAX_INVOCATION_TOKENS
        or not all(type(one) is int and one >= 0 for one in found)
    ):
        raise AdapterInvalid(
            f"{CONFIG_NAME}: alora_invocation_tokens must be a list of at most {MAX_INVOCATION_TOKENS} token ids"
        )
    if fields.get("task_type") != "CAUSAL_LM":
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: alora_invocation_tokens needs task_type CAUSAL_LM, not {_shown(fields.get('task_type'))}: "
            "PEFT activates the adapter in no other"
        )
    others = (
        (fields.get("use_dora"), "use_dora"),
        (init, f"init_lora_weights {init!a}"),
        (
            fields.get("target_parameters"),
            "target_parameters",
        ),
    )
    name = next((name for is_used, name in others if is_used), "")
    if name:
        raise AdapterUnsupported(f"{CONFIG_NAME}: alora_invocation_tokens together with {name} is not served")
    return tuple(found)


def compiled_patterns(fields: Mapping[str, Any], name: str, budget: Budget) -> list[tuple[ModulePattern, Any]]:
    value = fields.get(name) or {}
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise AdapterInvalid(f"{CONFIG_NAME}: {name} must be an object of at most {MAX_PATTERNS} entries")
    return [(compile_pattern(text, f"{CONFIG_NAME}: {name}", budget), item) for text, item in value.items()]


def rank(value: Any, name: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise AdapterInvalid(f"{CONFIG_NAME}: {name} is {_shown(value)}; a rank is a whole number from 1 to {MAX_RANK}")
    return value


def alpha(value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < abs(value) <= MAX_ALPHA:  # false for NaN too
        raise AdapterInvalid(
            f"{CONFIG_NAME}: {name} is {_shown(value)}; alpha is a finite number, not 0, of at most {MAX_ALPHA:.0f}"
        )
    return float(value)


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise AdapterInvalid(f"{CONFIG_NAME}: {name} must be true or false, not {_shown(value)}")
    return bool(value)


def _token_indices(value: Any) -> dict[str, tuple[int, ...]]:
    found: dict[Any, Any] = cast("dict[Any, Any]", value) if isinstance(value, dict) else {"": value} if value else {}
    for path, indices in found.items():
        is_list = (
            isinstance(indices, list) and len(indices) <= MAX_TOKEN_ROWS and len(set(map(str, indices))) == len(indices)
        )
        if not isinstance(path, str) or not is_list or not all(type(one) is int and one >= 0 for one in indices):
            raise AdapterInvalid(
                f"{CONFIG_NAME}: trainable_token_indices must be a list of at most {MAX_TOKEN_ROWS} token ids, each "
                "once, or an object with such lists by module"
            )
    return {path: tuple(indices) for path, indices in found.items()}


def _shown(value: Any) -> str:
    return ascii(value)[:60]
