"""Native paged attention against float64, and independent of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.attention_cases import CPU, Problem, biases_of, make_problem, sinks_of, spec_of
from support.guarded_memory import at_end, at_start
from support.lora_cases import bits, pairwise
from support.native_kernels import best_first, native_kernels, using
from torch import Tensor

from loraplex_server.backends.cpu.attention import NativePagedAttention, native_plan, reason_against
from loraplex_server.backends.reference import TorchPagedAttention
from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, LayerKv

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
STEPS = {
    "decode": [(5, 1), (0, 1), (30, 1)],
    "long decode": [(300, 1), (9, 1), (127, 1), (128, 1)],
    "prompts": [(0, 7), (0, 40), (0, 1)],
    "chunks": [(64, 33), (3, 6), (131, 20)],
    "verification": [(10, 4), (200, 4), (6, 4)],
    "long prompts": [(0, 290), (140, 150), (250, 9)],
    "everything": [(5, 1), (0, 13), (150, 1), (17, 5), (12, 12), (100, 1)],
}
LONGEST = 320  # context of these steps
# heads, KV heads: groups of 1, 2, 3, 5, 7, all in one, exactly 16, and more than the 16 that are computed at once
HEADS = [(2, 2), (4, 2), (6, 2), (5, 1), (14, 2), (16, 1), (17, 1), (40, 1), (48, 2)]
DIMS = [32, 64, 96, 128, 160, 256, 512, 40, 75, 80, 100]
WINDOWS = [None, 1, 6, 17, 70]
SOFTCAPS = [None, 2.0]
CHUNKS = [None, 1, 16, 37, 128]
BLOCK_SIZES = [1, 3, 4, 16, 64]
THREADS = [1, 2, 3]


@pytest.fixture(params=best_first(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


@pytest.fixture
def backend(isa: str) -> NativePagedAttention:
    return NativePagedAttention(native_kernels())


def spec(num_heads: int = 4, num_kv_heads: int = 2, dim: int = 32, **changes: object) -> AttentionSpec:
    base: dict[str, object] = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "scaling": dim**-0.5}
    return spec_of(**(base | {"k_dim": dim, "v_dim": dim} | changes))


def narrow(dim: int) -> int:
    """About three quarters of the features."""
    return max(32, dim * 3 // 4)


@pytest.mark.parametrize(
    (
        "step",
        "heads",
        "dim",
        "has_narrow_values",
        "window",
        "softcap",
        "chunk",
        "has_sinks",
        "has_bias",
        "block_size",
        "dtype",
        "num_threads",
    ),
    pairwise(
        *(list(STEPS), HEADS, DIMS, [False, True], WINDOWS, SOFTCAPS, CHUNKS, [False, True], [False, True]),
        *(BLOCK_SIZES, DTYPES, THREADS),
    ),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_grid(
    step: str,
    heads: tuple[int, int],
    dim: int,
    has_narrow_values: bool,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    has_sinks: bool,
    has_bias: bool,
    block_size: int,
    dtype: torch.dtype,
    num_threads: int,
) -> None:
    sinks = sinks_of(heads[0]) if has_sinks else None
    key_bias = biases_of(heads[0], LONGEST) if has_bias else None
    one = spec(*heads, dim, window=window, softcap=softcap, chunk=chunk, sinks=sinks, key_bias=key_bias)
    if has_narrow_values:
        one = replace(one, v_dim=narrow(dim))
    problem = make_problem(STEPS[step], one, dtype, block_size=block_size)
    got = problem.run(NativePagedAttention(native_kernels(num_threads)))
    # Float32 rounds scores of the size of these biases, up to 160.
    tolerance = TOLERANCES[dtype] * (2 if has_bias else 1)
    problem.check(got, tolerance)
    # The torch back end is a second opinion, in the same dtype.
    again = make_problem(STEPS[step], one, dtype, block_size=block_size)
    torch.testing.assert_close(got, again.run(TorchPagedAttention()), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [at_end, at_start], ids=lambda f: f.__name__)
def test_nothing_beyond_the_pages_is_read(backend: NativePagedAttention, dtype: torch.dtype, place: object) -> None:
    """No read passes the guarded pages, with blocks that are nearly full, and the last block in the last page."""
    for window in (None, 9):
        one = spec(6, 2, 96, window=window, key_bias=place(biases_of(6, 32)) if window else None)  # type: ignore[operator]
        problem = make_problem([(30, 1), (0, 17), (15, 4)], one, dtype, block_size=16)
        guarded = LayerKv(*(place(pages) for pages in problem.pages))  # type: ignore[operator]
        problem.kv = guarded
        problem.query = at_end(problem.query)
        problem.check(problem.run(backend), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_what_others_left_in_their_pages_never_matters(
    backend: NativePagedAttention, dtype: torch.dtype, window: int | None
) -> None:
    """The rest of a block of the span's own does not matter either."""
    problem = make_problem([(20, 1), (0, 6), (141, 1)], spec(window=window), dtype, poison=float("nan"))
    problem.check(problem.run(backend), TOLERANCES[dtype])


