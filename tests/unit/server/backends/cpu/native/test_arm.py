"""Native kernels for Arm under an emulator.

They have the same bits as with AVX2; with the instructions for bfloat16 nearly the same, and with SVE those of NEON.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.native_calls import Program
from support.native_kernels import isas, using

from loraplex_server.backends.cpu.native.build import LIBRARY, MACHINES, SOURCES, build, find_compiler
from loraplex_server.backends.cpu.native.library import (
    Experts,
    Layer,
    Library,
    Linear,
    Member,
    Mixer,
    Norm,
    Pieces,
    Routed,
    Runs,
    Spans,
    Stack,
    Step,
    Table,
)
from loraplex_server.layers.mixers import Layout
from loraplex_server.layers.quantization import INT4, INT8, WeightFormat

COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64-static"
DRIVER = Path(__file__).resolve().parents[5] / "support" / "native_driver.cpp"
F32, BF16 = 0, 1
DTYPES = [F32, BF16]
CPU = "max,sve256=on"  # has all of them; the largest vectors that are named are the longest
ISAS = tuple(MACHINES["linux", "aarch64"].variants)
# Of what the instructions for bfloat16 compute to what float32 would: they round each pair's products to a float by
# themselves. Outputs of bfloat16 differ in their last bit here and there.
TOLERANCE = 4e-3
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
    assert compiler.variants == ISAS
    library = build(folder / LIBRARY.name, sources=SOURCES, compiler=compiler, objects=folder / "objects")
    driver = folder / "driver"
    subprocess.run(
        [COMPILER, "-std=c++17", "-O1", "-o", str(driver), str(DRIVER), str(library), f"-Wl,-rpath,{folder}"],
        check=True,
    )
    return [EMULATOR, "-cpu", CPU, "-L", "/usr/aarch64-linux-gnu", str(driver)]


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


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


def check(program: Program, avx2: Library, emulated: list[str], isa: str, folder: Path, dtype: int = F32) -> None:
    """Runs a program by the emulated kernels and by AVX2's, and compares its buffers. `dtype`: of the program's
    products."""
    found = program.run_by(emulated, folder, isa)
    pointed = {idx for idx, _, _ in program.pointers}
    if isa == "sve256":
        same = program.run_by(emulated, folder, "neonbf16")
        assert not [idx for idx, own in enumerate(found) if idx not in pointed and not np.array_equal(own, same[idx])]
    program.run(avx2)
    for idx, (own, other) in enumerate(zip(program.buffers, found, strict=True)):
        if idx in pointed or np.array_equal(own, other):
            continue
        share = f"buffer {idx} differs in {int((own != other).sum())} of {own.nbytes} bytes"
        assert isa != "neon", share
        assert dtype == BF16, share
        assert distance(program.dtypes[idx], own, other) < TOLERANCE, share


def distance(dtype: np.dtype[Any], own: NDArray[np.uint8], other: NDArray[np.uint8]) -> float:
    """Relative distance of two buffers of floats; 0 for scratch, which is bytes."""
    if dtype == np.uint8:
        return 0.0
    assert dtype in (np.uint16, np.float32), f"{dtype} has to be equal"
    a, b = (as_floats(values.view(dtype)) for values in (own, other))
    assert np.array_equal(np.isnan(a), np.isnan(b))
    return float(np.linalg.norm(np.nan_to_num(a - b)) / np.linalg.norm(np.nan_to_num(a)))


def as_floats(values: NDArray[Any]) -> NDArray[np.float64]:
    """The values in float64, from float32 or from the bits of bfloat16."""
    wide = values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)
    return wide.astype(np.float64)


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
def test_linears(
    dtype: int, avx2: Library, emulated: list[str], isa: str, dice: np.random.Generator, tmp_path: Path
) -> None:
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
    check(program, avx2, emulated, isa, tmp_path, dtype)


def put_table(
    program: Program,
    dice: np.random.Generator,
    dtype: int,
    k: int,
    outputs: int,
    ranks: list[int],
    num_experts: int = 1,
) -> Table:
    a = [program.put(floats(dice, dtype, num_experts, rank, k)) if rank else 0 for rank in ranks]
    b = [program.put(floats(dice, dtype, num_experts, outputs, rank)) if rank else 0 for rank in ranks]
    pointers = [program.put(np.array(one, np.int64), are_pointers=True) for one in (a, b)]
    scales = program.put(dice.random(len(ranks)).astype(np.float32))
    return Table(*pointers, program.put(np.array(ranks, np.int32)), scales)


def put_own_table(
    program: Program, dice: np.random.Generator, dtype: int, k: int, outputs: int, ranks: list[int]
) -> Table:
    """A table with a weight of its own for the first of two slots, and blocks of four inputs for the second one."""
    table = put_table(program, dice, dtype, k, outputs, ranks)
    weight = program.put(floats(dice, dtype, outputs, k, scale=0.1))
    blocks = program.put(floats(dice, dtype, k // 4, 4, 4))
    table.own_ptrs = program.put(np.array([weight, 0], np.int64), are_pointers=True)
    table.block_ptrs = program.put(np.array([0, blocks], np.int64), are_pointers=True)
    table.block_sizes = program.put(np.array([0, 4], np.int64))
    table.block_strides = program.put(np.array([0, 16], np.int64))
    table.gain_ptrs, table.shift_ptrs = (program.put(np.zeros(2, np.int64)) for _ in range(2))
    return table


def put_norm(program: Program, dice: np.random.Generator, dtype: int, n: int) -> Norm:
    """A norm with a weight of its own for the second of two slots."""
    weight, own = (program.put(floats(dice, dtype, n)) for _ in range(2))
    return Norm(weight, program.put(np.array([0, own], np.int64), are_pointers=True))


def put_layer_norm(program: Program, dice: np.random.Generator, dtype: int, n: int) -> Norm:
    weight, bias = (program.put(floats(dice, dtype, n)) for _ in range(2))
    return Norm(weight=weight, bias=bias)


def put_runs(program: Program, runs: list[tuple[int, int, int]], max_rank: int) -> Runs:
    """Runs of rows, each given as (first row, row behind the last, slot)."""
    columns = [np.array(column, np.int32) for column in zip(*runs, strict=True)]
    uses = np.arange(len(runs) + 1, dtype=np.int32)
    weights = np.linspace(0.5, 1.0, len(runs), dtype=np.float32)
    arrays = (columns[0], columns[1], uses, columns[2], weights)
    return Runs(len(runs), max_rank, *(program.put(array) for array in arrays))


@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters(
    dtype: int, avx2: Library, emulated: list[str], isa: str, dice: np.random.Generator, tmp_path: Path
) -> None:
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
        member = Member(
            packed=put_packed(program, dice, dtype, outputs, k), num_outputs=outputs, bias=bias,
            table=put_own_table(program, dice, dtype, k, outputs, [4, 16]), y=program.put(zeros(dtype, rows, outputs)),
        )  # fmt: skip
        scratch = program.put(np.zeros(avx2.functions.lp_linears_scratch(rows, 16, 1, outputs), np.float32))
        runs = program.put_struct(put_runs(program, [(0, 1, 0), (1, 9, 1), (12, 40, 1)], 16))
        program.call("lp_linears", dtype, 0, x, k, rows, program.put_struct(member), 1, runs, scratch)
    check(program, avx2, emulated, isa, tmp_path, dtype)


def put_spans(program: Program, spans: list[tuple[int, int]], block_size: int) -> Spans:
    """Spans, each given as (queries, context)."""
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
    dtype: int, avx2: Library, emulated: list[str], isa: str, dice: np.random.Generator, tmp_path: Path
) -> None:
    program = Program()
    heads, kv_heads, block_size = 8, 2, 16
    texts = [(1, 1), (1, 77), (5, 40), (33, 33)]
    spans = put_spans(program, texts, block_size)
    tokens, num_blocks = sum(queries for queries, _ in texts), len(texts) * int(spans.table_stride)
    where = program.put_struct(spans)
    queries, pages = (
        {size: program.put(floats(dice, dtype, *shape, size)) for size in (64, 75, 32, 43)}
        for shape in ((tokens, heads), (num_blocks, block_size, kv_heads))
    )
    sinks = program.put(floats(dice, F32, heads))
    biases = program.put(floats(dice, F32, heads, 96))
    for softcap, window, chunk, sink, bias in (
        (0.0, 0, 0, None, None),
        (30.0, 9, 0, None, None),
        (0.0, 0, 16, sinks, None),
        (0.0, 9, 0, None, biases),
    ):
        for dim, v_dim in ((64, 64), (64, 32), (75, 75), (75, 43)):
            out = program.put(zeros(dtype, tokens, heads, v_dim))
            shape = (heads, kv_heads, dim, v_dim, dim**-0.5, softcap, window, chunk)
            program.call("lp_attend", dtype, queries[dim], out, pages[dim], pages[v_dim], *shape, sink, bias, 96, where)
    x, weight = program.put(floats(dice, dtype, 11, 90)), program.put(floats(dice, dtype, 90))
    y = program.put(zeros(dtype, 11, 90))
    program.call("lp_rms_norm", dtype, x, weight, 11, 90, 1e-5, 0.0, 1, y)
    gate = program.put(floats(dice, dtype, 11, 90))
    for gates_first, x_dtype in ((0, dtype), (1, dtype), (1, F32)):
        x, y = program.put(floats(dice, x_dtype, 11, 90)), program.put(zeros(x_dtype, 11, 90))
        program.call("lp_gated_norm", x_dtype, dtype, x, gate, weight, 11, 90, 1e-5, gates_first, y)
    for act in (0, 1, 2):
        up, y = program.put(floats(dice, dtype, 11, 90)), program.put(zeros(dtype, 11, 75))
        program.call("lp_gate", dtype, act, gate, 90, up, 90, 11, 75, y)
    rows = 40
    values = floats(dice, dtype, rows, 333)
    values[2, 100] = values[3, 108] = np.float32(np.nan) if dtype == F32 else 0x7FC0
    bits = program.put(dice.integers(0, 1 << 32, (2, 11), dtype=np.uint32))
    for masks in (None, program.put(np.arange(rows, dtype=np.int32) % 3 - 1)):
        best, place = program.put(np.zeros(rows, np.float32)), program.put(np.zeros(rows, np.int64))
        program.call("lp_argmax", dtype, program.put(values), rows, 333, masks, bits, 11, best, place)
    check(program, avx2, emulated, isa, tmp_path, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(
    dtype: int, avx2: Library, emulated: list[str], isa: str, dice: np.random.Generator, tmp_path: Path
) -> None:
    program = Program()
    num_experts, hidden, inner, top_k, ranks = 5, 96, 64, 2, [4, 16, 0]
    pairs, downs = (
        program.put(np.zeros(num_experts * packed_bytes(outputs, k, dtype), np.uint8))
        for outputs, k in ((2 * inner, hidden), (hidden, inner))
    )
    for expert in range(num_experts):
        gate, up = (program.put(floats(dice, dtype, inner, hidden, scale=0.1)) for _ in range(2))
        down = program.put(floats(dice, dtype, hidden, inner, scale=0.1))
        to = pairs + expert * packed_bytes(2 * inner, hidden, dtype)
        program.call("lp_pack_pair", dtype, 0, gate, None, up, None, hidden, inner, hidden, to)
        to = downs + expert * packed_bytes(hidden, inner, dtype)
        program.call("lp_pack", dtype, 0, down, None, inner, hidden, inner, to)
    experts = Experts(
        dtype=dtype, act=0, num_experts=num_experts, hidden=hidden, inner=inner, gate_up=pairs, down=downs,
        up_table=put_table(program, dice, dtype, hidden, 2 * inner, ranks, num_experts),
        down_table=put_table(program, dice, dtype, inner, hidden, ranks[::-1], num_experts),
    )  # fmt: skip
    where = program.put_struct(experts)
    for rows in (1, 9, 70):
        num_bytes = avx2.functions.lp_experts_scratch_bytes(ctypes.byref(experts), rows * top_k, max(ranks))
        chosen = np.stack([dice.permutation(num_experts)[:top_k] for _ in range(rows)]).astype(np.int64)
        routed = Routed(
            num_rows=rows, top_k=top_k, x=program.put(floats(dice, dtype, rows, hidden)), chosen=program.put(chosen),
            weights=program.put(dice.random((rows, top_k)).astype(np.float32)),
            uses=program.put(np.arange(rows, dtype=np.int64) % 4), slots=program.put(np.arange(3, dtype=np.int32)),
            slot_weights=program.put(np.array([1.0, 0.5, 1.0], np.float32)), num_uses=3, max_rank=max(ranks),
            scratch=program.put(np.zeros(num_bytes, np.uint8)), y=program.put(zeros(dtype, rows, hidden)),
        )  # fmt: skip
        program.call("lp_experts_run", where, program.put_struct(routed))
    check(program, avx2, emulated, isa, tmp_path, dtype)


def put_pieces(program: Program, chains: list[list[tuple[int, int, int]]]) -> Pieces:
    """The pieces of each text, each given as (length, place before, place behind or -1)."""
    starts, pieces, start = [0], list[tuple[int, int, int, int]](), 0
    for chain in chains:
        for length, source, target in chain:
            pieces.append((start, length, source, target))
            start += length
        starts.append(len(pieces))
    return Pieces(len(chains), program.put(np.array(starts, np.int32)), program.put(np.array(pieces, np.int64)))


def put_mixer(
    program: Program, dice: np.random.Generator, dtype: int, hidden: int, ranks: list[int], layout: Layout
) -> dict[str, Any]:
    """The fields of a layer with a mixer in attention's place, Mamba 2 or Gated DeltaNet, whose states have four
    places."""
    keys, heads, k_dim, v_dim, width, num_places = 3, 6, 16, 32, 4, 4
    size, is_mamba2 = heads * v_dim, layout is Layout.TOGETHER
    channels = 2 * keys * k_dim + size
    outputs = {
        Layout.APART: (channels, size, heads, heads),
        Layout.BY_KEY_HEADS: (channels + size, 2 * heads),
        Layout.TOGETHER: (channels + size + heads,),
    }
    recurrence = Linear(
        num_keys=keys, num_heads=heads, k_dim=k_dim, v_dim=v_dim,
        rates=program.put(-dice.random(heads).astype(np.float32)), biases=program.put(floats(dice, F32, heads)),
        skips=program.put(floats(dice, F32, heads)) if is_mamba2 else None, least=0.1, most=2.0,
        states=program.put(floats(dice, F32, num_places, heads, k_dim, v_dim, scale=0.1)),
        is_delta=not is_mamba2, normalizes=not is_mamba2, rounds=not is_mamba2,
        scale=1.0 if is_mamba2 else k_dim**-0.5,
    )  # fmt: skip
    mixer = Mixer(
        projection=put_packed(program, dice, dtype, channels + size + (16 if is_mamba2 else 32), hidden),
        o=put_packed(program, dice, dtype, hidden, size),
        conv_weight=program.put(floats(dice, F32, width, channels)),
        conv_bias=program.put(floats(dice, F32, channels)),
        norm=put_norm(program, dice, dtype, size), norm_eps=1e-6,
        norm_size=size // 2 if is_mamba2 else v_dim, gates_first=is_mamba2,
        width=width, layout=layout, recurrence=recurrence,
        conv_states=program.put(floats(dice, dtype, num_places, width - 1, channels)),
    )  # fmt: skip
    shapes = {f"in{idx}": (hidden, number) for idx, number in enumerate(outputs[layout])} | {"out": (size, hidden)}
    tables = {name: put_own_table(program, dice, dtype, *shape, ranks) for name, shape in shapes.items()}
    address = ctypes.cast(program.put_struct(mixer), ctypes.POINTER(Mixer))
    return {"mixer": address} | {f"mixer_{name}_table": table for name, table in tables.items()}


def put_layers(program: Program, layers: ctypes.Array[Layer]) -> int:
    """The address of layers side by side."""
    address = program.put(np.concatenate([np.frombuffer(bytes(layer), np.uint8) for layer in layers]))
    idx = len(program.buffers) - 1
    for number, layer in enumerate(layers):
        one = Program()
        one.put_struct(layer)
        program.pointers += [(idx, number * ctypes.sizeof(Layer) + offset, to) for _, offset, to in one.pointers]
    return address


@pytest.mark.parametrize(
    "kind", ["llama", "gemma", "gemma4", "phi", "starcoder", "glm", "qwen", "qwen3_next", "granite4"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stack_of_layers(
    dtype: int, kind: str, avx2: Library, emulated: list[str], isa: str, dice: np.random.Generator, tmp_path: Path
) -> None:
    norms, act, all_heads = ["norm1", "norm2"], int(kind in ("gemma", "gemma4")), kind == "phi"
    merges_qkv, merges_gate_up = kind == "phi", kind in ("phi", "glm")
    if kind in ("gemma", "gemma4", "glm"):
        norms += ["attention_norm", "ffn_norm"]
    size_of_input = 32 if kind == "gemma4" else 0
    program = Program()
    hidden, heads, kv_heads, ffn, block_size, ranks = 64, 4, 2, 96, 16, [4, 16]
    dim = 40 if kind == "llama" else 32  # which fills no bands
    spans = put_spans(program, [(1, 20), (7, 7), (1, 3)], block_size)
    tokens, num_blocks, widths = 9, 3 * int(spans.table_stride), (heads * dim, kv_heads * dim)
    layout = {"qwen": Layout.APART, "qwen3_next": Layout.BY_KEY_HEADS, "granite4": Layout.TOGETHER}.get(kind)
    gates_heads = kind in ("qwen", "qwen3_next")
    q_outputs = widths[0] * (2 if gates_heads else 1)
    layers = (Layer * 2)()
    pages: list[int] = []
    for number, layer in enumerate(layers):
        shares_kv = kind == "gemma4" and bool(pages)
        if layout is not None and number == 0:
            for name, value in put_mixer(program, dice, dtype, hidden, ranks, layout).items():
                setattr(layer, name, value)
        else:
            layer.qkv = put_packed(program, dice, dtype, q_outputs + 2 * widths[1], hidden)
            layer.o = put_packed(program, dice, dtype, hidden, widths[0])
        if kind != "starcoder":  # whose feed-forward part is the caller's
            layer.down = put_packed(program, dice, dtype, hidden, ffn)
            pair = [program.put(floats(dice, dtype, ffn, hidden, scale=0.1)) for _ in range(2)]
            layer.gate_up = program.put(np.zeros(packed_bytes(2 * ffn, hidden, dtype), np.uint8))
            program.call("lp_pack_pair", dtype, 0, pair[0], None, pair[1], None, hidden, ffn, hidden, layer.gate_up)
        layer.qkv_bias = program.put(floats(dice, dtype, q_outputs + 2 * widths[1]))
        for norm in norms:
            put = put_layer_norm if kind == "starcoder" else put_norm
            setattr(layer, norm, put(program, dice, dtype, hidden))
        if kind != "starcoder":
            num_normed = (heads, kv_heads) if all_heads else (1, 1)
            layer.q_norm, layer.k_norm = (put_norm(program, dice, dtype, num * dim) for num in num_normed)
        if not shares_kv:
            pages = [program.put(floats(dice, dtype, num_blocks, block_size, kv_heads, dim)) for _ in range(2)]
        layer.k_pages, layer.v_pages = pages
        layer.num_kv_heads, layer.head_dim, layer.ffn, layer.shares_kv, layer.scale = kv_heads, dim, ffn, shares_kv, 1.0
        layer.gates_heads = gates_heads
        if size_of_input:
            layer.scale = 0.75
            layer.v_norm = put_norm(program, dice, dtype, dim)
            layer.input_gate = put_packed(program, dice, dtype, size_of_input, hidden)
            layer.input_projection = put_packed(program, dice, dtype, hidden, size_of_input)
            layer.input_norm = put_norm(program, dice, dtype, hidden)
        layer.eps, layer.qk_eps, layer.scaling, layer.turns = 1e-5, 1e-6, dim**-0.5, kind != "gemma"
        shapes = {"o": (widths[0], hidden), "down": (ffn, hidden)}
        qkv = {"q": (hidden, q_outputs), "k": (hidden, widths[1]), "v": (hidden, widths[1])}
        shapes |= {"q": (hidden, widths[0] + 2 * widths[1])} if merges_qkv else qkv
        shapes |= {"gate": (hidden, 2 * ffn)} if merges_gate_up else {"gate": (hidden, ffn), "up": (hidden, ffn)}
        if size_of_input:
            shapes |= {"input_gate": (hidden, size_of_input), "input_projection": (size_of_input, hidden)}
        for part, shape in shapes.items():
            setattr(layer, f"{part}_table", put_own_table(program, dice, dtype, *shape, ranks))
    both, num_layers = put_layers(program, layers), 2
    if kind == "starcoder":  # the second layer, behind the feed-forward part of the first
        both, num_layers = both + ctypes.sizeof(Layer), 1
    mixed = layers[0].mixer.contents.recurrence if layout is not None else Linear()
    mixer_size = mixed.num_heads * mixed.v_dim
    channels = 2 * mixed.num_keys * mixed.k_dim + mixer_size
    stack = Stack(
        dtype=dtype, num_layers=num_layers, hidden=hidden, num_heads=heads, q_size=max(widths[0], mixer_size),
        qkv_size=q_outputs + 2 * widths[1], gate_size=q_outputs - widths[0], ffn=ffn, input=size_of_input,
        act=act, format=0,
        merges_qkv=merges_qkv, merges_gate_up=merges_gate_up, norms_all_heads=all_heads,
        narrows=kind == "llama", norm_offset=float(kind == "gemma"), added=0.5 if kind == "phi" else 1.0,
        projected_size=channels + mixer_size + 32, convolved_size=channels, recurred_size=mixer_size,
        layers=ctypes.cast(both, ctypes.POINTER(Layer)),
    )  # fmt: skip
    runs = put_runs(program, [(0, 1, 0), (1, 8, 1)], max(ranks))
    num_bytes = avx2.functions.lp_stack_scratch_bytes(ctypes.byref(stack), tokens, tokens, max(ranks))
    angles = dice.random((tokens, dim)).astype(np.float32)
    step = Step(
        num_tokens=tokens, num_rotary=dim, hidden=program.put(floats(dice, dtype, tokens, hidden)),
        cos=program.put(np.cos(angles)), sin=program.put(np.sin(angles)), spans=spans, runs=runs,
        scratch=program.put(np.zeros(num_bytes, np.uint8)),
        pieces=put_pieces(program, [[(1, 0, 1)], [(4, 2, 2), (3, 2, 3)], [(1, 0, -1)]]),
    )  # fmt: skip
    if size_of_input:
        step.inputs = program.put(floats(dice, dtype, 2, tokens, size_of_input))
    if kind == "glm":
        step.query_scales = program.put(1 + dice.random(tokens).astype(np.float32))
    if num_layers == 1:
        step.fed, step.feed = (program.put(floats(dice, dtype, tokens, hidden)) for _ in range(2))
    program.call("lp_stack_run", program.put_struct(stack), program.put_struct(step))
    check(program, avx2, emulated, isa, tmp_path, dtype)


CHAINS = [[(1, 0, 1)], [(5, 2, 3), (4, 3, -1)], [(19, 4, 4)]]
NUM_TOKENS, NUM_PLACES = 29, 5
WILD = (np.nan, np.inf, -np.inf, 1e4, -1e4, 1e38, -1e38, 0.0, 85.0, -85.0, 90.0, -90.0)  # where exp has to be careful


@pytest.mark.parametrize("dtype", DTYPES)
def test_recurrences(
    dtype: int, avx2: Library, emulated: list[str], isa: str, dice: np.random.Generator, tmp_path: Path
) -> None:
    program = Program()
    pieces = program.put_struct(put_pieces(program, CHAINS))
    heads, keys, k_dim, v_dim = 4, 2, 32, 48
    for form, by_channel, is_delta, normalizes in (
        ("plain", 0, 0, 0),
        ("delta", 0, 1, 1),
        ("channels", 1, 1, 0),
        ("gates", 0, 1, 1),
        ("steps", 0, 0, 0),
    ):
        q, k = (program.put(floats(dice, dtype, NUM_TOKENS, keys, k_dim)) for _ in range(2))
        v = program.put(floats(dice, dtype, NUM_TOKENS, heads, v_dim))
        decay = program.put(-dice.random((NUM_TOKENS, heads, k_dim if by_channel else 1)).astype(np.float32))
        beta = program.put(dice.random((NUM_TOKENS, heads)).astype(np.float32)) if is_delta else None
        out = program.put(zeros(F32, NUM_TOKENS, heads, v_dim))
        states = program.put(floats(dice, F32, NUM_PLACES, heads, k_dim, v_dim, scale=0.1))
        strides = (keys * k_dim, keys * k_dim, heads * v_dim, heads, heads * v_dim)
        sizes = (heads, keys, k_dim, v_dim, by_channel, is_delta, normalizes)
        rates, biases = -dice.random(heads).astype(np.float32), floats(dice, F32, heads)
        a, b = (program.put(floats(dice, dtype, NUM_TOKENS, heads)) for _ in range(2))
        of_heads = program.put(rates), program.put(biases)
        if form == "gates":
            gates = (None, None, a, b, *of_heads, None)
        elif form == "steps":
            gates = (None, None, a, None, *of_heads, program.put(floats(dice, F32, heads)))
        else:
            gates = (decay, beta, None, None, None, None, None)
        linear = Linear(q, k, v, *gates, out, states, *strides, *sizes, k_dim**-0.5, 0.1, 1.0, form == "gates")
        program.call("lp_attend_linearly", dtype, program.put_struct(linear), pieces)
    channels, width = 530, 4
    for is_activated in (0, 1):
        values, wild = floats(dice, dtype, NUM_TOKENS, channels), np.array(WILD, np.float32)
        values[15, : len(WILD)] = wild if dtype == F32 else wild.view(np.uint32) >> 16
        x, out = program.put(values), program.put(zeros(dtype, NUM_TOKENS, channels))
        weight, bias = program.put(floats(dice, F32, width, channels)), program.put(floats(dice, F32, channels))
        states = program.put(floats(dice, dtype, NUM_PLACES, width - 1, channels))
        sizes = (width, channels, is_activated)
        program.call("lp_convolve", dtype, x, channels, weight, bias, *sizes, states, out, pieces)
    channels, n = 70, 16
    x, step = (program.put(dice.random((NUM_TOKENS, channels)).astype(np.float32)) for _ in range(2))
    a = program.put(-dice.random((channels, n)).astype(np.float32))
    b, c = (program.put(floats(dice, F32, NUM_TOKENS, n)) for _ in range(2))
    states, out = program.put(floats(dice, F32, NUM_PLACES, channels, n)), program.put(zeros(F32, NUM_TOKENS, channels))
    program.call("lp_scan", x, step, a, b, c, channels, n, states, out, pieces)
    check(program, avx2, emulated, isa, tmp_path, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_the_same_bits_in_any_batch(
    dtype: int, emulated: list[str], isa: str, dice: np.random.Generator, tmp_path: Path
) -> None:
    program = Program()
    outputs, k, rows = 70, 160, max(ROWS)
    x = program.put(floats(dice, dtype, rows, k))
    weights = {0: put_packed(program, dice, dtype, outputs, k)}
    for form, numbers, codes in ((INT8, (-127, 128), (118, 128)), (INT4, (0, 16), (160, 200))):
        values = program.put(dice.integers(*numbers, (outputs, k), dtype=np.int8))
        scales = program.put(dice.integers(*codes, (outputs, k // 32), dtype=np.uint8))
        weights[form.code] = program.put(np.zeros(packed_bytes(outputs, k, dtype, form), np.uint8))
        program.call("lp_pack", dtype, form.code, values, scales, k, outputs, k, weights[form.code])
    places = dict[tuple[int, int], int]()
    for num_rows in ROWS:
        for code, weight in weights.items():
            y = program.put(zeros(dtype, num_rows, outputs))
            places[code, num_rows] = len(program.buffers) - 1
            program.call("lp_linear", dtype, x, k, num_rows, k, weight, code, outputs, None, y, outputs)
    found = program.run_by(emulated, tmp_path, isa)
    for (code, _), idx in places.items():
        whole = found[places[code, rows]]
        assert np.count_nonzero(whole), "products were computed"
        assert np.array_equal(found[idx], whole[: found[idx].nbytes])


@pytest.mark.parametrize(
    ("cpu", "isa"),
    [
        ("cortex-a72", "neon"),
        ("a64fx", "neon"),  # SVE without bfloat16
        ("max,sve=off", "neonbf16"),
        ("max,sve128=on", "neonbf16"),
        ("max,sve256=on", "sve256"),
        ("max,sve512=on", "neonbf16"),
        ("max,sve512=on,sve-default-vector-length=32", "sve256"),  # as a system sets it
    ],
)
def test_the_instruction_set_follows_the_cpu(cpu: str, isa: str, emulated: list[str], tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("in", "out")]
    files[0].write_bytes(bytes(8))  # no buffers, no pointers, no calls
    command = [cpu if word == CPU else word for word in emulated]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == isa
