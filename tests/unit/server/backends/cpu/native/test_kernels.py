"""The native kernels, with each instruction set that runs here: packing, products, norms.

Segmented LoRA and dense products are tested in the suites of ops/, attention and stacks of layers in the server's.
Inputs lie in guarded memory wherever that is possible: reading or writing one element too many ends the process.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from support.guarded_memory import at_end, at_start
from support.lora_cases import bits, pairwise
from support.native_kernels import native_kernels
from torch import Tensor

from loraplex_server.backends.cpu.native import library as library_module
from loraplex_server.backends.cpu.native.build import LIBRARY
from loraplex_server.backends.cpu.native.kernels import NativeKernels, PackedWeight
from loraplex_server.backends.cpu.native.library import IDENTITY, KERNELS, Library
from loraplex_server.layers.masks import RowMasks
from loraplex_server.layers.quantization import INT4, INT8, WeightFormat

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = 1e-6  # of the sum of the terms' sizes, which are added in float32
# Of the result, once.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}
INPUTS = [32, 64, 608, 2080]  # the last is several slabs of a band
OUTPUTS = [1, 15, 16, 17, 32, 33, 100, 2100]
ROWS = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 70]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def check_product(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Checks got [rows, out] = x [rows, in] @ weight.T + bias, as far from it as rounding explains."""
    terms = x.double().abs() @ weight.double().abs().T
    want = x.double() @ weight.double().T
    if bias is not None:
        want, terms = want + bias.double(), terms + bias.double().abs()
    error = (got.double() - want).abs()
    assert (error <= TOLERANCE * terms + ROUNDING[got.dtype] * want.abs()).all(), float(error.max())


# --- packing ----------------------------------------------------------------------------------------------------------


