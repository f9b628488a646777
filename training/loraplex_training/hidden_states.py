"""On-disk cache of hidden states.

States are computed once and read in every epoch, one file at a time. A file is a piece: whole examples, bounded in
size, the unit of memory and of shuffling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from loraplex_training.output import write_bytes
from loraplex_training.target import Example

PIECE_BYTES = 64 << 20
NOTHING = -100  # label of a missing token; cross entropy ignores it


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions that tokens can be drafted from, example by example."""

    hidden: Tensor  # [num_rows, hidden]
    labels: Tensor  # int64 [num_rows, num_heads]
    lengths: tuple[int, ...]  # rows of each example


def piece_of(examples: Sequence[Example], hidden: Sequence[Tensor], num_heads: int) -> Piece:
    """A piece in memory, without a file. `hidden` is [num_tokens, hidden] of each example."""
    labels = [labels_of(each, num_heads) for each in examples]
    states = [
        rows[each.first : each.first + wanted.shape[0]].cpu()
        for each, rows, wanted in zip(examples, hidden, labels, strict=True)
    ]
    return Piece(torch.cat(states), torch.cat(labels).long(), tuple(each.shape[0] for each in labels))


class StateCache:
    """Cache of states: filled by `add`, then read. Owns the files in its folder; the caller removes the folder."""

    def __init__(self, folder: Path, num_heads: int, piece_bytes: int = PIECE_BYTES) -> None:
        self._folder = folder
        self._num_heads = num_heads
        self._piece_bytes = piece_bytes
        self._paths: list[Path] = []
        self._piece_rows: list[int] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []  # of the piece that grows
        self._waiting_bytes = 0

    @property
    def piece_rows(self) -> Sequence[int]:
        """Number of rows of each piece."""
        return self._piece_rows

    @property
    def num_rows(self) -> int:
        return sum(self._piece_rows)

    def add(self, example: Example, hidden: Tensor) -> None:
        """Adds an example's states, [num_tokens, hidden]. Raises DiskFull."""
        labels = labels_of(example, self._num_heads)
        if not labels.shape[0]:
            return  # nothing comes after the next token
        states = hidden[example.first : example.first + labels.shape[0]].to("cpu", copy=True)
        self._waiting.append((states, labels))
        self._waiting_bytes += states.nbytes + labels.nbytes
        if self._waiting_bytes >= self._piece_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes the last piece. Call it after the last `add`."""
        if not self._waiting:
            return
        tensors = {
            "hidden": torch.cat([states for states, _ in self._waiting]),
            "labels": torch.cat([labels for _, labels in self._waiting]),
            "lengths": torch.tensor([labels.shape[0] for _, labels in self._waiting], dtype=torch.int32),
        }
        path = self._folder / f"{len(self._paths)}.safetensors"
        write_bytes(path, save(tensors))
        self._paths.append(path)
        self._piece_rows.append(tensors["labels"].shape[0])
        self._waiting, self._waiting_bytes = [], 0

    def pieces(self) -> Iterator[Piece]:
        return (self.read(piece_idx) for piece_idx in range(len(self._paths)))

    def read(self, piece_idx: int) -> Piece:
        tensors = load_file(self._paths[piece_idx])
        return Piece(tensors["hidden"], tensors["labels"].long(), tuple(tensors["lengths"].tolist()))


def labels_of(example: Example, num_heads: int) -> Tensor:
    """int32 [num_rows, num_heads]: row r, column i is the token two and i after position `first` + r."""
    tokens = torch.tensor(example.token_ids[example.first + 2 :] + [NOTHING] * (num_heads - 1), dtype=torch.int32)
    return tokens.unfold(0, num_heads, 1) if tokens.shape[0] >= num_heads else tokens.new_zeros(0, num_heads)
