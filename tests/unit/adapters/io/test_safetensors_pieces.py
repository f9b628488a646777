"""Tensors read piece by piece."""

from __future__ import annotations

import pytest
import torch
from support.adapter_files import BytesFile

from loraplex_adapters.io.safetensors import DTYPES, FILE_DTYPES, PIECE_BYTES, SERIAL_ELEMENTS, PieceReader, TensorInfo
from loraplex_adapters.io.uncached import PAGE_BYTES
from loraplex_contracts.errors import NonFinite


def file_of(values: torch.Tensor, file_dtype: str, offset: int) -> tuple[BytesFile, TensorInfo]:
    data = values.view(torch.uint8).numpy().tobytes()
    info = TensorInfo("x", file_dtype, (values.numel(),), offset, len(data), "f")
    return BytesFile(b"\0" * offset + data), info


@pytest.mark.parametrize("file_dtype", FILE_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 8, 1 << 13])
def test_all_elements_in_order(file_dtype: str, dtype: str, offset: int) -> None:
    source = DTYPES[FILE_DTYPES[file_dtype]]
    values = torch.randn(3 * PIECE_BYTES // source.itemsize + 77).to(source)
    file, info = file_of(values, file_dtype, offset)
    reader = PieceReader({"f": file}, dtype)
    for _ in range(2):  # memory that was used before
        pieces = [piece.clone() for piece in reader.pieces(info)]
        assert torch.equal(torch.cat(pieces), values.to(DTYPES[dtype]))
    num = values.numel() // 2
    some = [piece.clone() for piece in reader.pieces(info, start=1000, count=num)]
    assert torch.equal(torch.cat(some), values[1000 : 1000 + num].to(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_a_whole_tensor_has_memory_of_its_own(dtype: str, wide: torch.dtype) -> None:
    """The pieces share theirs."""
    values = torch.randn(3 * PIECE_BYTES // 4 + 77)
    file, info = file_of(values, "F32", 8)
    reader = PieceReader({"f": file}, dtype)
    found = reader.whole(info, wide)
    reader.whole(info, wide).zero_()
    assert found.dtype == wide
    assert torch.equal(found, values.to(DTYPES[dtype]).to(wide))


def test_a_tensor_without_elements() -> None:
    """A block of one input in OFT is one."""
    info = TensorInfo("x", "F32", (4, 0), 0, 0, "f")
    assert PieceReader({"f": BytesFile(b"")}, "float32").whole(info, torch.float32).shape == (4, 0)


def test_a_piece_ends_with_a_page() -> None:
    """A piece ends with a page where the tensor lies on whole elements of it; and no piece is large."""
    file, info = file_of(torch.zeros(PIECE_BYTES), "F32", 8 * 101)
    assert all(piece.numel() <= PIECE_BYTES // 4 for piece in PieceReader({"f": file}, "bfloat16").pieces(info))
    assert all(end % PAGE_BYTES == 0 for _, end in file.reads[:-1])
    assert all(end - start <= PIECE_BYTES for start, end in file.reads)
    assert len(file.reads) == 5
    file, info = file_of(torch.zeros(PIECE_BYTES), "F32", 4097)
    assert sum(piece.numel() for piece in PieceReader({"f": file}, "float32").pieces(info)) == PIECE_BYTES


@pytest.mark.parametrize("place", [0, SERIAL_ELEMENTS - 1, SERIAL_ELEMENTS, 100_000])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e30])
def test_what_is_not_finite_is_found_anywhere(place: int, value: float) -> None:
    values = torch.zeros(100_001)
    values[place] = value
    file, info = file_of(values, "F32", 0)
    with pytest.raises(NonFinite):
        for _ in PieceReader({"f": file}, "float16").pieces(info):
            pass
