"""Speculator assembly: proposers and default heads, as the configuration names them."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from loraplex_adapters.cache.manager import AdapterManager
from loraplex_contracts.adapters import AdapterId, AdapterKey, name_in
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    FailedPrecondition,
    InvalidArgument,
    UnsafeFormat,
    UnsupportedModel,
    is_out_of_memory,
)
from loraplex_runtime.reports import Progress
from loraplex_server.backends.backend import Backend
from loraplex_server.config import DraftModelConfig, EngineConfig
from loraplex_server.layers.attention import ModelSpec
from loraplex_server.library_errors import error_line
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import load_model
from loraplex_server.model.medusa_model import MODEL_HEADS, ServedModel
from loraplex_server.model.memory import fitting
from loraplex_server.model.places import no_heads
from loraplex_server.model.runner import ModelRunner
from loraplex_server.speculation.cross_tokenizer import UniversalProposer
from loraplex_server.speculation.draft_model import Drafter, DraftMemory, DraftModelProposer
from loraplex_server.speculation.history import History
from loraplex_server.speculation.medusa import HeadSlots, MedusaProposer
from loraplex_server.speculation.policy import LeastCost
from loraplex_server.speculation.prompt_lookup import PromptLookupProposer
from loraplex_server.speculation.proposer import (
    GRAMMAR,
    MEDUSA,
    PROMPT_LOOKUP,
    UNIVERSAL,
    ForcedTokenProposer,
    Proposer,
    draft_key,
)
from loraplex_server.speculation.speculator import Speculator
from loraplex_server.speculation.step_costs import StepCosts
from loraplex_server.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

POLL_S = 0.005
# Steps of a draft model with another tokenizer for one token of the target: its tokens may be longer.
MIN_ROUNDS = 0.5
# The share of token ids that may differ between two vocabularies that count as the same: added tokens differ within
# one family of models. A token that differs is a draft that is not accepted.
_MAX_DIFFERENCE = 0.01
# What helps where the memory is full.
NO_ROOM = "give it less with --draft-kv-memory, or leave it out"


@dataclass(frozen=True, slots=True)
class Drafts:
    """Draft models by the speculator's names, and their least costs."""

    proposers: dict[str, Proposer] = field(default_factory=dict[str, Proposer])
    least_costs: dict[str, LeastCost] = field(default_factory=dict[str, LeastCost])


@dataclass(frozen=True, slots=True)
class Target:
    """Facts about the target model, for proposers."""

    loaded: LoadedModel
    served: ServedModel
    runner: ModelRunner
    cache: AdapterManager
    heads: HeadSlots
    drafts: Drafts


def build_speculator(config: EngineConfig, target: Target, step_costs: StepCosts, progress: Progress) -> Speculator:
    """The speculator that the configuration asks for. Raises the typed errors of loading default heads."""
    speculation = config.speculation
    proposers: dict[str, Proposer] = {
        MEDUSA: MedusaProposer(target.runner, target.cache, target.heads),
        PROMPT_LOOKUP: PromptLookupProposer(history=History(speculation.lookup_history)),
        GRAMMAR: ForcedTokenProposer(),
        **target.drafts.proposers,
    }
    heads_id = AdapterId(speculation.default_medusa or (MODEL_HEADS if target.served.heads is not None else ""))
    default_heads = None
    if heads_id:
        progress(f"loading Medusa heads {heads_id}")
        if config.adapters.num_device_slots == 1:
            log.warning("default heads take the only adapter slot: requests with adapters fail; set --adapter-slots")
        default_heads = _followed(target.cache, heads_id, bring_up_heads(target.cache, heads_id))
    return Speculator(
        speculation,
        proposers,
        step_costs,
        draft_names=tuple(draft.name for draft in speculation.drafts),
        least_costs=target.drafts.least_costs,
        default_heads=default_heads,
        drafts_by_default=target.served.heads is not None,
        num_token_ids=min(target.loaded.spec.vocab_size, target.loaded.spec.num_logits),
        max_step_tokens=config.batch.max_step_tokens,
    )


