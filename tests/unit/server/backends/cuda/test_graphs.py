"""Steps from graphs equal eager steps.

A fake graph calls the captured function again, on what is in its buffers. `test_interpreter.py` does so over the real
Triton kernels.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.backends import PatchedBackend
from support.dense import greedy, make_dense
from support.driver import Job, Rig, make_rig, random_prompts
from support.replay import ReplayableReference, ReplayableTorch, calls_again, rowwise
from support.zoo import VOCAB_SIZE, random_model
from transformers import PreTrainedModel

from loraplex_adapters.weights import AdapterWeights, LoraFactors
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.plan import AdapterUse, NewSequence, Span, StepPlan
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.backends.cuda.graphs import Capture, GraphShape, graph_shapes, pad_step
from loraplex_server.layers.lora import Segment
from loraplex_server.layers.step import StagedStep
from loraplex_server.model.loader import adopt_model

NUM_TOKENS = 7
MAX_ROWS = 5
DECODE, RAGGED = GraphShape(MAX_ROWS, 2), GraphShape(MAX_ROWS, ragged_tokens=300)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_dense(random_model("llama"))


class Replays:
    """Counts the steps of a rig that came out of graphs."""

    def __init__(self) -> None:
        self.num = 0

    def capture(self, launch: Callable[[], object]) -> Callable[[], None]:
        again = calls_again(launch)

        def replay() -> None:
            self.num += 1
            again()

        return replay


def rig_of(
    model: PreTrainedModel, shapes: list[GraphShape] | None = None, capture: Capture | None = None, **fields: Any
) -> tuple[Rig, Replays]:
    """A rig that replays steps of these shapes; without shapes, one that runs everything eager."""
    replays, ops = Replays(), ReplayableReference()
    backend = PatchedBackend(make_linear=rowwise, capture=capture or replays.capture)
    loaded = adopt_model(copy.deepcopy(model), backend=backend)
    rig = make_rig(loaded, max_rows=MAX_ROWS, ops=ops, attention=ReplayableTorch(), **fields)
    rig.free_blocks.remove(0)  # for padding
    if shapes:
        said: list[str] = []
        rig.runner.capture(shapes, said.append)
        assert said[0] == f"capturing {2 * len(shapes)} CUDA graphs"
        assert said[-1].startswith(f"{2 * len(shapes)} CUDA graphs in ")
        rig.cache.clear_blocks([0])
        for layer in rig.cache.layers:
            assert layer.k[1:].isnan().all(), "a capture wrote to somebody's block"
    install(rig)
    return rig, replays


def install(rig: Rig) -> None:
    """Adapters of different ranks in slots 0 to 3; the last reaches the head, slot 2 one module only."""
    torch.manual_seed(5)
    linears = {path: module for path, module in rig.loaded.targets.items() if path != rig.loaded.embedding_path}
    for slot, rank in enumerate((1, 4, 8, 3)):
        paths = [p for p in linears if p != "lm_head" or slot == 3]
        if slot == 2:
            paths = ["model.layers.1.mlp.down_proj"]
        factors = {
            path: LoraFactors(
                torch.randn(rank, linears[path].in_features, dtype=torch.float64) / 4,
                torch.randn(linears[path].out_features, rank, dtype=torch.float64) / 4,
                0.5 + slot,
            )
            for path in paths
        }
        key = AdapterKey("lora", f"{slot}" * 64)
        rig.slots.install(slot, AdapterWeights(key, torch.zeros(0, dtype=torch.uint8), factors))


def mixed_jobs(drafting: Callable[[list[int]], list[int]] | None = None) -> list[Job]:
    """More than fit at a time: without an adapter, with one of four, with a mixture; greedy, sampled, with logprobs."""
    uses = [(), (AdapterUse(0),), (AdapterUse(1),), (AdapterUse(2), AdapterUse(3, 0.5)), (AdapterUse(3),)]
    jobs = [
        Job(prompt, NUM_TOKENS, uses[idx % 5]) for idx, prompt in enumerate(random_prompts(10, VOCAB_SIZE, seed=11))
    ]
    for idx in (1, 3, 6):
        jobs[idx].sampling = SamplingParams(temperature=0.9, top_p=0.9, seed=idx, presence_penalty=0.5)
    jobs[4].output = OutputParams(logprobs=True, top_logprobs=2, prompt_logprobs=True)
    for job in jobs[::2] if drafting else ():
        job.propose = drafting
    return jobs


def assert_same(replayed: Rig, eager: Rig, jobs: list[Job], want: list[Job], *, bits: bool) -> None:
    for job, other in zip(jobs, want, strict=True):
        assert job.error is None
        assert job.tokens == other.tokens
        assert job.num_accepted == other.num_accepted
        assert [entry.token_id for entry in job.logprobs] == [entry.token_id for entry in other.logprobs]
        got, expected = replayed.logits(job), eager.logits(other)
        assert torch.equal(got, expected) if bits else torch.allclose(got, expected, rtol=1e-10, atol=1e-10)
        for entry, known in zip(job.prompt_logprobs, other.prompt_logprobs, strict=True):
            assert entry.logprob == pytest.approx(known.logprob, abs=1e-10)


# --- whole texts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_chunk", [1, 7])
def test_decode_steps_are_the_eager_ones_bit_by_bit(model: PreTrainedModel, max_chunk: int) -> None:
    """Steps replay in buckets with room to spare, beside eager steps where prompts come in chunks; the random draws are
    alike in both."""
    shapes = [GraphShape(1), GraphShape(3), GraphShape(MAX_ROWS)]
    (eager, _), (replayed, replays) = rig_of(model, max_chunk=max_chunk), rig_of(model, shapes, max_chunk=max_chunk)
    want, jobs = mixed_jobs(), mixed_jobs()
    eager.run(want)
    replayed.run(jobs)
    assert replays.num > 10
    assert (replays.num == replayed.num_steps) is (max_chunk == 1)
    assert_same(replayed, eager, jobs, want, bits=True)


def test_drafts_of_all_lengths_share_a_replay(model: PreTrainedModel) -> None:
    """Rows with drafts and rows without any share a replay; attention sees more queries than eager, so the last bits
    may differ."""

    shapes = [GraphShape(n, length) for n in (2, MAX_ROWS) for length in (1, 2, 3, 5)]
    (eager, _), (replayed, replays) = rig_of(model, max_chunk=3), rig_of(model, shapes, max_chunk=3)
    want, jobs = mixed_jobs(propose_at_random), mixed_jobs(propose_at_random)
    eager.run(want)
    replayed.run(jobs)
    assert replays.num > replayed.num_steps // 2
    assert_same(replayed, eager, jobs, want, bits=False)


def test_drafts_that_are_right_are_accepted(model: PreTrainedModel) -> None:
    prompts = random_prompts(4, VOCAB_SIZE, seed=1)[1:]
    texts = [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    rig, replays = rig_of(model, [GraphShape(MAX_ROWS, length) for length in (1, 3)])
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts]
    for job, text in zip(jobs, texts, strict=True):
        whole = job.prompt + text
        job.propose = lambda so_far, whole=whole: whole[len(so_far) : len(so_far) + 2]
    rig.run(jobs)
    assert replays.num
    assert [job.tokens for job in jobs] == texts
    assert sum(job.num_accepted for job in jobs) > 6


def propose_at_random(so_far: list[int]) -> list[int]:
    dice = random.Random(sum(so_far))
    return [dice.randrange(2, VOCAB_SIZE) for _ in range(dice.randint(0, 4))]


@pytest.mark.parametrize("drafting", [None, propose_at_random], ids=["decode", "drafts"])
def test_steps_with_prompts_are_the_eager_ones_bit_by_bit(
    model: PreTrainedModel, drafting: Callable[[list[int]], list[int]] | None
) -> None:
    """Chunks of prompts, decode steps and drafts of all lengths share a ragged replay."""
    shapes = [GraphShape(MAX_ROWS, ragged_tokens=size) for size in (4, 12, 40)]
    (eager, _), (replayed, replays) = rig_of(model, max_chunk=7), rig_of(model, shapes, max_chunk=7)
    want, jobs = mixed_jobs(drafting), mixed_jobs(drafting)
    eager.run(want)
    replayed.run(jobs)
    assert replays.num == replayed.num_steps
    assert_same(replayed, eager, jobs, want, bits=True)


@pytest.mark.parametrize(
    ("lens", "starts", "num_head_rows", "want"),
    [
        ([1, 2], [5, 7], 1, DECODE),
        ([1, 2], [0, 7], 1, RAGGED),  # nothing is known in front of the first span
        ([1, 3], [5, 0], 1, RAGGED),
        ([1, 298], [5, 0], 256, RAGGED),
        ([1, 298], [5, 0], 257, None),  # logprobs of a prompt
        ([1, 300], [5, 0], 1, None),
    ],
)
def test_the_graph_of_a_step(
    model: PreTrainedModel, lens: list[int], starts: list[int], num_head_rows: int, want: GraphShape | None
) -> None:
    rig, _ = rig_of(model, [RAGGED, DECODE])
    graphs = rig.runner._graphs  # pyright: ignore[reportPrivateUsage]
    assert graphs is not None
    step = staged(lens, starts, (), list(range(num_head_rows)))
    bucket, _ = graphs._fit(step)  # pyright: ignore[reportPrivateUsage]
    assert (None if bucket is None else bucket.shape) == want


def test_hidden_states_outlive_the_next_replay(model: PreTrainedModel) -> None:
    """The hidden states of a step under way are kept while another one is handed over."""
    rig, replays = rig_of(model, [GraphShape(2)])
    prompt = random_prompts(2, VOCAB_SIZE, seed=2)[1]
    want = greedy(model, prompt, 4)
    rig.runner.overlaps = True
    entered = NewSequence("k", 0, tuple(prompt), len(prompt), SamplingParams(), OutputParams(), keeps_hidden=True)
    blocks = tuple(range(1, 9))
    first = rig.runner.execute(StepPlan(0, (Span("k", 0, 0, len(prompt), 1, blocks),), (entered,)))
    second = rig.runner.execute(StepPlan(1, (Span("k", 0, len(prompt), 1, 1),)))
    third = rig.runner.execute(StepPlan(2, (Span("k", 0, len(prompt) + 1, 1, 1),)))
    assert [handle.result().spans["k"].token_ids for handle in (first, second)] == [(want[0],), (want[1],)]
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, want[0]]])
        state = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, -1]
    torch.testing.assert_close(rig.runner.last_hidden([0])[0], state, rtol=1e-9, atol=1e-9)
    assert third.result().spans["k"].token_ids == (want[2],)
    assert replays.num == 2


# --- what fits no graph -----------------------------------------------------------------------------------------------


def test_more_adapters_on_a_row_than_were_reserved(model: PreTrainedModel) -> None:
    uses = (AdapterUse(0), AdapterUse(1, 0.5), AdapterUse(3, 0.25))
    prompts = random_prompts(3, VOCAB_SIZE, seed=4)
    (eager, _), (replayed, replays) = rig_of(model, max_chunk=1), rig_of(model, [GraphShape(MAX_ROWS)], max_chunk=1)
    want, jobs = [[Job(p, NUM_TOKENS, uses) for p in prompts] for _ in range(2)]
    eager.run(want)
    replayed.run(jobs)
    assert replays.num == 0
    assert_same(replayed, eager, jobs, want, bits=True)


def test_an_adapter_of_the_embedding_runs_eager(model: PreTrainedModel) -> None:
    """The adapter's embedding factors are looked up on the host. The neighbours' steps are replayed again when it has
    left."""
    (eager, _), (replayed, replays) = rig_of(model, max_chunk=1), rig_of(model, [GraphShape(MAX_ROWS)], max_chunk=1)
    factors = LoraFactors(torch.randn(2, VOCAB_SIZE).double(), torch.randn(32, 2).double(), 1.0)
    for rig in (eager, replayed):
        path = rig.loaded.embedding_path
        key = AdapterKey("lora", "9" * 64)
        rig.slots.install(5, AdapterWeights(key, torch.zeros(0, dtype=torch.uint8), {path: factors}))
    prompt = random_prompts(2, VOCAB_SIZE, seed=4)[1]
    want, jobs = [[Job(prompt, NUM_TOKENS, (AdapterUse(5),)), Job(prompt, 30, (AdapterUse(1),))] for _ in range(2)]
    eager.run(want)
    replayed.run(jobs)
    assert 0 < replays.num < replayed.num_steps
    assert_same(replayed, eager, jobs, want, bits=True)
    assert jobs[0].tokens != jobs[1].tokens[:NUM_TOKENS]


@pytest.mark.parametrize(("family", "is_replayed"), [("llama", True), ("gemma2", False)])
def test_an_adapter_of_the_head_follows_a_replay(family: str, is_replayed: bool) -> None:
    """An adapter of the head is replayed where nothing is done to the logits behind the head; gemma2 caps them, so such
    steps run eager."""
    model = make_dense(random_model(family))
    (eager, _), (replayed, replays) = rig_of(model, max_chunk=1), rig_of(model, [GraphShape(MAX_ROWS)], max_chunk=1)
    prompts = random_prompts(4, VOCAB_SIZE, seed=9)
    want, jobs = [
        [Job(prompt, NUM_TOKENS, (AdapterUse(3),) if idx % 2 else ()) for idx, prompt in enumerate(prompts)]
        for _ in range(2)
    ]
    eager.run(want)
    replayed.run(jobs)
    assert (replays.num == replayed.num_steps) is is_replayed
    assert_same(replayed, eager, jobs, want, bits=True)
    plain = [Job(prompts[1], NUM_TOKENS)]
    replayed.run(plain)
    assert plain[0].tokens != jobs[1].tokens


def test_steps_without_adapters_launch_no_adapter_kernel(model: PreTrainedModel) -> None:
    rig, replays = rig_of(model, [GraphShape(MAX_ROWS)], max_chunk=1)
    ops = rig.slots.ops
    assert isinstance(ops, ReplayableReference)
    ops.num_applied = 0
    rig.run([Job(prompt, NUM_TOKENS) for prompt in random_prompts(3, VOCAB_SIZE)])
    assert replays.num == rig.num_steps
    assert ops.num_applied == 0
    rig.run([Job(prompt, 2, (AdapterUse(2),)) for prompt in random_prompts(1, VOCAB_SIZE)])
    num_linears = sum("proj" in path for path in rig.loaded.targets)
    assert ops.num_applied == 2 * num_linears, "modules that the adapter leaves alone must be launched too"


@pytest.mark.parametrize("shape", [GraphShape(MAX_ROWS), GraphShape(MAX_ROWS, ragged_tokens=9)], ids=str)
def test_padding_disturbs_nobody(model: PreTrainedModel, shape: GraphShape) -> None:
    """Whatever is in block 0, and in the row that missing spans read."""
    rig, replays = rig_of(model, [shape], max_chunk=1)
    prompt = random_prompts(2, VOCAB_SIZE, seed=7)[1]
    want = greedy(model, prompt, NUM_TOKENS)
    for layer in rig.cache.layers:
        layer.k[0], layer.v[0] = float("nan"), float("nan")
    rig.runner.mirror.tokens[0] = VOCAB_SIZE - 1
    jobs = [Job(prompt, NUM_TOKENS)]
    rig.run(jobs)
    assert replays.num == rig.num_steps
    assert jobs[0].tokens == want


# --- what cannot be captured ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_before", [0, 1, 3, 5])
def test_a_capture_that_fails_leaves_a_server_that_runs(model: PreTrainedModel, num_before: int) -> None:
    """The server runs with the graphs captured before the failure, or with none; the failure is reported once."""
    replays, said = Replays(), list[str]()

    def capture(launch: Callable[[], object]) -> Callable[[], None]:
        if replays.num == num_before:
            launch()
            raise RuntimeError("operation not permitted when stream is capturing\nwith a trace")
        replays.num += 1
        return calls_again(launch)

    rig, _ = rig_of(model, capture=capture, max_chunk=1)
    rig.runner.capture([GraphShape(9, ragged_tokens=50), GraphShape(MAX_ROWS), GraphShape(2)], said.append)
    which = f"steps that fit none of {num_before} captured graphs" if num_before else "steps"
    assert said[1:] == [f"{which} run without CUDA graphs: operation not permitted when stream is capturing"]
    assert rig.loaded.context.attention is None
    assert all(module.num_installed <= 4 for module in rig.loaded.targets.values())
    prompts = random_prompts(3, VOCAB_SIZE)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in prompts]
    rig.run(jobs)
    assert [job.tokens for job in jobs] == [greedy(model, prompt, NUM_TOKENS) for prompt in prompts]


def test_attention_that_cannot_be_captured_says_so(model: PreTrainedModel) -> None:
    rig = make_rig(adopt_model(copy.deepcopy(model), backend=PatchedBackend(capture=calls_again)))
    said: list[str] = []
    rig.runner.capture([GraphShape(2)], said.append)
    assert said == ["steps run without CUDA graphs, of which torch attention cannot be a part"]


# --- shapes and padding -----------------------------------------------------------------------------------------------


def test_shapes_follow_the_number_of_sequences() -> None:
    assert uniform(1, 0) == [GraphShape(1)]
    assert [shape.num_spans for shape in uniform(64, 0)] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert [shape.num_spans for shape in uniform(20, 0)] == [1, 2, 4, 8, 16, 20]
    large = [shape.num_spans for shape in uniform(300, 0)]
    assert large[-1] == 300
    assert all(b - a <= max(8, b // 8) for a, b in itertools.pairwise(large[3:]))
    verify = [shape for shape in uniform(64, 16) if shape.query_len > 1]
    assert {shape.query_len for shape in verify} == {2, 3, 5, 9}
    assert max(shape.num_tokens for shape in verify) <= 256
    assert GraphShape(8, 5) in verify
    assert {shape.query_len for shape in uniform(4, 6)} == {1, 2, 3, 5, 7}
    assert len(set(uniform(64, 64))) == len(uniform(64, 64)) < 50


def uniform(max_running: int, max_drafted: int) -> list[GraphShape]:
    return [shape for shape in graph_shapes(max_running, max_drafted, 512) if not shape.is_ragged]


@pytest.mark.parametrize(
    ("max_step_tokens", "sizes"),
    [
        (5, [5]),
        (64, [64]),
        (100, [64, 100]),
        (1024, [64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024]),
        (9999, [64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]),
    ],
)
def test_shapes_of_steps_with_prompts(max_step_tokens: int, sizes: list[int]) -> None:
    ragged = [shape for shape in graph_shapes(5, 4, max_step_tokens) if shape.is_ragged]
    assert ragged == [GraphShape(5, ragged_tokens=size) for size in sizes]


def staged(lens: list[int], starts: list[int], segments: tuple[Segment, ...], head_rows: list[int]) -> StagedStep:
    """Spans in rows 0, 1, ... of 100 tokens, row r in the blocks from 10 * r on, blocks of 4."""
    positions = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lens, strict=True)])
    rows = np.repeat(np.arange(len(lens)), lens)
    tokens = np.stack([100 * rows + positions, positions, 40 * rows + positions])
    spans = tuple(Span(str(row), row, start, n, 0) for row, (start, n) in enumerate(zip(starts, lens, strict=True)))
    ends = np.array(starts) + np.array(lens)
    tables = np.arange(10)[None, :] + 10 * np.arange(len(lens))[:, None]
    return StagedStep(spans, (), tokens, np.array(lens), ends, tables, 4, segments, np.array(head_rows), (), (), (), ())


def test_short_spans_repeat_known_tokens_in_front() -> None:
    step = pad_step(staged([1, 1, 3], [5, 2, 7], (Segment(1, 2, 4), Segment(2, 5, 6, 0.5)), [0, 3, 4]), 3)
    assert step is not None
    assert step.tokens[0].tolist() == [3, 4, 5, 100, 101, 102, 207, 208, 209]
    assert step.tokens[1].tolist() == [3, 4, 5, 0, 1, 2, 7, 8, 9]
    assert step.tokens[2].tolist() == [-1, -1, 5, -1, -1, 42, 87, 88, 89]
    assert step.query_lens.tolist() == [3, 3, 3]
    assert step.token_segments == (Segment(3, 6, 4), Segment(6, 9, 6, 0.5))
    assert step.head_rows.tolist() == [2, 7, 8]


def test_spans_of_one_length_stay_as_they_are() -> None:
    step = staged([2, 2], [0, 3], (Segment(0, 4, 1),), [1, 3])
    same = pad_step(step, 2)
    assert same is not None
    assert same.tokens is step.tokens
    assert same.token_segments is step.token_segments


def test_a_span_at_the_beginning_has_nothing_to_repeat() -> None:
    assert pad_step(staged([1, 3], [1, 7], (), [0]), 3) is None
