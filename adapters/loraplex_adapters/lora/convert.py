"""From the tensors of a file to the bytes of a LoRA's layout. How pieces are read and written is pieces.py's."""

from __future__ import annotations

from loraplex_adapters.formats.peft import LoraPlan
from loraplex_adapters.pieces import PieceWriter, WriteFn, float_pieces, sha256_of, weight_sha256
from loraplex_adapters.sources.base import SourceFile
from loraplex_proto.errors import AdapterUnsupported

__all__ = ["check_base_copies", "weight_sha256", "write_payload"]


def write_payload(plan: LoraPlan, file: SourceFile, write: WriteFn) -> None:
    """Writes exactly `plan.layout.num_bytes` bytes. Raises NonFinite, or what the file raises."""
    out = PieceWriter(write)
    for module, placed in zip(plan.modules, plan.layout.placed, strict=True):
        for tensor, offset in ((module.a, placed.a_offset), (module.b, placed.b_offset)):
            out.pad_to(offset)
            for piece in float_pieces(tensor, file, plan.layout.dtype):
                out.write(piece)
    out.pad_to(plan.layout.num_bytes)


def check_base_copies(plan: LoraPlan, file: SourceFile) -> None:
    """Raises AdapterUnsupported when a saved weight is not the base model's own."""
    for tensor, module in plan.base_copies:
        if sha256_of(tensor, file, plan.layout.dtype) != module.weight_sha256:
            raise AdapterUnsupported(
                f"{tensor.where} replaces a weight of the base model by another, which is not served"
            )
