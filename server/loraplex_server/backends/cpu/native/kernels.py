"""Native kernels called with tensors: packing, products, low-rank updates, attention, decoders.

Owns the threads. A C function gets its arguments in the order of their names in library.py. Checks nothing that its
callers know: a wrong shape here is a wrong address there, so callers are the few modules that take shapes from the
tensors themselves.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from loraplex_contracts.errors import FailedPrecondition
from loraplex_server.backends.cpu.native.library import (
    Draws,
    Experts,
    Guesses,
    GuessScratch,
    Head,
    Library,
    Linear,
    Member,
    Noise,
    Pieces,
    Routed,
    Runs,
    Spans,
    Stack,
    Step,
    Table,
)
from loraplex_server.layers.masks import RowMasks
from loraplex_server.layers.quantization import INT4, INT8, QuantizedWeight, WeightFormat
from loraplex_server.layers.transfer import LARGE_PAGE
from loraplex_server.sampling.draw import BOUND_SHIFT, DrawRows, NoiseField

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}  # lp::DType
K_MULTIPLE: Final = {torch.float32: 1, torch.bfloat16: 32}  # of a packed weight's inputs
ACTIVATIONS: Final = {"SiLUActivation": 0, "SiLU": 0, "GELUTanh": 1, "PytorchGELUTanh": 1}  # modules, and their codes
BAND: Final = 32  # outputs, and inputs of a block; see src/kernels.h


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One or several weights [out, in] in bands; see src/kernels.h."""

    memory: Tensor  # uint8
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype  # of products with it
    format: WeightFormat | None = None  # of few bits

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def matrix(self) -> Tensor:
        """The weights again, one below the other: a copy [out, in]."""
        return self._panels().reshape(-1, self.num_inputs)[: self.num_outputs]

    def of_pair(self, which: int, num_outputs: int) -> Tensor:
        """One of the two weights of `pack_pair`: a copy [out, in]."""
        return self._panels()[:, which].reshape(-1, self.num_inputs)[:num_outputs]

    def _panels(self) -> Tensor:
        """The packed values as [bands, 2, 16, in]."""
        num_bands, k = -(-self.num_outputs // BAND), self.num_inputs
        if self.format is not None:
            return self._panels_of_few_bits(num_bands, self.format)
        values = self.memory.view(self.dtype)
        if self.dtype == torch.float32:
            return values.view(num_bands, k, 2, BAND // 2).permute(0, 2, 3, 1)
        blocks = values.view(num_bands, k // BAND, 2, BAND // 2, BAND // 2, 2)  # blocks of inputs, panels, pairs
        return blocks.permute(0, 2, 4, 1, 3, 5).reshape(num_bands, 2, BAND // 2, k)

    def _panels_of_few_bits(self, num_bands: int, form: WeightFormat) -> Tensor:
        """Values of few bits as `_panels` gives them. In memory a block's scales lie before its values; see
        src/kernels.h."""
        num_blocks, half = -(-self.num_inputs // BAND), BAND // 2
        blocks = self.memory.view(num_bands, num_blocks, -1)
        codes, values = blocks[:, :, :BAND].reshape(num_bands, num_blocks, 2, half), blocks[:, :, BAND:]
        if form is INT8:  # panels, groups of inputs, outputs, inputs of a group
            values = values.reshape(num_bands, num_blocks, 2, BAND // 4, half, 4).permute(0, 2, 4, 1, 3, 5)
            values = (values.to(torch.int16) - 128).to(torch.int8)
        else:  # panels, groups of pairs, outputs, inputs of a pair, bytes of pairs, pairs
            nibbles = torch.stack((values & 15, values >> 4), dim=-1)
            nibbles = nibbles.reshape(num_bands, num_blocks, 2, 4, half, 2, 2, 2)
            values = nibbles.permute(0, 2, 4, 1, 3, 6, 7, 5).to(torch.int8)
        codes = codes.permute(0, 2, 3, 1).reshape(-1, num_blocks)
        weight = QuantizedWeight(form, values.reshape(-1, num_blocks * BAND), codes).widened(self.dtype)
        return weight[:, : self.num_inputs].view(num_bands, 2, half, self.num_inputs)


@dataclass(frozen=True, slots=True)
class RunsOfRows:
    """A step's adapters as the kernels read them, with what keeps its arrays alive."""

    struct: Runs
    max_uses: int  # adapters of one row
    arrays: tuple[Tensor, ...]


class NativeKernels:
    """The library's kernels with a pool of threads."""

    def __init__(self, library: Library, num_threads: int) -> None:
        """Raises FailedPrecondition where the system gives the process fewer threads."""
        self.num_threads = num_threads
        self.isa = library.isa
        self._functions: Any = library.functions
        pool: int | None = self._functions.lp_pool_new(num_threads)
        if pool is None:
            raise FailedPrecondition(
                f"the system does not give this process {num_threads} threads; take fewer with --threads, or raise the "
                "limit of processes or of memory",
                field="--threads",
            )
        self._pool = pool
        self._inner = torch.empty(0)  # scratch of `add_lora` and `linears`
        self._routed = torch.empty(0, dtype=torch.uint8)  # scratch of `run_experts`
        # Not at exit: threads that are still computing then would lose the pool under their feet.
        weakref.finalize(self, _free_pool, self._functions, self._pool, os.getpid()).atexit = False

    # --- weights ------------------------------------------------------------------------------------------------------

    def can_pack(self, weight: Tensor) -> bool:
        """True if there is a product for this weight [out, in]."""
        multiple = K_MULTIPLE.get(weight.dtype)
        return weight.device.type == "cpu" and multiple is not None and weight.shape[1] % multiple == 0

    def pack(self, weights: Sequence[Tensor], form: WeightFormat | None = None) -> PackedWeight:
        """Weights [out, in] one below the other. `form`: of few bits."""
        if any(weight.shape[0] % BAND for weight in weights[:-1]):  # a band has outputs of several
            weights = [torch.cat(tuple(weights))]
        return self._pack_parts(weights, [weight.shape[0] for weight in weights], form)

    def pack_experts(self, weight: Tensor, form: WeightFormat | None) -> PackedWeight:
        """A weight of each expert [experts, out, in], each in whole bands."""
        return self._pack_parts(weight.unbind(), [_in_bands(weight.shape[1])] * weight.shape[0], form)

    def _pack_parts(self, weights: Sequence[Tensor], sizes: list[int], form: WeightFormat | None) -> PackedWeight:
        """Packs weights one after the other. `sizes`: the outputs that the memory of each has room for."""
        dtype, num_inputs = weights[0].dtype, weights[0].shape[1]
        packed = self._allocate(sum(sizes), num_inputs, dtype, form)
        address = packed.address
        for weight, size in zip(weights, sizes, strict=True):
            values, scales = self._source(weight, form)
            self._functions.lp_pack(
                self._pool, DTYPES[dtype], _code(form), values.data_ptr(), _address(scales), num_inputs,
                weight.shape[0], num_inputs, address,
            )  # fmt: skip
            address += self._functions.lp_packed_bytes(DTYPES[dtype], _code(form), size, num_inputs)
        return packed

    def pack_expert_pairs(self, weight: Tensor, form: WeightFormat | None) -> PackedWeight:
        """Gate and up of each expert [experts, 2 * inner, in], of which 16 outputs of each take turns. `inner`: a
        multiple of 16."""
        num_experts, num_outputs, num_inputs = weight.shape
        packed = self._allocate(num_experts * num_outputs, num_inputs, weight.dtype, form)
        expert_bytes = packed.memory.numel() // num_experts
        for idx, one in enumerate(weight):
            gate, up = one.chunk(2)
            self._pack_pair(gate, up, form, packed.address + idx * expert_bytes)
        return packed

    def pack_pair(self, first: Tensor, second: Tensor, form: WeightFormat | None = None) -> PackedWeight:
        """Two weights of one shape [out, in]: 16 outputs of each take turns."""
        num_outputs, num_inputs = first.shape
        packed = self._allocate(-(-num_outputs // 16) * 32, num_inputs, first.dtype, form)
        self._pack_pair(first, second, form, packed.address)
        return packed

    def _pack_pair(self, first: Tensor, second: Tensor, form: WeightFormat | None, address: int) -> None:
        num_outputs, num_inputs = first.shape
        (one, one_scales), (other, other_scales) = self._source(first, form), self._source(second, form)
        self._functions.lp_pack_pair(
            self._pool, DTYPES[first.dtype], _code(form), one.data_ptr(), _address(one_scales), other.data_ptr(),
            _address(other_scales), num_inputs, num_outputs, num_inputs, address,
        )  # fmt: skip

    def _source(self, weight: Tensor, form: WeightFormat | None) -> tuple[Tensor, Tensor | None]:
        """Content to pack of a weight: its values, and the scales of those in few bits."""
        if form is None:
            return weight.detach().contiguous(), None
        found = self.quantize(weight, form)
        return found.values, found.codes

    def quantize(self, weight: Tensor, form: WeightFormat) -> QuantizedWeight:
        """The same weights and scales as `form.quantize`."""
        if form is not INT4 or weight.dtype not in DTYPES:
            return form.quantize(weight)
        rows = weight.detach().contiguous()
        values = torch.empty(rows.shape, dtype=torch.int8)
        codes = torch.empty((rows.shape[0], -(-rows.shape[1] // BAND)), dtype=torch.uint8)
        self._functions.lp_round_int4(
            self._pool, DTYPES[rows.dtype], rows.data_ptr(), *rows.shape, 0, values.data_ptr(), codes.data_ptr()
        )
        return QuantizedWeight(form, values, codes)

    def round_(self, weight: Tensor, form: WeightFormat) -> None:
        """Rounds as `form.round_` does."""
        if form is not INT4 or weight.dtype not in DTYPES or not weight.is_contiguous():
            form.round_(weight)
        else:
            self._functions.lp_round_int4(
                self._pool, DTYPES[weight.dtype], weight.data_ptr(), *weight.shape, 1, None, None
            )

    def _allocate(
        self, num_outputs: int, num_inputs: int, dtype: torch.dtype, form: WeightFormat | None
    ) -> PackedWeight:
        num_bytes = self._functions.lp_packed_bytes(DTYPES[dtype], _code(form), num_outputs, num_inputs)
        align = LARGE_PAGE if num_bytes >= LARGE_PAGE else 64
        memory = torch.empty(num_bytes + align, dtype=torch.uint8)
        start = -memory.data_ptr() % align
        memory = memory[start : start + num_bytes]
        self._functions.lp_use_large_pages(memory.data_ptr(), num_bytes)
        return PackedWeight(memory, num_outputs, num_inputs, dtype, form)

    # --- single operations --------------------------------------------------------------------------------------------

    def linear(self, x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
        """x [..., in] -> x @ W.T + bias [..., out]"""
        rows = x.reshape(-1, packed.num_inputs).contiguous()
        y = x.new_empty((*x.shape[:-1], packed.num_outputs))
        self._functions.lp_linear(
            self._pool, DTYPES[packed.dtype], rows.data_ptr(), packed.num_inputs, rows.shape[0], packed.num_inputs,
            packed.address, _code(packed.format), packed.num_outputs, _address(bias), y.data_ptr(), packed.num_outputs,
        )  # fmt: skip
        return y

    def linears(
        self,
        x: Tensor,
        like: PackedWeight,
        members: ctypes.Array[Member],
        sizes: Sequence[int],
        runs: RunsOfRows,
        max_rank: int,
    ) -> tuple[Tensor, ...]:
        """x [..., in] -> x @ W.T + bias of each member, with the runs' updates [..., out]. `like`: the packed weight of
        one of them. `sizes`: their outputs. `max_rank`: of their tables."""
        rows = x.reshape(-1, like.num_inputs).contiguous()
        num_rows = rows.shape[0]
        runs.struct.max_rank = max_rank * runs.max_uses
        outputs = tuple(x.new_empty((*x.shape[:-1], size)) for size in sizes)
        for member, y in zip(members, outputs, strict=True):
            member.y = y.data_ptr()
        needed = self._functions.lp_linears_scratch(num_rows, runs.struct.max_rank, len(sizes), sum(sizes))
        if self._inner.numel() < needed:
            self._inner = torch.empty(2 * needed)
        self._functions.lp_linears(
            self._pool, DTYPES[like.dtype], _code(like.format), rows.data_ptr(), like.num_inputs, num_rows, members,
            len(sizes), ctypes.byref(runs.struct), self._inner.data_ptr(),
        )  # fmt: skip
        return outputs

    def experts(self, x: Tensor, experts: Tensor, packed: PackedWeight, num_outputs: int) -> Tensor:
        """x [rows, in] times the weight of each of a row's experts [rows, experts of a row], int64 -> [pairs, out].
        `packed`: the weights of all experts, each padded to whole bands."""
        rows, chosen = x.contiguous(), experts.contiguous()
        num_experts = packed.num_outputs // _in_bands(num_outputs)
        y = x.new_empty(chosen.numel(), num_outputs)
        self._functions.lp_experts(
            self._pool, DTYPES[packed.dtype], rows.data_ptr(), packed.num_inputs, chosen.data_ptr(), chosen.numel(),
            chosen.shape[1], num_experts, packed.address, _code(packed.format), num_outputs, y.data_ptr(),
        )  # fmt: skip
        return y

    def run_experts(self, experts: Experts, routed: Routed) -> None:
        """All that experts compute of a step. Its scratch is set here. Raises IndexError where a row goes to an expert
        that is not there."""
        needed = self._functions.lp_experts_scratch_bytes(
            ctypes.byref(experts), routed.num_rows * routed.top_k, routed.max_rank
        )
        if self._routed.numel() < needed:
            self._routed = torch.empty(needed, dtype=torch.uint8)
        routed.scratch = self._routed.data_ptr()
        if not self._functions.lp_experts_run(self._pool, ctypes.byref(experts), ctypes.byref(routed)):
            raise IndexError(f"a router chose an expert that is none of {experts.num_experts}")

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, narrows: bool = True) -> Tensor:
        """x [..., features] -> (weight + offset) * x / rms(x). `narrows`: x / rms(x) is rounded to the dtype first."""
        rows = x.contiguous()
        y = torch.empty_like(rows)
        num_features = weight.shape[0]
        self._functions.lp_rms_norm(
            self._pool, DTYPES[x.dtype], rows.data_ptr(), weight.data_ptr(), rows.numel() // num_features,
            num_features, eps, offset, narrows, y.data_ptr(),
        )  # fmt: skip
        return y

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool) -> Tensor:
        """x, gate [..., features] -> weight * x / rms(x) * silu(gate), or, where the gate goes first, the norm of x *
        silu(gate), in x's dtype. x may be in float32 beside others in bfloat16."""
        rows, gates = x.contiguous(), gate.contiguous()
        y = torch.empty_like(rows)
        num_features = weight.shape[0]
        self._functions.lp_gated_norm(
            self._pool, DTYPES[x.dtype], DTYPES[weight.dtype], rows.data_ptr(), gates.data_ptr(), weight.data_ptr(),
            rows.numel() // num_features, num_features, eps, gates_first, y.data_ptr(),
        )  # fmt: skip
        return y

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate, up [..., features] -> silu(gate), rounded to the dtype, times up."""
        num_features = gate.shape[-1]
        gates, ups = (x.reshape(-1, num_features) for x in (gate, up))
        if gates.stride(1) != 1 or ups.stride(1) != 1:
            gates, ups = gates.contiguous(), ups.contiguous()
        y = torch.empty(gate.shape, dtype=gate.dtype)
        self._functions.lp_gate(
            self._pool, DTYPES[gate.dtype], ACTIVATIONS["SiLU"], gates.data_ptr(), gates.stride(0), ups.data_ptr(),
            ups.stride(0), len(gates), num_features, y.data_ptr(),
        )  # fmt: skip
        return y

    def argmax(self, values: Tensor, masks: RowMasks | None = None) -> tuple[Tensor, Tensor]:
        """values [rows, n] -> the largest of each row (float32; NaN if one is) and its index, the lowest on ties. Of a
        row with a mask the largest that it allows; NaN also where another value is infinite."""
        numbers = bits = None
        if masks is not None:
            numbers, bits = array("i", masks.numbers), masks.bits
            if bits.shape[1] * 32 < values.shape[1] or not bits.flags.c_contiguous or max(numbers) >= len(bits):
                raise ValueError(f"masks {bits.shape} do not fit values {tuple(values.shape)}")
        rows = values if values.is_contiguous() else values.contiguous()
        best = torch.empty(rows.shape[0], dtype=torch.float32)
        where = torch.empty(rows.shape[0], dtype=torch.int64)
        self._functions.lp_argmax(
            self._pool, DTYPES[rows.dtype], rows.data_ptr(), rows.shape[0], rows.shape[1],
            None if numbers is None else numbers.buffer_info()[0], None if bits is None else bits.ctypes.data,
            0 if bits is None else bits.shape[1], best.data_ptr(), where.data_ptr(),
        )  # fmt: skip
        return best, where

    def draw(self, scores: Tensor, rows: DrawRows, noise: NoiseField, *, truncates: bool) -> tuple[Tensor, Tensor]:
        """scores [rows, vocabulary] in float32 -> the token drawn from each row, and the row's largest score; what
        `draw_dense` gives."""
        values = scores if scores.stride(1) == 1 else scores.contiguous()
        columns = [rows.keys.contiguous(), rows.temperature.contiguous()]
        if truncates:
            columns += [column.contiguous() for column in (rows.top_k, rows.top_p, rows.log_min_p)]
        draws = Draws(*values.shape, values.stride(0), values.data_ptr(), *(one.data_ptr() for one in columns))
        tables = [one.data_ptr() for one in (noise.mixed_ids, noise.values, noise.slopes)]
        bound = Noise(*tables, noise.low_bits, noise.bound_slope, noise.bound_least, BOUND_SHIFT)
        tops = torch.empty(values.shape[0], dtype=torch.float32)
        token_ids = torch.empty(values.shape[0], dtype=torch.int64)
        self._functions.lp_draw(
            self._pool, ctypes.byref(draws), ctypes.byref(bound), tops.data_ptr(), token_ids.data_ptr()
        )
        return token_ids, tops

    def add_lora(self, y: Tensor, x: Tensor, table: Table, runs: RunsOfRows, max_rank: int) -> None:
        """y [rows, out] += each run's update of x [rows, in]; last dimensions contiguous. `max_rank`: of the table."""
        num_rows, num_inputs = x.shape
        runs.struct.max_rank = max_rank * runs.max_uses
        needed = self._functions.lp_lora_scratch(num_rows, runs.struct.max_rank, y.shape[1])
        if self._inner.numel() < needed:
            self._inner = torch.empty(2 * needed)
        self._functions.lp_lora(
            self._pool, DTYPES[y.dtype], x.data_ptr(), num_inputs, num_rows, ctypes.byref(table),
            ctypes.byref(runs.struct), self._inner.data_ptr(), y.data_ptr(), y.shape[1], y.stride(0),
        )  # fmt: skip

    def dense(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, start: int = 0, end: int | None = None
    ) -> None:
        """y [rows, out] = x [rows, in] @ weight.T + bias, in rows start..end, with a weight as it lies, [out, in]; for
        few rows."""
        x_stride, y_stride, item_bytes = x.stride(0), y.stride(0), x.element_size()
        end = x.shape[0] if end is None else end
        self._functions.lp_dense(
            self._pool, DTYPES[x.dtype], x.data_ptr() + start * x_stride * item_bytes, x_stride, end - start,
            x.shape[1], weight.data_ptr(), weight.shape[0], _address(bias),
            y.data_ptr() + start * y_stride * item_bytes, y_stride,
        )  # fmt: skip

    def guess(self, guesses: Guesses, head: Head, hidden: Tensor, scratch: GuessScratch, best: Any, where: Any) -> None:
        """Guesses of heads that share the model's own, from hidden [states, features], into arrays of C."""
        self._functions.lp_guess(
            self._pool, ctypes.byref(guesses), ctypes.byref(head), hidden.data_ptr(), ctypes.byref(scratch), best,
            where,
        )  # fmt: skip

    def attend(
        self,
        query: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        spans: Spans,
        *,
        scaling: float,
        softcap: float | None,
        window: int | None,
        chunk: int | None = None,
        sinks: Tensor | None = None,
        key_bias: Tensor | None = None,
    ) -> Tensor:
        """query [tokens, heads, dim] -> [tokens, heads, v_dim] over pages [blocks, block_size, kv_heads, dim] and
        [.., v_dim], in which the step's own keys and values are already. `sinks`: float32 [heads]. `key_bias`: as in
        AttentionSpec, in float32."""
        query = query.contiguous()
        num_tokens, num_heads, dim = query.shape
        v_dim = v_pages.shape[3]
        out = query.new_empty(num_tokens, num_heads, v_dim)
        self._functions.lp_attend(
            self._pool, DTYPES[query.dtype], query.data_ptr(), out.data_ptr(), k_pages.data_ptr(),
            v_pages.data_ptr(), num_heads, k_pages.shape[2], dim, v_dim, scaling, softcap or 0.0, window or 0,
            chunk or 0, _address(sinks), _address(key_bias), 0 if key_bias is None else key_bias.stride(0),
            ctypes.byref(spans),
        )  # fmt: skip
        return out

    # --- recurrences ------------------------------------------------------------------------------------------------

    def attend_linearly(self, dtype: torch.dtype, linear: Linear, pieces: Pieces) -> None:
        """Computes linear attention from places to places of the states."""
        self._functions.lp_attend_linearly(self._pool, DTYPES[dtype], ctypes.byref(linear), ctypes.byref(pieces))

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, pieces: Pieces, *, is_activated: bool
    ) -> Tensor:
        """x [tokens, channels], last dimension contiguous, weight [width, channels] and bias in float32, states
        [places, width - 1, channels] -> [tokens, channels]"""
        out = torch.empty(x.shape, dtype=x.dtype)
        self._functions.lp_convolve(
            self._pool, DTYPES[x.dtype], x.data_ptr(), x.stride(0), weight.data_ptr(), _address(bias),
            weight.shape[0], weight.shape[1], is_activated, states.data_ptr(), out.data_ptr(), ctypes.byref(pieces),
        )  # fmt: skip
        return out

    def scan(self, x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, states: Tensor, pieces: Pieces) -> Tensor:
        """x, step [tokens, channels], a [channels, n], b, c [tokens, n], states [places, channels, n], all contiguous
        and in float32 -> [tokens, channels]"""
        out = torch.empty_like(x)
        self._functions.lp_scan(
            self._pool, x.data_ptr(), step.data_ptr(), a.data_ptr(), b.data_ptr(), c.data_ptr(), x.shape[1], b.shape[1],
            states.data_ptr(), out.data_ptr(), ctypes.byref(pieces),
        )  # fmt: skip
        return out

    # --- stacks of layers ---------------------------------------------------------------------------------------------

    def stack_scratch_bytes(self, stack: Stack, num_tokens: int, num_outputs: int, max_rank: int) -> int:
        return int(self._functions.lp_stack_scratch_bytes(ctypes.byref(stack), num_tokens, num_outputs, max_rank))

    def run_stack(self, stack: Stack, step: Step) -> None:
        """Computes all layers, in place over the step's hidden states."""
        self._functions.lp_stack_run(self._pool, ctypes.byref(stack), ctypes.byref(step))


def _in_bands(num_outputs: int) -> int:
    """The outputs of whole bands that hold so many."""
    return -(-num_outputs // BAND) * BAND


def _code(form: WeightFormat | None) -> int:
    """Number of a weight format in lp::Format."""
    return 0 if form is None else form.code


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _free_pool(functions: Any, pool: int, process_id: int) -> None:
    if os.getpid() == process_id:  # a forked process has the pool without its threads, for which it would wait for ever
        functions.lp_pool_free(pool)


NO_RUNS: Final = RunsOfRows(Runs(), 0, ())
