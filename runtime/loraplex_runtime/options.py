"""Fields of configuration dataclasses that are command line flags too (flags.py makes those), and sizes in words.

Imports nothing beyond the standard library, because configurations travel to processes that know no command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field
from typing import Any, Final

from loraplex_contracts.errors import InvalidArgument

_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def option(
    default: Any,
    text: str,
    flag: str,
    *aliases: str,
    is_bytes: bool = False,
    parse: Callable[[str], Any] | None = None,
    off: str = "",
    metavar: str | None = None,
    env: str | None = None,
    panel: str | None = None,
) -> Any:
    """A field that is a command line flag too.

    Sizes are ints here and '512MiB' on the command line; other values that are no plain ones there are made by `parse`.
    `off` is the flag of a switch's opposite; without, a switch that is on has --no-FLAG. `env` is a variable that may
    give the value, `panel` a heading of the help.
    """
    how = {"is_bytes": is_bytes, "parse": parse, "off": off, "metavar": metavar, "env": env, "panel": panel}
    return field(default=default, metadata={"help": text, "flag": flag, "aliases": aliases, **how})


def parse_bytes(text: str) -> int:
    """'512MiB', '8g', '1048576' -> bytes. Raises InvalidArgument."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if not found:
        raise InvalidArgument(f"{text!r} is not a size; write it as 512MiB, 8GiB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2]])
