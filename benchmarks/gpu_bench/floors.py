"""The fewest bytes that a step can move."""

from __future__ import annotations

from gpu_bench.adapters import linears
from gpu_bench.shapes import Shape
from loraplex_server.layers.attention import kv_block_bytes
from loraplex_server.model.loaded_model import LoadedModel


def weight_bytes(loaded: LoadedModel) -> int:
    """Every weight that each step reads. Of an embedding that is not the head too it reads a few rows only."""
    embedding = loaded.model.get_input_embeddings().weight
    head = loaded.model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding
    return sum(parameter.nbytes for parameter in loaded.model.parameters() if is_tied or parameter is not embedding)


def kv_bytes(loaded: LoadedModel, shape: Shape, batch: int) -> int:
    return batch * shape.context * kv_block_bytes(loaded.spec, 1, loaded.dtype.itemsize)


def adapter_bytes(loaded: LoadedModel, rank: int) -> int:
    """Bytes of one adapter's factors."""
    return sum(rank * (m.in_features + m.out_features) for m in linears(loaded).values()) * loaded.dtype.itemsize
