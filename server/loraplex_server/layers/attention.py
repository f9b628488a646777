"""Paged attention: layer shapes, KV memory, interface of back ends, hook into Transformers.

A step is one flattened row of spans. Of each span the queries are its last `query_len` tokens and the keys everything
up to them, causal by absolute position. Decode, a chunk of a prompt and the verification of a draft are the same.

The scheduler decides which sequence has which block; block tables say which block holds a position. Transformers looks
attention up by name in a table of the process, so this is the one thing here that is process-wide; what the function
does is decided by the handle that the loader put on the module. Under the serving name no mask function is registered:
models then build no mask at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from loraplex_contracts.errors import is_out_of_memory
from loraplex_server.kv.rope import RopeScaling
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.transfer import large_pages, upload

# --- attention layers of a model --------------------------------------------------------------------------------------


class Reach(NamedTuple):
    """The reach of a query into the past. None: everything before it."""

    window: int | None = None  # itself and the window-1 tokens before it
    chunk: int | None = None  # itself and what is before it in its chunk; chunks of so many tokens begin at position 0

    def first_keys(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The first position that each query sees; `positions`: of the queries."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Heads, scaling, reach and biases of one attention layer."""

    num_heads: int
    num_kv_heads: int
    k_dim: int  # of one head; queries have the same
    v_dim: int
    scaling: float
    window: int | None = None  # a query sees itself and the window-1 tokens before it; None: everything before it
    softcap: float | None = None
    chunk: int | None = None  # a query sees its own chunk of so many tokens, as in Reach
    # [num_heads], at least float32: one more score of each head, neither scaled nor capped, of a key without a value.
    sinks: Tensor | None = field(default=None, compare=False)
    # [num_heads, at least the context's positions, a multiple of 32], float32 or wider: what is added to each head's
    # scores, behind their scaling and cap, by the position of the key (ALiBi).
    key_bias: Tensor | None = field(default=None, compare=False)
    # The attention layer, by number, whose keys and values it is given; both have the same pages. None: its own.
    source: int | None = None

    @property
    def reach(self) -> Reach:
        return Reach(self.window, self.chunk)

    @property
    def num_groups(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts about the model for runner, cache and front end."""

    layers: tuple[AttentionSpec, ...]
    vocab_size: int  # token ids that may go in
    num_logits: int  # token ids that may come out
    hidden_size: int  # at the head's input
    max_context_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    rope: RopeScaling | None = None  # None: rotations depend on positions alone


def kv_block_bytes(spec: ModelSpec, block_size: int, itemsize: int) -> int:
    """Bytes of one KV block in all layers. `itemsize` is that of the cache's dtype."""
    own = (layer for layer in spec.layers if layer.source is None)
    per_token = sum(layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in own)
    return per_token * block_size * itemsize


# --- KV memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's pages: views into the cache."""

    k: Tensor  # [num_blocks, block_size, kv_heads, k_dim]
    v: Tensor  # [num_blocks, block_size, kv_heads, v_dim]

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Stores key, value [num_tokens, kv_heads, dim] at slots [num_tokens] (block * block_size + offset)."""
        self.k.flatten(0, 1).index_copy_(0, slots, key.to(self.k.dtype))
        self.v.flatten(0, 1).index_copy_(0, slots, value.to(self.v.dtype))


class KvCache:
    """Pages of all layers, in the model's dtype.

    Layers of one shape share an allocation, so that copying or clearing a block is a few operations, not a few per
    layer. A layer that is given another's keys and values has that one's pages, and writes the same to them. Memory is
    taken from the system as blocks are first used. A block is cleared when a sequence takes it: attention may multiply
    a masked position by zero, and what was left there need not be finite.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        shapes = [(layer.num_kv_heads, layer.k_dim, layer.v_dim) for layer in spec.layers]
        self._pages: list[Tensor] = []  # [layers of that shape, num_blocks, block_size, kv_heads, dim]
        layers: dict[int, LayerKv] = {}
        own = [idx for idx, layer in enumerate(spec.layers) if layer.source is None]
        for shape in dict.fromkeys(shapes[idx] for idx in own):
            members = [idx for idx in own if shapes[idx] == shape]
            heads, k_dim, v_dim = shape
            k = large_pages((len(members), num_blocks, block_size, heads, k_dim), dtype, device)
            v = large_pages((len(members), num_blocks, block_size, heads, v_dim), dtype, device)
            self._pages += [k, v]
            for place, layer_idx in enumerate(members):
                layers[layer_idx] = LayerKv(k[place], v[place])
        sources = [idx if layer.source is None else layer.source for idx, layer in enumerate(spec.layers)]
        self.layers = tuple(layers[source] for source in sources)

    @property
    def num_bytes(self) -> int:
        return sum(pages.numel() * pages.element_size() for pages in self._pages)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Sets blocks to zero in all layers."""
        if not block_ids:
            return
        idx = upload(torch.tensor(block_ids, dtype=torch.int64), self.device)
        for pages in self._pages:
            pages.index_fill_(1, idx, 0)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies blocks in all layers; all sources are read before a target is written."""
        if not sources:
            return
        source, target = upload(torch.tensor([sources, targets], dtype=torch.int64), self.device)
        for pages in self._pages:
            pages.index_copy_(1, target, pages.index_select(1, source))


def num_blocks_for(spec: ModelSpec, block_size: int, dtype: torch.dtype, budget_bytes: int) -> int:
    """Number of blocks that fit into a byte budget; 0 when not even one does."""
    return budget_bytes // max(1, kv_block_bytes(spec, block_size, dtype.itemsize))  # no bytes: without attention


# --- operation --------------------------------------------------------------------------------------------------------


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
class StepShape:
    """Up to `num_spans` spans of `query_len` tokens each, or ragged ones, of any lengths with up to `ragged_tokens` in
    all."""

    num_spans: int
    query_len: int = 1  # of spans that are not ragged
    ragged_tokens: int = 0

    @property
    def is_ragged(self) -> bool:
        return self.ragged_tokens > 0

    @property
    def num_tokens(self) -> int:
        return self.ragged_tokens or self.num_spans * self.query_len


@dataclass(frozen=True, slots=True)
class Reserved(StepShape):
    """Bounds of the steps that a plan with fixed addresses takes."""

    max_blocks: int = field(kw_only=True)  # of any span


class PagedAttention(Protocol):
    """One implementation of paged attention."""

    @property
    def name(self) -> str: ...

    @property
    def needs_clean_blocks(self) -> bool:
        """True if attention reads positions that were never written, and multiplies what is there by zero."""
        ...

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> Any:
        """The plan of a step: everything that its layers share. Once per step; host work, no device synchronisation."""
        ...

    def run(self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKv, spec: AttentionSpec, plan: Any) -> Tensor:
        """Writes key and value to their pages and attends.

        query [num_tokens, heads, k_dim], key and value [num_tokens, kv_heads, dim] -> [num_tokens, heads, v_dim].
        """
        ...


@runtime_checkable
class ReplayableAttention(PagedAttention, Protocol):
    """An implementation whose launches can be captured once and replayed for other steps of the same shape."""

    @property
    def replays_ragged(self) -> bool:
        """True if `reserve` takes ragged bounds."""
        ...

    def reserve(self, reserved: Reserved, block_size: int, dtype: torch.dtype, device: torch.device) -> Any:
        """A plan with buffers at fixed addresses, for steps within `reserved`.

        As reserved, all spans are empty. `run` with it launches the same kernels on the same addresses whatever was
        refilled. An empty span has output 0, and nothing is written for it.
        """
        ...

    def refill(self, plan: Any, batch: AttentionBatch) -> None:
        """Puts a step into a reserved plan: host work and asynchronous copies, no synchronisation, nothing allocated on
        the device.

        Raises ValueError on a step that does not fit what was reserved.
        """
        ...


class AttentionLayer:
    """The record that the attention function finds on an attention module of the model; one per layer."""

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


# --- hook into Transformers -------------------------------------------------------------------------------------------

SERVING = "loraplex"
PROBING = "loraplex_probe"
HANDLE = "loraplex_attention"  # the attribute of an attention module
REACH = "loraplex_reach"  # the attribute of a mask: a Reach, or a str saying what is wrong


def register_attention() -> None:
    """Makes the names of attention known to Transformers. Harmless to repeat."""
    from transformers.masking_utils import AttentionMaskInterface  # late: seconds, and only models need them
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(SERVING, attend)
    AttentionInterface.register(PROBING, attend)
    AttentionMaskInterface.register(PROBING, probing_mask)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function: hands over to the module's handle."""
    handle = getattr(module, HANDLE)
    return handle(query, key, value, attention_mask, options), None


def probing_mask(*_: Any, mask_function: Any = None, device: torch.device | str = "cpu", **__: Any) -> Tensor:
    """A mask as small as it can be that carries what kind of mask it is: the truth about how far a layer sees."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    reach = "a mask without a function" if mask_function is None else describe_mask(mask_function, device)
    setattr(mask, REACH, reach)
    return mask


def describe_mask(mask_function: Any, device: torch.device | str = "cpu") -> Reach | str:
    """The reach that a mask function of Transformers allows, or the kind of mask that it is instead.

    Evaluated at positions further out than windows and chunks are long, on `device`, where a function may have tensors
    of its own (Llama 4's has).
    """
    far = 1 << 20
    places = (far, far - 1, far - 3)
    keys = torch.arange(far + 2, device=device)
    try:
        first = [_first_seen(mask_function, place, keys) for place in places]
        if not any(first):
            return Reach()
        windows = {place - seen + 1 for place, seen in zip(places, first, strict=True)}
        if len(windows) == 1:
            return Reach(window=windows.pop())
        chunk = first[0] - _first_seen(mask_function, max(0, first[0] - 1), keys) or far
        found = Reach(chunk=chunk)
        places = (*places, first[0], chunk - 1, chunk, 2 * chunk - 1, 3 * chunk)
        keys = torch.arange(max(places) + 2, device=device)
        seen = [_first_seen(mask_function, place, keys) for place in places]
    except _NoReach as reason:
        return str(reason)
    return found if seen == found.first_keys(np.array(places)).tolist() else "a mask that is neither window nor chunks"


class _NoReach(Exception):
    """A mask that no reach describes."""


def _first_seen(mask_function: Any, position: int, keys: Tensor) -> int:
    """The first of the keys' positions that a query at this position sees. Raises _NoReach where it does not see all
    from there on."""
    kv = keys[: position + 2]
    zero = keys[0]
    try:
        allowed = mask_function(zero, zero, torch.tensor(position, device=keys.device), kv)
    except Exception as error:  # model-specific code
        if is_out_of_memory(error):
            raise
        raise _NoReach(f"a mask that cannot be evaluated ({type(error).__name__})") from error
    allowed = torch.as_tensor(allowed).expand(kv.shape)
    if allowed[position + 1]:
        raise _NoReach("later tokens")
    first = position + 1 - int(allowed.count_nonzero())
    if first > position or not allowed[first:-1].all():
        raise _NoReach("a mask with holes")
    return first
