"""Loaded model: the model, its adapted modules, attention layers and step context."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers.utils.hub import cached_file

from loraplex_adapters.formats.files import TOKENIZER_NAME
from loraplex_adapters.formats.tokens import all_tokens
from loraplex_adapters.io.safetensors import weight_sha256
from loraplex_adapters.weights import BaseTargets, TargetModule
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.cpu.decoder.stack import NativeStack
from loraplex_server.layers.adapter_slots import AdapterSlots, NormPlace
from loraplex_server.layers.attention import AttentionLayer, KvCache, ModelSpec, PagedAttention
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.experts import AdaptedExperts, AdaptedModule, AdaptedRouter, ExpertLinear
from loraplex_server.layers.linear import AdaptedEmbedding, AdaptedHead, AdaptedLinear
from loraplex_server.layers.lora import SegmentedLora
from loraplex_server.model.direct import DirectForward
from loraplex_server.model.language import absent_parts
from loraplex_server.model.states import StateMemory, StateSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _weights(module: AdaptedLinear | AdaptedEmbedding) -> tuple[Tensor, Tensor | None]:
    """A module's W [out, in] and bias, for adapters that are made with them."""
    if isinstance(module, AdaptedLinear):
        return module.base.matrix().detach(), module.bias
    return cast(Tensor, module.weight).detach().t(), None


def _dense_target(path: str, module: AdaptedLinear | AdaptedEmbedding, digest: str, *, is_shared: bool) -> TargetModule:
    """A linear or an embedding. `digest`: of its weight, where PEFT saves copies of that."""
    is_linear = isinstance(module, AdaptedLinear)
    return TargetModule(
        path,
        "linear" if is_linear else "embedding",
        module.in_features,
        module.out_features,
        is_linear and module.is_conv1d,
        is_linear and module.bias is not None,
        is_shared=is_shared,
        is_lookup=is_linear or module.is_lookup(),
        weights=partial(_weights, module),
        weight_sha256=digest,
    )


def _expert_target(path: str, module: AdaptedRouter | ExpertLinear) -> TargetModule:
    """A router of experts, or one linear of all of them."""
    is_router = isinstance(module, AdaptedRouter)
    return TargetModule(
        path,
        "router" if is_router else "experts",
        module.in_features,
        module.out_features,
        num_experts=0 if is_router else module.num_experts,
        swaps_features=not is_router and module.swaps_features,
    )