def unpacked(packed: PackedWeight) -> Tensor:
    """The packed weight as [bands * 32, in], padding included, by what src/kernels.h says of the layout."""
    values = packed.memory.view(packed.dtype)
    k = packed.num_inputs
    if packed.dtype == torch.float32:
        return values.view(-1, k, 32).transpose(1, 2).reshape(-1, k)
    # [band][block of 32 inputs][panel][pair][output][2] -> [band][panel][output][block][pair][2]
    return values.view(-1, k // 32, 2, 16, 16, 2).permute(0, 2, 4, 1, 3, 5).reshape(-1, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_outputs", OUTPUTS[:-1])
def test_packed_weights_are_the_weights(kernels: NativeKernels, dtype: torch.dtype, num_outputs: int) -> None:
    weight = at_end(random(num_outputs, 96, dtype=dtype))
    got = unpacked(kernels.pack([weight]))
    assert torch.equal(got[:num_outputs], weight)
    assert not got[num_outputs:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_weights_below_each_other(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weights = [at_end(random(size, 64, dtype=dtype)) for size in (64, 32, 45)]
    got = unpacked(kernels.pack(weights))
    assert torch.equal(got[:141], torch.cat(weights))
    assert not got[141:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_outputs", [1, 16, 40, 96])
def test_pairs_take_turns(kernels: NativeKernels, dtype: torch.dtype, num_outputs: int) -> None:
    first, second = (at_end(random(num_outputs, 64, dtype=dtype)) for _ in range(2))
    got = unpacked(kernels.pack_pair(first, second)).view(-1, 2, 16, 64)
    for part, weight in ((got[:, 0], first), (got[:, 1], second)):
        rows = part.reshape(-1, 64)
        assert torch.equal(rows[:num_outputs], weight)
        assert not rows[num_outputs:].any()


def test_a_transposed_weight_is_packed_as_it_is_seen(kernels: NativeKernels) -> None:
    weight = random(64, 40, dtype=torch.float32).t()
    assert torch.equal(unpacked(kernels.pack([weight]))[:40], weight)


def test_which_weights_there_are_products_for(kernels: NativeKernels) -> None:
    assert kernels.can_pack(torch.empty(3, 7))
    assert kernels.can_pack(torch.empty(3, 64, dtype=torch.bfloat16))
    assert not kernels.can_pack(torch.empty(3, 48, dtype=torch.bfloat16))
    assert not kernels.can_pack(torch.empty(3, 64, dtype=torch.float16))
    assert not kernels.can_pack(torch.empty(3, 64, device="meta"))


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "num_rows", "num_inputs", "num_outputs", "has_bias", "num_threads"),
    pairwise(DTYPES, ROWS, INPUTS, OUTPUTS, [False, True], [1, 2, 3]),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_products(
    isa: str,
    dtype: torch.dtype,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    has_bias: bool,
    num_threads: int,
) -> None:
    kernels = native_kernels(num_threads)
    weight = random(num_outputs, num_inputs, dtype=dtype)
    bias = at_end(random(num_outputs, dtype=dtype)) if has_bias else None
    x = at_end(random(num_rows, num_inputs, dtype=dtype))
    check_product(kernels.linear(x, kernels.pack([weight]), bias), x, weight, bias)


@pytest.mark.parametrize("num_inputs", [1, 7, 33])
def test_any_number_of_inputs_in_float32(kernels: NativeKernels, num_inputs: int) -> None:
    weight, x = random(40, num_inputs, dtype=torch.float32), at_end(random(9, num_inputs, dtype=torch.float32))
    check_product(kernels.linear(x, kernels.pack([weight]), None), x, weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(2080, 40), (64, 2100)])
def test_a_row_has_the_same_bits_in_any_batch(isa: str, dtype: torch.dtype, num_inputs: int, num_outputs: int) -> None:
    weight, x = random(num_outputs, num_inputs, dtype=dtype), random(70, num_inputs, dtype=dtype)
    one = native_kernels(1)
    packed = one.pack([weight])
    alone = torch.cat([one.linear(row, packed, None) for row in x.split(1)])
    for num_threads in (1, 2, 3):
        kernels = native_kernels(num_threads)
        for num_rows in (*range(2, 35), 48, 49, 63, 64, 65, 66, 70):
            got = kernels.linear(x[70 - num_rows :], packed, None)
            assert torch.equal(bits(got), bits(alone[70 - num_rows :])), (num_threads, num_rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(320, 40), (32, 1100)])
def test_so_many_rows_that_they_go_in_parts(isa: str, dtype: torch.dtype, num_inputs: int, num_outputs: int) -> None:
    weight, x = random(num_outputs, num_inputs, dtype=dtype), random(1100, num_inputs, dtype=dtype)
    kernels = native_kernels(2)
    packed = kernels.pack([weight])
    few = torch.cat([kernels.linear(rows, packed, None) for rows in x.split(16)])
    for num_rows in (512, 513, 1029, 1100):
        assert torch.equal(bits(kernels.linear(x[:num_rows], packed, None)), bits(few[:num_rows])), num_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [3, 20, 40, 70])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_stays_alone(kernels: NativeKernels, dtype: torch.dtype, num_rows: int, bad: float) -> None:
    packed, x = kernels.pack([random(40, 64, dtype=dtype)]), random(num_rows, 64, dtype=dtype)
    good = kernels.linear(x, packed, None)
    broken = x.clone()
    broken[1::3, 5] = bad
    got = kernels.linear(broken, packed, None)
    is_bad = torch.zeros(num_rows, dtype=torch.bool)
    is_bad[1::3] = True
    assert not got[is_bad].isfinite().any()
    assert torch.equal(bits(got[~is_bad]), bits(good[~is_bad]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_view_and_more_dimensions(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight, wide = random(24, 32, dtype=dtype), random(2, 5, 90, dtype=dtype)
    x = wide[:, :, 50:82]
    got = kernels.linear(x, kernels.pack([weight]), None)
    assert got.shape == (2, 5, 24)
    check_product(got.view(10, 24), x.reshape(10, 32), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_rows(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """A step that ends no prompt asks for no logits."""
    packed = kernels.pack([random(40, 64, dtype=dtype)])
    assert kernels.linear(torch.empty(1, 0, 64, dtype=dtype), packed, None).shape == (1, 0, 40)
    assert kernels.rms_norm(torch.empty(0, 64, dtype=dtype), torch.ones(64, dtype=dtype), 1e-5).shape == (0, 64)


def test_a_large_weight_lies_on_large_pages(kernels: NativeKernels) -> None:
    weight = random(1100, 640, dtype=torch.float32)
    packed = kernels.pack([weight])
    assert packed.address % (2 << 20) == 0
    assert torch.equal(unpacked(packed)[:1100], weight)


# --- dense products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [(1, 33, 1), (5, 70, 64), (16, 31, 70), (40, 8, 9)])
def test_a_weight_as_it_lies(
    kernels: NativeKernels, dtype: torch.dtype, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    weight, bias = at_end(random(num_outputs, num_inputs, dtype=dtype)), at_end(random(num_outputs, dtype=dtype))
    x, y = at_end(random(num_rows, num_inputs, dtype=dtype)), at_end(torch.full((num_rows, num_outputs), 7.0).to(dtype))
    kernels.dense(x, weight, bias, y)
    check_product(y, x, weight, bias)
    for row in range(num_rows):
        alone = torch.empty(1, num_outputs, dtype=dtype)
        kernels.dense(x[row : row + 1], weight, bias, alone)
        assert torch.equal(bits(alone[0]), bits(y[row]))


# --- norms ------------------------------------------------------------------------------------------------------------


def transformers_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_features"), [(1, 1), (3, 31), (9, 64), (17, 100)])
def test_rms_norm(kernels: NativeKernels, dtype: torch.dtype, num_rows: int, num_features: int) -> None:
    x, weight = at_end(random(num_rows, num_features, dtype=dtype)), at_end(random(num_features, dtype=dtype))
    got = kernels.rms_norm(x.view(1, num_rows, num_features), weight, 1e-5)[0]
    torch.testing.assert_close(got, transformers_norm(x, weight, 1e-5), rtol=2 * ROUNDING[dtype], atol=1e-6)
    for row in range(num_rows):
        assert torch.equal(bits(kernels.rms_norm(x[row], weight, 1e-5)), bits(got[row]))


# --- guarded memory on the other side ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_before_the_arguments_is_read(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight, bias = at_start(random(45, 64, dtype=dtype)), at_start(random(45, dtype=dtype))
    for num_rows in (1, 17, 33):
        x, y = at_start(random(num_rows, 64, dtype=dtype)), at_start(torch.zeros(num_rows, 45, dtype=dtype))
        check_product(kernels.linear(x, kernels.pack([weight]), bias), x, weight, bias)
        kernels.dense(x, weight, bias, y)
        check_product(y, x, weight, bias)


@pytest.fixture(scope="module")
def packing() -> NativeKernels:
    """Kernels for packing alone, which needs no instruction set."""
    if not LIBRARY.exists():
        pytest.skip("the native library is not built: make native")
    functions = ctypes.CDLL(str(LIBRARY))
    library_module._declare(functions, {**IDENTITY, **KERNELS})
    return NativeKernels(Library(functions, LIBRARY), 1)


@pytest.mark.parametrize("form", [None, INT8, INT4], ids=["plain", "int8", "int4"])
@pytest.mark.parametrize(("dtype", "num_inputs"), [(torch.float32, 40), (torch.float32, 64), (torch.bfloat16, 64)])
def test_packed_weights_come_back(
    packing: NativeKernels, dtype: torch.dtype, num_inputs: int, form: WeightFormat | None
) -> None:
    weights = [torch.randn(num_outputs, num_inputs).to(dtype) for num_outputs in (64, 32, 50)]
    pair = [torch.randn(40, num_inputs).to(dtype) for _ in range(2)]
    if form is not None:
        for weight in (*weights, *pair):
            form.round_(weight)
    assert torch.equal(packing.pack(weights, form).matrix(), torch.cat(weights))
    packed = packing.pack_pair(*pair, form)
    for which, weight in enumerate(pair):
        assert torch.equal(packed.of_pair(which, 40), weight)


# --- the largest value ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 31, 32, 33, 1000])
def test_the_largest_among_those_that_a_mask_allows(dtype: torch.dtype, size: int, kernels: NativeKernels) -> None:
    num_words = -(-size // 32)
    dice = np.random.default_rng(size)
    words = dice.integers(0, 1 << 32, (3, num_words), dtype=np.uint32).view(np.int32)
    words[1] = 0
    is_allowed = np.unpackbits(words.view(np.uint8), axis=1, count=size, bitorder="little").astype(bool)
    values = at_end(torch.randint(-9, 9, (5, size)).to(dtype))  # with ties
    numbers = [2, -1, 0, 1, 2]
    best, where = kernels.argmax(values, RowMasks(numbers, words))
    for row, number in enumerate(numbers):
        allowed = torch.ones(size, dtype=torch.bool) if number < 0 else torch.from_numpy(is_allowed[number])
        want = values[row].float().masked_fill(~allowed, -torch.inf)
        assert best[row] == want.max()
        assert torch.isinf(best[row]) or where[row] == int((want == want.max()).nonzero()[0])
    for bad in (torch.nan, torch.inf):
        wild = values.clone()
        wild[0, -1] = wild[3, 0] = bad
        best, _ = kernels.argmax(wild, RowMasks(numbers, words))
        assert not best[[0, 3]].isfinite().any(), "also where it is not allowed"
        assert torch.isneginf(best[0]) == torch.isneginf(best[3]) == torch.tensor(False)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.argmax(torch.zeros(1, 32 * num_words + 1, dtype=dtype), RowMasks([0], words))
