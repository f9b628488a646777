"""Dense products on a CUDA device: the Triton kernel as compiled, against float64."""

from __future__ import annotations

import pytest
import torch

from loraplex_server.backends.registry import choose_backend, lora_operations
from loraplex_server.layers.lora import DenseTable, DenseWeight, Segment

STATUS = next(status for status in lora_operations() if status.name == "triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STATUS.usable, reason=f"the Triton kernels cannot run here: {STATUS.reason}"),
]
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("width", [256, 1000, 4096])
@pytest.mark.parametrize("rows_per_segment", [1, 7, 100])
def test_products(dtype: torch.dtype, width: int, rows_per_segment: int) -> None:
    torch.manual_seed(width + rows_per_segment)
    table = DenseTable(width)
    for slot, size in enumerate((width, 2000, 72, 32000)):
        weight = (torch.randn(size, width, device="cuda") / width**0.5).to(dtype)
        table.set(slot, DenseWeight(weight, torch.randn(size, device="cuda").to(dtype) if slot % 2 else None))
    num_rows = 9 * rows_per_segment
    segments = [Segment(i * rows_per_segment, (i + 1) * rows_per_segment, (i * 3) % 4) for i in range(8)]
    x = torch.randn(num_rows, width, device="cuda").to(dtype)
    y = torch.full((num_rows, 32000), float("nan"), dtype=dtype, device="cuda")
    want = y.double()
    for segment in segments:
        dense = table.get(segment.adapter_slot)
        assert dense is not None
        rows = slice(segment.start, segment.end)
        product = x[rows].double() @ dense.weight.double().T
        want[rows, : dense.num_outputs] = product if dense.bias is None else product + dense.bias.double()
    ops = choose_backend("cuda").dense()
    assert ops.name == "triton"
    prepared = ops.prepare(segments, num_rows, 4, x.device)
    ops.apply(y, x, table, prepared)
    torch.testing.assert_close(y.double(), want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype], equal_nan=True)
    again = torch.full_like(y, float("nan"))
    ops.apply(again, x, table, prepared)
    assert torch.equal(again.nan_to_num(0.0), y.nan_to_num(0.0))
