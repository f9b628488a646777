"""Triton kernels of fused norms, gates and rotary embeddings.

Needs triton; runs on CUDA, and on a CPU in Triton's interpreter for tests.
"""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# pyright: reportMissingParameterType=false
# ruff: noqa: N803
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_server.backends.cuda.kernel_shapes import SUPPORTED, next_power
from loraplex_server.backends.fusion import NormForm

# A model in another dtype keeps its own operations.
# Wider rows do not fit a program's registers.
MAX_FEATURES = 16384
# Features of a gate in one program: eight for each of its threads, which is 16 bytes in bfloat16.
BLOCK_FEATURES = 1024


@triton.jit(do_not_specialize=["num_inner"])
def rms_norm_kernel(
    y_ptr,  # [num_rows, num_features]
    x_ptr,  # row `i` begins at i // num_inner * outer_stride + i % num_inner * inner_stride
    weight_ptr,  # [num_features]
    num_features,
    num_inner,
    outer_stride,
    inner_stride,
    eps,
    OFFSET: tl.constexpr,
    NARROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < num_features
    x_at = x_ptr + row // num_inner * outer_stride + row % num_inner * inner_stride + n
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / num_features + eps)
    if NARROWS:
        x = x.to(y_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + n, mask=inside, other=0.0).to(tl.float32) + OFFSET
    tl.store(y_ptr + row * num_features + n, (x * weight).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    query_out_ptr,  # [num_tokens, query_heads, 2 * HALF]
    key_out_ptr,  # [num_tokens, key_heads, 2 * HALF]
    query_ptr,
    key_ptr,
    cos_ptr,  # [num_tokens, 2 * HALF]
    sin_ptr,  # likewise
    query_heads,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    cos_stride,
    sin_stride,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rotary embedding of queries and keys. Grid: tokens x (query heads and then key heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_heads = tl.num_programs(1) - query_heads
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    if head < query_heads:
        x_at = query_ptr + token * query_token_stride + head * query_head_stride + d
        out_at = query_out_ptr + (token * query_heads + head) * (2 * HALF) + d
    else:
        x_at = key_ptr + token * key_token_stride + (head - query_heads) * key_head_stride + d
        out_at = key_out_ptr + (token * key_heads + head - query_heads) * (2 * HALF) + d
    dtype = query_ptr.dtype.element_ty
    first = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x_at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos_at = cos_ptr + token * cos_stride + d
    sin_at = sin_ptr + token * sin_stride + d
    # Rounded as a model's own code does it, product by product.
    left = (first * tl.load(cos_at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    right = (second * tl.load(sin_at, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out_at, (left - right).to(dtype), mask=inside)
    left = (second * tl.load(cos_at + HALF, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    right = (first * tl.load(sin_at + HALF, mask=inside, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    tl.store(out_at + HALF, (left + right).to(dtype), mask=inside)


@triton.jit
def silu_product_kernel(
    y_ptr,  # [num_rows, num_features]
    gate_ptr,
    up_ptr,
    num_features,
    gate_stride,
    up_stride,
    BLOCK: tl.constexpr,
):
    """SiLU of the gate times up. Grid: rows x blocks of features."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < num_features
    dtype = y_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + row * gate_stride + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + n, mask=inside, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(y_ptr + row * num_features + n, (gate * up).to(dtype), mask=inside)


# Their types know neither launch options nor that a plain int becomes a constant.
_rms_norm: Any = rms_norm_kernel
_rotate: Any = rotate_kernel
_silu_product: Any = silu_product_kernel


class TritonFused:
    """FusedOps for CUDA."""

    name = "triton"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        num_features = x.shape[-1]
        if x.dtype not in SUPPORTED or num_features > MAX_FEATURES:
            raise TypeError(f"no norm of {num_features} features in {x.dtype}")
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if not y.numel():
            return y
        # As heads of tokens, whose rows may lie apart; anything else becomes one piece first.
        rows = x[0] if x.dim() == 4 and x.shape[0] == 1 else x.reshape(1, -1, num_features)
        if rows.stride(2) != 1:
            rows = rows.contiguous()
        block = next_power(num_features)
        _rms_norm[(y.numel() // num_features,)](
            *(y, rows, weight, num_features, rows.shape[1], rows.stride(0), rows.stride(1), eps),
            OFFSET=form.offset,
            NARROWS=form.narrows,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            enable_fp_fusion=True,
        )
        return y

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool) -> Tensor:
        raise TypeError("norms beside gates are left to the model")

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if query.dtype not in SUPPORTED or query.shape[-1] % 2:
            raise TypeError(f"no rotation of {query.shape[-1]} features in {query.dtype}")
        num_tokens, dim = query.shape[2:]
        query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key))
        cos, sin = (x if x.stride(2) == 1 else x.contiguous() for x in (cos, sin))
        outs = [torch.empty(num_tokens, x.shape[1], dim, dtype=x.dtype, device=x.device) for x in (query, key)]
        if num_tokens:
            _rotate[(num_tokens, query.shape[1] + key.shape[1])](
                *(*outs, query, key, cos, sin, query.shape[1], query.stride(2), query.stride(1)),
                *(key.stride(2), key.stride(1), cos.stride(1), sin.stride(1)),
                HALF=dim // 2,
                BLOCK=next_power(dim // 2),
                num_warps=1,
                enable_fp_fusion=False,  # a product in one instruction with the sum is not rounded by itself
            )
        return outs[0].transpose(0, 1).unsqueeze(0), outs[1].transpose(0, 1).unsqueeze(0)

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        if gate.dtype not in SUPPORTED or up.dtype != gate.dtype or up.shape != gate.shape:
            raise TypeError(f"no product of {gate.dtype} {list(gate.shape)} and {up.dtype} {list(up.shape)}")
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        num_features = gate.shape[-1]
        if not y.numel():
            return y
        # As rows, which lie apart where both are columns of a joint product.
        gate, up = (x.reshape(-1, num_features) for x in (gate, up))
        gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (gate, up))
        _silu_product[(len(gate), triton.cdiv(num_features, BLOCK_FEATURES))](
            y, gate, up, num_features, gate.stride(0), up.stride(0), BLOCK=BLOCK_FEATURES, enable_fp_fusion=True
        )
        return y
