"""Plan of loading an adapter of any kind, checked against the base model.

Reads configurations and headers, never weights. Heads may lie in a file of their own, among a LoRA's tensors, or in a
whole model, of which only the tensors under `medusa_head` are the adapter's. Every tensor of an adapter's files has its
place in the plan, or the load fails with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loraplex_adapters.formats.files import (
    CONFIG_NAME,
    MAX_BASE_CHARS,
    MAX_CONFIG_BYTES,
    MEDUSA_WEIGHTS_NAME,
    MODEL_CONFIG_NAME,
    WEIGHTS_NAME,
    detect_kind,
    ignored_template,
)
from loraplex_adapters.formats.medusa import HeadsPlan, model_tensors, plan_heads, read_medusa_config, split_heads
from loraplex_adapters.formats.peft import plan_lora
from loraplex_adapters.formats.peft_config import parse_labels, parse_lora_config, parse_peft_fields
from loraplex_adapters.formats.peft_plan import LoraPlan, PlannedModule
from loraplex_adapters.formats.peft_saved import without_base_copies
from loraplex_adapters.formats.peft_variants import VARIANTS, plan_variant
from loraplex_adapters.formats.pooling import read_pooling
from loraplex_adapters.formats.templates import read_templates
from loraplex_adapters.formats.tokens import check_tokens
from loraplex_adapters.io.safetensors import PieceReader, TensorInfo, read_header
from loraplex_adapters.io.source_files import AdapterFiles, parse_object, read_all
from loraplex_adapters.weights import AdapterLayout, BaseTargets, place_adapter
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The tensors to read and their places. It has a LoRA, heads, or both."""

    layout: AdapterLayout
    lora: LoraPlan | None
    heads: HeadsPlan | None
    warnings: tuple[str, ...]

    @property
    def modules(self) -> tuple[PlannedModule, ...]:
        return () if self.lora is None else self.lora.modules

    @property
    def takes_long(self) -> bool:
        """True if weights of the base model are decomposed for it, or rotations computed."""
        return self.lora is not None and (bool(self.lora.init) or any(one.made for one in self.lora.saved))

    def without_base_copies(self, reader: PieceReader) -> AdapterPlan:
        """The plan without parameters that are mere copies of the base model's."""
        if self.lora is None:
            return self
        lora = without_base_copies(self.lora, reader)
        return self._with(lora, self.heads)

    def with_heads(self, heads: HeadsPlan) -> AdapterPlan:
        """The plan with other heads."""
        return self._with(self.lora, heads)

    def _with(self, lora: LoraPlan | None, heads: HeadsPlan | None) -> AdapterPlan:
        before, layout = self.layout, _layout(self.layout.dtype, lora, heads)
        layout = replace(layout, templates=before.templates, pooling=before.pooling)
        return replace(self, lora=lora, heads=heads, layout=layout)


def plan_adapter(files: AdapterFiles, targets: BaseTargets, *, with_templates: bool = False) -> AdapterPlan:
    """The plan of an adapter. `with_templates`: those that it brings are part of it. Raises AdapterInvalid or one of
    its kinds, or what the files raise."""
    layout_of_files = detect_kind(files.names)
    if layout_of_files == "model":
        tensors = model_tensors(files, read_medusa_config(files))
    else:
        names = [name for name in (WEIGHTS_NAME, MEDUSA_WEIGHTS_NAME) if name in files.names]
        tensors = [tensor for name in names for tensor in read_header(files.open(name)).values()]
    found, others = split_heads(tensors)
    lora = _plan_lora(files, others, targets) if others or not found else None
    # A LoRA alone often has its base model's config.json beside it: nothing to do with it.
    heads = plan_heads(read_medusa_config(files), found, targets) if found else None
    if lora is None and CONFIG_NAME in files.names:
        raise AdapterInvalid(f"there is an {CONFIG_NAME}, but no LoRA tensor in {', '.join(sorted(files.opened))}")
    layout = _layout(targets.dtype, lora, heads)
    template = None
    if layout_of_files != "model":  # whose templates and pooling are the base model's
        layout = replace(layout, pooling=read_pooling(files))
        if with_templates:
            layout = replace(layout, templates=read_templates(files))
        else:
            template = ignored_template(files.names)
    unused = (f"comes with {template}, which is not used: the base model's chat template is",) if template else ()
    warnings = (*(lora.warnings if lora else ()), *(heads.warnings if heads else ()), *unused)
    return AdapterPlan(layout, lora, heads, tuple(dict.fromkeys(warnings)))


def _layout(dtype: str, lora: LoraPlan | None, heads: HeadsPlan | None) -> AdapterLayout:
    factors = [] if lora is None else [module.shape for module in lora.modules]
    classifier = None if lora is None or lora.classifier is None else lora.classifier.shape
    saved = () if lora is None else [one.shape for one in lora.saved]
    layout = place_adapter(dtype, factors, None if heads is None else heads.shape, classifier, saved)
    if lora is None:
        return layout
    peft_type = lora.format if lora.format in VARIANTS else f"{lora.init} initialisation" if lora.init else "LORA"
    return replace(layout, invocation=lora.invocation, peft_type=peft_type)


def _plan_lora(files: AdapterFiles, tensors: Sequence[TensorInfo], targets: BaseTargets) -> LoraPlan:
    if CONFIG_NAME not in files.names:
        if not tensors:
            raise AdapterInvalid(f"{', '.join(sorted(files.opened))} has no Medusa head")
        raise AdapterUnsupported(
            f"{tensors[0].where} is not a tensor of a Medusa head, no {CONFIG_NAME} says that it is a LoRA's, and no "
            "tensor is left out silently"
        )
    misplaced = next((tensor for tensor in tensors if tensor.file != tensors[0].file), None)
    if misplaced is not None:
        raise AdapterInvalid(
            f"{misplaced.where} is not a tensor of a Medusa head; a LoRA's tensors must lie in one file"
        )
    fields = parse_peft_fields(read_all(files.open(CONFIG_NAME), MAX_CONFIG_BYTES))
    by_name = {tensor.name: tensor for tensor in tensors}
    peft_type = fields.get("peft_type")
    if peft_type is None:
        raise AdapterInvalid(f"{CONFIG_NAME} has no peft_type; save the adapter with PEFT's save_pretrained")
    if peft_type in VARIANTS:
        return plan_variant(fields, by_name, targets)  # which have no rows of tokens
    if peft_type != "LORA":
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: peft_type {ascii(peft_type)[:60]} is not served; LORA, {', '.join(VARIANTS)} are"
        )
    config = parse_lora_config(fields)
    if config.classifies != "no" and not config.labels and MODEL_CONFIG_NAME in files.names:
        data = read_all(files.open(MODEL_CONFIG_NAME), MAX_CONFIG_BYTES)
        beside = parse_object(data, MODEL_CONFIG_NAME, MAX_CONFIG_BYTES)
        config = replace(config, labels=parse_labels(beside, MODEL_CONFIG_NAME))
    plan = plan_lora(config, by_name, targets)
    check_tokens(files, plan, targets)
    return plan


def declared_base(files: AdapterFiles) -> str:
    """The base model that the configuration names, for people to read; empty where it does not. Raises what reading it
    raises."""
    for name in (CONFIG_NAME, MODEL_CONFIG_NAME):
        if name in files.opened:
            base = parse_object(read_all(files.open(name), MAX_CONFIG_BYTES), name, MAX_CONFIG_BYTES).get(
                "base_model_name_or_path"
            )
            if isinstance(base, str) and base and base.isprintable():
                return base[:MAX_BASE_CHARS]
    return ""
