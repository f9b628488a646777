"""A step's segments as the kernels read them: blocks of rows that share an adapter, in layers that never overlap.

Built on the host (sorting on the device would synchronise every step) and copied in one piece. Knows no ranks and no
factors; imports no triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_adapters.ops.base import Segment
from loraplex_adapters.ops.segments import join_neighbours

FEW_ROWS = 16
MANY_ROWS = 64


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """Positions list the rows of every block one after the other; a row appears once per layer at most.

    Rows need no order in the step: blocks reach them through `rows`, so that activations are not permuted.
    """

    slots: tuple[int, ...]  # distinct, for the host's own look at ranks
    block_rows: int
    num_positions: int
    num_blocks: int
    layers: tuple[tuple[int, int], ...]  # first block and number of blocks
    rows: Tensor  # int32 [num_positions]
    weights: Tensor  # float32 [num_positions]
    blocks: Tensor  # int32 [num_blocks, 3]: first position, number of rows, slot


def split_layers(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Segments (in row order) in as few groups as possible, so that no row is in a group twice.

    Each group is one launch that reads and writes y: terms on the same row add up in a fixed order, without atomics.
    """
    layers: list[list[Segment]] = []
    for segment in segments:
        for layer in layers:
            if layer[-1].end <= segment.start:
                layer.append(segment)
                break
        else:
            layers.append([segment])
    return layers


def build_plan(segments: Sequence[Segment], device: torch.device) -> KernelPlan:
    layers: list[dict[int, tuple[list[int], list[float]]]] = []
    joined = join_neighbours(segments)
    for layer in split_layers(joined):
        groups: dict[int, tuple[list[int], list[float]]] = {}
        for s in layer:
            rows, weights = groups.setdefault(s.slot, ([], []))
            rows.extend(range(s.start, s.end))
            weights.extend([s.weight] * (s.end - s.start))
        layers.append(groups)
    sizes = [len(rows) for groups in layers for rows, _ in groups.values()]
    # One size for the step. Short segments would leave most of a large block idle, long ones would read B too often.
    block_rows = MANY_ROWS if max(sizes, default=0) > FEW_ROWS else FEW_ROWS

    all_rows: list[int] = []
    all_weights: list[float] = []
    blocks: list[int] = []
    spans: list[tuple[int, int]] = []
    for groups in layers:
        first_block = len(blocks) // 3
        for slot, (rows, weights) in sorted(groups.items()):
            for i in range(0, len(rows), block_rows):
                blocks += [len(all_rows) + i, min(block_rows, len(rows) - i), slot]
            all_rows += rows
            all_weights += weights
        spans.append((first_block, len(blocks) // 3 - first_block))
    num_positions, num_blocks = len(all_rows), len(blocks) // 3
    rows_at, weights_at, blocks_at = _on_device([all_rows, all_weights, blocks], device)
    return KernelPlan(
        slots=tuple(sorted({s.slot for s in joined})),
        block_rows=block_rows,
        num_positions=num_positions,
        num_blocks=num_blocks,
        layers=tuple(spans),
        rows=rows_at,
        weights=weights_at.view(torch.float32),
        blocks=blocks_at.view(num_blocks, 3),
    )


def _on_device(columns: Sequence[Sequence[float]], device: torch.device) -> list[Tensor]:
    """The columns as 32-bit words, in one copy that the host does not wait for."""
    parts = [
        torch.tensor(c, dtype=torch.float32).view(torch.int32) if i == 1 else torch.tensor(c, dtype=torch.int32)
        for i, c in enumerate(columns)
    ]
    host = torch.cat(parts)
    if device.type == "cuda":
        host = host.pin_memory()
    return list(host.to(device, non_blocking=True).split([len(c) for c in columns]))
