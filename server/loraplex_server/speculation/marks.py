"""Which tokens of prompts come out as others.

An answer that turns its prompt into another shape (a record into JSON, a form into SQL) copies values and writes marks
of its own between them: where the prompt has `; age=` it has `", "age": `. A plain copy ends at every mark; `copying`
goes round them with what is remembered here. Pure; knows tokens only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_WRITTEN = -1
MAX_MARKS = 2048  # tokens of which something is remembered, some 100 bytes each; then it begins anew


class Marks:
    """What outputs of one kind write in place of which tokens of their prompts.

    Learned where a copy begins or ends: there the two texts differ. What an output has written itself is no mark: it
    may be copied.
    """

    def __init__(self) -> None:
        self._instead: dict[int, int] = {}  # by token of prompts; _WRITTEN: outputs have it too
        self.ends: set[int] = set()  # tokens that came in place of others: what ends a value

    def is_mark(self, token_id: int) -> bool:
        """Whether something else came in place of that token, and never itself."""
        return self._instead.get(token_id, _WRITTEN) != _WRITTEN

    def instead(self, token_id: int) -> int:
        """What came in place of that mark the last time."""
        return self._instead[token_id]

    def first(self, token_ids: Sequence[int]) -> int:
        """The index of the first token that would not be copied, or how many there are."""
        known = self._instead
        for idx, token_id in enumerate(token_ids):
            if known.get(token_id, _WRITTEN) != _WRITTEN:
                return idx
        return len(token_ids)

    def learn(self, token_id: int, came: int) -> None:
        """Next to tokens that were copied, `came` stands where the prompt has `token_id`."""
        if self._instead.get(token_id, 0) != _WRITTEN:
            self._instead[token_id] = came
            self.ends.add(came)

    def write(self, token_ids: Iterable[int]) -> None:
        """An output has these."""
        known = self._instead
        if len(known) > MAX_MARKS:
            known.clear()
            self.ends.clear()
        for token_id in token_ids:
            came = known.get(token_id)
            if came != _WRITTEN:
                known[token_id] = _WRITTEN
                if came is not None:
                    self.ends.discard(came)
