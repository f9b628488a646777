"""CUDA graphs of whole steps, by shape, and their capture.

A graph repeats kernels with the arguments that they were captured with, so everything that differs from step to step is
in buffers at fixed addresses, which are refilled before a replay. There is a graph for each *bucket*, with and without
adapters: so many spans of so many tokens for decoding and verification, or so many tokens in ragged spans for steps
with prompts. Which adapters those are is in the buffers too, so loading and evicting them changes no graph.

A step smaller than its bucket is padded: missing spans have no context, no adapter and no place in the KV cache; where
spans have one length, a short one gets known tokens of its own in front, which are run again and not written. So drafts
of different lengths share a replay. Logits of padding are not used.

Owns buffers and graphs. The function that captures is an argument: `CudaCapture`, or in tests one that calls the
captured function again. A step that fits no bucket is run eager by the runner.
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
import warnings
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from loraplex_runtime.reports import Progress
from loraplex_server.layers.adapter_slots import as_if_installed
from loraplex_server.layers.attention import ModelSpec, ReplayableAttention, Reserved, StepShape
from loraplex_server.layers.experts import AdaptedModule
from loraplex_server.layers.linear import AdaptedEmbedding, AdaptedHead
from loraplex_server.layers.lora import PreparedSegments, ReplayableLora
from loraplex_server.layers.step import StagedStep, StepResources
from loraplex_server.layers.transfer import refill

# --- capture ----------------------------------------------------------------------------------------------------------

Replay = Callable[[], None]
# Makes a graph of what a function launches; the function may be called several times for that.
Capture = Callable[[Callable[[], object]], Replay]


class CudaCapture:
    """Captures graphs that share one pool of memory: only one of them runs at a time. Owns stream and pool.

    The function runs twice on the capturing stream before it is captured: the first run compiles kernels and allocates
    workspaces; in the second a wait for the device raises, because inside a capture its error would be hard to read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], object]) -> Replay:
        """A function that replays what `launch` launches. Raises RuntimeError, or what `launch` raises; the device is
        as usable as before then."""
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            # Also around the capture, whose own end does not restore the stream when it raises.
            with torch.cuda.stream(self._stream):
                launch()
                with _waiting_raises():
                    launch()
                graph = torch.cuda.CUDAGraph()
                # Other threads may load adapters meanwhile.
                with (
                    _no_garbage_collection(),
                    torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
                ):
                    launch()
            before.wait_stream(self._stream)
        return graph.replay


@contextmanager
def _waiting_raises() -> Generator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode misses some waits, which the capture finds
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    """Holds the garbage collector: nothing on the device may be freed during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- graphs of steps --------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

# Verification pays where a step waits for the weights. With more tokens than this it computes.
MAX_VERIFIED_TOKENS = 256
# Drafts longer than this are rare: their steps run eager.
MAX_GRAPH_DRAFT = 8
# A step with prompts of 512 tokens takes 10 ms on an H200 and its launches take the host 34, with an adapter 67; from
# some 2,048 tokens on the device takes longer than the host. Below the least number the weights are waited for.
MIN_RAGGED_TOKENS, MAX_RAGGED_TOKENS = 64, 2048
# Bytes that a graph keeps on the device, by layer: its nodes, and buffers of its own.
GRAPH_BYTES_PER_LAYER = 256 << 10

REPORT_EVERY = 16


@dataclass(frozen=True, slots=True)
class GraphShape(StepShape):
    """The shape of the steps that a graph takes."""

    @property
    def num_head_rows(self) -> int:
        """Tokens that get logits. Few tokens of prompts want them; each one of a draft does."""
        return min(self.num_tokens, max(self.num_spans, MAX_VERIFIED_TOKENS)) if self.is_ragged else self.num_tokens


def graph_shapes(max_running: int, max_drafted: int, max_step_tokens: int) -> list[GraphShape]:
    """Shapes to capture for up to `max_running` sequences, drafts of up to `max_drafted` tokens and steps with prompts
    of up to `max_step_tokens` tokens."""
    shapes = [GraphShape(num_spans) for num_spans in _sizes(max_running)]
    for query_len in [1 + length for length in _powers(min(max_drafted, MAX_GRAPH_DRAFT))]:
        fitting = [size for size in _powers(max_running) if size * query_len <= MAX_VERIFIED_TOKENS]
        shapes += [GraphShape(num_spans, query_len) for num_spans in fitting]
    sizes = _ragged_sizes(min(max_step_tokens, MAX_RAGGED_TOKENS))
    return shapes + [GraphShape(max_running, ragged_tokens=size) for size in sizes]


def graph_bytes(shapes: Sequence[GraphShape], spec: ModelSpec, dtype: torch.dtype) -> int:
    """Estimate of the device memory that graphs of these shapes take at most, with and without adapters."""
    num_rows = max((shape.num_head_rows for shape in shapes), default=0)
    per_graph = GRAPH_BYTES_PER_LAYER * len(spec.layers)
    return 2 * len(shapes) * per_graph + num_rows * (spec.num_logits + spec.hidden_size) * dtype.itemsize


def _powers(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest itself; nothing up to 0."""
    return sorted({*(1 << exponent for exponent in range(largest.bit_length())), largest} - {0})


