"""JSON that came with an adapter, read without trust: bounded, no duplicate keys, no NaN, never deeper than the parser.

Knows nothing of what the objects mean.
"""

from __future__ import annotations

import json
from typing import Any

from loraplex_contracts.errors import AdapterInvalid


def parse_object(data: bytes, what: str, max_bytes: int) -> dict[str, Any]:
    """The JSON object in `data`. `what` names the file in the errors. Raises AdapterInvalid."""
    if len(data) > max_bytes:
        raise AdapterInvalid(f"{what} has {len(data)} bytes; at most {max_bytes} are read")
    try:
        parsed = json.loads(data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise AdapterInvalid(f"{what} is nested too deeply") from None
    except ValueError as error:  # malformed JSON, bad UTF-8, a number of thousands of digits
        raise AdapterInvalid(f"{what} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(parsed, dict):
        raise AdapterInvalid(f"{what} is not a JSON object")
    return parsed


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"key {twice[:80]!a} appears twice")
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")
