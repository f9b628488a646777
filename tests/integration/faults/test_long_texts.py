"""Floods of long texts that must not delay other clients."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from support.faults import Stopwatch, fault
from support.processes import Running, loraplex, wait_until
from support.world import make_world

from loraplex import AsyncClient, DeadlineExceeded, ResourceExhausted
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import inference_pb2, inference_pb2_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MESSAGE_BYTES = (4 << 20) - 1000  # what a worker takes
# On idle cores the gap is under 0.2 s. Beside another test process it was 0.63 s; texts tokenized in the event loop
# stop a stream for as long as the callers stay, which is 3 s.
LONGEST_GAP_S = 1.5
DEADLINE_S = 3.0
NUM_CALLERS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of long context, whose tokenizer's tokens may stand for any number of bytes: all texts are tokenized."""
    root = make_world(tmp_path_factory.mktemp("long"), num_adapters=0).model
    for name, changes in (
        ("config.json", {"max_position_embeddings": 131_072}),
        ("tokenizer.json", {"normalizer": {"type": "NFC"}}),
    ):
        path = root / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    (root / "chat_template.jinja").write_text("{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}")
    return root


@pytest.fixture(scope="module")
def worker(model: Path) -> Iterator[Running]:
    with loraplex(
        "worker", str(model), "--port", "0", "--threads", "1", "--stream-wait", "0", "--drain", "1"
    ) as running:
        yield running


@pytest.fixture(scope="module")
def router(worker: Running) -> Iterator[Running]:
    with loraplex("router", "--port", "0", "--worker", worker.address) as running:
        yield running


async def longest_gap_s(chunks: AsyncIterator[object], until: asyncio.Event) -> float:
    longest_s, last_s = 0.0, time.monotonic()
    async for _ in chunks:
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        if until.is_set():
            break
    return longest_s


def num_children(worker: Running) -> int:
    return len(psutil.Process(worker.process.pid).children())


def memory_bytes(server: Running) -> int:
    return psutil.Process(server.process.pid).memory_info().rss


@fault(
    "eight callers send 4 MB of text each (prompts, chats, Tokenize) and leave after 3 s",
    clients_see="DEADLINE_EXCEEDED; streams beside them: no gap over 1.5 s",
    within_s=5,
)
async def test_long_texts_leave_streams_alone(worker: Running, stopwatch: Stopwatch) -> None:
    text = "many words " * (MESSAGE_BYTES // 11)
    num_before = num_children(worker)
    async with AsyncClient(worker.address) as client, AsyncClient(worker.address) as other:
        stream = client.stream("hello", max_tokens=100_000, ignore_eos=True)
        await anext(stream)
        is_over = asyncio.Event()
        gap = asyncio.ensure_future(longest_gap_s(stream, is_over))
        calls = [
            *[other.generate(text, timeout_s=DEADLINE_S) for _ in range(NUM_CALLERS - 4)],
            *[other.generate(messages=[{"role": "user", "content": text}], timeout_s=DEADLINE_S) for _ in range(2)],
            *[other.tokenize(text, timeout_s=DEADLINE_S) for _ in range(2)],
        ]
        stopwatch.start()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        stopwatch.stop()
        # Meanwhile, and behind them, short requests are served.
        assert (await other.generate("hello", max_tokens=2)).text
        is_over.set()
        assert await gap < LONGEST_GAP_S
    assert [type(end) for end in ends].count(DeadlineExceeded) >= NUM_CALLERS - 2, ends  # the first one may be through
    num_left = num_before + 1  # the process that renders long chats stays from the first of them on
    await asyncio.to_thread(wait_until, lambda: num_children(worker) <= num_left, 10, "nobody tokenizes any more")


@fault("message of 64 kB that is 64 MiB decompressed", clients_see="RESOURCE_EXHAUSTED", within_s=3)
def test_a_compressed_message_is_bounded_by_what_it_becomes(
    worker: Running, router: Running, stopwatch: Stopwatch
) -> None:
    request = inference_pb2.GenerateRequest(text="a" * (64 << 20))
    fits = inference_pb2.GenerateRequest(text="a" * 1000, stopping=inference_pb2.Stopping(max_tokens=1))
    options = [("grpc.max_send_message_length", -1)]
    for server in (worker, router):
        with grpc.insecure_channel(server.address, options=options, compression=grpc.Compression.Gzip) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            assert stub.Generate(fits).completions
            before = memory_bytes(server)
            stopwatch.start()
            with pytest.raises(grpc.RpcError) as caught:
                stub.Generate(request)
            stopwatch.stop()
            assert isinstance(from_rpc_error(caught.value), ResourceExhausted)
            assert memory_bytes(server) - before < 32 << 20
