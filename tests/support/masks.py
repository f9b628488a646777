"""Masks of grammars as lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loraplex_server.grammars.matcher import Matcher, allowed_tokens


def allowed(matcher: Matcher, draft: Sequence[int] = ()) -> list[list[int]]:
    bits = allowed_tokens([(matcher, 0, draft)], len(draft) + 1)
    unpacked = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in unpacked]