def load_drafts(config: EngineConfig, loaded: LoadedModel, served: ServedModel, progress: Progress) -> Drafts:
    """The draft models for `loaded`, with all the memory that they take. They run where it does, in a dtype of their
    own. Raises what `load_draft` raises, and OutOfMemory."""
    drafts = Drafts()
    if not config.speculation.drafts:
        return drafts
    tokenizer = TextTokenizer.from_pretrained(served.base, revision=served.revision)
    draft_target = DraftTarget(loaded.spec, tokenizer)
    memory = DraftMemory(config.batch.max_running, config.speculation.draft_kv_bytes, config.kv.block_size)
    for draft in config.speculation.drafts:
        progress(f"loading draft model {draft.name}")
        with fitting(f"draft model {draft.name}", loaded.device, NO_ROOM):
            proposer = load_draft(draft, draft_target, memory, device=str(loaded.device), backend=loaded.backend)
            if loaded.device.type == "cuda":
                proposer.drafter.runner.warm_up(memory.max_prompt_tokens, progress)
            if config.model.cuda_graphs:
                shapes = loaded.backend.graph_shapes(config.batch.max_running, 0, memory.max_prompt_tokens)
                proposer.drafter.runner.capture(shapes, progress)
            num_rounds = MIN_ROUNDS if proposer.name == UNIVERSAL else 1.0
            key = draft_key(draft.name)
            drafts.proposers[key] = proposer
            drafts.least_costs[key] = LeastCost.of(proposer.drafter.measure(), num_rounds)
    return drafts


def bring_up_heads(cache: AdapterManager, adapter_id: AdapterId) -> AdapterKey:
    """Loads the default heads and pins them to the device, where every base request wants them."""
    try:
        while cache.load(adapter_id, True, time.monotonic()) is None:
            cache.poll(time.monotonic())
            time.sleep(POLL_S)
    except AdapterNotFound:
        raise no_heads(adapter_id) from None
    key = None
    while key is None:
        key = cache.resolve(adapter_id, time.monotonic())
    cache.drop_hold(key, name=name_in(adapter_id))  # the operator's pin stays
    if not key.has_heads:
        raise InvalidArgument(
            f"--default-medusa names {adapter_id!a}, which is a LoRA without heads; name Medusa heads",
            field="--default-medusa",
        )
    return key


