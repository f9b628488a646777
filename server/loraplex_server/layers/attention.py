"""Paged attention: interface, and the handle that an attention module calls.

A step is one flattened row of spans. Of each span the queries are its last `query_len` tokens and the keys everything
up to them, causal by absolute position. Decode, a chunk of a prompt and the verification of a draft are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_server.layers.context import StepContext
from loraplex_server.layers.kv_memory import LayerKv
from loraplex_server.layers.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step as attention sees it; built once per step, on the host apart from `slots`."""

    query_lens: npt.NDArray[np.int64]  # [num_spans]
    context_lens: npt.NDArray[np.int64]  # [num_spans], the span's own tokens included
    block_tables: npt.NDArray[np.int64]  # [num_spans, max_blocks]; past a span's blocks: any block of its own
    block_size: int
    # [num_tokens] where each token's key and value go: what the block tables say for its position. In a refill, on the
    # host, also -1: nowhere, because the cache has them already.
    slots: Tensor

    @property
    def query_starts(self) -> npt.NDArray[np.int64]:
        """[num_spans + 1] first token of each span in the row."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.query_lens)])


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bounds of the steps that a plan with fixed addresses takes: up to `num_spans` spans of `query_len` tokens."""

    num_spans: int
    query_len: int
    max_blocks: int  # of any span

    @property
    def num_tokens(self) -> int:
        return self.num_spans * self.query_len


class PagedAttention(Protocol):
    """One implementation."""

    @property
    def name(self) -> str: ...

    @property
    def needs_clean_blocks(self) -> bool:
        """Whether it reads positions that were never written, and multiplies what is there by zero."""
        ...

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> Any:
        """Everything that the step's layers share. Once per step; host work, no device synchronisation."""
        ...

    def run(self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKv, spec: AttentionSpec, plan: Any) -> Tensor:
        """Writes key and value to their pages and attends.

        query [num_tokens, heads, k_dim], key and value [num_tokens, kv_heads, dim] -> [num_tokens, heads, v_dim].
        """
        ...


@runtime_checkable
class ReplayableAttention(PagedAttention, Protocol):
    """An implementation whose launches can be captured once and replayed for other steps of the same shape."""

    def reserve(self, reserved: Reserved, block_size: int, dtype: torch.dtype, device: torch.device) -> Any:
        """A plan with buffers at fixed addresses, for steps within `reserved`.

        As reserved, all spans are empty. `run` with it launches the same kernels on the same addresses whatever was
        refilled. An empty span has output 0, and nothing is written for it.
        """
        ...

    def refill(self, plan: Any, batch: AttentionBatch) -> None:
        """Puts a step in: host work and asynchronous copies, no synchronisation, nothing allocated on the device.

        Raises ValueError on a step that does not fit what was reserved.
        """
        ...


class AttentionLayer:
    """What the attention function finds on an attention module of the model; one per layer."""

    __slots__ = ("backend", "context", "kv", "spec")

    def __init__(self, spec: AttentionSpec, context: StepContext) -> None:
        self.spec = spec
        self.context = context
        self.backend: PagedAttention | None = None
        self.kv: LayerKv | None = None

    def bind(self, backend: PagedAttention, kv: LayerKv) -> None:
        self.backend = backend
        self.kv = kv

    def unbind(self) -> None:
        self.backend = None
        self.kv = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """query, key, value [1, heads, num_tokens, dim] -> [1, num_tokens, heads, v_dim].

        The mask and the options were read by the probe: they are in `spec`.
        """
        assert self.backend is not None, "no KV cache is bound to the model"
        assert self.kv is not None
        out = self.backend.run(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            self.kv,
            self.spec,
            self.context.attention,
        )
        return out.unsqueeze(0).to(query.dtype).contiguous()  # some models view it in another shape
