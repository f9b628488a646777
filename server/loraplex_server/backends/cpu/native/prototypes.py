"""Prototypes of the native library's C functions for ctypes, one row for each function.

Belongs to src/*.cpp: a change of a function's arguments there changes its row here, and ABI_VERSION in both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

ABI_VERSION: Final = 3  # kAbiVersion in src/version.cpp


class Prototype(NamedTuple):
    """What a function returns (None: nothing) and takes."""

    returns: Any
    arguments: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()  # of the arguments


# Those that tell what the library is and whether it runs here. They never change, so that an old library is recognized.
IDENTITY: Final[Mapping[str, Prototype]] = {
    "lp_abi_version": Prototype(ctypes.c_int),
    "lp_source_hash": Prototype(ctypes.c_char_p),
    "lp_isa": Prototype(ctypes.c_char_p),
    "lp_has_kernels": Prototype(ctypes.c_int),
}

_POINTER: Final = ctypes.c_void_p
_INT: Final = ctypes.c_int
_LONG: Final = ctypes.c_int64
_FLOAT: Final = ctypes.c_float


class Table(ctypes.Structure):
    """LpTable: one module's factors by slot. All null: it has none."""

    _fields_ = (("a_ptrs", _POINTER), ("b_ptrs", _POINTER), ("ranks", _POINTER), ("scales", _POINTER))


class Runs(ctypes.Structure):
    """LpRuns: which rows use which adapters."""

    _fields_ = (
        ("num_runs", ctypes.c_int32),
        ("max_rank", ctypes.c_int32),
        ("starts", _POINTER),
        ("ends", _POINTER),
        ("first_uses", _POINTER),
        ("slots", _POINTER),
        ("weights", _POINTER),
    )


class Spans(ctypes.Structure):
    """LpSpans: the step's spans over the paged KV cache."""

    _fields_ = (
        ("num_spans", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("table_stride", _LONG),
        ("query_starts", _POINTER),
        ("context_lens", _POINTER),
        ("block_tables", _POINTER),
        ("slots", _POINTER),
    )


class Layer(ctypes.Structure):
    """LpLayer: one decoder layer's weights, pages and adapter tables."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "o", "gate_up", "down", "qkv_bias", "o_bias")),
        *((name, _POINTER) for name in ("norm1", "norm2", "q_norm", "k_norm", "k_pages", "v_pages")),
        *((name, _FLOAT) for name in ("eps", "qk_eps", "scaling", "softcap")),
        ("window", _LONG),
        *((f"{name}_table", Table) for name in ("q", "k", "v", "o", "gate", "up", "down")),
    )


class Stack(ctypes.Structure):
    """LpStack: what all layers share."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("dtype", "num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "ffn", "act")
        ),
        ("is_int8", ctypes.c_int32),
        ("layers", ctypes.POINTER(Layer)),
    )


