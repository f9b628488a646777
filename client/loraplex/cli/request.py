"""The options of a request as flags, for every command that sends some.

Groups of fields that are called as the SDK's options are, so that `options_of` has nothing to translate.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, cast

from loraplex import AnySpeculation, DraftModel, GenerateOptions, InvalidArgument, Medusa
from loraplex_runtime.options import option

_sampling = partial(option, panel="Sampling")
_drafting = partial(option, panel="Speculation: the same text, sooner")


def parse_speculation(text: str) -> AnySpeculation:
    """KIND or KIND:NAME. Raises InvalidArgument."""
    kind, has_name, name = text.partition(":")
    match kind, bool(has_name):
        case ("off" | "auto" | "prompt_lookup" | "medusa" | "draft_model") as known, False:
            return known
        case "medusa", True if name:
            return Medusa(name)
        case "draft_model", True if name:
            return DraftModel(name)
        case _:
            raise InvalidArgument(
                f"--speculation takes off, auto, prompt_lookup, medusa, medusa:ADAPTER, draft_model or "
                f"draft_model:NAME, not {text!a}",
                field="--speculation",
            )


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen."""

    temperature: float | None = _sampling(
        None, "0 takes the likeliest token, the default; higher varies more.", "--temperature"
    )
    top_p: float | None = _sampling(None, "Choose among the tokens that make up this share.", "--top-p")
    top_k: int | None = _sampling(None, "Choose among this many tokens.", "--top-k")
    seed: int | None = _sampling(None, "The same seed gives the same text again.", "--seed")


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who guesses tokens ahead."""

    speculation: AnySpeculation | None = _drafting(
        None,
        "Who guesses the tokens that the model then checks: prompt_lookup (copies from the text so far), medusa (extra "
        "heads; with medusa:ADAPTER those of that adapter), draft_model (a smaller model; with draft_model:NAME one of "
        "several), auto or off. Default: as the server and the adapter have it.",
        "--speculation",
        metavar="KIND[:NAME]",
        parse=parse_speculation,
    )
    max_draft_tokens: int | None = _drafting(None, "Guess this many tokens at a time at most.", "--max-draft-tokens")
    fixed_draft_length: bool = _drafting(
        False, "Always guess as many, instead of fewer where guesses miss.", "--fixed-length"
    )


def options_of(*groups: Any) -> GenerateOptions:
    """What the dataclasses in `groups` say. What is not given is left out."""
    said = {one.name: getattr(group, one.name) for group in groups for one in fields(group)}
    return cast(GenerateOptions, {name: value for name, value in said.items() if _is_given(value)})


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value not in ("", ())
