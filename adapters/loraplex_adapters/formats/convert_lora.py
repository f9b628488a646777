"""From the tensors of a file to the bytes of a LoRA's layout. How pieces are read and written is pieces.py's.

Tensors that lie one behind the other, in the file as in the layout, are read as if they were one: an adapter has
hundreds of them, each smaller than a piece. PEFT saves them in the layout's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from loraplex_adapters.formats.peft import LoraPlan
from loraplex_adapters.io.safetensors_header import DTYPE_BYTES, TensorInfo
from loraplex_adapters.io.source_files import SourceFile
from loraplex_adapters.io.tensor_pieces import DTYPES, PieceReader, PieceWriter, WriteFn, weight_sha256
from loraplex_contracts.errors import AdapterUnsupported, NonFinite

__all__ = ["check_base_copies", "weight_sha256", "write_payload"]


def write_payload(plan: LoraPlan, file: SourceFile, write: WriteFn, reader: PieceReader) -> None:
    """Writes exactly `plan.layout.num_bytes` bytes. Raises NonFinite, or what the file raises."""
    out = PieceWriter(write)
    for run in _runs(plan):
        out.pad_to(run.target)
        try:
            for piece in reader.pieces(run.whole, file, plan.layout.dtype):
                out.write(piece)
        except NonFinite:
            for tensor in run.tensors:  # which one is it?
                for _ in reader.pieces(tensor, file, plan.layout.dtype):
                    pass
            raise
    out.pad_to(plan.layout.num_bytes)


def check_base_copies(plan: LoraPlan, file: SourceFile, reader: PieceReader) -> None:
    """Raises AdapterUnsupported when a saved weight is not the base model's own."""
    for tensor, module in plan.base_copies:
        if reader.sha256(tensor, file, plan.layout.dtype) != module.weight_sha256:
            raise AdapterUnsupported(
                f"{tensor.where} replaces a weight of the base model by another, which is not served"
            )


@dataclass(slots=True)
class _Run:
    """Tensors without a gap between them."""

    tensors: list[TensorInfo]
    target: int  # where their bytes begin in the layout

    @property
    def whole(self) -> TensorInfo:
        """As one tensor, with the first one's name."""
        return replace(self.tensors[0], num_bytes=sum(tensor.num_bytes for tensor in self.tensors))


def _runs(plan: LoraPlan) -> Iterator[_Run]:
    """In the layout's order."""
    itemsize = DTYPES[plan.layout.dtype].itemsize
    run: _Run | None = None
    source_end = target_end = -1
    for module, placed in zip(plan.modules, plan.layout.placed, strict=True):
        for tensor, target in ((module.a, placed.a_offset), (module.b, placed.b_offset)):
            if run and (tensor.offset, target, tensor.dtype) == (source_end, target_end, run.tensors[0].dtype):
                run.tensors.append(tensor)
            else:
                if run:
                    yield run
                run = _Run([tensor], target)
            source_end = tensor.offset + tensor.num_bytes
            target_end = target + tensor.num_bytes // DTYPE_BYTES[tensor.dtype] * itemsize
    if run:
        yield run
