"""Native kernels for Arm under an emulator: the same bits as with AVX2."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.native_calls import Program
from support.native_kernels import isas, using

from loraplex_server.backends.cpu.native.build import LIBRARY, MACHINES, SOURCES, build, find_compiler
from loraplex_server.backends.cpu.native.library import Layer, Library, Runs, Spans, Stack, Step, Table
from loraplex_server.layers.quantization import INT4, INT8, WeightFormat

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
DRIVER = Path(__file__).resolve().parents[5] / "support" / "native_driver.cpp"
F32, BF16 = 0, 1
DTYPES = [F32, BF16]
ROWS = (1, 2, 3, 4, 7, 9, 32, 70)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs the driver."""
    for tool, package in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user-static")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not there: apt install {package}")
    folder = tmp_path_factory.mktemp("arm")
    compiler = find_compiler([COMPILER], MACHINES["linux", "aarch64"])
    assert compiler.variants == ("neon",)
    library = build(folder / LIBRARY.name, sources=SOURCES, compiler=compiler, objects=folder / "objects")
    driver = folder / "driver"
    subprocess.run(
        [COMPILER, "-std=c++17", "-O1", "-o", str(driver), str(DRIVER), str(library), f"-Wl,-rpath,{folder}"],
        check=True,
    )
    return [EMULATOR, "-L", "/usr/aarch64-linux-gnu", str(driver)]


@pytest.fixture
def avx2() -> Iterator[Library]:
    if "avx2" not in isas():
        pytest.skip("the kernels for AVX2, which have the same order of sums, do not run here")
    with using("avx2") as library:
        yield library


@pytest.fixture
def dice() -> np.random.Generator:
    return np.random.default_rng(0)


def floats(dice: np.random.Generator, dtype: int, *shape: int, scale: float = 1.0) -> NDArray[np.float32 | np.uint16]:
    values = (dice.standard_normal(shape) * scale).astype(np.float32)
    return values if dtype == F32 else (values.view(np.uint32) >> 16).astype(np.uint16)


def zeros(dtype: int, *shape: int) -> NDArray[np.float32 | np.uint16]:
    return np.zeros(shape, np.float32 if dtype == F32 else np.uint16)


def check(program: Program, avx2: Library, emulated: list[str], folder: Path) -> None:
    said, found = program.run_by(emulated, folder)
    assert said == "neon"
    program.run(avx2)
    pointed = {idx for idx, _, _ in program.pointers}
    for idx, (own, other) in enumerate(zip(program.buffers, found, strict=True)):
        if idx not in pointed:
            assert np.array_equal(own, other), (
                f"buffer {idx} differs in {int((own != other).sum())} of {own.nbytes} bytes"
            )


