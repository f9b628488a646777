"""Loading of draft models, and the proposer that fits.

Raises the typed error of what cannot be had, with the flag that names it. Owns nothing afterwards.
"""

from __future__ import annotations

import logging
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
from loraplex_server.layers.spec import ModelSpec
from loraplex_server.model.loader import load_model
from loraplex_server.speculation.draft_model.drafter import Drafter, DraftMemory
from loraplex_server.speculation.draft_model.proposers import DraftModelProposer, UniversalProposer
from loraplex_server.speculation.proposer import Proposer
from loraplex_server.text.tokenizer import TextTokenizer

log = logging.getLogger(__name__)

# Of the token ids that either vocabulary has, so many may mean something else, or be missing, in the other: added
# tokens differ within one family of models. What differs is a draft that is not accepted.
_MAX_DIFFERENCE = 0.01


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model as the operator names it."""

    name: str
    path: str  # a directory or a Hub id
    adapter_path: str = ""  # directory of a PEFT LoRA that is merged into it
    tokenizer_path: str = ""  # where it is not in `path`
    dtype: str = "auto"
    device: str = "auto"


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The model that is drafted for."""

    spec: ModelSpec
    tokenizer: TextTokenizer

    @property
    def num_ids(self) -> int:
        """Token ids that may both come out and go in."""
        return min(self.spec.vocab_size, self.spec.num_logits)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model, ready to run."""

    name: str
    drafter: Drafter
    tokenizer: TextTokenizer | None  # None: its token ids are the target's


def load_draft(
    source: DraftSource,
    target: DraftTarget,
    memory: DraftMemory,
    *,
    backend: Backend | None = None,
) -> DraftModel:
    """Raises UnsupportedModel, FailedPrecondition on a vocabulary that nothing leads to, AdapterNotFound,
    AdapterInvalid, InvalidArgument on a bad dtype or device, or OutOfMemory."""
    try:
        if Path(source.path).is_file():
            raise UnsupportedModel(f"{source.path} is a file; name the directory that it is in")
        loaded = load_model(
            source.path,
            dtype=source.dtype,
            device=source.device,
            backend=backend,
            amend=(lambda model: _merge(model, source)) if source.adapter_path else None,
        )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"draft model {source.name}: {error.message}", field="--draft-model") from error
    tokenizer = _tokenizer(source)
    shares_ids = _shares_ids(source, loaded.spec, tokenizer, target)
    if shares_ids:
        longest = target.spec.max_context_tokens
        memory = replace(memory, max_len=longest if memory.max_len is None else min(memory.max_len, longest))
    drafter = Drafter(loaded, memory, model_digest=f"{source.path} {source.adapter_path}")
    return DraftModel(source.name, drafter, None if shares_ids else tokenizer)


def make_proposer(draft: DraftModel, target: DraftTarget) -> Proposer:
    """The proposer that owns the draft model from here on."""
    if draft.tokenizer is None:
        return DraftModelProposer(draft.drafter, num_target_ids=target.num_ids, eos_token_ids=target.spec.eos_token_ids)
    return UniversalProposer(
        draft.drafter,
        target_tokenizer=target.tokenizer,
        draft_tokenizer=draft.tokenizer,
        num_target_ids=target.num_ids,
        eos_token_ids=target.spec.eos_token_ids,
    )


def have_same_ids(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether two vocabularies mean the same by their token ids, but for a few."""
    num_same = sum(other.get(piece) == token_id for piece, token_id in one.items())
    return num_same >= (1 - _MAX_DIFFERENCE) * max(len(one), len(other))


def _shares_ids(source: DraftSource, spec: ModelSpec, tokenizer: TextTokenizer, target: DraftTarget) -> bool:
    """Whether the draft model's token ids are the target's. Raises FailedPrecondition where they are not, and there is
    no way by text either."""
    ours, theirs = target.tokenizer.vocabulary, tokenizer.vocabulary
    if ours is not None and theirs is not None:
        return have_same_ids(ours.pieces, theirs.pieces)
    if spec.vocab_size == target.spec.vocab_size:
        return True  # as far as anybody can tell
    sizes = f"the vocabulary of draft model {source.name} has {spec.vocab_size} tokens, the base model's"
    if theirs is None:
        raise FailedPrecondition(
            f"{sizes} {target.spec.vocab_size}, and it comes without a tokenizer; name the tokenizer with "
            f"--draft-tokenizer {source.name}=PATH",
            field="--draft-tokenizer",
        )
    raise FailedPrecondition(
        f"{sizes} {target.spec.vocab_size}, and the base model has no tokenizer to go by text; use a draft model of "
        "the same vocabulary",
        field="--draft-model",
    )


def _tokenizer(source: DraftSource) -> TextTokenizer:
    path = source.tokenizer_path or source.path
    flag = "--draft-tokenizer" if source.tokenizer_path else "--draft-model"
    try:
        found = TextTokenizer.from_pretrained(path)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"draft model {source.name}: {error.message}", field=flag) from error
    if source.tokenizer_path and not found.has_text:
        raise UnsupportedModel(
            f"draft model {source.name}: there is no tokenizer in {path}; --draft-tokenizer names a directory with a "
            "tokenizer.json",
            field=flag,
        )
    return found


def _merge(model: PreTrainedModel, source: DraftSource) -> PreTrainedModel:
    """The model with its adapter merged, as PEFT does it."""
    from peft import PeftModel  # takes a second, and few draft models have an adapter

    folder, flag = Path(source.adapter_path), "--draft-adapter"
    if not (folder / "adapter_config.json").is_file():
        raise AdapterNotFound(f"there is no PEFT adapter in {folder} ({flag} {source.name})", field=flag)
    if not (folder / "adapter_model.safetensors").is_file():
        raise UnsafeFormat(
            f"{folder} has no adapter_model.safetensors ({flag} {source.name}); save the adapter as safetensors",
            field=flag,
        )
    try:
        with warnings.catch_warnings():
            # PEFT warns of tensors that did not find a place: no adapter of this model's then.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            peft = PeftModel.from_pretrained(model, source.adapter_path)
            merged = peft.merge_and_unload(safe_merge=True)
    except Exception as error:  # whatever its readers and layers raise
        reason = str(error).strip().split("\n", 1)[0]
        raise AdapterInvalid(
            f"PEFT cannot merge the adapter in {folder} into draft model {source.name}: {reason}", field=flag
        ) from error
    return cast(PreTrainedModel, merged)
