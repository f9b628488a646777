"""Native CPU library: prototypes of its C functions for ctypes, and loading.

Prototypes belong to src/*.cpp: a change of a function's arguments there changes its row here, and ABI_VERSION in both.
A library of another version or other sources is refused. kernels.py calls the functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from loraplex_server.backends.cpu.native.build import (
    LIBRARY,
    SOURCES,
    BuildError,
    built_from,
    source_hash,
    this_machine,
)

# --- prototypes -------------------------------------------------------------------------------------------------------

ABI_VERSION: Final = 21  # kAbiVersion in src/version.cpp


class Prototype(NamedTuple):
    """Types that a function returns (None: nothing) and takes."""

    returns: Any
    arguments: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()  # of the arguments


# Functions that tell what the library is and whether it runs here. They never change, so that an old library is
# recognized.
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
    """LpTable: one module's factors and own products by slot. All null: it has none."""

    _fields_ = (
        *((name, _POINTER) for name in ("a_ptrs", "b_ptrs", "ranks", "scales", "gain_ptrs", "shift_ptrs")),
        *((name, _POINTER) for name in ("own_ptrs", "block_ptrs", "block_sizes", "block_strides")),
    )


class Member(ctypes.Structure):
    """LpMember: one of the linears that read the same rows."""

    _fields_ = (("packed", _POINTER), ("num_outputs", _LONG), ("bias", _POINTER), ("table", Table), ("y", _POINTER))


class Norm(ctypes.Structure):
    """LpNorm: one norm's weight, those of adapters by slot, and a bias. All null: there is no such norm."""

    _fields_ = (("weight", _POINTER), ("own_ptrs", _POINTER), ("bias", _POINTER))


class Runs(ctypes.Structure):
    """LpRuns: which rows use which adapters."""

    _fields_ = (
        *(("num_runs", _INT), ("max_rank", _INT)),
        *((name, _POINTER) for name in ("starts", "ends", "first_uses", "slots", "weights")),
    )


class Spans(ctypes.Structure):
    """LpSpans: the step's spans over the paged KV cache."""

    _fields_ = (
        *(("num_spans", _INT), ("block_size", _INT), ("table_stride", _LONG)),
        *((name, _POINTER) for name in ("query_starts", "context_lens", "block_tables", "slots")),
    )


class Pieces(ctypes.Structure):
    """LpPieces: pieces of texts, and the places of the states before and behind them."""

    _fields_ = (("num_chains", _INT), ("chains", _POINTER), ("pieces", _POINTER))


class Linear(ctypes.Structure):
    """LpLinear: linear attention of a step."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "k", "v", "decay", "beta", "a", "b", "rates", "biases")),
        *((name, _POINTER) for name in ("skips", "out", "states")),
        *((name, _LONG) for name in ("q_stride", "k_stride", "v_stride", "gate_stride", "out_stride")),
        *((name, _INT) for name in ("num_heads", "num_keys", "k_dim", "v_dim")),
        *((name, _INT) for name in ("decay_by_channel", "is_delta", "normalizes")),
        *((name, _FLOAT) for name in ("scale", "least", "most")),
        ("rounds", _INT),
    )


class Mixer(ctypes.Structure):
    """LpMixer: one mixer's weights, and its states and results in a step."""

    _fields_ = (
        *((name, _POINTER) for name in ("projection", "o", "conv_weight", "conv_bias")),
        *(("norm", Norm), ("norm_eps", _FLOAT)),
        *((name, _INT) for name in ("norm_size", "gates_first", "width", "layout")),
        ("recurrence", Linear),
        *((name, _POINTER) for name in ("conv_states", "projected", "convolved")),
    )


