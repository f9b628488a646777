"""Deadlines across hops: each hop answers a little before the one that asked it gives up.

What gRPC itself says when a deadline passes is a code without details, and which of the two sides says it first is
chance. A server that ends the request just before that can still say why.
"""

from __future__ import annotations

from typing import Final

MARGIN_S: Final = 0.05
MARGIN_SHARE: Final = 0.05


def answer_within_s(remaining_s: float) -> float:
    """The time in which to answer who waits for `remaining_s` more."""
    return remaining_s - min(MARGIN_S, MARGIN_SHARE * remaining_s)
