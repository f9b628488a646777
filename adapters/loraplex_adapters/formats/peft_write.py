"""Bytes of a planned PEFT adapter: copies of tensors, and what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from loraplex_adapters.formats.peft_plan import LoraPlan, PlannedClassifier, PlannedModule, PlannedSaved
from loraplex_adapters.io.safetensors import DTYPE_BYTES, DTYPES, PieceReader, PieceWriter, TensorInfo
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.weights import AdapterLayout, TargetModule
from loraplex_contracts.errors import NonFinite

# Bytes of a base weight that are widened at once.
_BLOCK_BYTES = 8 << 20


def write_lora(plan: LoraPlan, layout: AdapterLayout, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the factors from the beginning of the layout on. Raises NonFinite, or what the file raises."""
    own = {one.shape.path: one for one in plan.saved if one.shape.name == "weight" and one.shape.token_ids is None}
    for run in _runs(plan, layout):
        if isinstance(run, PlannedModule):
            for place, tensor in _computed(run, layout, reader, own.get(run.target.path)):
                out.pad_to(place)
                out.write(tensor)
            continue
        out.pad_to(run.target)
        try:
            for piece in reader.pieces(run.whole):
                out.write(piece)
        except NonFinite:
            for tensor in run.tensors:  # which one is it?
                for _ in reader.pieces(tensor):
                    pass
            raise


