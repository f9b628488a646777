r"""PEFT LoRA: configuration, rank patterns, classifier, plan against the base model, and bytes.

The plan is made of the configuration (`adapter_config.json`) and the file's header. Every field that changes the
mathematics is either carried out or refused by name; an unknown field is refused too, unless it is empty: it may belong
to a new variant. Every tensor of the file ends up in the plan, or the load fails with its name; so does a module that
the base model lacks, a wrong shape, a rank over the limit. Modules may have ranks and scales of their own.

PEFT runs `re.match(rf"(.*\.)?({pattern})$", path)` for `rank_pattern` and `alpha_pattern`. A hostile pattern would hang
Python's backtracking matcher or exhaust memory while it is compiled. RE2 matches in linear time; the cost of a pattern,
and of all patterns of an adapter together, is bounded here. Accepted is what `re` and RE2 read alike: literals, `.`,
`\d \D \w \W \s \S` and escaped punctuation, `[...]`, `(...)` and `(?:...)`, `|`, `* + ?` (lazy or not), `{m}` `{m,}`
`{m,n}`, `^` and `$`. Everything else (backreferences, lookaround, flags) is refused. Paths are ASCII in practice;
classes mean their ASCII members.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from loraplex_adapters.formats.files import CONFIG_NAME, WEIGHTS_NAME
from loraplex_adapters.io.safetensors import (
    DTYPE_BYTES,
    DTYPES,
    PieceReader,
    PieceWriter,
    TensorInfo,
    check_float,
)
from loraplex_adapters.io.source_files import parse_object
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.weights import AdapterLayout, BaseTargets, ClassifierShape, FactorShape, TargetModule
from loraplex_contracts.adapters import ClassifierInfo
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterUnsupported,
    BaseMismatch,
    NonFinite,
    RankLimit,
    ShapeMismatch,
)

# --- configuration --------------------------------------------------------------------------------------------------

MAX_CONFIG_BYTES = 1 << 20
MAX_PATTERNS = 4096
MAX_TARGETS = 4096
MAX_RANK = 1 << 16
MAX_ALPHA = float(1 << 16)
MAX_LABELS = 4096
MAX_LABEL_CHARS = 256
# What Transformers calls a classifier on top of a model.
CLASSIFIER_NAMES = ("score", "classifier")
Classifies = Literal["no", "texts", "tokens"]
_CLASSIFIERS: Mapping[str, Classifies] = {"SEQ_CLS": "texts", "TOKEN_CLS": "tokens"}

# Empty (null, false, [], {}) is fine; anything else changes what the adapter computes.
_REFUSED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "lora_bias": "a bias on lora_B",
    "layer_replication": "layers repeated by the adapter",
    "target_parameters": "LoRA on parameters, such as the experts of a mixture",
    "trainable_token_indices": "token rows trained with the adapter",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "megatron_config": "a Megatron model",
    "router": "routing between adapters",
}
# Initialisations that left the base model as it was; the others moved part of it into the adapter.
_CLEAN_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
_BASE_CHANGING_INITS = ("pissa", "olora", "corda", "loftq", "lora_ga", "lora-ga")
# Only training depends on these, or the choice of modules, which the tensors show anyway.
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "exclude_modules",
    "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying", "merge_weights",
    # fan_in_fan_out says how the base stores its weight; the factors have one orientation in any case.
    "fan_in_fan_out",
    # Decided by the tensors: without saved biases it has no effect, and saved ones are refused by name.
    "bias",
})  # fmt: skip
_USED = frozenset({
    "peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights",
    "target_modules", "base_model_name_or_path", "modules_to_save", "task_type", "id2label",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeftLoraConfig:
    """The part of the configuration that serving needs."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[ModulePattern, int], ...]
    alpha_pattern: tuple[tuple[ModulePattern, float], ...]
    target_modules: frozenset[str] | None  # None: a pattern or a shorthand; the tensors decide
    base_model: str  # informative only: shapes decide
    classifies: Classifies = "no"  # by a module that is saved with the adapter
    labels: tuple[str, ...] = ()  # empty where the configuration has none

    def rank_and_scale(self, path: str, budget: Budget) -> tuple[int, float]:
        """Of one module. As in PEFT: the first pattern that matches, else the common value; the scale comes from the
        module's own rank and alpha, never from a padded or a common rank."""
        rank = next((rank for pattern, rank in self.rank_pattern if pattern.matches(path, budget)), self.r)
        alpha = next((alpha for pattern, alpha in self.alpha_pattern if pattern.matches(path, budget)), self.lora_alpha)
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def names_target(self, path: str) -> bool:
        """True when `target_modules` lists the module, by its name or by the end of it."""
        return self.target_modules is None or not self.target_modules.isdisjoint(path_ends(path))