class Layer(ctypes.Structure):
    """LpLayer: one decoder layer's weights, norms, pages and adapter tables."""

    _fields_ = (
        *(("qkv", _POINTER), ("o", _POINTER), ("mixer", ctypes.POINTER(Mixer))),
        *((name, _POINTER) for name in ("gate_up", "down", "input_gate", "input_projection", "qkv_bias", "o_bias")),
        *((name, Norm) for name in ("norm1", "norm2", "q_norm", "k_norm", "v_norm")),
        *((name, Norm) for name in ("attention_norm", "ffn_norm", "input_norm")),
        *((name, _POINTER) for name in ("k_pages", "v_pages")),
        *((name, _FLOAT) for name in ("eps", "qk_eps", "scaling", "softcap")),
        *(("window", _LONG), ("turns", _LONG), ("sinks", _POINTER)),
        *((f"mixer_{name}_table", Table) for name in ("in0", "in1", "in2", "in3", "out")),
        *((f"{name}_table", Table) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((f"{name}_table", Table) for name in ("input_gate", "input_projection")),
        *((name, _INT) for name in ("num_kv_heads", "head_dim", "ffn", "shares_kv", "gates_heads")),
        ("scale", _FLOAT),
    )


class Stack(ctypes.Structure):
    """LpStack: what all layers share."""

    _fields_ = (
        *((name, _INT) for name in ("dtype", "num_layers", "hidden", "num_heads", "q_size", "qkv_size", "gate_size")),
        *((name, _INT) for name in ("projected_size", "convolved_size", "recurred_size", "ffn", "input")),
        *((name, _INT) for name in ("act", "format", "merges_qkv", "merges_gate_up", "norms_all_heads", "narrows")),
        *((name, _FLOAT) for name in ("norm_offset", "added")),
        *((name, _INT) for name in ("is_layer_norm", "is_parallel", "is_grouped")),
        ("layers", ctypes.POINTER(Layer)),
    )


class Step(ctypes.Structure):
    """LpStep: one step's hidden states and what its layers share."""

    _fields_ = (
        *(("num_tokens", _INT), ("num_rotary", _INT), ("hidden", _POINTER), ("cos", _POINTER), ("sin", _POINTER)),
        *(("query_scales", _POINTER), ("inputs", _POINTER)),
        *(("spans", Spans), ("pieces", Pieces), ("runs", Runs), ("scratch", _POINTER)),
        *(("outputs", _POINTER), ("num_outputs", _INT)),
        *(("fed", _POINTER), ("feed", _POINTER), ("continues", _INT)),
    )


class Experts(ctypes.Structure):
    """LpExperts: the weights of a layer's experts, and adapters' factors of them."""

    _fields_ = (
        *((name, _INT) for name in ("dtype", "format", "act", "num_experts")),
        *(("hidden", _LONG), ("inner", _LONG), ("gate_up", _POINTER), ("down", _POINTER)),
        *(("up_table", Table), ("down_table", Table)),
    )


class Routed(ctypes.Structure):
    """LpRouted: a step's rows and the experts that they go to."""

    _fields_ = (
        *((name, _LONG) for name in ("num_rows", "top_k")),
        *((name, _POINTER) for name in ("x", "chosen", "weights", "uses", "slots", "slot_weights")),
        *(("num_uses", _LONG), ("max_rank", _LONG), ("scratch", _POINTER), ("y", _POINTER)),
    )


class Block(ctypes.Structure):
    """LpBlock: the residual block of some rows of guesses."""

    _fields_ = (("start", _INT), ("end", _INT), ("weight", _POINTER), ("bias", _POINTER))


class Guesses(ctypes.Structure):
    """LpGuesses: how a batch of guesses lies."""

    _fields_ = (
        *((name, _INT) for name in ("dtype", "num_rows", "num_layers")),
        *((name, _POINTER) for name in ("sources", "num_blocks", "blocks")),
    )


class Head(ctypes.Structure):
    """LpHead: the model's own head."""

    _fields_ = (
        *(("features", _LONG), ("num_outputs", _LONG), ("packed", _POINTER), ("bias", _POINTER)),
        ("format", _INT),
    )


class Draws(ctypes.Structure):
    """LpDraws: rows of scores, and how a token of each is drawn."""

    _fields_ = (
        *(("num_rows", _INT), ("n", _LONG), ("stride", _LONG)),
        *((name, _POINTER) for name in ("scores", "keys", "temperature", "top_k", "top_p", "log_min_p")),
    )


class Noise(ctypes.Structure):
    """LpNoise: tables of a token's noise."""

    _fields_ = (
        *((name, _POINTER) for name in ("mixed_ids", "values", "slopes")),
        ("low_bits", _INT),
        *((name, _FLOAT) for name in ("bound_slope", "bound_least", "bound_shift")),
    )


class GuessScratch(ctypes.Structure):
    """LpGuessScratch: memory for a batch of guesses."""

    _fields_ = (("x", _POINTER), ("inner", _POINTER), ("logits", _POINTER))


def _struct(kind: type[ctypes.Structure]) -> Any:
    return ctypes.POINTER(kind)


# Types of arguments by their names in src/*.cpp. Names that are not here are pointers to memory.
_TYPES: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("dtype", "format", "num_threads", "num_rows", "num_heads", "num_kv_heads", "dim", "v_dim"), _INT),
    **dict.fromkeys(("k", "n", "stride", "x_stride", "y_stride", "num_outputs", "num_bytes", "num_tokens"), _LONG),
    **dict.fromkeys(("max_rank", "window", "chunk", "bias_stride", "num_words"), _LONG),
    **dict.fromkeys(("scaling", "softcap", "eps", "offset"), _FLOAT),
    **dict.fromkeys(("width", "is_activated", "narrows"), _INT),
    **dict.fromkeys(("channels", "num_pairs", "per_row", "num_experts"), _LONG),
    "name": ctypes.c_char_p,
    "table": _struct(Table),
    "runs": _struct(Runs),
    "spans": _struct(Spans),
    "pieces": _struct(Pieces),
    "linear": _struct(Linear),
    "guesses": _struct(Guesses),
    "head": _struct(Head),
    "stack": _struct(Stack),
    "step": _struct(Step),
}


