"""A worker over gRPC: promises to clients, hostile and mistaken requests."""

from __future__ import annotations

import asyncio
import io
import logging
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from safetensors.torch import load_file, save_file
from support.inline_worker import inline_worker
from support.processes import wait_until
from support.world import TinyWorld
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex import (
    AdapterInvalid,
    AdapterNotFound,
    AsyncClient,
    Client,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidArgument,
    LoraplexError,
    NoChatTemplate,
    Unavailable,
    Unimplemented,
)
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import (
    adapter_pb2,
    inference_pb2,
    inference_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from loraplex_runtime.logs import PlainFormatter
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig, WorkerConfig
from loraplex_server.grpc.server import Worker, start_worker

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def adapters_root(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few adapters that tests may change."""
    root = tmp_path_factory.mktemp("adapters")
    for name in tiny_world.names[:6]:
        shutil.copytree(tiny_world.adapters / name, root / name)
    return root


@pytest.fixture(scope="module")
def worker(tiny_world: TinyWorld, adapters_root: Path) -> Iterator[Worker]:
    engine = EngineConfig(
        ModelConfig(str(tiny_world.model), dtype="float64", max_context_tokens=128),
        KvConfig(memory_bytes=4 << 20),
        BatchConfig(max_running=8, max_step_tokens=32, max_queued=16),
        AdaptersConfig(root=adapters_root, num_device_slots=3),
    )
    with inline_worker(WorkerConfig(engine, port=0)) as running:
        yield running


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[Client]:
    with Client(worker.address) as one:
        yield one


@pytest.fixture(scope="module")
def stub(worker: Worker) -> Iterator[Any]:
    with grpc.insecure_channel(worker.address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


@pytest.fixture(scope="module")
def reference(tiny_world: TinyWorld) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_world.model, dtype=torch.float64).eval()


def greedy(reference: Any, prompt: list[int], num_new: int, **options: Any) -> list[int]:
    settings = {"do_sample": False, "max_new_tokens": num_new, "min_new_tokens": num_new, "pad_token_id": 0, **options}
    return reference.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()


def error_of(call: Any) -> LoraplexError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return from_rpc_error(caught.value)


# --- what is promised -----------------------------------------------------------------------------------------------


def test_greedy_text_is_that_of_generate(client: Client, reference: Any, tiny_world: TinyWorld) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_world.model)
    prompt = tokenizer("the quick brown fox").input_ids
    made = client.generate("the quick brown fox", max_tokens=20, ignore_eos=True)
    (completion,) = made.completions
    assert list(completion.token_ids) == greedy(reference, prompt, 20)
    assert made.usage.prompt_tokens == len(prompt)
    assert made.usage.completion_tokens == 20
    assert made.adapter_digest == ""


def test_stream_and_unary_agree_and_a_seed_repeats(client: Client, tiny_world: TinyWorld) -> None:
    options: dict[str, Any] = {
        "adapter_id": tiny_world.names[0], "max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7,
        "ignore_eos": True,
    }  # fmt: skip
    unary = client.generate("hello", **options)
    chunks = list(client.stream("hello", **options))
    assert "".join(chunk.text for chunk in chunks) == unary.text
    assert unary.adapter_digest
    assert chunks[0].adapter_digest == unary.adapter_digest
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is not None
    assert client.generate("hello", **{**options, "seed": 8}).text != unary.text


def test_n_completions(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    several = client.generate("hello there, you", n=3, **options)
    assert [completion.index for completion in several.completions] == [0, 1, 2]
    assert several.completions[0].text == client.generate("hello there, you", **options).text
    assert len({completion.text for completion in several.completions}) == 3
    assert several.usage.completion_tokens == 36
    assert several.usage.prompt_tokens == several.completions[0].usage.prompt_tokens


def test_logprobs_are_the_models(client: Client, reference: Any) -> None:
    prompt = list(b"some prompt")
    made = client.generate(
        token_ids=prompt, max_tokens=5, ignore_eos=True, logprobs=True, top_logprobs=3, prompt_logprobs=True
    )
    (completion,) = made.completions
    ids = prompt + list(completion.token_ids)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    for i, row in enumerate(completion.logprobs):
        at = len(prompt) + i - 1
        assert row.token_id == ids[at + 1]
        assert row.logprob == pytest.approx(float(expected[at, row.token_id]), abs=1e-6)
        assert [t.token_id for t in row.top] == expected[at].topk(3).indices.tolist()
    assert [row.token_id for row in made.prompt_logprobs] == prompt[1:]
    for i, row in enumerate(made.prompt_logprobs):
        assert row.logprob == pytest.approx(float(expected[i, row.token_id]), abs=1e-6)


def test_prompt_tokens_begin_with_the_first_and_have_logprobs(client: Client, tiny_world: TinyWorld) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_world.model)
    prompt = tokenizer("some prömpt").input_ids
    options: dict[str, Any] = {"max_tokens": 3, "top_logprobs": 2, "prompt_logprobs": True}
    plain = client.generate("some prömpt", **options)
    made = client.generate("some prömpt", prompt_tokens=True, token_bytes=True, **options)
    assert [token.token_id for token in made.prompt_tokens] == prompt
    assert b"".join(token.token_bytes for token in made.prompt_tokens).decode() == "some prömpt"
    assert made.prompt_tokens[0].logprob is None
    rows = zip(made.prompt_tokens[1:], plain.prompt_logprobs, made.prompt_logprobs, strict=True)
    for token, expected, derived in rows:
        assert token.logprob == derived.logprob == pytest.approx(expected.logprob)
        assert [one.token_id for one in token.top] == [one.token_id for one in expected.top]
        assert all(one.token_bytes for one in token.top)
    with client.stream("some prömpt", prompt_tokens=True, **options) as chunks:
        first, *others = chunks
    assert [token.token_id for token in first.prompt_tokens] == prompt
    assert not any(chunk.prompt_tokens for chunk in others)


def test_the_seed_that_was_chosen_repeats_the_texts(client: Client) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "n": 2, "ignore_eos": True}
    made = client.generate("hello", **options)
    assert made.seed is not None
    again = client.generate("hello", seed=made.seed, **options)
    assert [one.token_ids for one in again.completions] == [one.token_ids for one in made.completions]
    with client.stream("hello", **options) as chunks:
        streamed = list(chunks)
    (seed,) = {chunk.seed for chunk in streamed}
    again = client.generate("hello", seed=seed, **options)
    for index, completion in enumerate(again.completions):
        ids = [token_id for chunk in streamed if chunk.index == index for token_id in chunk.token_ids]
        assert list(completion.token_ids) == ids
    assert client.generate("hello", max_tokens=2).seed is None


def test_a_prompt_that_is_cut_is_the_end_of_the_text(client: Client) -> None:
    text, options = "the quick brown fox " * 40, {"max_tokens": 4}
    with pytest.raises(ContextLengthExceeded):
        client.generate(text, **options)
    cut = client.generate(text, truncate_prompt=20, **options)
    assert cut.completions[0].token_ids == client.generate(text[-20:], **options).completions[0].token_ids
    assert client.generate(text, truncate_prompt=0, **options).usage.prompt_tokens == 128 - 4


def test_a_stop_string_ends_the_text_before_it(client: Client) -> None:
    whole = client.generate("hello", max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    text = whole.text
    stop = text[12:14]
    cut = client.generate("hello", max_tokens=40, temperature=1.0, seed=5, ignore_eos=True, stop=[stop])
    assert cut.text == text[: text.index(stop)]
    assert cut.completions[0].finish_reason == "stop"
    assert cut.completions[0].stop_string == stop
    assert cut.usage.completion_tokens < 40


def test_bad_words_allowed_tokens_and_typical_p_are_those_of_generate(
    client: Client, reference: Any, tiny_world: TinyWorld
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_world.model)
    prompt = tokenizer("hello").input_ids
    plain = greedy(reference, prompt, 20)

    def ids(**options: Any) -> list[int]:
        made = client.generate("hello", max_tokens=20, min_tokens=20, **options)
        return list(made.completions[0].token_ids)

    words = [word for word in map(chr, range(ord("!"), ord("~") + 1)) if tokenizer(word).input_ids[0] in plain]
    banned = [tokenizer(text).input_ids for word in words for text in (word, f" {word}")]
    assert words
    assert ids(bad_words=words) == greedy(reference, prompt, 20, bad_words_ids=banned) != plain
    allowed = sorted({*range(40, 90)} - set(plain[:1]))
    expected = greedy(reference, prompt, 20, prefix_allowed_tokens_fn=lambda batch, tokens: allowed)
    assert ids(allowed_token_ids=allowed) == expected != plain
    # So small a share leaves one token, which need not be the likeliest.
    typical = {"do_sample": True, "typical_p": 1e-6, "top_k": 0}
    assert ids(typical_p=1e-6, temperature=1.0, seed=4) == greedy(reference, prompt, 20, **typical) != plain


def test_sampling_options_that_leave_no_token_fail_their_request_and_no_other(
    client: Client, reference: Any, tiny_world: TinyWorld
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_world.model)
    prompt = tokenizer("hello").input_ids
    neighbour = client.stream("hello", max_tokens=100, ignore_eos=True)
    chunks = [next(neighbour)]  # it runs
    for _ in range(3):
        with pytest.raises(InvalidArgument) as caught:
            client.generate("hello", max_tokens=3, bad_words=["a"], allowed_token_ids=tokenizer("a").input_ids)
        assert caught.value.field == "sampling"
    chunks += neighbour
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == greedy(reference, prompt, 100)


def test_echo_and_tokenize(client: Client) -> None:
    assert client.generate("hello", max_tokens=3, ignore_eos=True, echo=True).text.startswith("hello")
    tokens = client.tokenize("hello")
    assert len(tokens.token_ids) == 5
    assert client.tokenize("hello", offsets=True).starts == (0, 1, 2, 3, 4)
    assert client.detokenize(tokens.token_ids) == "hello"
    assert client.tokenize("hello", adapter_id="a000") == tokens
    with pytest.raises(AdapterNotFound):
        client.tokenize("hello", adapter_id="nowhere")
    facts = client.tokenizer_info()
    assert facts.eos is not None
    assert (facts.eos.text, facts.special_tokens[0].text) == ("</s>", "<s>")


def test_info_health_and_reflection(client: Client, worker: Worker) -> None:
    info = client.info()
    assert (info.role, info.max_context_tokens, info.dtype) == ("worker", 128, "float64")
    assert (info.max_device_adapters, info.tasks) == (3, ("generate", "embed", "classify", "score"))
    assert info.kv_block_tokens > 0
    with grpc.insecure_channel(worker.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "loraplex.v1.InferenceService"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert health.Check(request).status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
        names = {service.name for service in answer.list_services_response.service}
    assert {"loraplex.v1.InferenceService", "loraplex.v1.AdapterService", "grpc.health.v1.Health"} <= names


def test_more_adapters_than_slots_simply_work(client: Client, tiny_world: TinyWorld) -> None:
    first = [client.generate("hello", adapter_id=name, max_tokens=6).text for name in tiny_world.names[:6]]
    again = [client.generate("hello", adapter_id=name, max_tokens=6).text for name in tiny_world.names[:6]]
    assert first == again
    rows = client.adapters.list()
    assert sum(row.state == "on_device" for row in rows) <= 3


def test_a_folder_that_is_added_is_listed_soon_and_loads_at_once(
    client: Client, tiny_world: TinyWorld, adapters_root: Path, worker: Worker
) -> None:
    def names() -> list[str]:
        return [row.adapter_id for row in client.adapters.iterate(include_unloaded=True, page_size=2)]

    before = names()
    assert before == sorted(before)
    assert set(tiny_world.names[:6]) <= set(before)
    shutil.copytree(tiny_world.adapters / tiny_world.names[0], adapters_root / "org" / "added")
    client.generate("x", adapter_id="org/added", max_tokens=1)
    shutil.copytree(tiny_world.adapters / tiny_world.names[1], adapters_root / "later")
    wait_until(lambda: {"org/added", "later"} <= set(names()))
    (row,) = client.adapters.get("later")
    assert (row.state, row.tier) == ("known", "source")
    with grpc.insecure_channel(worker.address) as channel:  # as clients from before there were pages ask
        raw: bytes = channel.unary_unary("/loraplex.v1.AdapterService/ListAdapters")(b"\x08\x01")
    answer = adapter_pb2.ListAdaptersResponse.FromString(raw)
    assert ([row.adapter_id for row in answer.adapters], answer.next_page_token) == (names(), "")
    client.adapters.unload("org/added")
    for name in ("org", "later"):
        shutil.rmtree(adapters_root / name)
    wait_until(lambda: "later" not in names())


def test_new_content_under_the_same_name(client: Client, tiny_world: TinyWorld, adapters_root: Path) -> None:
    name = "changing"
    shutil.copytree(tiny_world.adapters / tiny_world.names[0], adapters_root / name)
    before = client.generate("hello", adapter_id=name, max_tokens=8)
    shutil.rmtree(adapters_root / name)
    shutil.copytree(tiny_world.adapters / tiny_world.names[1], adapters_root / name)
    bound = client.generate("hello", adapter_id=name, max_tokens=8)
    assert bound.adapter_digest == before.adapter_digest, "files are not looked at on a request's path"
    client.adapters.load(name)
    after = client.generate("hello", adapter_id=name, max_tokens=8)
    assert after.adapter_digest != before.adapter_digest
    assert after.text == client.generate("hello", adapter_id=tiny_world.names[1], max_tokens=8).text
    client.adapters.unload(name)
    shutil.rmtree(adapters_root / name)
    with pytest.raises(AdapterNotFound):
        client.generate("hello", adapter_id=name, max_tokens=8)


# --- what mistakes get ----------------------------------------------------------------------------------------------


def test_unknown_adapter(client: Client) -> None:
    with pytest.raises(AdapterNotFound) as caught:
        client.generate("hello", adapter_id="nobody")
    assert caught.value.resource == "nobody"
    with pytest.raises(AdapterNotFound, match="did you mean 'a00") as caught:
        client.generate("hello", adapter_id="a00x")
    assert "a00" in caught.value.metadata["near_names"]


@pytest.mark.parametrize("adapter_id", ["../a000", "/etc/passwd", "a\0b", "http://host/x", "a" * 200, "\u0430dapter"])
def test_ids_are_never_paths(client: Client, adapter_id: str) -> None:
    with pytest.raises(InvalidArgument):
        client.generate("hello", adapter_id=adapter_id)


def test_a_broken_adapter_fails_alone(client: Client, tiny_world: TinyWorld, adapters_root: Path) -> None:
    expected = client.generate("hello", adapter_id=tiny_world.names[0], max_tokens=8).text
    source = adapters_root / tiny_world.names[0]
    nan = adapters_root / "nan"
    shutil.copytree(source, nan)
    tensors = load_file(nan / "adapter_model.safetensors")
    first = next(iter(tensors))
    tensors[first] = torch.full_like(tensors[first], math.nan)
    save_file(tensors, nan / "adapter_model.safetensors")
    cut = adapters_root / "cut"
    shutil.copytree(source, cut)
    data = (cut / "adapter_model.safetensors").read_bytes()
    (cut / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
    reasons = {}
    for name in ("nan", "cut"):
        with pytest.raises(AdapterInvalid) as caught:
            client.generate("hello", adapter_id=name)
        reasons[name] = caught.value.reason
    assert reasons == {"nan": "NON_FINITE", "cut": "ADAPTER_INVALID"}
    assert client.generate("hello", adapter_id=tiny_world.names[0], max_tokens=8).text == expected


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"n": 1000}, "n"),
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"top_p": 1.5}, "sampling.top_p"),
        ({"max_tokens": 10**6}, "stopping.max_tokens"),
        ({"stop": ["x" * 10_000]}, "stopping.stop"),
        ({"top_logprobs": 1000}, "output.top_logprobs"),
        ({"logit_bias": {10**6: 1.0}}, "sampling.logit_bias"),
    ],
)
def test_bad_values_name_their_field(client: Client, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.generate("hello", **options)
    assert caught.value.field is not None
    assert caught.value.field.startswith(field)


def test_nothing_in_a_request_without_fields_is_ignored(stub: Any, worker: Worker) -> None:
    newer = b"\xa2\x7d\x01x"  # field 2004, a string
    assert isinstance(error_of(lambda: stub.GetInfo(inference_pb2.GetInfoRequest.FromString(newer))), Unimplemented)
    with grpc.insecure_channel(worker.address) as channel:
        get_load = worker_pb2_grpc.WorkerServiceStub(channel).GetLoad
        assert isinstance(error_of(lambda: get_load(worker_pb2.GetLoadRequest.FromString(newer))), Unimplemented)


def test_errors_and_the_log_carry_the_request_id(stub: Any, caplog: pytest.LogCaptureFixture) -> None:
    setup = logging.getLogger("loraplex.requests")
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(PlainFormatter())
    # A line follows its answer: one of another test's call may come only now.
    handler.addFilter(lambda record: record.getMessage().startswith("Generate"))
    setup.addHandler(handler)
    request = inference_pb2.GenerateRequest(text="hello", adapter_id="nobody", request_id="mine")
    try:
        with caplog.at_level(logging.INFO, setup.name):
            early = inference_pb2.GenerateRequest(request_id="early")  # no prompt
            assert error_of(lambda: stub.Generate(early)).request_id == "early"
            assert error_of(lambda: stub.Generate(request)).request_id == "mine"
            assert error_of(lambda: list(stub.GenerateStream(request))).request_id == "mine"
            request.request_id = ""
            given = error_of(lambda: stub.Generate(request)).request_id
            wait_until(lambda: lines.getvalue().count("\n") == 4)  # a line follows its answer
    finally:
        setup.removeHandler(handler)
    assert given
    ends = [line.rpartition(" ")[2] for line in lines.getvalue().splitlines()]
    assert ends == [f"request_id={name}" for name in ("early", "mine", "mine", given)]


def test_a_prompt_beyond_the_context(client: Client) -> None:
    with pytest.raises(ContextLengthExceeded):
        client.generate("x" * 500)
    with pytest.raises(InvalidArgument):
        client.generate(token_ids=[10**6])


def test_no_chat_template(client: Client) -> None:
    with pytest.raises(NoChatTemplate):
        client.generate(messages=[{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    "method", ["InferenceService/Generate", "InferenceService/GenerateStream", "AdapterService/LoadAdapter"]
)
def test_bytes_that_are_no_message(worker: Worker, method: str) -> None:
    with grpc.insecure_channel(worker.address) as channel:
        kind = channel.unary_stream if method.endswith("Stream") else channel.unary_unary
        call = kind(f"/loraplex.v1.{method}")
        error = error_of(lambda: list(call(b"\xff\xff")))
    assert type(error) is InvalidArgument
    assert "not a loraplex.v1." in error.message
    assert "DecodeError" not in error.message


@pytest.mark.parametrize("way", ["unary", "stream"])
def test_a_deadline_frees_what_the_request_held(client: Client, worker: Worker, way: str) -> None:
    options: dict[str, Any] = {"max_tokens": 120, "ignore_eos": True, "n": 8, "cache_salt": f"deadline-{way}"}
    if way == "unary":
        with pytest.raises(DeadlineExceeded):
            client.generate("hello", timeout_s=0.1, **options)
    num_chunks, timeout_s = 0, 0.25
    while way == "stream" and not num_chunks:
        assert timeout_s < 10, "the deadline came in mid-stream"
        with pytest.raises(DeadlineExceeded):
            for _ in client.stream("hello", timeout_s=timeout_s, **options):
                num_chunks += 1
        timeout_s *= 2  # on a busy machine the first chunk takes longer than that, and so do all of them

    def is_idle() -> bool:
        load = worker.engine.state.load
        # One block is never handed out; cached prefixes count as free.
        return load.num_running == load.num_queued == 0 and load.num_free_blocks >= load.num_blocks - 1 > 0

    wait_until(is_idle, 10, "the engine is idle and has its blocks back")


async def test_going_is_announced_before_requests_are_refused(tiny_world: TinyWorld) -> None:
    engine = EngineConfig(ModelConfig(str(tiny_world.model), max_context_tokens=64), KvConfig(memory_bytes=1 << 20))
    worker = await start_worker(WorkerConfig(engine, port=0), inline=True)
    async with AsyncClient(worker.address) as client, grpc.aio.insecure_channel(worker.address) as channel:
        watch = worker_pb2_grpc.WorkerServiceStub(channel).WatchLoad(worker_pb2.WatchLoadRequest())
        assert not (await watch.read()).load.draining
        draining = asyncio.ensure_future(worker.drain(5.0, announce_s=1.0))
        assert (await asyncio.wait_for(watch.read(), 0.9)).load.draining, "at once, not with the next heartbeat"
        request = health_pb2.HealthCheckRequest(service="loraplex.v1.InferenceService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        load = (await worker_pb2_grpc.WorkerServiceStub(channel).GetLoad(worker_pb2.GetLoadRequest())).load
        assert load.draining, "routers send no more"
        assert (await client.generate("hello", max_tokens=3)).text  # but somebody whom nobody told does
        await draining
        with pytest.raises(Unavailable):
            await client.generate("hello", max_tokens=3)