def _tokens_of(model_id: str) -> Callable[[], Mapping[str, int]] | None:
    """Reads a model's tokenizer.json once, where it is on this machine."""
    found = cached_file(
        model_id,
        TOKENIZER_NAME,
        local_files_only=True,
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else cache(lambda: all_tokens(json.loads(Path(found).read_bytes())))


@dataclass
class LoadedModel:
    """A model that is ready for steps, once KV cache and adapter slots are bound to it."""

    model: PreTrainedModel
    model_id: str
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    backend: Backend
    context: StepContext
    attention: tuple[AttentionLayer, ...]
    targets: dict[str, AdaptedModule]
    embedding_path: str
    norms: Mapping[str, NormPlace]  # by path: given all tokens of a step
    decoder: NativeStack | None  # computes all layers in one call, where there is one
    states: tuple[StateSpec, ...]  # that mixers keep of each sequence
    digests: Mapping[str, str]  # of weights as they were before rounding
    weight_format: str  # empty, or of few bits, to which weights are rounded
    direct: DirectForward | None = None  # in the place of the model's own forward pass, where it gives the same bits

    @property
    def model_type(self) -> str:
        return self.model.config.model_type

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def head(self) -> nn.Module:
        """The language model's head."""
        return cast(nn.Module, self.model.get_output_embeddings())

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's modules by path, with those of layers that a decoder stands for."""
        yield from self.model.named_modules()
        if self.decoder is not None:
            yield from self.decoder.own_modules()

    @cached_property
    def experts(self) -> tuple[AdaptedExperts, ...]:
        return tuple(module for _, module in self.named_modules() if isinstance(module, AdaptedExperts))

    @cached_property
    def _takes_turns(self) -> bool:
        """True if back end and torch compute in turns. Beside a whole decoder torch has next to nothing to do; where it
        computes the experts, these are most of the weights."""
        is_whole = self.decoder is not None and not self.decoder.shape.names.own_parts
        return not is_whole and all(one.fused is not None or one.products for one in self.experts)

    def torch_threads(self, num_tokens: int) -> AbstractContextManager[None]:
        """Gives torch, within the block, as many threads as are good for a step of so many tokens."""
        return self.backend.torch_threads(num_tokens, self.dtype) if self._takes_turns else nullcontext()

    def base_targets(self, max_rank: int) -> BaseTargets:
        """The base as adapter formats see it. Takes a moment: it hashes two weights that PEFT saves copies of."""
        modules: dict[str, TargetModule] = {}
        digests: dict[int, str] = {}  # tied weights are read once
        uses = Counter(id(one.weight) for one in self.targets.values() if isinstance(one, AdaptedLinear))
        for path, module in self.targets.items():
            if isinstance(module, AdaptedRouter | ExpertLinear):
                modules[path] = _expert_target(path, module)
                continue
            digest = ""
            if isinstance(module, AdaptedHead) or path == self.embedding_path:
                weight = cast(Tensor, module.weight)
                digest = self.digests.get(path) or digests.get(weight.data_ptr()) or weight_sha256(weight)
                digests[weight.data_ptr()] = digest
            is_shared = isinstance(module, AdaptedLinear) and uses[id(module.weight)] > 1
            modules[path] = _dense_target(path, module, digest, is_shared=is_shared)
        spec = self.spec
        head = next((path for path, module in self.targets.items() if isinstance(module, AdaptedHead)), "")
        # The whole configuration's word: it is what Transformers ties by and PEFT asks, where a text's own differs.
        is_tied = self.model.config.to_dict().get("tie_word_embeddings", False)
        return BaseTargets(
            modules,
            self.model_id,
            self.dtype_name,
            max_rank,
            spec.hidden_size,
            spec.num_logits,
            backbone=self.model.base_model_prefix,
            parameters={path: place.parameters for path, place in self.norms.items()},
            embedding=self.embedding_path,
            head=head,
            weight_format=self.weight_format,
            tied_head=head if is_tied else "",
            other_modules=frozenset(
                path
                for path, module in self.named_modules()
                if path not in modules and next(module.parameters(recurse=False), None) is not None
            ),
            absent_parts=absent_parts(self.model),
            experts={
                path: tuple(name for name, _ in module.base.named_parameters(recurse=False))
                for path, module in self.named_modules()
                if isinstance(module, AdaptedExperts)
            },
            tokens=_tokens_of(self.model_id),
        )

    def state_memory(self, num_slots: int, num_spare: int) -> StateMemory | None:
        """Memory for what mixers keep, in so many slots; None where there are no such mixers. See `StateMemory`."""
        if not self.states:
            return None
        ops = self.backend.recurrences()
        return StateMemory(self.states, num_slots, self.device, num_spare=num_spare, ops=ops)

    def logits(self, input_ids: Tensor, position_ids: Tensor, head_rows: Tensor | None = None) -> Tensor:
        """One forward pass over input_ids and position_ids [1, num_tokens], as the step context says: logits
        [len(head_rows), num_logits] of these tokens, of all for None."""
        if self.direct is not None:
            return self.direct(input_ids, position_ids, head_rows)[0]
        keep = 0 if head_rows is None else head_rows
        out = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=keep)
        return out.logits[0]

    def bind_kv(self, cache: KvCache, backend: PagedAttention) -> None:
        """Connects the attention layers to their pages."""
        for layer, kv in zip(self.attention, cache.layers, strict=True):
            layer.bind(backend, kv)
        if self.decoder is not None:
            self.decoder.bind(cache.layers)

    def unbind_kv(self) -> None:
        for layer in self.attention:
            layer.unbind()
        if self.decoder is not None:
            self.decoder.bind(())

    def adapter_slots(self, ops: SegmentedLora, num_slots: int) -> AdapterSlots:
        """Makes the modules' factor tables; once per model."""
        slots = AdapterSlots(self.targets, ops, num_slots, self.device, self.norms)
        if self.decoder is not None:
            self.decoder.use(slots)
        return slots
