"""Achieved bandwidth of single kernels, over all layers of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpu_bench.adapters import choose_slots, linears, products
from gpu_bench.deadline import Deadline
from gpu_bench.floors import kv_bytes
from gpu_bench.machine import Timing, time_call
from gpu_bench.stepper import BLOCK_SIZE, Stepper
from loraplex_contracts.plan import NewSequence
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.backends.registry import choose_backend, lora_operations
from loraplex_server.layers.attention import AttentionBatch
from loraplex_server.layers.linear import AdaptedLinear
from loraplex_server.layers.lora import (
    DenseTable,
    DenseWeight,
    FactorTable,
    PreparedSegments,
    ReplayableLora,
    Segment,
    SegmentedLora,
    join_neighbours,
)
from loraplex_server.sampling.sampler import Sampler

POPULARITIES = ("identical", "distinct")
NEEDED_S = 10.0  # of one kernel, its compilation included


@dataclass(frozen=True)
class KernelFigure:
    """One line of the table. `calls` launches of the operation took `total_us` together."""

    kernel: str
    case: str
    calls: int
    total_us: float
    num_bytes: int
    gb_s: float
    of_bandwidth: float
    is_graph: bool


class _Work(NamedTuple):
    kernel: str
    case: str
    calls: int
    num_bytes: int
    call: Callable[[], object]
    is_replayable: bool = True


def all_kernels(
    stepper: Stepper, bandwidth: float, deadline: Deadline, say: Callable[[str], None]
) -> Iterator[KernelFigure]:
    device = stepper.loaded.device
    sizes = sorted({size for size in stepper.shape.batches if size > 1})[:2]
    with torch.inference_mode():
        for work in _all_work(stepper, sizes):
            if not deadline.allows(f"kernels from {work.kernel}, {work.case} on", NEEDED_S):
                break
            say(f"{work.kernel}, {work.case}")
            yield _figure(work, time_call(work.call, device, is_replayable=work.is_replayable), bandwidth)
    stepper.install(0)


def _figure(work: _Work, timing: Timing, bandwidth: float) -> KernelFigure:
    rate = work.num_bytes / timing.seconds
    return KernelFigure(
        work.kernel, work.case, work.calls, 1e6 * timing.seconds, work.num_bytes, rate / 1e9, rate / bandwidth,
        timing.is_graph,
    )  # fmt: skip


def _all_work(stepper: Stepper, sizes: Sequence[int]) -> Iterator[_Work]:
    for batch in sizes:
        yield from _lora_work(stepper, batch)
        yield _attention_work(stepper, batch, 1)
    yield _attention_work(stepper, sizes[0], stepper.shape.num_draft_tokens + 1)
    yield from _base_work(stepper, sizes[0])
    yield _medusa_work(stepper, sizes[0])
    for top_p in (1.0, 0.95):
        yield _sampler_work(stepper, sizes[-1], top_p)


Group = tuple[AdaptedLinear, ...]  # computed at once: siblings, or a linear by itself


class _Sizes(NamedTuple):
    """Widths of a group of linears: its inputs, and the outputs of each linear."""

    num_in: int
    outs: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.num_in}->{'+'.join(map(str, self.outs))}"


def _by_sizes(stepper: Stepper) -> dict[_Sizes, list[Group]]:
    found: dict[_Sizes, list[Group]] = {}
    for group in products(stepper.loaded):
        sizes = _Sizes(group[0].in_features, tuple(member.out_features for member in group))
        found.setdefault(sizes, []).append(group)
    return found


def _punica() -> list[SegmentedLora]:
    has_punica = any(status.name == "punica" and status.usable for status in lora_operations())
    return [choose_backend("cuda").lora(name="punica")] if has_punica else []


def _lora_work(stepper: Stepper, batch: int) -> Iterator[_Work]:
    """Down and up together, by sizes of what is computed at once: as launched for one step, and as a graph launches it
    for whatever comes. Punica beside it where it is installed."""
    loaded = stepper.loaded
    stepper.install(batch)
    own = next(iter(linears(loaded).values())).ops
    assert own is not None
    for ops in (own, *_punica()):
        for sizes, groups in _by_sizes(stepper).items():
            for popularity in POPULARITIES:
                slots = choose_slots(popularity, batch)
                segments = join_neighbours([Segment(row, row + 1, slot) for row, slot in enumerate(slots)])
                x = torch.randn(batch, sizes.num_in, device=loaded.device).to(loaded.dtype)
                y = torch.zeros(batch, sum(sizes.outs), device=loaded.device, dtype=loaded.dtype)
                tables = [_tables(group) for group in groups]
                factors = [table.factors[slot] for of_group in tables for table in of_group for slot in set(slots)]
                num_bytes = sum(f.a.nbytes + f.b.nbytes for f in factors if f is not None)
                num_bytes += len(groups) * (x.nbytes + 2 * y.nbytes)
                case = f"{sizes}, batch {batch}, {popularity}"
                num_slots = stepper.shape.max_batch
                prepared = ops.prepare(segments, batch, num_slots, loaded.device)
                call = _lora_call(ops, tables, prepared, x, y)
                yield _Work(f"lora ({ops.name})", case, len(groups), num_bytes, call, ops is own)
                if isinstance(ops, ReplayableLora):
                    reserved = ops.reserve(batch, num_slots, loaded.device)
                    ops.refill(reserved, segments)
                    call = _lora_call(ops, tables, reserved, x, y)
                    yield _Work(f"lora ({ops.name}, reserved)", case, len(groups), num_bytes, call)


def _tables(group: Group) -> list[FactorTable]:
    return [member.table for member in group if member.table is not None]


def _lora_call(
    ops: SegmentedLora, tables: Sequence[Sequence[FactorTable]], prepared: PreparedSegments, x: Tensor, y: Tensor
) -> Callable[[], None]:
    def call() -> None:
        for of_group in tables:
            if len(of_group) > 1:
                ops.apply_merged(y, x, of_group, prepared)
            else:
                ops.apply(y, x, of_group[0], prepared)

    return call


def _base_work(stepper: Stepper, batch: int) -> Iterator[_Work]:
    """The base's products, for comparison."""
    loaded = stepper.loaded
    for sizes, groups in _by_sizes(stepper).items():
        x = torch.randn(batch, sizes.num_in, device=loaded.device).to(loaded.dtype)
        num_out = sum(sizes.outs)
        num_bytes = len(groups) * (sizes.num_in * num_out + batch * (sizes.num_in + num_out)) * x.itemsize

        def call(x: Tensor = x, groups: Sequence[Group] = groups) -> None:
            for first, *_ in groups:
                (first.merged or first).base(x)

        yield _Work("base product", f"{sizes}, batch {batch}", len(groups), num_bytes, call)


