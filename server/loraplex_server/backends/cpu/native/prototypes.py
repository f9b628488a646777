"""The C functions of the native library, as ctypes sees them. One row for each function; the loader reads the table.

Belongs to src/*.cpp: whoever changes a function's arguments there changes its row here and ABI_VERSION in both.
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


# Those that say what the library is and whether it runs here; they never change, or no old library could be told from a
# new one.
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


KERNELS: Final[Mapping[str, Prototype]] = {
    "lp_use_isa": Prototype(_INT, (ctypes.c_char_p,)),
    "lp_pool_new": Prototype(_POINTER, (_INT,)),
    "lp_pool_free": Prototype(None, (_POINTER,)),
    "lp_use_large_pages": Prototype(None, (_POINTER, _LONG)),
    # dtype, in eight bits or not, outputs, inputs
    "lp_packed_bytes": Prototype(_LONG, (_INT, _INT, _LONG, _LONG)),
    # pool, dtype, weight(s), each with its exponents, stride, outputs, inputs, packed
    "lp_pack": Prototype(None, (_POINTER, _INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER)),
    "lp_pack_pair": Prototype(
        None, (_POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _LONG, _LONG, _POINTER)
    ),
    # pool, dtype, x, its stride, rows, inputs, packed, in eight bits or not, outputs, bias, y, its stride
    "lp_linear": Prototype(
        None, (_POINTER, _INT, _POINTER, _LONG, _INT, _LONG, _POINTER, _INT, _LONG, _POINTER, _POINTER, _LONG)
    ),
    # rows, largest rank, outputs
    "lp_lora_scratch": Prototype(_LONG, (_LONG, _LONG, _LONG)),
    # pool, dtype, x, inputs, rows, table, runs, scratch, y, outputs, its stride
    "lp_lora": Prototype(
        None,
        (
            *(_POINTER, _INT, _POINTER, _LONG, _INT, ctypes.POINTER(Table), ctypes.POINTER(Runs)),
            *(_POINTER, _POINTER, _LONG, _LONG),
        ),
    ),
    # pool, dtype, x, its stride, rows, inputs, weight, outputs, bias, y, its stride
    "lp_dense": Prototype(
        None, (_POINTER, _INT, _POINTER, _LONG, _INT, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _LONG)
    ),
    # pool, dtype, q, out, keys, values, heads, KV heads, dim, scaling, softcap, window, spans
    "lp_attend": Prototype(
        None,
        (
            *(_POINTER, _INT, _POINTER, _POINTER, _POINTER, _POINTER),
            *(_INT, _INT, _INT, _FLOAT, _FLOAT, _LONG, ctypes.POINTER(Spans)),
        ),
    ),
    # pool, dtype, x, weight, rows, features, eps, y
    "lp_rms_norm": Prototype(None, (_POINTER, _INT, _POINTER, _POINTER, _INT, _LONG, _FLOAT, _POINTER)),
    # pool, dtype, x, rows, features, largest, where
    "lp_argmax": Prototype(None, (_POINTER, _INT, _POINTER, _INT, _LONG, _POINTER, _POINTER)),
    # pool, guesses, head, hidden states, scratch, largest, where
    "lp_guess": Prototype(
        None,
        (
            *(_POINTER, ctypes.POINTER(Guesses), ctypes.POINTER(Head), _POINTER, ctypes.POINTER(GuessScratch)),
            *(_POINTER, _POINTER),
        ),
    ),
    "lp_stack_scratch_bytes": Prototype(_LONG, (ctypes.POINTER(Stack), _LONG, _LONG)),
    "lp_stack_run": Prototype(None, (_POINTER, ctypes.POINTER(Stack), ctypes.POINTER(Step))),
}
