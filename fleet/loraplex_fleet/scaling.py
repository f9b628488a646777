"""Scaling: the wanted number of workers from the load that they report.

Pure; time is an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# Fewer workers only where those that stay would have at most this share of their target.
DOWN_SHARE: Final = 0.7


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds that the operator sets."""

    min: int
    max: int
    target: float  # pending tokens of a worker
    up_after_s: float
    down_after_s: float
    # No second change sooner: the first one must have had its effect, and a model takes time to load.
    settle_s: float


@dataclass(frozen=True, slots=True)
class ScalingState:
    """Memory of decisions: since when the load has asked for more or for fewer, and for how many at the most."""

    more_since_s: float | None = None
    fewer_since_s: float | None = None
    peak: int = 0  # most workers that were wanted since `fewer_since_s`
    changed_s: float = -math.inf


START: Final = ScalingState()


def wanted_for(pending_tokens: float, bounds: Bounds) -> int:
    """Workers that this load needs, within the bounds."""
    return min(max(math.ceil(pending_tokens / bounds.target), bounds.min), bounds.max)


def decide(
    state: ScalingState, now_s: float, count: int, pending_tokens: float, bounds: Bounds
) -> tuple[int, ScalingState]:
    """The number of workers from now on, and what to remember. `count` is the number until now, `pending_tokens` the
    sum over all of them."""
    if not bounds.min <= count <= bounds.max:  # the bounds have changed
        return min(max(count, bounds.min), bounds.max), ScalingState(changed_s=now_s)
    wanted = wanted_for(pending_tokens, bounds)
    if wanted > count:
        since_s = now_s if state.more_since_s is None else state.more_since_s
        if now_s - since_s >= bounds.up_after_s and now_s - state.changed_s >= bounds.settle_s:
            return wanted, ScalingState(changed_s=now_s)
        return count, ScalingState(more_since_s=since_s, changed_s=state.changed_s)
    fewer = wanted_for(pending_tokens / DOWN_SHARE, bounds)
    if fewer < count:
        since_s = now_s if state.fewer_since_s is None else state.fewer_since_s
        peak = max(state.peak, fewer)
        if now_s - since_s >= bounds.down_after_s and now_s - state.changed_s >= bounds.settle_s:
            return peak, ScalingState(changed_s=now_s)
        return count, ScalingState(fewer_since_s=since_s, peak=peak, changed_s=state.changed_s)
    return count, ScalingState(changed_s=state.changed_s)
