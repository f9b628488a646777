"""Products of experts on a GPU, captured in CUDA graphs of steps."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA = torch.device("cuda")
NUM_EXPERTS, TOP_K, NUM_IN, NUM_OUT = 64, 8, 256, 192


@pytest.mark.parametrize("num_rows", [1, 8, 64, 1024])  # 8,192 pairs at most, whose sorting takes another way
def test_a_captured_product_follows_its_router(num_rows: int) -> None:
    from loraplex_server.backends.cuda.experts import TritonExperts

    torch.manual_seed(0)
    weight = torch.randn(NUM_EXPERTS, NUM_OUT, NUM_IN, device=CUDA, dtype=torch.bfloat16)
    products = TritonExperts(weight)
    x = torch.zeros(num_rows, NUM_IN, device=CUDA, dtype=torch.bfloat16)
    chosen = torch.zeros(num_rows, TOP_K, device=CUDA, dtype=torch.int64)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        products(x, chosen)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = products(x, chosen)
    for num_used in (NUM_EXPERTS, TOP_K):  # all experts, and a few that get all rows
        x.normal_()
        chosen.copy_(torch.rand(num_rows, num_used, device=CUDA).topk(TOP_K).indices)
        graph.replay()
        assert torch.equal(y, products(x, chosen)), "a replay computes what a launch does"
        rows = slice(0, 16)  # of which float64 holds the weights of each pair
        want = torch.einsum("ri,rkoi->rko", x[rows].double(), weight[chosen[rows]].double()).flatten(0, 1)
        torch.testing.assert_close(y[: len(want)].double(), want, rtol=2e-2, atol=2e-2 * float(want.abs().max()))