def _followed(cache: AdapterManager, adapter_id: AdapterId, key: AdapterKey) -> Callable[[], AdapterKey]:
    """A function for the default heads as they are now: loaded again, their name may have others. Without any there,
    they are those that it had."""

    def followed() -> AdapterKey:
        nonlocal key
        found = cache.bound_key(adapter_id)
        if found is not None and found.has_heads:
            key = found
        return key

    return followed


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The model that is drafted for."""

    spec: ModelSpec
    tokenizer: TextTokenizer


def load_draft(
    config: DraftModelConfig,
    target: DraftTarget,
    memory: DraftMemory,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: Backend | None = None,
) -> DraftModelProposer:
    """A proposer with the draft model that `config` names, by way of text where its token ids are not the target's.

    Raises UnsupportedModel, FailedPrecondition on a vocabulary that cannot be converted, AdapterNotFound,
    AdapterInvalid, InvalidArgument on a bad dtype or device, or OutOfMemory.
    """
    try:
        if Path(config.model).is_file():
            raise UnsupportedModel(f"{config.model} is a file; name the directory that it is in")
        loaded = load_model(
            config.model,
            dtype=dtype,
            device=device,
            backend=backend,
            amend=(lambda model: _merge(model, config.name, Path(config.adapter or ""))) if config.adapter else None,
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"draft model {config.name}: {error.message}", field="--draft-model") from error
    tokenizer = _tokenizer(config)
    num_ids = min(target.spec.vocab_size, target.spec.num_logits)  # token ids that may both come out and go in
    shares_ids = _shares_ids(config.name, loaded.spec, tokenizer, target)
    if shares_ids:
        longest = target.spec.max_context_tokens
        memory = replace(memory, max_len=longest if memory.max_len is None else min(memory.max_len, longest))
    drafter = Drafter(loaded, memory, model_digest=f"{config.model} {config.adapter or ''}")
    if shares_ids:
        return DraftModelProposer(drafter, num_target_ids=num_ids, eos_token_ids=target.spec.eos_token_ids)
    return UniversalProposer(
        drafter,
        target_tokenizer=target.tokenizer,
        draft_tokenizer=tokenizer,
        num_target_ids=num_ids,
        eos_token_ids=target.spec.eos_token_ids,
    )


def have_same_ids(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """True if two vocabularies mean the same by their token ids, except for a few."""
    num_same = sum(other.get(piece) == token_id for piece, token_id in one.items())
    return num_same >= (1 - _MAX_DIFFERENCE) * max(len(one), len(other))


def _shares_ids(name: str, spec: ModelSpec, tokenizer: TextTokenizer, target: DraftTarget) -> bool:
    """True if the draft model's token ids are the target's. Raises FailedPrecondition where they are not, and a
    tokenizer to recode texts with is missing."""
    ours, theirs = target.tokenizer.vocabulary, tokenizer.vocabulary
    if ours is not None and theirs is not None:
        return have_same_ids(ours.pieces, theirs.pieces)
    if spec.vocab_size == target.spec.vocab_size:
        return True  # nothing says otherwise
    sizes = f"the vocabulary of draft model {name} has {spec.vocab_size} tokens, the base model's"
    if theirs is None:
        raise FailedPrecondition(
            f"{sizes} {target.spec.vocab_size}, and it comes without a tokenizer; name the tokenizer with "
            f"--draft-tokenizer {name}=PATH",
            field="--draft-tokenizer",
        )
    raise FailedPrecondition(
        f"{sizes} {target.spec.vocab_size}, and the base model has no tokenizer to go by text; use a draft model of "
        "the same vocabulary",
        field="--draft-model",
    )


def _tokenizer(config: DraftModelConfig) -> TextTokenizer:
    path = config.tokenizer or config.model
    flag = "--draft-tokenizer" if config.tokenizer else "--draft-model"
    try:
        found = TextTokenizer.from_pretrained(path)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"draft model {config.name}: {error.message}", field=flag) from error
    if config.tokenizer and not found.has_text:
        raise UnsupportedModel(
            f"draft model {config.name}: there is no tokenizer in {path}; --draft-tokenizer names a directory with a "
            "tokenizer.json",
            field=flag,
        )
    return found


def _merge(model: PreTrainedModel, name: str, folder: Path) -> PreTrainedModel:
    """The model with its adapter merged, as PEFT does it."""
    from peft import PeftModel  # takes a second, and few draft models have an adapter

    flag = "--draft-adapter"
    if not (folder / "adapter_config.json").is_file():
        raise AdapterNotFound(f"there is no PEFT adapter in {folder} ({flag} {name})", field=flag)
    if not (folder / "adapter_model.safetensors").is_file():
        raise UnsafeFormat(
            f"{folder} has no adapter_model.safetensors ({flag} {name}); save the adapter as safetensors",
            field=flag,
        )
    try:
        with warnings.catch_warnings():
            # PEFT only warns of missing tensors: the adapter is of another model then.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*is_gradient_checkpointing")
            peft = PeftModel.from_pretrained(model, str(folder))
            merged = peft.merge_and_unload(safe_merge=True)
    except Exception as error:  # whatever its readers and layers raise
        if is_out_of_memory(error):
            raise
        raise AdapterInvalid(
            f"PEFT cannot merge the adapter in {folder} into draft model {name}: {error_line(error)}", field=flag
        ) from error
    return cast(PreTrainedModel, merged)
