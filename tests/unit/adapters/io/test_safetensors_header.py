"""Safetensors headers: valid ones read, invalid ones refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from support.adapter_files import BytesFile, safetensors_bytes

from loraplex_adapters.io import safetensors, source_files
from loraplex_adapters.io.safetensors import TensorInfo, read_header
from loraplex_contracts.errors import AdapterInvalid


def read(data: bytes) -> dict[str, TensorInfo]:
    return read_header(BytesFile(data, "file.safetensors"))


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "b": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "a": torch.ones(4, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7.0),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    data = (tmp_path / "x.safetensors").read_bytes()
    found = read(data)
    assert set(found) == set(tensors)
    assert found["b"].shape == (2, 3)
    assert found["b"].dtype == "BF16"
    for name, tensor in tensors.items():
        info = found[name]
        raw = data[info.offset : info.offset + info.num_bytes]
        assert raw == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    with safe_open(tmp_path / "x.safetensors", "pt") as theirs:
        assert set(theirs.keys()) == set(found)


BAD_HEADERS: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": b"\x00" * 7,
    "length only": struct.pack("<Q", 2),
    "header longer than the file": safetensors_bytes(b"{}", b"", header_bytes=100),
    "header of 2^63 bytes": safetensors_bytes(b"{}", b"", header_bytes=1 << 63),
    "no JSON": safetensors_bytes(b"\xff\xfe!!", b""),
    "a list": safetensors_bytes(b"[]", b""),
    "deep nesting": safetensors_bytes(b'{"a":' * 100_000, b""),
    "NaN": safetensors_bytes(b'{"a": NaN}', b""),
    "a number of 10,000 digits": safetensors_bytes(b'{"a": ' + b"9" * 10_000 + b"}", b""),
    "duplicate names": safetensors_bytes(
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        bytes(4),
    ),
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "entry is no object": safetensors_bytes({"a": 1}, b""),
    "entry lacks a field": safetensors_bytes({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "entry has one more field": safetensors_bytes({"a": entry(0, 4) | {"x": 1}}, bytes(4)),
    "unknown dtype": safetensors_bytes({"a": entry(0, 4, dtype="F31")}, bytes(4)),
    "dtype is no string": safetensors_bytes({"a": entry(0, 4, dtype=["F32"])}, bytes(4)),
    "negative dimension": safetensors_bytes({"a": entry(0, 4, shape=[-1])}, bytes(4)),
    "absurd dimension": safetensors_bytes({"a": entry(0, 4, shape=[1 << 62, 0])}, bytes(4)),
    "fractional dimension": safetensors_bytes({"a": entry(0, 4, shape=[1.0])}, bytes(4)),
    "boolean dimension": safetensors_bytes({"a": entry(0, 4, shape=[True])}, bytes(4)),
    "too many dimensions": safetensors_bytes({"a": entry(0, 4, shape=[1] * 9)}, bytes(4)),
    "shape does not fit the bytes": safetensors_bytes({"a": entry(0, 4, shape=[2])}, bytes(4)),
    "dtype does not fit the bytes": safetensors_bytes({"a": entry(0, 4, shape=[1], dtype="F64")}, bytes(4)),
    "offsets backwards": safetensors_bytes({"a": {"dtype": "F32", "shape": [0], "data_offsets": [4, 0]}}, bytes(4)),
    "three offsets": safetensors_bytes({"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0, 0]}}, b""),
    "overlap": safetensors_bytes({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "the same bytes twice": safetensors_bytes({"a": entry(0, 4), "b": entry(0, 4)}, bytes(4)),
    "gap": safetensors_bytes({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
    "data does not begin at once": safetensors_bytes({"a": entry(4, 8)}, bytes(8)),
    "bytes after the last tensor": safetensors_bytes({"a": entry(0, 4)}, bytes(5)),
    "cut in the data": safetensors_bytes({"a": entry(0, 4)}, bytes(3)),
    "out of range": safetensors_bytes({"a": entry(0, 1 << 40)}, bytes(4)),
    "empty name": safetensors_bytes({"": entry(0, 4)}, bytes(4)),
    "endless name": safetensors_bytes({"a" * 1000: entry(0, 4)}, bytes(4)),
}


@pytest.mark.parametrize("data", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_malformed_files_are_refused(data: bytes) -> None:
    with pytest.raises(AdapterInvalid) as raised:
        read(data)
    assert "file.safetensors" in str(raised.value)
    assert str(raised.value).isascii()
    assert len(str(raised.value)) < 600


def test_too_many_tensors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_TENSORS", 2)
    with pytest.raises(AdapterInvalid, match="3 tensors"):
        read(safetensors_bytes({f"t{i}": entry(4 * i, 4 * i + 4) for i in range(3)}, bytes(12)))


def test_the_header_is_bounded_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "MAX_HEADER_BYTES", 64)
    file = BytesFile(struct.pack("<Q", 65) + bytes(1 << 10))
    with pytest.raises(AdapterInvalid, match="claims a header of 65 bytes"):
        read_header(file)
    assert file.reads == [(0, 8)]


_GOOD = safetensors_bytes({"a": entry(0, 8, shape=[2, 1]), "b": entry(8, 12)}, bytes(12))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    damaged = bytearray(_GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        tensors = read(bytes(damaged))
    except AdapterInvalid:
        return
    assert sum(t.num_bytes for t in tensors.values()) <= len(damaged)
    assert all(0 <= t.offset and t.offset + t.num_bytes <= len(damaged) for t in tensors.values())


def test_metadata_is_ignored_whatever_it_says() -> None:
    header = {"__metadata__": {"format": "pt", "x": "y" * 1000}, "a": entry(0, 4)}
    assert set(read(safetensors_bytes(json.dumps(header).encode() + b"   ", bytes(4)))) == {"a"}
