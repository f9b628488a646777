"""The option `--speculation`, for every command that has it."""

from __future__ import annotations

from loraplex import AnySpeculation, DraftModel, InvalidArgument, Medusa


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
