"""Proposers: their contract, their names, and those that a request may use.

A draft only ever changes how soon a text comes: the target model samples every position itself and keeps what agrees
(`verify_chain`). So a proposer may be wrong, slow to start or silent. It is called from the engine's loop, between two
steps, and must not wait for anything but its own work.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import FailedPrecondition, InvalidArgument
from loraplex_contracts.plan import Candidate
from loraplex_contracts.request import Request, SpeculationParams
from loraplex_server.config import SpeculationConfig

MEDUSA = "medusa"
PROMPT_LOOKUP = "prompt_lookup"
DRAFT_MODEL = "draft_model"
UNIVERSAL = "universal"
DEFAULT_NUM_TOKENS = 8  # per step at most, where neither request nor server say; 12 and 16 were slower


class Ask(NamedTuple):
    """A draft of at most `num_tokens` tokens, 1 or more, is wanted for `candidate`."""

    candidate: Candidate
    num_tokens: int
    params: SpeculationParams  # the request's, with the server's defaults filled in
    medusa_key: AdapterKey | None = None  # its Medusa heads


class Proposer(Protocol):
    """One kind of drafting. Owns what it remembers of sequences; state is by sequence_id, made on the first ask."""

    @property
    def name(self) -> str:
        """What counters and answers call it: one of the names above."""
        ...

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        """A draft for each ask, in order: up to `num_tokens` ids of the target's vocabulary, empty for none.

        A sequence's tokens may have grown by any number since its last ask, and it may come for the first time at any
        length. An error that concerns one sequence gives that one an empty draft.
        """
        ...

    def num_behind(self, candidate: Candidate) -> int:
        """How many tokens would have to be read before its first draft: all of a sequence that is new to a draft model,
        none where only what the last steps brought is missing. Read once, they are no part of what drafting costs."""
        ...

    def suspend(self, sequence_id: str) -> None:
        """The sequence waits and may come back: what is costly to keep goes. Harmless for one that is not known."""
        ...

    def end(self, sequence_id: str) -> None:
        """The sequence has ended: its state goes. Harmless for one that is not known."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A request's proposers by the speculator's name for them, none where it does not speculate."""

    proposers: tuple[str, ...] = ()
    params: SpeculationParams = SpeculationParams(kind="off")  # defaults filled in
    medusa_key: AdapterKey | None = None  # its Medusa heads

    @property
    def uses_heads(self) -> bool:
        return MEDUSA in self.proposers


def brings_heads(key: AdapterKey | None) -> bool:
    return key is not None and key.kind != "lora"


def check_named_heads(request: Request, medusa_key: AdapterKey | None) -> None:
    """Raises FailedPrecondition where `speculation.medusa.adapter_id` names an adapter without heads, which would draft
    nothing. `medusa_key`: of that adapter; None where nothing is named."""
    if medusa_key is not None and not brings_heads(medusa_key):
        adapter_id = request.speculation.medusa_id
        raise FailedPrecondition(
            f"`speculation.medusa.adapter_id` names {adapter_id!a}, which is a LoRA without Medusa heads; name an "
            "adapter that has some, or leave `speculation.medusa` out",
            field="speculation.medusa.adapter_id",
            resource=adapter_id,
        )


def choose(
    request: Request, medusa_key: AdapterKey | None, config: SpeculationConfig, draft_names: Collection[str]
) -> Choice:
    """The proposers that the request may use. `medusa_key`: its heads, perhaps those of its own adapter. Raises
    FailedPrecondition or InvalidArgument for what this server does not have."""
    params = request.speculation
    kind = params.kind
    if kind is None:
        kind = "auto" if medusa_key is not None or config.default_draft_tokens > 0 else "off"
    if kind == "off":
        return Choice()
    match kind:
        case "medusa":
            if medusa_key is None:
                raise FailedPrecondition(
                    "there are no Medusa heads for this request: its adapter brings none and the server has no "
                    "--default-medusa; name some in `speculation.medusa.adapter_id`",
                    resource="speculation.medusa",
                )
            proposers = (MEDUSA,)
        case "prompt_lookup":
            proposers = (PROMPT_LOOKUP,)
        case "draft_model":
            proposers = (draft_key(_draft_name(params, draft_names)),)
        case _:
            proposers = (
                *((MEDUSA,) if medusa_key is not None else ()),
                PROMPT_LOOKUP,
                *(draft_key(name) for name in draft_names),
            )
    return Choice(proposers, _filled(params, config), medusa_key if MEDUSA in proposers else None)


def draft_key(name: str) -> str:
    """How the speculator names one of several draft models."""
    return f"{DRAFT_MODEL}:{name}"


def _draft_name(params: SpeculationParams, names: Collection[str]) -> str:
    if not names:
        raise FailedPrecondition(
            "this server has no draft model (--draft-model); leave `speculation.draft_model` out",
            resource="speculation.draft_model",
        )
    if not params.draft_name and len(names) == 1:
        return next(iter(names))
    if params.draft_name not in names:
        raise InvalidArgument(
            f"`speculation.draft_model.name` must be one of {', '.join(sorted(names))}; it is {params.draft_name!a}",
            field="speculation.draft_model.name",
        )
    return params.draft_name


def _filled(params: SpeculationParams, config: SpeculationConfig) -> SpeculationParams:
    """Bounds of n-grams stay as they are: what 0 means is prompt lookup's own matter."""
    wanted = params.max_draft_tokens or config.default_draft_tokens or DEFAULT_NUM_TOKENS
    return replace(
        params,
        max_draft_tokens=min(wanted, config.max_draft_tokens),
        fixed_length=params.fixed_length or not config.adaptive,
    )
