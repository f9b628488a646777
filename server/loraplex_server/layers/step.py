"""Step records: inputs on the host, and a model's fixed resources."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from loraplex_contracts.plan import NewSequence, Span
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.attention import AttentionBatch, KvCache, PagedAttention
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.lora import Segment

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class Row:
    """One running sequence."""

    sequence: NewSequence
    num_known: int  # tokens in the mirror that are certain
    num_blocks: int  # blocks in its table


@dataclass(frozen=True, slots=True)
class PooledSpan:
    """A span whose hidden states are pooled: `num_rows` rows of the head's input from `start` on."""

    span_idx: int
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class StagedStep:
    """A step's inputs, on the host. Spans are in the order of the flattened row."""

    spans: tuple[Span, ...]
    rows: tuple[Row, ...]  # of the spans
    tokens: Ints  # [3, num_tokens] of each token: its place in the mirror, its position, its KV slot
    query_lens: Ints  # [num_spans]
    context_lens: Ints  # [num_spans]
    block_tables: Ints  # [num_spans, max_blocks]
    block_size: int
    token_segments: tuple[Segment, ...]
    head_rows: Ints  # [num_head_rows] tokens whose logits are computed
    head_segments: tuple[Segment, ...]
    # Of each span: its first head row, how many of them are for prompt logprobs; its samples follow these.
    head_starts: tuple[int, ...]
    num_prompt_rows: tuple[int, ...]
    fresh_blocks: tuple[int, ...]  # attached by this step, without content yet
    pooled: tuple[PooledSpan, ...] = ()  # their rows are the last of `head_rows`
    rope_lengths: Ints | None = None  # [num_tokens], see StepContext

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_logit_rows(self) -> int:
        """Number of `head_rows` that get logits; they are in front of those that are pooled."""
        return len(self.head_rows) - sum(one.num_rows for one in self.pooled)

    def attention(self, slots: Tensor) -> AttentionBatch:
        """The step as attention sees it, with its slots on the host or on the device."""
        return AttentionBatch(self.query_lens, self.context_lens, self.block_tables, self.block_size, slots)


@dataclass(frozen=True, slots=True)
class StepResources:
    """A model, its memory and its operations: the same in all steps."""

    model: nn.Module
    context: StepContext
    tokens: Tensor  # [max_rows, max_len] int64 on the model's device: the tokens of each row
    cache: KvCache
    attention: PagedAttention
    slots: AdapterSlots