# --- bits -------------------------------------------------------------------------------------------------------------


def query_by_query(problem: Problem, backend: NativePagedAttention) -> Tensor:
    """Each query alone in its step, behind pages that hold everything before it."""
    results: list[Tensor] = []
    at = 0
    batch = problem.batch
    for idx, (past, new) in enumerate(problem.spans):
        for offset in range(new):
            part = slice(at + offset, at + offset + 1)
            alone = AttentionBatch(
                batch.query_lens[[idx]] * 0 + 1,
                batch.context_lens[[idx]] * 0 + past + offset + 1,
                batch.block_tables[[idx]],
                batch.block_size,
                batch.slots[part],
            )
            plan = backend.plan(alone, problem.kv.k.dtype, CPU)
            tensors = (problem.query[part], problem.key[part], problem.value[part])
            results.append(backend.run(*tensors, problem.kv, problem.spec, plan))
        at += new
    return torch.cat(results)


@pytest.mark.parametrize(
    ("step", "heads", "dim", "has_narrow_values", "window", "softcap", "chunk", "dtype", "num_threads"),
    pairwise(list(STEPS), HEADS, [32, 64, 75, 80, 128], [False, True], WINDOWS, SOFTCAPS, CHUNKS, DTYPES, THREADS),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_a_query_has_the_same_bits_in_any_span(
    step: str,
    heads: tuple[int, int],
    dim: int,
    has_narrow_values: bool,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    dtype: torch.dtype,
    num_threads: int,
) -> None:
    one = spec(*heads, dim, window=window, softcap=softcap, chunk=chunk, sinks=sinks_of(heads[0]) if chunk else None)
    if has_narrow_values:
        one = replace(one, v_dim=narrow(dim))
    one = replace(one, key_bias=biases_of(heads[0], LONGEST) if window in (None, 70) else None)
    problem = make_problem(STEPS[step], one, dtype)
    together = problem.run(NativePagedAttention(native_kernels(num_threads)))
    alone = query_by_query(problem, NativePagedAttention(native_kernels(1)))
    assert torch.equal(bits(together), bits(alone))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_any_size_give_the_same_bits(backend: NativePagedAttention, dtype: torch.dtype) -> None:
    results = [
        make_problem([(40, 3), (0, 20)], spec(window=25), dtype, block_size=64, seed=1).run(backend) for _ in range(2)
    ]
    assert torch.equal(bits(results[0]), bits(results[1]))
    problem = make_problem([(40, 3), (0, 20)], spec(window=25), dtype, block_size=64, seed=1)
    paged = make_problem([(40, 3), (0, 20)], spec(window=25), dtype, block_size=3, seed=1)
    # The same tokens in other blocks.
    for (past, new), wide, narrow in zip(
        problem.spans, problem.batch.block_tables, paged.batch.block_tables, strict=True
    ):
        for position in range(past + new):
            block, offset = divmod(position, 3)
            for source, target in zip(problem.pages, paged.pages, strict=True):
                target[narrow[block], offset] = source[wide[position // 64], position % 64]
    paged = replace(paged, query=problem.query, key=problem.key, value=problem.value)
    assert torch.equal(bits(paged.run(backend)), bits(results[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_bad_query_stays_alone(
    backend: NativePagedAttention, dtype: torch.dtype, bad: float, softcap: float | None
) -> None:
    """A bad query changes no other row, and is seen to be bad: NaN does not get lost in a maximum or a softcap."""
    problem = make_problem([(20, 3), (9, 1)], spec(6, 2, 32, softcap=softcap), dtype)
    good = problem.run(backend)
    problem.query = problem.query.clone()
    problem.query[1, 2] = bad
    got = problem.run(backend)
    if softcap is None or bad != bad:
        assert got[1, 2].isnan().all()
    for row, head in ((row, head) for row in range(4) for head in range(6)):
        if (row, head) != (1, 2):
            assert torch.equal(bits(got[row, head]), bits(good[row, head]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (9, None), (140, None), (None, 67)])
@pytest.mark.parametrize("is_value", [True, False])
def test_a_bad_token_is_seen_by_none_before_it(
    backend: NativePagedAttention, dtype: torch.dtype, bad: float, window: int | None, chunk: int | None, is_value: bool
) -> None:
    """Tokens whose window or chunk has left it behind do not see it either; and a prompt's queries are computed many at
    a time."""
    one, at = spec(6, 2, 96, window=window, chunk=chunk, sinks=sinks_of(6) if chunk else None), 150
    one = replace(one, key_bias=biases_of(6, 320) if window == 140 else None)
    good = make_problem([(20, 300)], one, dtype).run(backend)
    problem = make_problem([(20, 300)], one, dtype)
    tokens = problem.value if is_value else problem.key
    tokens[at] = bad
    got = problem.run(backend)
    blind = torch.ones(300, dtype=torch.bool)
    last = at + (window or 300) if chunk is None else (20 + at) // chunk * chunk + chunk - 20
    blind[at:last] = False
    assert torch.equal(bits(got[blind]), bits(good[blind]))
    if bad != bad or is_value:
        assert not got[~blind].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_score_may_come_last(backend: NativePagedAttention, dtype: torch.dtype) -> None:
    """A sum that was made before the largest score then counts for next to nothing, or for nothing."""
    for growth in (0.02, 0.3):
        problem = make_problem([(0, 400)], spec(2, 1, 32), dtype)
        problem.query[:] = 1.0
        problem.key[:] = (growth * torch.arange(400.0))[:, None, None].to(dtype)
        positions = torch.arange(400)
        scores = problem.key[:, 0, :].double().sum(-1) * problem.spec.scaling
        weights = scores.repeat(400, 1).masked_fill(positions > positions[:, None], -torch.inf).softmax(-1)
        want = (weights @ problem.value[:, 0].double())[:, None].expand(-1, 2, -1)
        tolerance = 4 * max(TOLERANCES[dtype] / 2, 6e-8 * float(scores.max()))  # float32 rounds sums of that size
        torch.testing.assert_close(problem.run(backend).double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_far_apart(backend: NativePagedAttention, dtype: torch.dtype) -> None:
    """One key wins by more than exp can tell, and all lose alike."""
    problem = make_problem([(40, 1), (0, 9)], spec(scaling=40.0), dtype)
    problem.check(problem.run(backend), TOLERANCES[dtype] * 4)


# --- plans ------------------------------------------------------------------------------------------------------------


def test_layers_of_several_shapes_share_a_plan(backend: NativePagedAttention) -> None:
    specs = [spec(), spec(6, 2, 64, window=40), spec(2, 2, 32, softcap=3.0), spec(chunk=39), spec(sinks=sinks_of(4))]
    specs.append(spec(key_bias=biases_of(4, 141)))
    problems = [make_problem([(0, 9), (140, 1), (77, 3)], one, torch.float32) for one in specs]
    plan = backend.plan(problems[0].batch, torch.float32, CPU)
    for problem in problems:
        problem.check(problem.run(backend, plan), 1e-5)


def test_spans_are_found_in_other_plans_too() -> None:
    """A stack of layers attends by itself, whichever back end the other layers use."""
    problem = make_problem([(3, 2), (0, 4)], spec(), torch.float32)
    other = TorchPagedAttention().plan(problem.batch, torch.float32, CPU)
    found = native_plan(other).spans
    assert (found.num_spans, found.block_size) == (2, 4)
    assert found.table_stride == problem.batch.block_tables.shape[1]


@pytest.mark.parametrize(
    ("one", "dtype", "reason"),
    [
        (spec(), torch.float32, ""),
        (spec(dim=512), torch.bfloat16, ""),
        (spec(), None, ""),
        (spec(dim=47), torch.float32, ""),
        (spec(dim=24), torch.float32, "heads of 24 and 24"),
        (spec(dim=544), torch.float32, "heads of 544 and 544"),
        (replace(spec(), v_dim=64), torch.float32, "heads of 32 and 64"),
        (replace(spec(dim=64), v_dim=24), torch.float32, "heads of 64 and 24"),
        (replace(spec(dim=192), v_dim=128), torch.float32, ""),
        (spec(scaling=-1.0), torch.float32, "scores times -1.0"),
        (spec(), torch.float16, "not in float16"),
        (spec(sinks=sinks_of(4, torch.float64)), torch.float32, "sinks in another dtype"),
        (spec(key_bias=biases_of(4, 9, torch.float64)), torch.float32, "biases in another dtype"),
    ],
)
def test_what_it_does_not_compute_is_said(one: AttentionSpec, dtype: torch.dtype | None, reason: str) -> None:
    found = reason_against(one, dtype)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)
