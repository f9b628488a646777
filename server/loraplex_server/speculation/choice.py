"""What a request may draft with: from what it says, what its adapter brings and what the server has. Pure.

Decided once, when the request is accepted; which of its proposers drafts in a step, and how much, is decided then.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import FailedPrecondition, InvalidArgument
from loraplex_contracts.request import Request, SpeculationParams
from loraplex_server.config import SpeculationConfig
from loraplex_server.speculation.base import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP

DEFAULT_NUM_TOKENS = 8  # per step at most, where neither request nor server say


@dataclass(frozen=True, slots=True)
class Choice:
    """A request's proposers by the speculator's name for them, none where it does not speculate."""

    proposers: tuple[str, ...] = ()
    params: SpeculationParams = SpeculationParams(kind="off")  # defaults filled in
    heads: AdapterKey | None = None

    @property
    def uses_heads(self) -> bool:
        return MEDUSA in self.proposers


def brings_heads(key: AdapterKey | None) -> bool:
    return key is not None and key.kind != "lora"


def check_named_heads(request: Request, heads: AdapterKey | None) -> None:
    """`heads`: what `speculation.medusa.adapter_id` names, None where it names nothing. Raises FailedPrecondition for
    an adapter without heads, which would draft nothing."""
    if heads is not None and not brings_heads(heads):
        adapter_id = request.speculation.medusa_id
        raise FailedPrecondition(
            f"`speculation.medusa.adapter_id` names {adapter_id!a}, which is a LoRA without Medusa heads; name an "
            "adapter that has some, or leave `speculation.medusa` out",
            field="speculation.medusa.adapter_id",
            resource=adapter_id,
        )


def choose(
    request: Request, heads: AdapterKey | None, config: SpeculationConfig, draft_names: Collection[str]
) -> Choice:
    """`heads`: the heads that it may use, its own adapter's included. Raises FailedPrecondition or InvalidArgument for
    what this server does not have."""
    params = request.speculation
    kind = params.kind
    if kind is None:
        kind = "auto" if heads is not None or config.default_draft_tokens > 0 else "off"
    if kind == "off":
        return Choice()
    match kind:
        case "medusa":
            if heads is None:
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
                *((MEDUSA,) if heads is not None else ()),
                PROMPT_LOOKUP,
                *(draft_key(name) for name in draft_names),
            )
    return Choice(proposers, _filled(params, config), heads if MEDUSA in proposers else None)


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
