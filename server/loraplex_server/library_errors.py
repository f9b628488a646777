"""Errors of Transformers, PEFT and Jinja, as one line of a sentence."""

from __future__ import annotations


def error_line(error: Exception, *, instead_of_code: str = "serve a model that Transformers has") -> str:
    """A library's error message, in one line. `instead_of_code`: the advice where it asks whether to run code that lies
    beside a checkpoint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # The first line of some only introduces the second.
    message = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    if "custom code" in message:
        return f"it is code beside the checkpoint, which is never run here; {instead_of_code}"
    return message if " " in message else f"{type(error).__name__}: {message}"