def _attention_work(stepper: Stepper, batch: int, query_len: int) -> _Work:
    loaded, shape = stepper.loaded, stepper.shape
    device, per_row, layers = loaded.device, stepper.num_row_blocks, loaded.attention
    tables = 1 + np.arange(batch)[:, None] * per_row + np.arange(per_row)[None, :]
    positions = np.tile(np.arange(shape.context - query_len, shape.context), batch)
    blocks = tables[np.repeat(np.arange(batch), query_len), positions // BLOCK_SIZE]
    step = AttentionBatch(
        query_lens=np.full(batch, query_len, np.int64),
        context_lens=np.full(batch, shape.context, np.int64),
        block_tables=tables[:, : -(-shape.context // BLOCK_SIZE)].astype(np.int64),
        block_size=BLOCK_SIZE,
        slots=torch.from_numpy(blocks * BLOCK_SIZE + positions % BLOCK_SIZE).to(device),
    )
    backend = layers[0].backend
    assert backend is not None
    plan = backend.plan(step, loaded.dtype, device)

    def random(heads: int, dim: int) -> Tensor:
        return torch.randn(batch * query_len, heads, dim, device=device).to(loaded.dtype)

    spec = layers[0].spec
    query, key, value = (
        random(spec.num_heads, spec.k_dim),
        random(spec.num_kv_heads, spec.k_dim),
        random(spec.num_kv_heads, spec.v_dim),
    )

    def call() -> None:
        for layer in layers:
            assert layer.kv is not None
            backend.run(query, key, value, layer.kv, layer.spec, plan)

    num_bytes = kv_bytes(loaded, shape, batch) + 2 * len(layers) * (query.nbytes + key.nbytes + value.nbytes)
    case = f"batch {batch}, {shape.context} tokens, {query_len} queries each"
    return _Work(f"attention ({backend.name})", case, len(layers), num_bytes, call)


def _medusa_work(stepper: Stepper, batch: int) -> _Work:
    """The product of heads that two adapters bring, half of the rows each."""
    loaded, ops = stepper.loaded, stepper.loaded.backend.dense()
    hidden, num_out = loaded.spec.hidden_size, loaded.spec.num_logits
    table = DenseTable(hidden)
    for slot in range(2):
        weight = (torch.randn(num_out, hidden, device=loaded.device) / hidden**0.5).to(loaded.dtype)
        table.set(slot, DenseWeight(weight, None))
    x = torch.randn(batch, hidden, device=loaded.device).to(loaded.dtype)
    y = torch.zeros(batch, num_out, device=loaded.device, dtype=loaded.dtype)
    half = batch // 2
    prepared = ops.prepare([Segment(0, half, 0), Segment(half, batch, 1)], batch, 2, loaded.device)
    num_bytes = 2 * num_out * hidden * loaded.dtype.itemsize + x.nbytes + y.nbytes
    case = f"{hidden}->{num_out}, batch {batch}, 2 sets"
    return _Work(f"medusa head ({ops.name})", case, 1, num_bytes, lambda: ops.apply(y, x, table, prepared))


def _sampler_work(stepper: Stepper, batch: int, top_p: float) -> _Work:
    """Drawing with a temperature, and where it is below 1 top-p, from logits that the head has just written; includes
    no transfer."""
    loaded, num_logits = stepper.loaded, stepper.loaded.spec.num_logits
    backend = loaded.backend
    sampler = Sampler(batch, num_logits, loaded.device, argmax=backend.argmax(), noisy_argmax=backend.noisy_argmax())
    for row in range(batch):
        params = SamplingParams(temperature=0.8, top_p=top_p, seed=row)
        sampler.set_row(row, NewSequence(str(row), row, (2, 3), 2, params, OutputParams()))
    logits = torch.randn(batch, num_logits, device=loaded.device).to(loaded.dtype)
    tokens = torch.zeros(batch, 64, dtype=torch.int64, device=loaded.device)
    rows, positions = list(range(batch)), [20] * batch
    case = f"batch {batch}, temperature" + (" and top-p" if top_p < 1.0 else "")
    return _Work("sampling", case, 1, logits.nbytes, lambda: sampler.sample(logits, rows, positions, tokens), False)
