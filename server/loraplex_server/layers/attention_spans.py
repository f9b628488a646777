"""A step's spans as back ends on a GPU need them: ragged block tables and slots, with empty spans up to a fixed number.

Host work in numpy. Slots follow from the block tables, so nothing is read from the device; only of a step for a
reserved plan, whose slots are on the host, it is looked up which tokens are not written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_server.layers.attention import AttentionBatch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reserved:
    """What the steps have in common that a plan with fixed addresses may be refilled with."""

    num_spans: int
    query_len: int
    max_blocks: int


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of a step. Empty ones have no context."""

    query_lens: Ints  # [num_spans]
    context_lens: Ints  # [num_spans]
    first_tokens: Ints  # [num_spans]
    table_starts: Ints  # [num_spans] in the concatenated block tables
    tables: Ints  # the blocks of all spans, one span after the other
    slots: Ints  # [num_tokens]; -1: nowhere

    @property
    def starts(self) -> Ints:
        """Position of each span's first query."""
        return self.context_lens - self.query_lens


def read_spans(batch: AttentionBatch, reserved: Reserved | None = None) -> Spans:
    """With `reserved`, padded with empty spans. Raises ValueError where the step does not fit into it."""
    # Tokens that are in the cache already; what is on the device names none.
    is_kept = batch.slots.numpy() < 0 if reserved is not None and batch.slots.device.type == "cpu" else None
    query_lens, context_lens = batch.query_lens, batch.context_lens
    num_blocks = -(-context_lens // batch.block_size)  # [num_spans]
    places = np.arange(batch.block_tables.shape[1])
    tables = batch.block_tables[places < num_blocks[:, None]]
    table_starts = np.cumsum(num_blocks) - num_blocks
    if reserved is not None:
        missing = reserved.num_spans - len(query_lens)
        if missing < 0 or (query_lens != reserved.query_len).any() or (num_blocks > reserved.max_blocks).any():
            raise ValueError(
                f"{len(query_lens)} spans of up to {query_lens.max(initial=0)} tokens and {num_blocks.max(initial=0)} "
                f"blocks do not fit into {reserved}"
            )
        query_lens = np.concatenate([query_lens, np.full(missing, reserved.query_len)])
        context_lens = np.concatenate([context_lens, np.zeros(missing, np.int64)])
        table_starts = np.concatenate([table_starts, np.zeros(missing, np.int64)])
    first_tokens = np.cumsum(query_lens) - query_lens
    num_tokens = int(query_lens.sum())
    owners = np.repeat(np.arange(len(query_lens)), query_lens)  # [num_tokens] span of each token
    positions = (context_lens - query_lens - first_tokens)[owners] + np.arange(num_tokens)
    slots = np.full(num_tokens, -1, np.int64)
    is_real = context_lens[owners] > 0
    positions, at = positions[is_real], table_starts[owners[is_real]]
    slots[is_real] = tables[at + positions // batch.block_size] * batch.block_size + positions % batch.block_size
    if is_kept is not None:
        slots[: len(is_kept)][is_kept] = -1
    return Spans(query_lens, context_lens, first_tokens, table_starts, tables, slots)


def no_spans(block_size: int) -> AttentionBatch:
    """The step in which nothing is done."""
    none = np.zeros(0, np.int64)
    return AttentionBatch(none, none, np.zeros((0, 1), np.int64), block_size, torch.empty(0, dtype=torch.int64))


def host_ints(size: int, device: torch.device) -> Tensor:
    """Host memory [size] from which a copy to `device` is asynchronous.

    Pinned memory comes from torch's cache, which gives it out again only after the copies from it are through.
    """
    return torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")


def host_copy(values: Ints, device: torch.device) -> Tensor:
    """`values` in such memory."""
    host = host_ints(len(values), device)
    host.numpy()[:] = values
    return host
