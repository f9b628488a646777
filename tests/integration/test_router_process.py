"""Router process: command, signals, TLS, metrics, and killed workers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx2
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.certificates import new_pair
from support.fake_workers import FakeWorker, Generate, chunks, cluster, router_for, until
from support.http import Http

from loraplex.cli.main import main
from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, WorkerLost
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import inference_pb2_grpc
from loraplex_router.config import RouterConfig, ServerOptions
from loraplex_router.server import Router, run_router, start_router

TESTS = Path(__file__).parents[1]
COMMAND = "import typer; from loraplex_router.cli import router; typer.run(router)"
# Of a port that two processes share: enough that each of them gets some.
NUM_CLIENTS = 20


def stub(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(channel)


@contextlib.asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A Python process; killed at the end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), *sys.path))},
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), 30)
    return line.decode().strip()


async def log_line_of(process: asyncio.subprocess.Process) -> str:
    """The message of a line of the log, in JSON."""
    assert process.stderr is not None
    return json.loads(await asyncio.wait_for(process.stderr.readline(), 30))["message"]


async def test_kill_9_of_a_worker() -> None:
    async with child("-m", "support.fake_workers") as process:
        address = await line_of(process)
        async with router_for([address]) as (router, channel):
            call = stub(channel).GenerateStream(Generate(text="x"))
            assert [(await call.read()).token_ids[0] for _ in range(2)] == [1, 2]
            process.kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            error = from_rpc_error(caught.value)
            assert isinstance(error, WorkerLost)
            assert error.metadata["tokens_sent"] == "2"
            await until(lambda: router.replicas.num_routable == 0)


async def test_the_command(tmp_path: Path) -> None:
    async with cluster(1) as c:
        hold = asyncio.Event()

        async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
            first, second = chunks(2)
            yield first
            await hold.wait()
            yield second

        c.workers[0].stream = stream
        flags = ["--worker", c.workers[0].address, "--port", "0", "--metrics-port", "0", "--announce", "0"]
        async with child("-c", COMMAND, *flags, "--log-format", "json") as process:
            line = ""
            while "router ready on 127.0.0.1:" not in line:
                line = await log_line_of(process)
            assert "(1 of 1 workers available, metrics on port " in line
            address = line.split()[3]
            async with grpc.aio.insecure_channel(address) as channel:
                call = stub(channel).GenerateStream(Generate(text="x"))
                await call.read()
                process.send_signal(signal.SIGTERM)
                # What runs may end.
                hold.set()
                assert (await call.read()).token_ids
            output, errors = await asyncio.wait_for(process.communicate(), 10)
            assert process.returncode == 0
            assert output == b""
            # Nobody else writes there, gRPC's C core included.
            assert all(json.loads(text)["message"] for text in errors.splitlines())
            assert errors


@pytest.mark.parametrize("command", [["router", "--worker", "127.0.0.1:1"], ["http", "--server", "127.0.0.1:1"]])
async def test_in_json_a_start_that_fails_is_a_line_of_the_log(command: list[str]) -> None:
    async with cluster(1) as c:
        taken = c.router.address.rpartition(":")[2]
        async with child("-m", "loraplex", *command, "--port", taken, "--log-format", "json") as process:
            output, errors = await asyncio.wait_for(process.communicate(), 30)
    lines = [json.loads(line) for line in errors.splitlines()]
    assert output == b""
    assert lines[-1]["level"] == "error"
    assert lines[-1]["reason"] == "FAILED_PRECONDITION"
    assert process.returncode == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "--worker must be given"),
        (["--worker", "nonsense"], "--worker takes [NAME=]HOST:PORT"),
        (["--worker", "a:1", "--auth-file", "x"], "--worker-token-file"),
        (["--worker", "a:1", "--tls-cert", "x"], "--tls-key"),
        (["--worker", "a:1", "--log-format", "xml"], "not one of"),
    ],
)
def test_flags_that_are_wrong(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", *flags]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_no_torch_in_the_routers_process() -> None:
    program = """
import sys
import loraplex_router.cli, loraplex_router.server
heavy = {"torch", "transformers", "numpy", "safetensors", "peft", "loraplex_server"} & sys.modules.keys()
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


