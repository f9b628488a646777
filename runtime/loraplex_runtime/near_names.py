"""Near names of adapters, of those that the caller may use, in errors."""

from __future__ import annotations

import difflib
import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Final

from loraplex_contracts.adapters import name_in
from loraplex_contracts.errors import NEAR_KEY, AdapterNotFound, LoraplexError, adapter_not_found
from loraplex_runtime.auth import Identity

MAX_SHOWN: Final = 3
MIN_RATIO: Final = 0.7  # difflib's, from 0 to 1: one letter that is wrong in a name of four
# Bounds on the work for one error. Names of 128 characters cost about 15 us in the first pass over them, and up to 2 ms
# in the second.
MAX_FILTERED: Final = 2048
MAX_COMPARED: Final = 256
MAX_RANKED: Final = 8


def near_names(name: str, identity: Identity, listings: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The names most like `name` that the caller may use, the nearest first, MAX_SHOWN at most.

    Each listing is sorted. Of a long one, only the names around the place of `name` are looked at."""
    name = name_in(name)
    visible: set[str] = set()
    for names in listings:
        visible.update(map(name_in, filter(identity.may_use, _around(names, name, MAX_FILTERED))))
    visible.discard(name)
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(name)

    def best(names: Iterable[str], num: int, *, is_exact: bool) -> list[str]:
        rated: list[tuple[float, str]] = []
        for one in names:
            matcher.set_seq1(one)
            ratio = matcher.ratio() if is_exact else matcher.quick_ratio()
            if ratio >= MIN_RATIO:
                rated.append((-ratio, one))
        return [one for _, one in heapq.nsmallest(num, rated)]

    ranked = best(_around(sorted(visible), name, MAX_COMPARED), MAX_RANKED, is_exact=False)
    return tuple(best(ranked, MAX_SHOWN, is_exact=True))


def with_near_names(error: LoraplexError, identity: Identity, listings: Iterable[Sequence[str]]) -> LoraplexError:
    """The error; for an unknown adapter, and in the same way for another tenant's, one that suggests near names.

    Names in the error already, which a worker found among those of all tenants, are replaced."""
    if type(error) is not AdapterNotFound or not error.resource:
        return error
    has_names = NEAR_KEY in error.metadata
    if not has_names and error.message != adapter_not_found(error.resource).message:
        return error  # says more than that
    found = adapter_not_found(error.resource, near_names(error.resource, identity, listings))
    kept = {key: value for key, value in error.metadata.items() if key != NEAR_KEY}
    found.field, found.metadata = error.field, found.metadata | kept
    return found


def _around(names: Sequence[str], name: str, limit: int) -> Sequence[str]:
    """The sorted `names` around the place of `name`, `limit` at most."""
    begin = max(0, min(bisect_left(names, name) - limit // 2, len(names) - limit))
    return names[begin : begin + limit]