def path_ends(path: str) -> Iterator[str]:
    """'c', 'b.c' and 'a.b.c' of 'a.b.c': what a target may call the module."""
    words = path.split(".")
    return (".".join(words[idx:]) for idx in range(len(words) - 1, -1, -1))


def parse_peft_config(data: bytes) -> PeftLoraConfig:
    """Raises AdapterInvalid or AdapterUnsupported, naming the field."""
    fields = parse_object(data, CONFIG_NAME, MAX_CONFIG_BYTES)
    peft_type = fields.get("peft_type")
    if peft_type is None:
        raise AdapterInvalid(f"{CONFIG_NAME} has no peft_type; save the adapter with PEFT's save_pretrained")
    if peft_type != "LORA":
        raise AdapterUnsupported(f"{CONFIG_NAME}: peft_type {_shown(peft_type)} is not served; LORA is")
    _refuse_variants(fields)
    classifies = _CLASSIFIERS.get(str(fields.get("task_type")), "no")
    _check_saved_modules(fields, classifies)
    _check_init(fields.get("init_lora_weights", True))
    budget = compile_budget()
    rank_pattern = _patterns(fields, "rank_pattern", budget)
    alpha_pattern = _patterns(fields, "alpha_pattern", budget)
    base_model = fields.get("base_model_name_or_path")
    return PeftLoraConfig(
        r=_rank(fields.get("r"), "r"),
        lora_alpha=_alpha(fields.get("lora_alpha"), "lora_alpha"),
        use_rslora=_flag(fields, "use_rslora"),
        rank_pattern=tuple((pattern, _rank(value, "rank_pattern")) for pattern, value in rank_pattern),
        alpha_pattern=tuple((pattern, _alpha(value, "alpha_pattern")) for pattern, value in alpha_pattern),
        # With tied weights PEFT saves factors for modules that it has taken off the list.
        target_modules=None if fields.get("ensure_weight_tying") else _targets(fields.get("target_modules")),
        base_model=base_model[:256] if isinstance(base_model, str) else "",
        classifies=classifies,
        labels=() if classifies == "no" else parse_labels(fields, CONFIG_NAME),
    )