async def test_several_processes_on_one_port() -> None:
    """One that is killed is started again while the other serves; a signal drains all of them."""
    async with cluster(1) as c:
        flags = ["--worker", c.workers[0].address, "--port", "0", "--http-port", "0", "--processes", "2"]
        async with child("-m", "loraplex", "router", *flags, "--announce", "0", "--json") as process:
            ready = json.loads(await line_of(process))
            pids = children_of(process.pid)
            assert len(pids) == 2
            assert await all_served(ready["address"])
            with urllib.request.urlopen(f"http://{ready['http']}/version", timeout=10) as answer:
                assert answer.status == 200
            os.kill(pids[0], signal.SIGKILL)
            assert await all_served(ready["address"])
            await until(lambda: len(set(children_of(process.pid)) - set(pids)) == 1, 30)
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.communicate(), 20)
            assert process.returncode == 0
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def children_of(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def all_served(address: str) -> bool:
    """True if all calls are served, over enough connections that each process gets one."""
    for _ in range(8):
        async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            call = stub(channel).GenerateStream(Generate(text="x"), wait_for_ready=True)
            if len([message async for message in call]) != 3:
                return False
    return True


async def test_a_router_that_drains_leaves_a_shared_port_to_the_others() -> None:
    """Running calls end where they are, and new ones go to the other process. A request that arrives as the port is
    left may be refused; it has not begun then, and the next one finds the other process."""
    async with cluster(1, server=ServerOptions(reuse_port=True)) as c:
        c.workers[0].stream = paced
        port = int(c.router.address.rpartition(":")[2])
        addresses = [c.workers[0].address]
        options = {"port": port, "server": ServerOptions(reuse_port=True)}
        async with router_for(addresses, **options) as (other, _), contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(
                    grpc.aio.insecure_channel(c.router.address, options=[("grpc.use_local_subchannel_pool", 1)])
                )
                for _ in range(NUM_CLIENTS)
            ]
            asked = [Asked() for _ in channels]
            asking = (keep_asking(*one) for one in zip(channels, asked, strict=True))
            await check_that_all_move(c.router, other, asking, asked)


@dataclass
class Asked:
    """Counts of one client's streams."""

    num_answered: int = 0
    num_refused: int = 0
    """Before the first message or byte."""


async def check_that_all_move(
    router: Router, other: Router, asking: Iterable[Coroutine[Any, Any, None]], asked: Sequence[Asked]
) -> None:
    """Drains a router while clients ask both. Each has three more answers then: one whose connection met the closing
    port connects again after gRPC's backoff, a second by default."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in asking]
        await until(lambda: len(router.calls) > 0 and len(other.calls) > 0)
        await asyncio.wait_for(router.drain(10.0), 8)
        before = [one.num_answered for one in asked]
        await until(lambda: all(one.num_answered >= num + 3 for one, num in zip(asked, before, strict=True)), 30)
        for task in tasks:
            task.cancel()
    assert max(one.num_refused for one in asked) <= 1


async def paced(request: Generate, context: Any) -> AsyncIterator[bytes]:
    for chunk in chunks(3):
        yield chunk
        await asyncio.sleep(0.01)


async def keep_asking(channel: grpc.aio.Channel, asked: Asked) -> None:
    """Streams one after the other, until it is cancelled. Raises what one fails with after its first message."""
    while True:
        num_messages = 0
        try:
            # While a channel waits to connect again, it refuses at once whatever does not wait.
            async for _ in stub(channel).GenerateStream(Generate(text="x"), wait_for_ready=True):
                num_messages += 1
        except grpc.aio.AioRpcError as error:
            if num_messages or error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise
            asked.num_refused += 1
        else:
            assert num_messages == 3
            asked.num_answered += 1


async def test_http_of_a_router_that_drains_leaves_a_shared_port_to_the_others() -> None:
    """The HTTP port drains as the gRPC port does above, with connections that clients keep."""
    server = ServerOptions(reuse_port=True)
    async with cluster(1, http_port=0, server=server) as c:
        assert c.router.http is not None
        c.workers[0].stream = paced
        options = {"http_port": int(c.router.http.address.rpartition(":")[2]), "server": server}
        async with router_for([c.workers[0].address], **options) as (other, _), contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Http(base_url=f"http://{c.router.http.address}", trust_env=False))
                for _ in range(NUM_CLIENTS)
            ]
            asked = [Asked() for _ in clients]
            asking = (keep_completing(*one) for one in zip(clients, asked, strict=True))
            await check_that_all_move(c.router, other, asking, asked)


async def keep_completing(client: Http, asked: Asked) -> None:
    """Streams one after the other, until it is cancelled. Raises what breaks after its first byte."""
    while True:
        text = ""
        body = {"prompt": "hi", "stream": True}
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code in (200, 503)
                async for part in answer.aiter_text():
                    text += part
        except httpx2.TransportError:
            if text:
                raise
            asked.num_refused += 1
        else:
            if answer.status_code == 200:
                assert text.endswith("data: [DONE]\n\n"), text
                asked.num_answered += 1
            else:
                asked.num_refused += 1


async def test_signals_end_it_and_a_second_one_at_once() -> None:
    async with cluster(1) as c:

        async def endless(request: Generate, context: Any) -> AsyncIterator[bytes]:
            yield next(chunks(1))
            await asyncio.Event().wait()

        c.workers[0].stream = endless
        config = RouterConfig(workers=(c.workers[0].address,), port=0, announce_s=30.0, drain_s=30.0)
        ready: asyncio.Queue[tuple[Router, int]] = asyncio.Queue()
        gc.unfreeze()
        running = asyncio.ensure_future(
            run_router(config, lambda router: ready.put_nowait((router, gc.get_freeze_count())))
        )
        router, num_frozen = await ready.get()
        gc.unfreeze()
        assert num_frozen, "collections would go through all that a router has"
        async with grpc.aio.insecure_channel(router.address) as channel:
            call = stub(channel).GenerateStream(Generate(text="x"))
            await call.read()
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: router.listener.health.is_draining)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(running, 5)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_taken_port_is_refused_in_words() -> None:
    async with cluster(1) as c:
        config = RouterConfig(workers=(c.workers[0].address,), port=int(c.router.address.rpartition(":")[2]))
        with pytest.raises(FailedPrecondition, match="cannot listen"):
            await start_router(config)


@pytest.mark.parametrize("flag", ["worker_token_file", "worker_ca"])
async def test_files_that_are_not_there(flag: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        await start_router(RouterConfig(workers=("127.0.0.1:1",), port=0, **{flag: tmp_path / "none"}))


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key and a certificate for 127.0.0.1 that signs itself."""
    pair = new_pair(tmp_path_factory.mktemp("tls"), "localhost")
    return pair.key, pair.cert