def packed_bytes(outputs: int, k: int, dtype: int, form: WeightFormat | None = None) -> int:
    bands, blocks = -(-outputs // 32), -(-k // 32)
    if form is None:
        return bands * k * 32 * (4 if dtype == F32 else 2)
    return bands * blocks * (32 + (1024 if form is INT8 else 512))


def put_packed(program: Program, dice: np.random.Generator, dtype: int, outputs: int, k: int) -> int:
    weight = program.put(floats(dice, dtype, outputs, k, scale=k**-0.5))
    packed = program.put(np.zeros(packed_bytes(outputs, k, dtype), np.uint8))
    program.call("lp_pack", dtype, 0, weight, None, k, outputs, k, packed)
    return packed


@pytest.mark.parametrize("dtype", DTYPES)
def test_linears(dtype: int, avx2: Library, emulated: list[str], dice: np.random.Generator, tmp_path: Path) -> None:
    program = Program()
    outputs = 70
    for k in (32, 96, 672):
        packed = put_packed(program, dice, dtype, outputs, k)
        weights = {0: packed}
        for form, numbers, codes in ((INT8, (-127, 128), (118, 128)), (INT4, (0, 16), (160, 200))):
            values = program.put(dice.integers(*numbers, (outputs, k), dtype=np.int8))
            scales = program.put(dice.integers(*codes, (outputs, k // 32), dtype=np.uint8))
            weights[form.code] = program.put(np.zeros(packed_bytes(outputs, k, dtype, form), np.uint8))
            program.call("lp_pack", dtype, form.code, values, scales, k, outputs, k, weights[form.code])
        weight = program.put(floats(dice, dtype, outputs, k))
        found = [program.put(np.zeros(shape, np.uint8)) for shape in ((outputs, k), (outputs, k // 32))]
        program.call("lp_round_int4", dtype, weight, outputs, k, 1, *found)
        bias = program.put(floats(dice, dtype, outputs))
        for rows in ROWS:
            x = program.put(floats(dice, dtype, rows, k))
            for code, weight in weights.items():
                y = program.put(zeros(dtype, rows, outputs))
                program.call("lp_linear", dtype, x, k, rows, k, weight, code, outputs, bias, y, outputs)
    check(program, avx2, emulated, tmp_path)


def put_table(program: Program, dice: np.random.Generator, dtype: int, k: int, outputs: int, ranks: list[int]) -> Table:
    a = [program.put(floats(dice, dtype, rank, k)) if rank else 0 for rank in ranks]
    b = [program.put(floats(dice, dtype, outputs, rank)) if rank else 0 for rank in ranks]
    pointers = [program.put(np.array(one, np.int64), are_pointers=True) for one in (a, b)]
    scales = program.put(dice.random(len(ranks)).astype(np.float32))
    return Table(*pointers, program.put(np.array(ranks, np.int32)), scales)


def put_runs(program: Program, runs: list[tuple[int, int, int]], max_rank: int) -> Runs:
    """Of (first row, row behind the last, slot)."""
    columns = [np.array(column, np.int32) for column in zip(*runs, strict=True)]
    uses = np.arange(len(runs) + 1, dtype=np.int32)
    weights = np.linspace(0.5, 1.0, len(runs), dtype=np.float32)
    arrays = (columns[0], columns[1], uses, columns[2], weights)
    return Runs(len(runs), max_rank, *(program.put(array) for array in arrays))


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters(dtype: int, avx2: Library, emulated: list[str], dice: np.random.Generator, tmp_path: Path) -> None:
    program = Program()
    ranks, rows = [1, 8, 13, 16, 64, 0], 40
    for k, outputs in ((64, 96), (160, 70)):
        table = program.put_struct(put_table(program, dice, dtype, k, outputs, ranks))
        uses = [(0, 1, 0), (1, 4, 1), (4, 5, 2), (5, 20, 3), (21, 37, 4), (37, 40, 5)]
        runs = program.put_struct(put_runs(program, uses, max(ranks)))
        scratch = program.put(np.zeros(avx2.functions.lp_lora_scratch(rows, max(ranks), outputs), np.float32))
        x, y = program.put(floats(dice, dtype, rows, k)), program.put(floats(dice, dtype, rows, outputs))
        program.call("lp_lora", dtype, x, k, rows, table, runs, scratch, y, outputs, outputs)
        dense, bias = program.put(floats(dice, dtype, outputs, k)), program.put(floats(dice, dtype, outputs))
        z = program.put(zeros(dtype, rows, outputs))
        program.call("lp_dense", dtype, x, k, rows, k, dense, outputs, bias, z, outputs)
    check(program, avx2, emulated, tmp_path)


def put_spans(program: Program, spans: list[tuple[int, int]], block_size: int) -> Spans:
    """Of (queries, context)."""
    width = max(-(-context // block_size) for _, context in spans)
    tables = np.arange(len(spans) * width, dtype=np.int64).reshape(len(spans), width)
    starts = np.cumsum([0, *(queries for queries, _ in spans)])
    slots = [
        tables[idx, position // block_size] * block_size + position % block_size
        for idx, (queries, context) in enumerate(spans)
        for position in range(context - queries, context)
    ]
    arrays = (starts, np.array([context for _, context in spans]), tables, np.array(slots))
    return Spans(len(spans), block_size, width, *(program.put(array.astype(np.int64)) for array in arrays))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_and_norms(
    dtype: int, avx2: Library, emulated: list[str], dice: np.random.Generator, tmp_path: Path
) -> None:
    program = Program()
    heads, kv_heads, dim, block_size = 8, 2, 64, 16
    texts = [(1, 1), (1, 77), (5, 40), (33, 33)]
    spans = put_spans(program, texts, block_size)
    tokens, num_blocks = sum(queries for queries, _ in texts), len(texts) * int(spans.table_stride)
    where = program.put_struct(spans)
    q = program.put(floats(dice, dtype, tokens, heads, dim))
    pages = [program.put(floats(dice, dtype, num_blocks, block_size, kv_heads, dim)) for _ in range(2)]
    sinks = program.put(floats(dice, F32, heads))
    biases = program.put(floats(dice, F32, heads, 96))
    for softcap, window, chunk, sink, bias in (
        (0.0, 0, 0, None, None),
        (30.0, 9, 0, None, None),
        (0.0, 0, 16, sinks, None),
        (0.0, 9, 0, None, biases),
    ):
        out = program.put(zeros(dtype, tokens, heads, dim))
        shape = (heads, kv_heads, dim, dim**-0.5, softcap, window, chunk)
        program.call("lp_attend", dtype, q, out, *pages, *shape, sink, bias, 96, where)
    x, weight = program.put(floats(dice, dtype, 11, 90)), program.put(floats(dice, dtype, 90))
    y = program.put(zeros(dtype, 11, 90))
    program.call("lp_rms_norm", dtype, x, weight, 11, 90, 1e-5, 0.0, 1, y)
    values = floats(dice, dtype, 5, 333)
    values[2, 100] = np.float32(np.nan) if dtype == F32 else 0x7FC0
    best, place = program.put(np.zeros(5, np.float32)), program.put(np.zeros(5, np.int64))
    program.call("lp_argmax", dtype, program.put(values), 5, 333, best, place)
    check(program, avx2, emulated, tmp_path)


@pytest.mark.parametrize("act", [0, 1], ids=["silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stack_of_layers(
    dtype: int, act: int, avx2: Library, emulated: list[str], dice: np.random.Generator, tmp_path: Path
) -> None:
    program = Program()
    hidden, heads, kv_heads, dim, ffn, block_size, ranks = 64, 4, 2, 32, 96, 16, [4, 16]
    spans = put_spans(program, [(1, 20), (7, 7), (1, 3)], block_size)
    tokens, num_blocks, widths = 9, 3 * int(spans.table_stride), (heads * dim, kv_heads * dim)
    layers = (Layer * 2)()
    for layer in layers:
        layer.qkv = put_packed(program, dice, dtype, widths[0] + 2 * widths[1], hidden)
        layer.o = put_packed(program, dice, dtype, hidden, widths[0])
        layer.down = put_packed(program, dice, dtype, hidden, ffn)
        pair = [program.put(floats(dice, dtype, ffn, hidden, scale=0.1)) for _ in range(2)]
        layer.gate_up = program.put(np.zeros(packed_bytes(2 * ffn, hidden, dtype), np.uint8))
        program.call("lp_pack_pair", dtype, 0, pair[0], None, pair[1], None, hidden, ffn, hidden, layer.gate_up)
        layer.qkv_bias = program.put(floats(dice, dtype, widths[0] + 2 * widths[1]))
        layer.norm1, layer.norm2 = (program.put(floats(dice, dtype, hidden)) for _ in range(2))
        layer.q_norm, layer.k_norm = (program.put(floats(dice, dtype, dim)) for _ in range(2))
        layer.k_pages, layer.v_pages = (
            program.put(floats(dice, dtype, num_blocks, block_size, kv_heads, dim)) for _ in range(2)
        )
        layer.eps, layer.qk_eps, layer.scaling = 1e-5, 1e-6, dim**-0.5
        shapes = {
            "q": (hidden, widths[0]),
            "k": (hidden, widths[1]),
            "v": (hidden, widths[1]),
            "o": (widths[0], hidden),
        }
        shapes |= {"gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden)}
        for part, shape in shapes.items():
            setattr(layer, f"{part}_table", put_table(program, dice, dtype, *shape, ranks))
    both = program.put(np.concatenate([np.frombuffer(bytes(layer), np.uint8) for layer in layers]))
    idx = len(program.buffers) - 1
    size = ctypes.sizeof(Layer)
    for number, layer in enumerate(layers):
        one = Program()
        one.put_struct(layer)
        program.pointers += [(idx, number * size + offset, to) for _, offset, to in one.pointers]
    stack = Stack(
        dtype=dtype, num_layers=2, hidden=hidden, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, ffn=ffn,
        act=act, format=0, layers=ctypes.cast(both, ctypes.POINTER(Layer)),
    )  # fmt: skip
    runs = put_runs(program, [(0, 1, 0), (1, 8, 1)], max(ranks))
    num_bytes = avx2.functions.lp_stack_scratch_bytes(ctypes.byref(stack), tokens, max(ranks))
    angles = dice.random((tokens, dim)).astype(np.float32)
    step = Step(
        num_tokens=tokens, num_rotary=dim, hidden=program.put(floats(dice, dtype, tokens, hidden)),
        cos=program.put(np.cos(angles)), sin=program.put(np.sin(angles)), spans=spans, runs=runs,
        scratch=program.put(np.zeros(num_bytes, np.uint8)),
    )  # fmt: skip
    program.call("lp_stack_run", program.put_struct(stack), program.put_struct(step))
    check(program, avx2, emulated, tmp_path)