def _check_saved_modules(fields: Mapping[str, Any], classifies: str) -> None:
    """Modules that are saved whole are served where they are a classifier, which PEFT calls by either name."""
    names = fields.get("modules_to_save")
    if not names or (classifies != "no" and isinstance(names, list) and set(map(str, names)) <= set(CLASSIFIER_NAMES)):
        return
    raise AdapterUnsupported(
        f"{CONFIG_NAME}: modules_to_save (whole modules saved with the adapter) is not served, but for "
        f"{' and '.join(CLASSIFIER_NAMES)} of a classifier (task_type SEQ_CLS or TOKEN_CLS)"
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
    for name, value in fields.items():
        if value and name not in _WITHOUT_EFFECT and name not in _USED:
            raise AdapterUnsupported(
                f"{CONFIG_NAME}: field {name[:80]!a} is not known and not empty, so it may change what the "
                "adapter computes; remove it if it does not"
            )


def _check_init(init: Any) -> None:
    if init is None or isinstance(init, bool) or (isinstance(init, str) and init in _CLEAN_INITS):
        return
    if isinstance(init, str) and init.lower().startswith(_BASE_CHANGING_INITS):
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: init_lora_weights {_shown(init)} changed the base model at the start; convert the adapter "
            "with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    raise AdapterUnsupported(f"{CONFIG_NAME}: init_lora_weights {_shown(init)} is not known")


def _patterns(fields: Mapping[str, Any], name: str, budget: Budget) -> list[tuple[ModulePattern, Any]]:
    value = fields.get(name) or {}
    if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
        raise AdapterInvalid(f"{CONFIG_NAME}: {name} must be an object of at most {MAX_PATTERNS} entries")
    return [(compile_pattern(text, f"{CONFIG_NAME}: {name}", budget), item) for text, item in value.items()]


def _rank(value: Any, name: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise AdapterInvalid(f"{CONFIG_NAME}: {name} is {_shown(value)}; a rank is a whole number from 1 to {MAX_RANK}")
    return value


def _alpha(value: Any, name: str) -> float:
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


def _targets(value: Any) -> frozenset[str] | None:
    """The listed targets. A string is a pattern or 'all-linear'; never matched, as the tensors say the same."""
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or len(value) > MAX_TARGETS or not all(isinstance(item, str) for item in value):
        raise AdapterInvalid(f"{CONFIG_NAME}: target_modules must be a string or a list of at most {MAX_TARGETS} names")
    return frozenset(value)


def _shown(value: Any) -> str:
    return ascii(value)[:60]


# --- rank and alpha patterns ----------------------------------------------------------------------------------------

MAX_PATTERN_CHARS = 256
# Of one compiled pattern, RE2's caches included: room for 1,000 instructions and some states of its automaton.
MAX_PATTERN_BYTES = 64 << 10
# A pattern for each of 126 layers' seven linears, in both fields, takes about half of it.
MAX_INSTRUCTIONS = 1 << 18
# One character compared with one instruction takes a nanosecond at worst; a call is worth some 500 of those.
MAX_MATCH_STEPS = 1 << 26
CALL_STEPS = 512
PLAIN_STEPS = 64

_PLAIN = frozenset(string.ascii_letters + string.digits + "_.-")
# Each alternative begins with another character, so this takes linear time itself.
_ESCAPE = r"\\(?:[dDwWsS]|[^a-zA-Z0-9])"
_UNDERSTOOD = re.compile(
    rf"(?:{_ESCAPE}|\[\^?\]?(?:{_ESCAPE}|[^\\\[\]])*\]|\((?!\?)|\(\?:|\{{\d{{1,3}}(?:,\d{{0,3}})?\}}|[^\\\[({{])*",
    re.ASCII | re.DOTALL,
)


@dataclass(slots=True)
class Budget:
    """Cost that compiling, or matching, all patterns of one adapter may still have."""

    steps_left: int
    refusal: str

    def spend(self, num_steps: int) -> None:
        """Raises AdapterUnsupported when nothing is left."""
        checkpoint()
        self.steps_left -= num_steps
        if self.steps_left < 0:
            raise AdapterUnsupported(f"rank_pattern and alpha_pattern {self.refusal}; use fewer or simpler patterns")


def compile_budget() -> Budget:
    """In instructions of RE2."""
    return Budget(MAX_INSTRUCTIONS, "are too large together")


def match_budget() -> Budget:
    """In nanoseconds at worst."""
    return Budget(MAX_MATCH_STEPS, "take too long to match")


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """One pattern with PEFT's meaning for module paths. `compiled` is RE2's; None for names and dots only."""

    text: str
    compiled: Any = None

    def matches(self, path: str, budget: Budget) -> bool:
        """Raises AdapterUnsupported when the adapter has used up its budget."""
        if self.compiled is not None:
            budget.spend(CALL_STEPS + self.compiled.programsize * len(path))
            return self.compiled.fullmatch(_encoded(path)) is not None
        # The common case, faster than any engine. A dot means any character, as in PEFT.
        budget.spend(PLAIN_STEPS)
        start = len(path) - len(self.text)
        if start < 0 or (start > 0 and path[start - 1] != "."):
            return False
        return all(want in (".", have) for want, have in zip(self.text, path[start:], strict=True))


def compile_pattern(text: str, field_name: str, budget: Budget) -> ModulePattern:
    """Raises AdapterUnsupported, naming the field, when the pattern is not understood or too large."""
    if len(text) > MAX_PATTERN_CHARS:
        raise AdapterUnsupported(f"{field_name}: a pattern of {len(text)} characters; at most {MAX_PATTERN_CHARS}")
    budget.spend(1)
    if set(text) <= _PLAIN:
        return ModulePattern(text)
    if _UNDERSTOOD.fullmatch(text) is None:
        raise _refusal(text, field_name, "it uses more than literals, sets, groups, counts and `|`")
    import re2

    try:
        re2.compile(_encoded(text), _options())  # alone, because its parentheses could pair with ours
        compiled = re2.compile(_encoded(rf"(?:.*\.)?(?:{text})"), _options())
    except re2.error as error:
        raise _refusal(text, field_name, error.args[0].decode(errors="replace")) from None
    budget.spend(compiled.programsize)
    return ModulePattern(text, compiled)


def _encoded(text: str) -> bytes:
    """JSON can hold lone surrogates; RE2 refuses their bytes."""
    return text.encode(errors="surrogatepass")


@cache
def _options() -> Any:
    import re2

    options = re2.Options()
    options.max_mem = MAX_PATTERN_BYTES
    options.never_capture = True
    options.log_errors = False
    return options


def _refusal(text: str, field_name: str, why: str) -> AdapterUnsupported:
    return AdapterUnsupported(f"{field_name}: pattern {text[:80]!a} is not served: {why}")


# --- plan and bytes -------------------------------------------------------------------------------------------------

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
class PlannedClassifier:
    """A classifier's tensors in the file, checked."""

    shape: ClassifierShape
    weight: TensorInfo
    bias: TensorInfo | None


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The tensors to read. `modules` are in the layout's order."""

    modules: tuple[PlannedModule, ...]
    base_copies: tuple[tuple[TensorInfo, TargetModule], ...]  # must equal the base model's own weight
    warnings: tuple[str, ...]
    classifier: PlannedClassifier | None = None


@dataclass(slots=True)
class _Found:
    """The tensors of one module as they turn up."""

    is_embedding: bool
    a: TensorInfo | None = None
    b: TensorInfo | None = None


def plan_lora(config: PeftLoraConfig, tensors: Mapping[str, TensorInfo], targets: BaseTargets) -> LoraPlan:
    """Raises AdapterInvalid or one of its kinds (AdapterUnsupported, BaseMismatch, ShapeMismatch, RankLimit)."""
    found: dict[str, _Found] = {}
    others: list[TensorInfo] = []
    saved: dict[str, TensorInfo] = {}  # of a classifier
    for tensor in tensors.values():
        checkpoint()
        path, part, rest = _parts(tensor)
        if part in _FACTORS and rest != "bias":
            _take(found, path, part, tensor)
        elif config.classifies != "no" and (name := _name_in_classifier(tensor)):
            if saved.setdefault(name, tensor) is not tensor:
                raise AdapterInvalid(f"{tensor.where} is a second {name} of a classifier")
        else:
            others.append(tensor)
    above = _above(found, targets)
    base_copies = [(tensor, _base_copy(tensor, above, targets)) for tensor in others]
    if not found:
        raise AdapterInvalid(f"{WEIGHTS_NAME} has no LoRA tensors")
    budget = match_budget()
    modules = [_module(path, above, entry, config, targets, budget) for path, entry in found.items()]
    modules.sort(key=lambda module: module.shape)
    return LoraPlan(
        tuple(modules),
        tuple(base_copies),
        tuple(_warnings(config, targets, found)),
        None if config.classifies == "no" else _classifier(config, saved, targets),
    )


def _name_in_classifier(tensor: TensorInfo) -> str:
    """`weight` or `bias`; empty for a tensor that is not a classifier's."""
    module, _, name = tensor.name.removeprefix(_PREFIX).partition(".")
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
    _check_shape(weight, (num_labels, targets.hidden_size))
    check_float(weight)
    if bias is not None:
        _check_shape(bias, (num_labels,))
        check_float(bias)
    labels = config.labels or tuple(f"LABEL_{number}" for number in range(num_labels))
    if len(labels) != num_labels:
        raise AdapterInvalid(f"{CONFIG_NAME}: id2label has {len(labels)} labels; {weight.where} has {num_labels} rows")
    info = ClassifierInfo(labels, config.classifies == "tokens")
    return PlannedClassifier(ClassifierShape(info, targets.hidden_size, bias is not None), weight, bias)


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


def _above(found: Mapping[str, _Found], targets: BaseTargets) -> str:
    """The prefix of the adapter's paths in the base model: an adapter of a model without a head
    (FEATURE_EXTRACTION) leaves out where that model is in the one with its head."""
    backbone = f"{targets.backbone}."
    is_headless = not any(path in targets.modules for path in found)
    return backbone if is_headless and any(backbone + path in targets.modules for path in found) else ""


def _base_copy(tensor: TensorInfo, above: str, targets: BaseTargets) -> TargetModule:
    """The base model's module of a tensor that is not a factor. Such a tensor is served only where it is a copy of the
    module's own weight, which PEFT saves beside a LoRA on embeddings; that is checked when it is read."""
    name = tensor.name.removeprefix(_PREFIX)
    for word in name.split("."):
        if word in _REFUSED_PARTS:
            raise AdapterUnsupported(f"{tensor.where} is {_REFUSED_PARTS[word]}, which is not served")
    if name.endswith(".bias"):
        raise AdapterUnsupported(f"{tensor.where} is a bias saved with the adapter, which is not served")
    path, _, last = name.rpartition(".")
    module = targets.modules.get(above + path.removesuffix(".base_layer"))
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


def _module(
    path: str, above: str, entry: _Found, config: PeftLoraConfig, targets: BaseTargets, budget: Budget
) -> PlannedModule:
    tensor = entry.a or entry.b
    assert tensor is not None
    if entry.a is None or entry.b is None:
        other = "B" if entry.b is None else "A"
        raise AdapterInvalid(f"{tensor.where} has no lora_{other} beside it")
    module = targets.modules.get(above + path)
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
    shape = FactorShape(module.path, rank, module.in_features, module.out_features, scale)
    return PlannedModule(shape, entry.a, entry.b)


def _no_such_module(path: str, tensor: TensorInfo, targets: BaseTargets) -> AdapterInvalid:
    if "experts" in path.split("."):
        return AdapterUnsupported(f"{tensor.where} adapts the experts of a mixture, which is not served")
    return BaseMismatch(
        f"{tensor.where} adapts a module that {targets.model_id!a} does not have; the adapter was "
        "made for another base model"
    )


def _check_shape(tensor: TensorInfo, expected: tuple[int, ...]) -> None:
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


def write_lora(plan: LoraPlan, layout: AdapterLayout, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the factors from the beginning of the layout on. Raises NonFinite, or what the file raises."""
    for run in _runs(plan, layout):
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


def check_base_copies(plan: LoraPlan, reader: PieceReader) -> None:
    """Raises AdapterUnsupported when a saved weight is not the base model's own."""
    for tensor, module in plan.base_copies:
        if reader.sha256(tensor) != module.weight_sha256:
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


def _runs(plan: LoraPlan, layout: AdapterLayout) -> Iterator[_Run]:
    """In the layout's order."""
    itemsize = DTYPES[layout.dtype].itemsize
    run: _Run | None = None
    source_end = target_end = -1
    for module, placed in zip(plan.modules, layout.factors, strict=True):
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