async def test_tls_on_both_hops(tls_files: tuple[Path, Path]) -> None:
    key, cert = tls_files
    worker = await FakeWorker("w", tls=tls_files).start()
    settings = {"workers": (worker.address,), "port": 0, "tls_cert": cert, "tls_key": key}
    router = await start_router(RouterConfig(**settings, worker_ca=cert))
    tls = grpc.ssl_channel_credentials(cert.read_bytes())
    async with grpc.aio.secure_channel(router.address, tls) as channel:
        assert (await stub(channel).Generate(Generate(text="x", request_id="r"))).request_id == "r"
    async with grpc.aio.insecure_channel(router.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await stub(channel).Generate(Generate(text="x"))
    await router.drain(0.0)
    # Without the CA the router does not get through to the worker.
    router = await start_router(RouterConfig(**settings))
    assert router.replicas.num_routable == 0
    await router.drain(0.0)
    await worker.stop()


async def test_tls_files_that_are_none(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    with pytest.raises(InvalidArgument, match="not a certificate and its key"):
        await start_router(RouterConfig(workers=("127.0.0.1:1",), port=0, tls_cert=empty, tls_key=empty))


async def test_metrics() -> None:
    async with cluster(2, metrics_port=0) as c:
        async for _ in stub(c.channel).GenerateStream(Generate(text="x")):
            pass
        c.workers[0].report(pending_tokens=50, running_requests=2, queued_requests=1, tiers={"sql": 4})
        await until(lambda: c.router.replicas[c.workers[0].address].load.num_running == 2)
        endpoint = c.router.listener.metrics
        assert endpoint is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
        worker = f'{{worker="{c.workers[0].address}"}}'
        for line in (
            'loraplex:router_requests_total{code="OK",method="GenerateStream"} 1.0',
            'loraplex:router_time_to_first_message_seconds_count{method="GenerateStream"} 1.0',
            "loraplex:router_relayed_messages_total 3.0",
            f"loraplex:router_worker_up{worker} 1.0",
            f"loraplex:router_worker_in_flight{worker} 0.0",
            f"loraplex:router_worker_work_tokens{worker} 50.0",
            f"loraplex:router_worker_running{worker} 2.0",
            f"loraplex:router_worker_queued{worker} 1.0",
            f"loraplex:router_worker_adapters{worker} 1.0",
        ):
            assert line + "\n" in text, line


async def test_reflection() -> None:
    async with cluster(1) as c:
        info = reflection_pb2_grpc.ServerReflectionStub(c.channel).ServerReflectionInfo()
        await info.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await info.read()).list_services_response.service}
        assert names == {
            "loraplex.v1.InferenceService",
            "loraplex.v1.PoolingService",
            "loraplex.v1.WorkerService",
            "loraplex.v1.AdapterService",
            "loraplex.v1.StatusService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        symbol = "loraplex.v1.InferenceService"
        await info.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
        (raw, *_) = (await info.read()).file_descriptor_response.file_descriptor_proto
        assert FileDescriptorProto.FromString(raw).service[0].name == "InferenceService"
        await info.done_writing()
        assert await info.read() is grpc.aio.EOF
        newer = c.channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(
            iter([reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()])
        )
        answer = reflection_pb2.ServerReflectionResponse.FromString(await newer.read())
        assert {service.name for service in answer.list_services_response.service} == names


async def test_ending_is_quick_without_requests() -> None:
    """Watches and open connections hold nothing up."""
    worker = await FakeWorker("w").start()
    router = await start_router(RouterConfig(workers=(worker.address,), port=0))
    async with grpc.aio.insecure_channel(router.address) as channel:
        await stub(channel).Generate(Generate(text="x"))
        await asyncio.wait_for(router.drain(30.0), 5)
    await worker.stop()
