"""Rotary embeddings scaled by a text's length: which tokens share keys.

Transformers rotates a text of up to `limit` tokens as in training, and a longer one by other frequencies: by one other
set (longrope), or by a set for each length (dynamic NTK). What counts is the length at the time at which a token is
computed: the whole prompt for its tokens, and what there is so far for a token behind it. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The dependence of rotary embeddings on a text's length. Raises ValueError where each token would have the text
    computed again."""

    limit: int  # tokens
    has_one_set: bool  # of frequencies beyond the limit; else one for each length
    # A text that grows past the limit is computed again from its first token. Else its keys stay as they are.
    restarts: bool = False

    def __post_init__(self) -> None:
        if self.restarts and not self.has_one_set:
            raise ValueError("a text that is computed anew once has one set of frequencies beyond its limit")

    def set_of(self, length: int) -> int:
        """The number of the set of frequencies of a text's token: 0 is that of training, else 1 or the length."""
        return 0 if length <= self.limit else 1 if self.has_one_set else length

    def num_first(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Number of a sequence's first tokens that are scaled as one text, when it enters with `num_tokens` in all."""
        return num_tokens if self.restarts else num_prompt_tokens

    def key(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """A number that tells a text's keys from those of other texts with the same tokens: 0 where they are equal."""
        return self.set_of(self.num_first(num_prompt_tokens, num_tokens))

    def outgrown(self, num_before: int, num_after: int) -> bool:
        """True if a text that grows from `num_before` to `num_after` tokens has to be computed again."""
        return self.restarts and num_before <= self.limit < num_after

    def num_room(self, num_tokens: int) -> int | None:
        """Number of tokens that may follow before a text of so many has to be computed again; None: any number."""
        return self.limit - num_tokens if self.restarts and num_tokens <= self.limit else None
