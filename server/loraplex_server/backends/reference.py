"""Reference back end in plain torch, on any device: attention, LoRA, dense products.

Attention: spans of one query length and similar context form a group, padded to its longest context and computed at
once; only the blocks that a group's queries can see are gathered. Groups, gather indices and masks are made once per
step and shared by all layers with the same reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, LayerKv, Reach
from loraplex_server.layers.lora import (
    DenseTable,
    FactorTable,
    PreparedSegments,
    Segment,
    SegmentedLora,
    check_dense_segments,
    check_segments,
)

# Up to this many queries per span the query heads that share a KV head are packed into the query dimension, so that
# keys and values are read once.
MAX_PACKED_QUERIES = 8
# A group's gathered contexts, in tokens: bounds the temporary copies of keys and values.
MAX_GROUP_TOKENS = 1 << 16
# Scores that no fused function computes are computed in pieces of at most this many elements.
MAX_SCORES = 1 << 24


@dataclass(frozen=True, slots=True)
class View:
    """The keys and values that a group gathers for layers of one reach."""

    blocks: Tensor  # [num_spans * num_blocks]
    mask: Tensor | None  # additive [num_spans, 1, query_len, num_blocks * block_size]; None: every key is visible
    length: int  # keys per span after the gather
    first_keys: Tensor  # [num_spans] position of the first of them


@dataclass(slots=True)
class Group:
    """Spans of one query length, computed at once."""

    query_len: int
    spans: list[int]
    tokens: slice | Tensor  # the group's tokens in the row: a slice where they lie together
    is_fresh: bool  # no context before the span: keys and values are those of the row, nothing is gathered
    views: dict[Reach, View] = field(default_factory=dict[Reach, View])
    packed: dict[tuple[Reach, int], Tensor] = field(default_factory=dict[tuple[Reach, int], Tensor])


@dataclass(slots=True)
class Plan:
    batch: AttentionBatch
    dtype: torch.dtype
    device: torch.device
    groups: list[Group]


class TorchPagedAttention:
    """Implements PagedAttention."""

    name = "torch"
    needs_clean_blocks = True

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> Plan:
        return Plan(batch, dtype, device, [_group(batch, spans, device) for spans in _partition(batch)])

    def run(self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKv, spec: AttentionSpec, plan: Plan) -> Tensor:
        key, value = key.to(kv.k.dtype), value.to(kv.v.dtype)
        query = query.to(kv.k.dtype)
        kv.write(key, value, plan.batch.slots)
        if len(plan.groups) == 1 and isinstance(plan.groups[0].tokens, slice):
            return _attend(plan, plan.groups[0], query, key, value, kv, spec)
        out = query.new_empty(query.shape[0], spec.num_heads, spec.v_dim)
        for group in plan.groups:
            tokens = group.tokens
            out[tokens] = _attend(plan, group, query[tokens], key[tokens], value[tokens], kv, spec)
        return out


def _partition(batch: AttentionBatch) -> Iterator[list[int]]:
    """Groups of spans by query length; within one, contexts that differ by more than 2x or are too many part."""
    order = np.lexsort((batch.context_lens, batch.query_lens)).tolist()
    queries: list[int] = batch.query_lens.tolist()
    contexts: list[int] = batch.context_lens.tolist()
    group: list[int] = []
    for idx in order:
        if group:
            first = group[0]
            is_fresh = contexts[idx] == queries[idx]
            if (
                queries[idx] != queries[first]
                or is_fresh != (contexts[first] == queries[first])
                or contexts[idx] > max(2 * contexts[first], 8 * batch.block_size)
                or (len(group) + 1) * contexts[idx] > MAX_GROUP_TOKENS
            ):
                yield sorted(group)
                group = []
        group.append(idx)
    if group:
        yield sorted(group)


def _group(batch: AttentionBatch, spans: list[int], device: torch.device) -> Group:
    starts = batch.query_starts
    query_len = int(batch.query_lens[spans[0]])
    is_fresh = int(batch.context_lens[spans[0]]) == query_len
    if spans == list(range(spans[0], spans[-1] + 1)):
        tokens: slice | Tensor = slice(int(starts[spans[0]]), int(starts[spans[-1] + 1]))
    else:
        idx = (starts[spans][:, None] + np.arange(query_len)[None, :]).ravel()
        tokens = torch.from_numpy(idx).to(device)
    return Group(query_len, spans, tokens, is_fresh)


def _view(plan: Plan, group: Group, reach: Reach) -> View:
    """Gather indices and mask of a group for layers of `reach`; made on first use in a step."""
    found = group.views.get(reach)
    if found is not None:
        return found
    block_size = plan.batch.block_size
    context = plan.batch.context_lens[group.spans]  # [num_spans]
    start = context - group.query_len  # position of the first query
    first_block = reach.first_keys(start) // block_size
    num_blocks = int(((context + block_size - 1) // block_size - first_block).max())
    place = first_block[:, None] + np.arange(num_blocks)[None, :]  # [num_spans, num_blocks] in the block table
    # Padding points to the span's own first block: whatever is read there is masked, and never another sequence's.
    last_block = ((context + block_size - 1) // block_size - 1)[:, None]
    place = np.where(place > last_block, first_block[:, None], place)
    blocks = np.take_along_axis(plan.batch.block_tables[group.spans], place, axis=1)
    mask, length = _mask(plan, group, reach, start, first_block * block_size, num_blocks * block_size)
    first_keys = torch.from_numpy(first_block * block_size).to(plan.device)
    view = View(torch.from_numpy(np.ascontiguousarray(blocks).ravel()).to(plan.device), mask, length, first_keys)
    group.views[reach] = view
    return view


def _mask(
    plan: Plan,
    group: Group,
    reach: Reach,
    start: np.ndarray[tuple[int], np.dtype[np.int64]],
    first_key: np.ndarray[tuple[int], np.dtype[np.int64]],
    length: int,
) -> tuple[Tensor | None, int]:
    """The additive mask [num_spans, 1, query_len, length], and how many of the gathered keys are kept."""
    if len(group.spans) == 1:
        length = int(start[0] - first_key[0]) + group.query_len  # of one span nothing needs padding
        if group.query_len == 1 and reach.first_keys(start)[0] <= first_key[0]:
            return None, length
    positions = start[:, None] + np.arange(group.query_len)[None, :]
    query_pos = torch.from_numpy(positions).to(plan.device)
    key_pos = torch.from_numpy(first_key[:, None] + np.arange(length)[None, :]).to(plan.device)
    hidden = key_pos[:, None, :] > query_pos[:, :, None]  # [num_spans, query_len, length]
    if reach != Reach():
        hidden |= key_pos[:, None, :] < torch.from_numpy(reach.first_keys(positions)).to(plan.device)[:, :, None]
    mask = torch.zeros(hidden.shape, dtype=plan.dtype, device=plan.device)
    return mask.masked_fill_(hidden, float("-inf")).unsqueeze(1), length


def _attend(
    plan: Plan, group: Group, query: Tensor, key: Tensor, value: Tensor, kv: LayerKv, spec: AttentionSpec
) -> Tensor:
    """Attention of one group: query [num_spans * query_len, heads, dim] -> [num_spans * query_len, heads, v_dim]."""
    num_spans, query_len = len(group.spans), group.query_len
    q = query.view(num_spans, query_len, spec.num_heads, spec.k_dim).transpose(1, 2)
    is_causal = False
    is_fused = spec.softcap is None and spec.sinks is None and spec.key_bias is None
    sees_all = (spec.window is None or query_len <= spec.window) and (spec.chunk is None or query_len <= spec.chunk)
    if is_fused and group.is_fresh and sees_all:
        k = key.view(num_spans, query_len, spec.num_kv_heads, spec.k_dim).transpose(1, 2)
        v = value.view(num_spans, query_len, spec.num_kv_heads, spec.v_dim).transpose(1, 2)
        mask, is_causal = None, query_len > 1
    else:
        view = _view(plan, group, spec.reach)
        k = kv.k.index_select(0, view.blocks).view(num_spans, -1, spec.num_kv_heads, spec.k_dim)
        v = kv.v.index_select(0, view.blocks).view(num_spans, -1, spec.num_kv_heads, spec.v_dim)
        k, v = k[:, : view.length].transpose(1, 2), v[:, : view.length].transpose(1, 2)
        mask = view.mask
    groups = spec.num_groups
    is_packed = groups > 1 and query_len <= MAX_PACKED_QUERIES and not is_causal
    if is_packed:
        # [num_spans, kv_heads, groups * query_len, dim]
        q = q.reshape(num_spans, spec.num_kv_heads, groups * query_len, spec.k_dim)
        mask = _packed_mask(group, spec.reach, groups, mask)
    if not is_fused:
        out = _by_scores(q, k, v, mask, _biases(spec, _view(plan, group, spec.reach)), spec)
    else:
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=spec.scaling,
            enable_gqa=groups > 1 and not is_packed,
        )
    if is_packed:
        out = out.reshape(num_spans, spec.num_heads, query_len, spec.v_dim)
    return out.transpose(1, 2).reshape(num_spans * query_len, spec.num_heads, spec.v_dim)


def _packed_mask(group: Group, reach: Reach, groups: int, mask: Tensor | None) -> Tensor | None:
    if mask is None or group.query_len == 1:
        return mask  # broadcasts over the packed heads
    found = group.packed.get((reach, groups))
    if found is None:
        found = group.packed[reach, groups] = mask.repeat(1, 1, groups, 1)
    return found


def _biases(spec: AttentionSpec, view: View) -> Tensor | None:
    """Biases [num_spans, heads, length] that are added to scores by the position of the key."""
    if spec.key_bias is None:
        return None
    positions = view.first_keys[:, None] + torch.arange(view.length, device=view.first_keys.device)
    positions = positions.clamp_(max=spec.key_bias.shape[1] - 1)  # what lies behind a span's context is hidden
    return spec.key_bias.to(positions.device)[:, positions].transpose(0, 1)


def _by_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, biases: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """Attention with capped scores, sinks or biases by key, which no fused torch function has."""
    precise = torch.promote_types(q.dtype, torch.float32)
    if biases is not None and q.shape[1] != spec.num_heads:  # the queries of a KV head are packed, head by head
        packed = q.shape[2] // spec.num_groups
        biases = biases.unflatten(1, (spec.num_kv_heads, -1)).repeat_interleave(packed, 2)
    elif biases is not None:
        biases = biases.unsqueeze(2)
    sinks = spec.sinks
    if sinks is not None:  # [query heads, 1, 1], or by the rows of a KV head where its queries are packed
        packed = q.shape[2] // spec.num_groups if q.shape[1] != spec.num_heads else 0
        sinks = sinks.to(q.device, precise)
        sinks = sinks.view(spec.num_kv_heads, -1).repeat_interleave(packed, 1) if packed else sinks[:, None]
        sinks = sinks[None, :, :, None]
    if k.shape[1] != q.shape[1]:
        k = k.repeat_interleave(spec.num_groups, dim=1)
        v = v.repeat_interleave(spec.num_groups, dim=1)
    k, v = k.to(precise), v.to(precise)
    per_query = q.shape[0] * q.shape[1] * k.shape[2]
    step = max(1, MAX_SCORES // per_query)
    pieces: list[Tensor] = []
    for begin in range(0, q.shape[2], step):
        part = slice(begin, begin + step)
        scores = q[:, :, part].to(precise) @ k.transpose(-1, -2)
        if spec.softcap is not None:
            scores = torch.tanh(scores * (spec.scaling / spec.softcap)) * spec.softcap
        else:
            scores = scores * spec.scaling
        if biases is not None:
            scores = scores + (biases if biases.shape[2] == 1 else biases[:, :, part]).to(precise)
        if mask is not None:
            scores = scores + (mask if mask.shape[2] == 1 else mask[:, :, part])
        if sinks is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            sink = sinks if sinks.shape[2] == 1 else sinks[:, :, part]
            sink = sink.expand(*scores.shape[:3], 1)
            weights = torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1]
        pieces.append(weights @ v)
    return torch.cat(pieces, dim=2).to(q.dtype)


# --- LoRA and dense products ------------------------------------------------------------------------------------------


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """y [rows, out] += factor * (x [rows, in] @ a.T [in, rank]) @ b.T [rank, out], at least in float32."""
    wide = torch.promote_types(y.dtype, torch.float32)
    term = (x.to(wide) @ a.to(wide).T) @ b.to(wide).T
    y.copy_(y.to(wide) + factor * term)


class ReferenceOps(SegmentedLora):
    """SegmentedLora, one segment after the other. A faster product may take the place of `add`."""

    name = "reference"

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(segments), num_rows)

    def apply(self, y: Tensor, x: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
        for segment in prepared.segments:
            factors = table.factors[segment.adapter_slot]
            if factors is None or factors.rank == 0 or segment.start == segment.end:
                continue
            rows = slice(segment.start, segment.end)
            self.add(y[rows], x[rows], factors.a, factors.b, segment.weight * factors.scale)

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
        """Adds one segment's term, as `add_low_rank` does."""
        add_low_rank(y, x, a, b, factor)


class ReferenceDense:
    """SegmentedDense, one segment after the other."""

    name = "reference"

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_dense_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(segments), num_rows)

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        wide = torch.promote_types(y.dtype, torch.float32)
        for segment in prepared.segments:
            dense = table.get(segment.adapter_slot)
            if dense is None or segment.start == segment.end:
                continue
            product = x[segment.start : segment.end].to(wide) @ dense.weight.to(wide).T  # [rows, out]
            if dense.bias is not None:
                product = product + dense.bias.to(wide)
            y[segment.start : segment.end, : dense.num_outputs] = product.to(y.dtype)
