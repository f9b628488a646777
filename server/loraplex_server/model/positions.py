"""A check of positions far out: a step's tokens are computed there as `generate()` computes them behind a long text.

Attention temperatures, scaled rotations and windows are all the same up to some position, so the first tokens do not
show them. Looked at are the context's end and the numbers of tokens that the configuration names. The same few tokens
run twice: as a step, where they lie beside tokens of other texts, and alone behind a past that only counts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from loraplex_server.model.past import EmptyPast, count_by_cache
from loraplex_server.model.recording import NUM_TOKENS, Recording, Refusal, plain_inputs, trial_run

log = logging.getLogger(__name__)

# Parts of the names of fields that count tokens.
COUNTS_TOKENS = ("position", "window", "floor", "chunk", "context", "length")
MAX_THRESHOLDS = 6  # of a configuration that names more, the largest
# Where a row has pairs of tokens of other texts. What lies before the last of them is a text from its beginning.
PLACES = (7, 5, 3)


@dataclass(frozen=True, slots=True)
class FarRow:
    """Tokens of several texts side by side, as in a step."""

    positions: tuple[int, ...]  # [NUM_TOKENS]
    places: tuple[int, ...]  # of the first token of each pair


def thresholds(config: PreTrainedConfig, limit: int) -> tuple[int, ...]:
    """Numbers of tokens within `limit` that the configuration names, in order. A run of the first tokens shows those
    below NUM_TOKENS, and a run of the last tokens those at the end."""
    found = {count for count in _counts(config.to_dict()) if NUM_TOKENS <= count <= limit - NUM_TOKENS}
    return tuple(sorted(found)[-MAX_THRESHOLDS:])


def _counts(fields: Mapping[str, Any]) -> Iterator[int]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _counts(value)  # rope parameters, perhaps of each kind of layer
        elif any(part in str(name) for part in COUNTS_TOKENS) and isinstance(value, int | float):
            yield int(value) if math.isfinite(value) else 0


def far_rows(counts: Sequence[int], limit: int) -> list[FarRow]:
    """Rows with pairs around each of these numbers of tokens, and at the end of a context of `limit`."""
    ends = [max(limit, NUM_TOKENS), *(count + 1 for count in counts)]
    rows: list[FarRow] = []
    for begin in range(0, len(ends), len(PLACES)):
        pairs = dict(zip(PLACES, ends[begin : begin + len(PLACES)], strict=False))
        positions = list(range(NUM_TOKENS))
        for place, end in pairs.items():
            positions[place : place + 2] = (end - 2, end - 1)
        rows.append(FarRow(tuple(positions), tuple(pairs)))
    return rows


def check_far(model: PreTrainedModel, plain: Recording, place: int, rows: Sequence[FarRow]) -> Recording:
    """What a step of the first row shows. `plain`: a run of plain positions, and a place in it. Raises Refusal.

    A model that counts positions by its cache gets a cache for its steps that says them, if that is what it needs.
    """
    try:
        return _check(model, plain, place, rows)
    except Refusal as refusal:
        hook = count_by_cache(model)
        try:
            found = _check(model, plain, place, rows)
        except Refusal:
            hook.remove()
            raise refusal from None
        log.info("the model counts positions by its cache, so every step has one")
        return found


def _check(model: PreTrainedModel, plain: Recording, place: int, rows: Sequence[FarRow]) -> Recording:
    steps = [packed_run(model, row.positions) for row in rows]
    for row, step in zip(rows, steps, strict=True):
        if not step.is_same_as(plain, place):
            raise Refusal(
                "positions of one request change the rotation of others, so requests in one step would change each "
                "other's text"
            )
        for first in row.places:
            alone = _run_alone(model, row.positions[first] - first)
            if not all(step.is_same_as(alone, idx) for idx in (first, first + 1)):
                raise Refusal(
                    f"around position {row.positions[first]} it computes a token of a step otherwise than `generate()` "
                    "does, so texts would be wrong"
                )
            if alone.specs != plain.specs:
                raise Refusal(f"its attention is another one from position {row.positions[first]} on")
    return steps[0]


def packed_run(model: PreTrainedModel, positions: Sequence[int]) -> Recording:
    """A trial run of tokens at these positions, as a step has them."""
    ids, plain = plain_inputs(model)
    recording = Recording(model.config.get_text_config(), has_plain_positions=False)
    return trial_run(model, recording, ids, torch.tensor([positions], device=plain.device), range(NUM_TOKENS))


def _run_alone(model: PreTrainedModel, start: int) -> Recording:
    """A trial run of the same tokens as one text, `start` tokens after its beginning."""
    ids, positions = plain_inputs(model)
    text = model.config.get_text_config()
    try:
        return trial_run(model, Recording(text), ids, positions + start, range(NUM_TOKENS), EmptyPast(start))
    except Refusal as refusal:
        log.debug("without a cache: %s", refusal)
    return trial_run(model, Recording(text, has_plain_positions=False), ids, positions + start, range(NUM_TOKENS))
