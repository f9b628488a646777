"""What every implementation does to a step's segments first: check them, and join neighbours.

Knows rows, slots and weights; knows no tensors and no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from loraplex_server.layers.lora import Segment


def check_segments(segments: Sequence[Segment], num_rows: int, num_slots: int) -> None:
    """Raises ValueError on a segment outside `0..num_rows` or a slot outside `0..num_slots`."""
    for segment in segments:
        if not 0 <= segment.start <= segment.end <= num_rows:
            raise ValueError(f"Segment {segment} is not inside the step's {num_rows} rows.")
        if not 0 <= segment.adapter_slot < num_slots:
            raise ValueError(f"Segment {segment} names a slot outside 0..{num_slots - 1}.")


def join_neighbours(segments: Sequence[Segment]) -> list[Segment]:
    """Row order, without empty segments, adjacent rows of one slot and weight as one segment.

    Overlapping segments stay apart, so their terms still add up.
    """
    joined: list[Segment] = []
    open_idx: dict[tuple[int, float], int] = {}  # where in `joined` the latest rows of a slot and weight are
    for segment in sorted(segments, key=lambda s: (s.start, s.end, s.adapter_slot, s.weight)):
        if segment.start == segment.end:
            continue
        key = (segment.adapter_slot, segment.weight)
        idx = open_idx.get(key)
        if idx is not None and joined[idx].end == segment.start:
            joined[idx] = Segment(joined[idx].start, segment.end, segment.adapter_slot, segment.weight)
        else:
            open_idx[key] = len(joined)
            joined.append(segment)
    return joined