def _ragged_sizes(largest: int) -> list[int]:
    """64, 128, 192, ..., 512, 640, ...: a quarter apart at most where steps are long, and the largest itself."""
    sizes = [MIN_RAGGED_TOKENS]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + max(MIN_RAGGED_TOKENS, (1 << sizes[-1].bit_length()) // 8))
    return [*(size for size in sizes if size < largest), largest]


def _sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ...: an eighth apart at most where steps are long, and the largest itself."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < largest:
        sizes.append(sizes[-1] + max(8, (1 << sizes[-1].bit_length()) // 16))
    return [*(size for size in sizes if size < largest), largest]


def pad_step(staged: StagedStep, query_len: int) -> StagedStep | None:
    """The step's tokens, segments and head rows in spans of `query_len` tokens each; slot -1: not written. None where a
    span has too few known tokens in front."""
    lens = staged.query_lens
    if (lens == query_len).all():
        return staged
    first = np.cumsum(lens) - lens  # [num_spans] first token of each span
    starts = staged.tokens[1, first]
    missing = query_len - lens
    if (starts < missing).any():
        return None
    ahead = np.arange(query_len)[None, :] - missing[:, None]  # [num_spans, query_len] of the span's own first token
    own = first[:, None] + np.maximum(ahead, 0)
    behind = np.minimum(ahead, 0)
    places, positions = staged.tokens[0][own] + behind, staged.tokens[1][own] + behind
    slots = np.where(ahead < 0, -1, staged.tokens[2][own])
    rows = np.arange(staged.num_tokens) + np.repeat(np.arange(len(lens)) * query_len + missing - first, lens)
    begins = rows.copy()
    begins[first] -= missing  # repeated tokens run with their adapter, as before
    segments = tuple(
        replace(s, start=int(begins[s.start]), end=int(rows[s.end - 1]) + 1) for s in staged.token_segments
    )
    tokens = np.stack([places, positions, slots]).reshape(3, -1)
    query_lens = np.full_like(lens, query_len)
    head_rows = rows[staged.head_rows]
    return replace(staged, tokens=tokens, query_lens=query_lens, token_segments=segments, head_rows=head_rows)


@dataclass(slots=True)
class _Bucket:
    """The graphs of one shape, and what they read."""

    shape: GraphShape
    attention: Any  # the back end's reserved plan
    segments: PreparedSegments | None = None
    plain: Replay | None = None  # without any adapter
    adapted: Replay | None = None


class StepGraphs:
    """Captured steps of one model."""

    def __init__(self, steps: StepResources, attention: ReplayableAttention, shapes: Sequence[GraphShape]) -> None:
        """`attention`: that of `steps`. `shapes`: of the steps to capture."""
        self._steps = steps
        self._attention = attention
        self._device = steps.tokens.device
        # None: steps with adapters run eager.
        self._ops = steps.slots.ops if isinstance(steps.slots.ops, ReplayableLora) else None
        targets = steps.slots.targets.values()
        self._embeddings = [module for module in targets if isinstance(module, AdaptedEmbedding)]
        # Few adapters change the head, and launches over its many columns are not free: its part follows a replay.
        self._head = next((module for module in targets if isinstance(module, AdaptedHead)), None)
        self._is_head_last = False  # what the head computes is the model's answer
        # A step's inputs, one after the other: places of its tokens in the mirror, positions, rows that reach the head.
        num_inputs = max(2 * shape.num_tokens + shape.num_head_rows for shape in shapes)
        self._inputs = torch.zeros(num_inputs, dtype=torch.int64, device=self._device)
        # [max_rows, num_logits] and [max_rows, hidden]: what all graphs put their results into.
        self._logits: Tensor | None = None
        self._hidden: Tensor | None = None
        self._max_rows = max(shape.num_head_rows for shape in shapes)
        self._shapes = shapes
        self._buckets: dict[int, list[_Bucket]] = {}  # of spans of one length, by it; the smallest first
        self._query_lens: list[int] = []
        self._ragged: list[_Bucket] = []  # the smallest first

    @property
    def num_wanted(self) -> int:
        return len(self._shapes) * (1 if self._ops is None else 2)

    @property
    def num_graphs(self) -> int:
        buckets = [*itertools.chain.from_iterable(self._buckets.values()), *self._ragged]
        return sum((bucket.plain is not None) + (bucket.adapted is not None) for bucket in buckets)

    # --- capturing ----------------------------------------------------------------------------------------------------

    def capture(self, capture: Capture, progress: Callable[[int], None]) -> None:
        """Captures the steps. First those without prompts, which are most; of a kind those without adapters, then with;
        of these the largest first, whose memory the others use again.

        Raises what a failing capture raises; graphs made before it stay usable. `progress` gets the number of graphs.
        """
        ordered = sorted(self._shapes, key=lambda shape: (shape.num_tokens, shape.num_spans), reverse=True)
        with torch.inference_mode():
            for is_ragged in (False, True):
                buckets = [self._reserve(shape) for shape in ordered if shape.is_ragged == is_ragged]
                for bucket in buckets:
                    if self._logits is None:
                        self._look_at_head(bucket)
                    bucket.plain = capture(lambda bucket=bucket: self._launch(bucket, adapted=False))
                    self._add(bucket)
                    progress(self.num_graphs)
                for bucket in buckets if self._ops is not None else ():
                    bucket.adapted = capture(lambda bucket=bucket: self._launch(bucket, adapted=True))
                    progress(self.num_graphs)

    def _add(self, bucket: _Bucket) -> None:
        """Makes a bucket known that is smaller than all others of its kind."""
        if bucket.shape.is_ragged:
            self._ragged.insert(0, bucket)
        else:
            self._buckets.setdefault(bucket.shape.query_len, []).insert(0, bucket)
            self._query_lens = sorted(self._buckets)

    def _reserve(self, shape: GraphShape) -> _Bucket:
        cache, max_len = self._steps.cache, self._steps.tokens.shape[1]
        max_blocks = -(-max_len // cache.block_size)
        reserved = Reserved(**asdict(shape), max_blocks=max_blocks)
        bucket = _Bucket(shape, self._attention.reserve(reserved, cache.block_size, cache.dtype, self._device))
        if self._ops is not None:
            bucket.segments = self._ops.reserve(shape.num_tokens, self._steps.slots.num_slots, self._device)
        return bucket

    def _launch(self, bucket: _Bucket, adapted: bool) -> Tensor:
        """Runs the step on what is in the buffers. Returns the model's own logits, of which there is a copy in the
        buffer."""
        steps, context = self._steps, self._steps.context
        places, positions, head_rows = self._inputs_of(bucket.shape)
        with as_if_installed(steps.slots.targets if adapted else {}):
            try:
                context.capture_head_input = True
                context.attention = bucket.attention
                context.token_segments = bucket.segments if adapted else None
                out = steps.model(
                    input_ids=steps.tokens.view(-1).index_select(0, places).unsqueeze(0),
                    position_ids=positions.unsqueeze(0),
                    use_cache=False,
                    logits_to_keep=head_rows,
                )
                assert context.head_input is not None
                self._keep(out.logits[0], context.head_input)
                return out.logits
            finally:
                context.clear()

    def _inputs_of(self, shape: GraphShape) -> tuple[Tensor, ...]:
        """Places and positions of tokens, and rows that reach the head."""
        sizes = shape.num_tokens, shape.num_tokens, shape.num_head_rows
        return self._inputs[: sum(sizes)].split(sizes)

    def _look_at_head(self, bucket: _Bucket) -> None:
        """Finds out whether the head's output is the logits, so that its adapters' terms can be added afterwards."""
        found: list[Tensor] = []

        def look(module: nn.Module, args: object, output: Tensor) -> None:
            found.append(output)

        hook = self._head.register_forward_hook(look) if self._head is not None else None
        try:
            out = self._launch(bucket, adapted=False)
        finally:
            if hook is not None:
                hook.remove()
        self._is_head_last = [y.data_ptr() for y in found] == [out.data_ptr()] and found[0].dtype == out.dtype

    def _keep(self, logits: Tensor, hidden: Tensor) -> None:
        """Copies results to fixed memory: graphs share the memory of everything else."""
        if self._logits is None or self._hidden is None:  # the first run, which nothing captures
            self._logits = logits.new_zeros(self._max_rows, logits.shape[1])
            self._hidden = hidden.new_zeros(self._max_rows, hidden.shape[1])
        self._logits[: len(logits)].copy_(logits)
        self._hidden[: len(hidden)].copy_(hidden)

    # --- a step -------------------------------------------------------------------------------------------------------

    def run(self, staged: StagedStep) -> tuple[Tensor, Tensor] | None:
        """Replays the step. Logits [num_head_rows, num_logits] and the head's input [num_head_rows, hidden]; the next
        call overwrites both. None where the step fits no graph: nothing was run then.
        """
        changes_head = self._changes([self._head] if self._head is not None else [], staged)
        if changes_head and not self._is_head_last:
            return None
        if self._changes(self._embeddings, staged) or not self._steps.slots.are_plain(staged.token_segments):
            return None  # what the host does cannot be replayed
        bucket, step = self._fit(staged)
        replay = None if bucket is None else bucket.adapted if staged.token_segments else bucket.plain
        if bucket is None or replay is None:
            return None
        try:
            self._refill(bucket, step)
        except ValueError as error:  # more than was reserved: many adapters on one row, for instance
            log.debug("a step runs without its graph: %s", error)
            return None
        replay()
        num_rows = len(staged.head_rows)
        assert self._logits is not None
        assert self._hidden is not None
        logits, hidden = self._logits[:num_rows], self._hidden[:num_rows]
        if changes_head and self._head is not None and self._head.table is not None:
            ops, num_slots = self._steps.slots.ops, self._steps.slots.num_slots
            ops.apply(
                logits, hidden, self._head.table, ops.prepare(staged.head_segments, num_rows, num_slots, logits.device)
            )
        return logits, hidden

    def _fit(self, staged: StagedStep) -> tuple[_Bucket | None, StagedStep]:
        """The smallest bucket that the step fits, and the step in spans as the bucket has them. None where it fits
        none."""
        bucket = self._find(staged)
        if bucket is not None and (padded := pad_step(staged, bucket.shape.query_len)) is not None:
            return bucket, padded
        return self._find_ragged(staged), staged

    def _find(self, staged: StagedStep) -> _Bucket | None:
        longest, num_spans = int(staged.query_lens[-1]), len(staged.spans)  # spans are ordered by length
        query_len = next((length for length in self._query_lens if length >= longest), None)
        if query_len is None:
            return None
        buckets = self._buckets[query_len]
        idx = bisect_left(buckets, num_spans, key=lambda bucket: bucket.shape.num_spans)
        return buckets[idx] if idx < len(buckets) else None

    def _find_ragged(self, staged: StagedStep) -> _Bucket | None:
        for bucket in self._ragged:
            if bucket.shape.num_tokens >= staged.num_tokens and bucket.shape.num_head_rows >= len(staged.head_rows):
                return bucket
        return None

    def _changes(self, modules: Sequence[AdaptedModule], staged: StagedStep) -> bool:
        """True if an adapter of the step has a part in one of these modules."""
        return any(
            module.num_installed and module.table is not None and module.table.factors[segment.adapter_slot] is not None
            for module in modules
            for segment in staged.token_segments
        )

    def _refill(self, bucket: _Bucket, step: StagedStep) -> None:
        """Refills the bucket's buffers with a step. Padding reads the first token of the first row, at position 0.
        Raises ValueError for what does not fit."""
        slots = torch.from_numpy(np.ascontiguousarray(step.tokens[2]))
        self._attention.refill(bucket.attention, step.attention(slots))
        if step.token_segments:
            assert self._ops is not None
            assert bucket.segments is not None
            self._ops.refill(bucket.segments, step.token_segments)
        shape = bucket.shape
        packed = np.zeros(2 * shape.num_tokens + shape.num_head_rows, dtype=np.int64)
        packed[: 2 * shape.num_tokens].reshape(2, -1)[:, : step.num_tokens] = step.tokens[:2]
        packed[2 * shape.num_tokens :][: len(step.head_rows)] = step.head_rows
        refill(self._inputs[: packed.size], torch.from_numpy(packed))


def capture_steps(
    steps: StepResources, shapes: Sequence[GraphShape], capture: Capture, progress: Progress
) -> StepGraphs | None:
    """Captures what can be captured and reports it. None: every step runs eager."""
    if not shapes:
        return None
    if not isinstance(steps.attention, ReplayableAttention):
        progress(f"steps run without CUDA graphs, of which {steps.attention.name} attention cannot be a part")
        return None
    if not steps.attention.replays_ragged:
        progress(f"steps with prompts run without CUDA graphs, of which {steps.attention.name} attention takes none")
        shapes = [shape for shape in shapes if not shape.is_ragged]
    graphs = StepGraphs(steps, steps.attention, shapes)
    start_s, num_wanted = time.perf_counter(), graphs.num_wanted
    progress(f"capturing {num_wanted} CUDA graphs")

    def report(num_graphs: int) -> None:
        if num_graphs % REPORT_EVERY == 0 and num_graphs < num_wanted:
            progress(f"captured {num_graphs} of {num_wanted} CUDA graphs")

    try:
        graphs.capture(capture, report)
    except Exception as error:  # whatever a model's code, kernels and driver raise; eager steps do without them all
        log.warning("a step could not be captured", exc_info=error)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        num_graphs = graphs.num_graphs
        which = f"steps that fit none of {num_graphs} captured graphs" if num_graphs else "steps"
        progress(f"{which} run without CUDA graphs: {reason}")
    else:
        progress(f"{num_wanted} CUDA graphs in {time.perf_counter() - start_s:.1f} s")
    return graphs if graphs.num_graphs else None
