"""Stand-in for FlashInfer's paged prefill wrapper, in torch.

In graph mode it computes from the buffers that it was given alone, as a replay would. It has no page table but theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

HEAD_DIMS = (64, 128, 256)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        self.backend = backend
        self.is_graph = use_cuda_graph
        self.num_plans = 0
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        if use_cuda_graph:
            assert all(buffer is not None for buffer in buffers)
            assert len(buffers[0]) == len(buffers[1]) == len(buffers[3]) + 1  # type: ignore[arg-type]
        self.buffers: tuple[Tensor, ...] = buffers  # type: ignore[assignment]
        self.max_rows: int | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(one.dtype == torch.int32 for one in given)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert head_dim_qk in HEAD_DIMS
        assert num_qo_heads % num_kv_heads == 0
        assert causal
        num_rows = int(qo_indptr[-1])
        if self.is_graph:
            self.max_rows = self.max_rows or num_rows
            assert num_rows <= self.max_rows, "the first plan says how many rows there will be"
            assert len(qo_indptr) == len(self.buffers[0]), "the batch size is fixed"
            for buffer, one in zip(self.buffers, given, strict=True):
                buffer[: len(one)].copy_(one)
        else:
            self.buffers = tuple(one.clone() for one in given)
        self.num_rows = num_rows
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self.window_left = window_left
        self.softcap = logits_soft_cap or 0.0
        self.dtypes = (q_data_type, kv_data_type or q_data_type)
        self.num_plans += 1

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        assert self.num_plans, "run before plan"
        k_cache, v_cache = paged_kv_cache
        num_heads, num_kv_heads, dim, page_size = self.shape
        assert (q.dtype, k_cache.dtype) == self.dtypes
        assert q.shape == (self.num_rows, num_heads, dim), "q does not match qo_indptr"
        assert k_cache.shape[1:] == v_cache.shape[1:] == (page_size, num_kv_heads, dim)
        out = torch.zeros_like(q) if out is None else out
        assert out.shape == q.shape
        qo_indptr, kv_indptr, indices, last_page = (buffer.tolist() for buffer in self.buffers)
        for i, last in enumerate(last_page):
            rows = slice(qo_indptr[i], qo_indptr[i + 1])
            pages = indices[kv_indptr[i] : kv_indptr[i + 1]]
            num_keys = max(0, len(pages) - 1) * page_size + last
            num_queries = rows.stop - rows.start
            if num_queries and num_keys:
                k = k_cache[pages].flatten(0, 1)[:num_keys]
                v = v_cache[pages].flatten(0, 1)[:num_keys]
                out[rows] = self._attend(q[rows], k, v).to(out.dtype)
        return out

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * self.scale
        if self.softcap > 0:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        query_pos = len(k) - len(q) + torch.arange(len(q))[:, None]
        key_pos = torch.arange(len(k))[None, :]
        hidden = key_pos > query_pos
        if self.window_left >= 0:
            hidden |= key_pos < query_pos - self.window_left
        return torch.einsum("hqk,khd->qhd", torch.softmax(scores.masked_fill(hidden, float("-inf")), -1), v)
