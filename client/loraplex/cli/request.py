"""The options of a request as flags, for every command that sends some.

Groups of fields that are called as the SDK's options are, so that `options_of` has nothing to translate.
"""

from __future__ import annotations

import builtins
from collections import abc
from dataclasses import dataclass, fields, make_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin, get_type_hints

from loraplex import AnySpeculation, DraftModel, GenerateOptions, InvalidArgument, Medusa
from loraplex_contracts.sampling import SAMPLING_OPTIONS
from loraplex_runtime.flags import option

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


def _sampling_flag(name: str) -> tuple[str, Any, Any]:
    """A sampling option's field, from the table of options and its type in `GenerateOptions`."""
    flag, text = "--" + name.replace("_", "-"), SAMPLING_OPTIONS[name].help
    kind = get_args(get_type_hints(GenerateOptions)[name])[0]
    match get_origin(kind) or kind:
        case abc.Mapping:
            parse = partial(_parse_pairs, flag=flag)
            return name, Any, _sampling(None, text, flag, metavar="ID:VALUE,...", parse=parse)
        case abc.Sequence:
            return name, Any, _sampling(None, text, flag, metavar="ID,...", parse=partial(_parse_ids, flag=flag))
        case builtins.str:
            return name, tuple[str, ...], _sampling((), f"{text} May be given several times.", flag)
        case _:
            return name, kind | None, _sampling(None, text, flag)


def _parse_ids(text: str, *, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument(f"{flag} takes token ids, 5,17, not {text!a}", field=flag) from None


def _parse_pairs(text: str, *, flag: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token_id): float(value) for token_id, value in pairs}
    except ValueError:
        raise InvalidArgument(f"{flag} takes token ids and values, 5:-1.5,17:2, not {text!a}", field=flag) from None


if TYPE_CHECKING:

    class Sampling:
        """The flags of all sampling options."""

else:
    Sampling = make_dataclass("Sampling", [_sampling_flag(name) for name in SAMPLING_OPTIONS], frozen=True)


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
