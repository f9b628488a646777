"""Verification of drafts, lossless for greedy and sampling rows.

The target draws a token at every position of the draft: `sampled[i]` given `draft[:i]`. While the draft tokens equal
the drawn ones, each draw has the same history as without a draft. Draws are functions of (seed, position, history), so
the same seed gives the same tokens with and without drafts, from the target's own distribution.
"""

from __future__ import annotations

from collections.abc import Sequence


def verify_chain(draft: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...]:
    """The accepted draft tokens and the token drawn behind them.

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
