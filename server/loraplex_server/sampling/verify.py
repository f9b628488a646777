"""Verification of drafts: a pure rule, lossless for greedy rows and for sampling rows.

The target has drawn its own token at every position behind the draft's prefix: `sampled[i]` given `draft[:i]`. As long
as a draft token equals the token drawn at its position, the next draw had the history that it would have had without
the draft, so it is what would have come. Draws are functions of (seed, position, history): the same seed gives the same
tokens with and without drafts, and each token has the target's own distribution, whatever proposed the draft.

Knows tokens; neither probabilities nor who proposed.
"""

from __future__ import annotations

from collections.abc import Sequence


def verify_chain(draft: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...]:
    """The tokens that come out: the accepted ones, and the one drawn behind them. All but the last were drafted.

    `sampled` has one more token than `draft`.
    """
    if len(sampled) != len(draft) + 1:
        raise ValueError(f"a draft of {len(draft)} tokens needs {len(draft) + 1} sampled ones, not {len(sampled)}")
    num_accepted = 0
    for proposed, drawn in zip(draft, sampled, strict=False):
        if proposed != drawn:
            break
        num_accepted += 1
    return tuple(sampled[: num_accepted + 1])