def write_classifier(plan: PlannedClassifier, layout: AdapterLayout, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the classifier at its place. Raises NonFinite, or what the file raises."""
    placed = layout.classifier
    assert placed is not None, "a classifier has its place in the layout"
    for tensor, place in ((plan.weight, placed.weight), (plan.bias, placed.bias)):
        if tensor is not None:
            out.pad_to(place)
            for piece in reader.pieces(tensor):
                out.write(piece)


def write_saved(plan: LoraPlan, layout: AdapterLayout, out: PieceWriter, reader: PieceReader) -> None:
    """Writes the saved parameters at their places. Raises NonFinite, or what the file raises."""
    for saved, placed in zip(plan.saved, layout.saved, strict=True):
        out.pad_to(placed.offset)
        if saved.made is not None:
            made = saved.made(partial(reader.whole, dtype=_wide(layout.dtype)))
            out.write(_narrow(made, layout.dtype, saved.shape.path))
            continue
        for piece in reader.pieces(saved.tensor):
            out.write(piece)


@dataclass(slots=True)
class _Run:
    """Tensors without a gap between them."""

    tensors: list[TensorInfo]
    target: int  # where their bytes begin in the layout

    @property
    def whole(self) -> TensorInfo:
        """The run as one tensor, with the first one's name."""
        return replace(self.tensors[0], num_bytes=sum(tensor.num_bytes for tensor in self.tensors))


def _runs(plan: LoraPlan, layout: AdapterLayout) -> Iterator[_Run | PlannedModule]:
    """Runs of tensors in the layout's order. A module comes by itself for what is computed of its tensors."""
    itemsize = DTYPES[layout.dtype].itemsize
    run: _Run | None = None
    source_end = target_end = -1
    for module, placed in zip(plan.modules, layout.factors, strict=True):
        for tensor, target in ((module.a, placed.a_offset), (module.b, placed.b_offset)):
            if tensor is None:
                continue
            if run and (tensor.offset, target, tensor.dtype) == (source_end, target_end, run.tensors[0].dtype):
                run.tensors.append(tensor)
            else:
                if run:
                    yield run
                run = _Run([tensor], target)
            source_end = tensor.offset + tensor.num_bytes
            target_end = target + tensor.num_bytes // DTYPE_BYTES[tensor.dtype] * itemsize
        if not module.shape.is_plain or module.made is not None:
            if run:
                yield run
            run = None
            yield module
    if run:
        yield run


def _computed(
    module: PlannedModule, layout: AdapterLayout, reader: PieceReader, own: PlannedSaved | None
) -> Iterator[tuple[int, Tensor]]:
    """Places and values that are computed of a module's tensors, in the order of the places. `own`: the weight that
    takes the place of the base model's."""
    path = module.shape.path
    placed = next(placed for placed in layout.factors if placed.shape.path == path)
    made = None
    if module.made is not None:
        made = a, b = module.made(partial(reader.whole, dtype=_wide(layout.dtype)))
        yield placed.a_offset, _narrow(a, layout.dtype, path)
        yield placed.b_offset, _narrow(b, layout.dtype, path)
    gain, shift = _rescaling(module, layout.dtype, reader, made, own)
    if gain is not None:
        yield placed.gain_offset, _narrow(gain, layout.dtype, path)
    if shift is not None:
        yield placed.shift_offset, _narrow(shift, layout.dtype, path)


def _wide(dtype: str) -> torch.dtype:
    return torch.float64 if dtype == "float64" else torch.float32


def _rescaling(
    module: PlannedModule,
    dtype: str,
    reader: PieceReader,
    made: tuple[Tensor, Tensor] | None,
    own: PlannedSaved | None,
) -> tuple[Tensor | None, Tensor | None]:
    """(gain [out], shift [out]) of y = gain * (W x + bias + scale * B A x) + shift, in float32 at least. `made`: A and
    B, where they are not the module's own tensors. `own`: W, where it is not the base model's.

    DoRA (arXiv 2402.09353): gain is the magnitude over the norm of each row of W + scale * B A. Raises NonFinite, or
    what the file raises.
    """
    wide = _wide(dtype)
    gain = None if module.gain is None else reader.whole(module.gain, wide).flatten()
    if module.shape.is_plain or (gain is not None and not module.shape.has_shift):
        return gain, None
    assert module.target.weights is not None, "targets of a loaded model have their weights"
    weight, base_bias = module.target.weights()

    def read(tensor: TensorInfo | None) -> Tensor | None:
        return None if tensor is None else reader.whole(tensor, wide).to(weight.device)

    magnitude, lora_bias, bias = read(module.magnitude), read(module.lora_bias), read(module.bias)
    gain = None if gain is None else gain.to(weight.device)
    if magnitude is not None:
        if own is not None:
            weight = _weight(own, module.target, reader, DTYPES[dtype]).to(weight.device)
        a, b = (read(module.a), read(module.b)) if made is None else (one.to(weight.device) for one in made)
        assert a is not None, "a magnitude has its factors"
        assert b is not None
        norms: list[Tensor] = []
        num_rows = max(1, _BLOCK_BYTES // (weight.shape[1] * wide.itemsize))
        for start in range(0, weight.shape[0], num_rows):
            update = b[start : start + num_rows] @ a
            rows = weight[start : start + num_rows].to(wide) + module.shape.scale * update
            norms.append(torch.linalg.vector_norm(rows, dim=1))
            checkpoint()
        gain = magnitude / torch.cat(norms)
    if not module.shape.has_shift:
        return gain, None
    old = base_bias.to(wide) if base_bias is not None else torch.zeros_like(weight[:, 0], dtype=wide)
    shift = -old if gain is None else -gain * old
    shift += old if bias is None else bias
    if lora_bias is not None:
        shift += module.shape.scale * lora_bias
    return gain, shift


def _weight(own: PlannedSaved, target: TargetModule, reader: PieceReader, dtype: torch.dtype) -> Tensor:
    """A saved weight as TargetModule.weights gives the base model's."""
    read = partial(reader.whole, dtype=dtype)
    weight = read(own.tensor) if own.made is None else own.made(read)
    return weight.mT if target.kind == "embedding" or target.is_conv1d else weight


def _narrow(tensor: Tensor, dtype: str, path: str) -> Tensor:
    """The tensor in the dtype it is stored in, on the CPU. Raises NonFinite."""
    found = tensor.to(DTYPES[dtype]).contiguous().cpu()
    if not bool(torch.isfinite(found).all()):
        raise NonFinite(f"{path!a}: what is computed of its tensors is not finite in the base model's dtype")
    return found
