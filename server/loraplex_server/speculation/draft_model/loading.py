"""Loading of draft models, and the proposer that fits."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    FailedPrecondition,
    UnsafeFormat,
    UnsupportedModel,
)
from loraplex_server.backends.backend import Backend
from loraplex_server.config import DraftModelConfig
from loraplex_server.layers.spec import ModelSpec
from loraplex_server.model.loader import load_model
from loraplex_server.speculation.draft_model.drafter import Drafter, DraftMemory
from loraplex_server.speculation.draft_model.proposers import DraftModelProposer, UniversalProposer
from loraplex_server.text.tokenizer import TextTokenizer

# The share of token ids that may differ between two vocabularies that count as the same: added tokens differ within
# one family of models. A token that differs is a draft that is not accepted.
_MAX_DIFFERENCE = 0.01


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The model that is drafted for."""

    spec: ModelSpec
    tokenizer: TextTokenizer

    @property
    def num_ids(self) -> int:
        """Token ids that may both come out and go in."""
        return min(self.spec.vocab_size, self.spec.num_logits)


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
    shares_ids = _shares_ids(config.name, loaded.spec, tokenizer, target)
    if shares_ids:
        longest = target.spec.max_context_tokens
        memory = replace(memory, max_len=longest if memory.max_len is None else min(memory.max_len, longest))
    drafter = Drafter(loaded, memory, model_digest=f"{config.model} {config.adapter or ''}")
    if shares_ids:
        return DraftModelProposer(drafter, num_target_ids=target.num_ids, eos_token_ids=target.spec.eos_token_ids)
    return UniversalProposer(
        drafter,
        target_tokenizer=target.tokenizer,
        draft_tokenizer=tokenizer,
        num_target_ids=target.num_ids,
        eos_token_ids=target.spec.eos_token_ids,
    )


def have_same_ids(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether two vocabularies mean the same by their token ids, but for a few."""
    num_same = sum(other.get(piece) == token_id for piece, token_id in one.items())
    return num_same >= (1 - _MAX_DIFFERENCE) * max(len(one), len(other))


def _shares_ids(name: str, spec: ModelSpec, tokenizer: TextTokenizer, target: DraftTarget) -> bool:
    """Whether the draft model's token ids are the target's. Raises FailedPrecondition where they are not, and a
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
            peft = PeftModel.from_pretrained(model, str(folder))
            merged = peft.merge_and_unload(safe_merge=True)
    except Exception as error:  # whatever its readers and layers raise
        reason = str(error).strip().split("\n", 1)[0]
        raise AdapterInvalid(
            f"PEFT cannot merge the adapter in {folder} into draft model {name}: {reason}", field=flag
        ) from error
    return cast(PreTrainedModel, merged)
