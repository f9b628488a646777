"""The fewest bytes that a step can move."""

from __future__ import annotations

from torch import Tensor

from gpu_bench.adapters import linears
from gpu_bench.shapes import Shape
from loraplex_server.model.loaded import LoadedModel
from loraplex_server.model.spec import kv_block_bytes


def weight_bytes(loaded: LoadedModel) -> int:
    """Every weight that each step reads: all but the embedding, of which it reads a few rows."""
    embedding: Tensor = loaded.model.get_input_embeddings().weight  # type: ignore[assignment]
    parameters = {parameter.data_ptr(): parameter for parameter in loaded.model.parameters()}
    head: Tensor = loaded.model.get_output_embeddings().weight  # type: ignore[union-attr, assignment]
    if head.data_ptr() != embedding.data_ptr():
        parameters.pop(embedding.data_ptr(), None)
    return sum(parameter.nbytes for parameter in parameters.values())


def kv_bytes(loaded: LoadedModel, shape: Shape, batch: int) -> int:
    return batch * shape.context * kv_block_bytes(loaded.spec, 1, loaded.dtype.itemsize)


def adapter_bytes(loaded: LoadedModel, rank: int) -> int:
    """Of one adapter's factors."""
    return sum(rank * (m.in_features + m.out_features) for m in linears(loaded).values()) * loaded.dtype.itemsize