class Step(ctypes.Structure):
    """LpStep: one step's hidden states and what its layers share."""

    _fields_ = (
        ("num_tokens", ctypes.c_int32),
        ("num_rotary", ctypes.c_int32),
        ("hidden", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("spans", Spans),
        ("runs", Runs),
        ("scratch", _POINTER),
    )


class Block(ctypes.Structure):
    """LpBlock: the residual block of some rows of guesses."""

    _fields_ = (("start", ctypes.c_int32), ("end", ctypes.c_int32), ("weight", _POINTER), ("bias", _POINTER))


class Guesses(ctypes.Structure):
    """LpGuesses: how a batch of guesses lies."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("dtype", "num_rows", "num_layers")),
        *((name, _POINTER) for name in ("sources", "num_blocks", "blocks")),
    )


class Head(ctypes.Structure):
    """LpHead: the model's own head."""

    _fields_ = (
        *(("features", _LONG), ("num_outputs", _LONG), ("packed", _POINTER), ("bias", _POINTER)),
        ("is_int8", ctypes.c_int32),
    )


class GuessScratch(ctypes.Structure):
    """LpGuessScratch."""

    _fields_ = (("x", _POINTER), ("inner", _POINTER), ("logits", _POINTER))


def _function(returns: Any, **arguments: Any) -> Prototype:
    """Arguments by the names that they have in src/*.cpp, in order."""
    return Prototype(returns, tuple(arguments.values()), tuple(arguments))


_MATRIX: Final = {"x": _POINTER, "x_stride": _LONG, "num_rows": _INT, "k": _LONG}  # x [num_rows][k]

KERNELS: Final[Mapping[str, Prototype]] = {
    "lp_use_isa": _function(_INT, name=ctypes.c_char_p),
    "lp_pool_new": _function(_POINTER, num_threads=_INT),
    "lp_pool_free": _function(None, pool=_POINTER),
    "lp_use_large_pages": _function(None, memory=_POINTER, num_bytes=_LONG),
    "lp_packed_bytes": _function(_LONG, dtype=_INT, is_int8=_INT, num_outputs=_LONG, k=_LONG),
    "lp_pack": _function(
        None,
        pool=_POINTER,
        dtype=_INT,
        weight=_POINTER,
        exponents=_POINTER,
        stride=_LONG,
        num_outputs=_LONG,
        k=_LONG,
        packed=_POINTER,
    ),
    "lp_pack_pair": _function(
        None,
        pool=_POINTER,
        dtype=_INT,
        first=_POINTER,
        first_exponents=_POINTER,
        second=_POINTER,
        second_exponents=_POINTER,
        stride=_LONG,
        num_outputs=_LONG,
        k=_LONG,
        packed=_POINTER,
    ),
    "lp_linear": _function(
        None,
        pool=_POINTER,
        dtype=_INT,
        **_MATRIX,
        packed=_POINTER,
        is_int8=_INT,
        num_outputs=_LONG,
        bias=_POINTER,
        y=_POINTER,
        y_stride=_LONG,
    ),
    "lp_lora_scratch": _function(_LONG, num_rows=_LONG, max_rank=_LONG, num_outputs=_LONG),
    "lp_lora": _function(
        None,
        pool=_POINTER,
        dtype=_INT,
        x=_POINTER,
        k=_LONG,
        num_rows=_INT,
        table=ctypes.POINTER(Table),
        runs=ctypes.POINTER(Runs),
        scratch=_POINTER,
        y=_POINTER,
        num_outputs=_LONG,
        y_stride=_LONG,
    ),
    "lp_dense": _function(
        None,
        pool=_POINTER,
        dtype=_INT,
        **_MATRIX,
        weight=_POINTER,
        num_outputs=_LONG,
        bias=_POINTER,
        y=_POINTER,
        y_stride=_LONG,
    ),
    "lp_attend": _function(
        None,
        pool=_POINTER,
        dtype=_INT,
        q=_POINTER,
        out=_POINTER,
        k_pages=_POINTER,
        v_pages=_POINTER,
        num_heads=_INT,
        num_kv_heads=_INT,
        dim=_INT,
        scaling=_FLOAT,
        softcap=_FLOAT,
        window=_LONG,
        spans=ctypes.POINTER(Spans),
    ),
    "lp_rms_norm": _function(
        None,
        pool=_POINTER,
        dtype=_INT,
        x=_POINTER,
        weight=_POINTER,
        num_rows=_INT,
        n=_LONG,
        eps=_FLOAT,
        y=_POINTER,
    ),
    "lp_argmax": _function(
        None, pool=_POINTER, dtype=_INT, x=_POINTER, num_rows=_INT, n=_LONG, best=_POINTER, where=_POINTER
    ),
    "lp_guess": _function(
        None,
        pool=_POINTER,
        guesses=ctypes.POINTER(Guesses),
        head=ctypes.POINTER(Head),
        hidden=_POINTER,
        scratch=ctypes.POINTER(GuessScratch),
        best=_POINTER,
        where=_POINTER,
    ),
    "lp_stack_scratch_bytes": _function(_LONG, stack=ctypes.POINTER(Stack), num_tokens=_LONG, max_rank=_LONG),
    "lp_stack_run": _function(None, pool=_POINTER, stack=ctypes.POINTER(Stack), step=ctypes.POINTER(Step)),
}
