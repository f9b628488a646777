"""Triton's products of experts against products one by one.

Not collected by itself: `test_interpreter.py` runs it in Triton's interpreter, in a process of its own. By hand:
`OMP_NUM_THREADS=1 TRITON_INTERPRET=1 pytest tests/unit/server/backends/cuda/expert_kernels.py`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support.backends import PatchedBackend
from support.driver import Job, make_rig, random_prompts
from support.zoo import VOCAB_SIZE, random_model
from torch import Tensor

from loraplex_server.backends.cuda.experts import TritonExperts, make_experts
from loraplex_server.layers.experts import DOWN, UP, AdaptedExperts
from loraplex_server.model.loader import adopt_model

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
NUM_EXPERTS, TOP_K = 5, 3


def routed(num_rows: int, num_inputs: int, dtype: torch.dtype, num_experts: int = NUM_EXPERTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    return x, torch.rand(num_rows, num_experts, generator=generator).topk(TOP_K).indices


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [(1, 16, 8), (9, 40, 70), (60, 96, 33)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_equals_products_one_by_one(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, is_transposed: bool
) -> None:
    """Experts without a row, with one block of pairs and with several, outputs and inputs that fill no block."""
    x, chosen = routed(num_rows, num_inputs, dtype)
    chosen[chosen == 2] = 4
    weight = torch.randn(NUM_EXPERTS, num_outputs, num_inputs).to(dtype)
    held = weight.mT.contiguous().mT if is_transposed else weight
    got = TritonExperts(held)(x, chosen)
    want = torch.einsum("rk,rtok->rto", x.double(), weight.double()[chosen]).flatten(0, 1)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    x, chosen = routed(70, 64, torch.float32, 2 * TOP_K)
    # Whole numbers, whose sums are exact: on some CPUs a row of numpy's products depends on the number of rows.
    x = (8 * x).round()
    products = TritonExperts(torch.randint(-8, 9, (2 * TOP_K, 96, 64)).float())
    together = products(x, chosen).view(70, TOP_K, -1)  # in blocks of many pairs
    for row in (0, 31, 69):
        assert torch.equal(products(x[row : row + 1], chosen[row : row + 1]), together[row])
    flat = products(x.repeat_interleave(TOP_K, dim=0)[::2], chosen.reshape(-1, 1)[::2])
    assert torch.equal(flat, together.flatten(0, 1)[::2])


def test_rows_of_a_wider_tensor_and_no_rows_at_all() -> None:
    products = TritonExperts(torch.randn(NUM_EXPERTS, 24, 32))
    x, chosen = routed(7, 64, torch.float32)
    assert torch.equal(products(x[:, :32], chosen), products(x[:, :32].contiguous(), chosen))
    assert products(x[:0, :32], chosen[:0]).shape == (0, 24)


def test_other_dtypes_keep_the_models_own_code() -> None:
    assert make_experts(torch.randn(2, 3, 4, dtype=torch.float64)) is None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_computes_by_them(family: str) -> None:
    """Experts may have weights that lie the other way round, biases and a gate of the family's own."""
    model = random_model(family, torch.float32)
    prompts = random_prompts(3, VOCAB_SIZE, seed=3, longest=9)
    logits: list[list[Tensor]] = []
    for make in (None, make_experts):
        rig = make_rig(adopt_model(copy.deepcopy(model), backend=PatchedBackend(make_experts=make)), seed=3)
        found = [module for module in rig.loaded.model.modules() if isinstance(module, AdaptedExperts)]
        assert [set(one.products) for one in found] == [{UP, DOWN} if make else set()] * 2
        jobs = [Job(prompt, 3) for prompt in prompts]
        rig.run(jobs)
        logits.append([rig.logits(job) for job in jobs])
    for own, got in zip(*logits, strict=True):
        torch.testing.assert_close(got, own, rtol=1e-4, atol=1e-4 * float(own.abs().max()))