def _function(returns: Any, names: str, **types: Any) -> Prototype:
    """The prototype of a function: arguments by the names that they have in src/*.cpp, in order; `types` where they
    differ from _TYPES."""
    arguments = names.split()
    known = {**_TYPES, **types}
    return Prototype(returns, tuple(known.get(name, _POINTER) for name in arguments), tuple(arguments))


KERNELS: Final[Mapping[str, Prototype]] = {
    "lp_use_isa": _function(_INT, "name"),
    "lp_pool_new": _function(_POINTER, "num_threads"),
    "lp_pool_free": _function(None, "pool"),
    "lp_use_large_pages": _function(None, "memory num_bytes"),
    "lp_packed_bytes": _function(_LONG, "dtype format num_outputs k"),
    "lp_round_int4": _function(None, "pool dtype weight num_outputs k rounds values codes", rounds=_INT),
    "lp_pack": _function(None, "pool dtype format weight scales stride num_outputs k packed"),
    "lp_pack_pair": _function(
        None, "pool dtype format first first_scales second second_scales stride num_outputs k packed"
    ),
    "lp_linear": _function(None, "pool dtype x x_stride num_rows k packed format num_outputs bias y y_stride"),
    "lp_linears_scratch": _function(
        _LONG, "num_rows max_rank num_modules num_outputs", num_rows=_LONG, num_modules=_LONG
    ),
    "lp_linears": _function(None, "pool dtype format x k num_rows members num_modules runs scratch", num_modules=_INT),
    "lp_experts": _function(None, "pool dtype x k experts num_pairs per_row num_experts packed format num_outputs y"),
    "lp_experts_scratch_bytes": _function(_LONG, "experts num_pairs max_rank", experts=_struct(Experts)),
    "lp_experts_run": _function(_INT, "pool experts routed", experts=_struct(Experts), routed=_struct(Routed)),
    "lp_lora_scratch": _function(_LONG, "num_rows max_rank num_outputs", num_rows=_LONG),
    "lp_lora": _function(None, "pool dtype x k num_rows table runs scratch y num_outputs y_stride"),
    "lp_dense": _function(None, "pool dtype x x_stride num_rows k weight num_outputs bias y y_stride"),
    "lp_attend": _function(
        None,
        "pool dtype q out k_pages v_pages num_heads num_kv_heads dim v_dim scaling softcap window chunk sinks key_bias "
        "bias_stride spans",
    ),
    "lp_attend_linearly": _function(None, "pool dtype linear pieces"),
    "lp_convolve": _function(None, "pool dtype x x_stride weight bias width channels is_activated states out pieces"),
    "lp_scan": _function(None, "pool x step a b c channels n states out pieces", step=_POINTER),
    "lp_rms_norm": _function(None, "pool dtype x weight num_rows n eps offset narrows y"),
    "lp_gated_norm": _function(
        None, "pool x_dtype dtype x gate weight num_rows n eps gates_first y", x_dtype=_INT, gates_first=_INT
    ),
    "lp_gate": _function(
        None, "pool dtype act gate gate_stride up up_stride num_rows n y", act=_INT, gate_stride=_LONG, up_stride=_LONG
    ),
    "lp_argmax": _function(None, "pool dtype x num_rows n masks bits num_words best where"),
    "lp_draw": _function(None, "pool draws noise tops token_ids", draws=_struct(Draws), noise=_struct(Noise)),
    "lp_guess": _function(None, "pool guesses head hidden scratch best where", scratch=_struct(GuessScratch)),
    "lp_stack_scratch_bytes": _function(_LONG, "stack num_tokens num_outputs max_rank"),
    "lp_stack_run": _function(None, "pool stack step"),
}


# --- loading ----------------------------------------------------------------------------------------------------------

_HOW: Final = "python -m loraplex_server.backends.cpu.native.build"


class NativeStatus(NamedTuple):
    usable: bool
    reason: str  # why it cannot be used; empty where it can
    isa: str  # the instruction set that runs here; empty where none does


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded library. Its functions are called as `library.functions.lp_name(...)`, without the GIL."""

    functions: Any  # ctypes.CDLL; each function of the prototypes has its types
    path: Path

    @property
    def isa(self) -> str:
        """The instruction set of the variant that runs."""
        name: bytes = self.functions.lp_isa()
        return name.decode()


class Loaded(NamedTuple):
    """The library, or none and why."""

    library: Library | None
    status: NativeStatus


def load(path: Path | None = None, sources: Path = SOURCES, kernels: Mapping[str, Prototype] = KERNELS) -> Loaded:
    """Loads the library at `path` (default: LIBRARY) if it was made of `sources` as they are, is of this version, and
    runs on this CPU."""
    try:
        library = _open(path or LIBRARY, sources, kernels)
    except _Refused as refused:
        return Loaded(None, NativeStatus(False, str(refused), ""))
    return Loaded(library, NativeStatus(True, "", library.isa))


class _Refused(Exception):
    """The library cannot be used, and why."""


def _open(path: Path, sources: Path, kernels: Mapping[str, Prototype]) -> Library:
    try:
        this_machine()
        present = source_hash(sources)
    except BuildError as error:
        raise _Refused(str(error)) from None
    if not path.exists():
        raise _Refused(f"not built; with a C++ compiler, {_HOW} builds it")
    # Before it is loaded, so that nothing of a stale library ever runs.
    if built_from(path) != present:
        raise _Refused(f"built from other sources than those that are there; {_HOW} builds it again")
    try:
        functions = ctypes.CDLL(str(path))
        _declare(functions, IDENTITY)
        version = functions.lp_abi_version()
        if version != ABI_VERSION:
            raise _Refused(f"of version {version}, and this package is made for {ABI_VERSION}; {_HOW} builds it again")
        _declare(functions, kernels)
    except (OSError, AttributeError) as error:  # a system library that is missing or too old; a function that is
        raise _Refused(f"does not load: {error}") from None
    library = Library(functions, path)
    if not functions.lp_has_kernels():
        raise _Refused("this CPU has none of the instruction sets that it was built for")
    return library


def _declare(functions: ctypes.CDLL, prototypes: Mapping[str, Prototype]) -> None:
    for name, prototype in prototypes.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = prototype.returns, prototype.arguments
