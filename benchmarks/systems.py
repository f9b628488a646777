"""Systems under comparison: child processes on a pipe, and gRPC servers.

Each holds its model from its start to its end, so that runs of different systems can take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from workloads import WorkItem, read_workload

from loraplex import AsyncClient

HERE = Path(__file__).resolve().parent
READY = re.compile(r"ready on ([\w.:\[\]-]+:\d+)")
HTTP_READY = re.compile(r"HTTP on ([\w.:\[\]-]+:\d+)")
VLLM_SERVER = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
VLLM_READY = re.compile(r"Application startup complete")
QUIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Latency:
    """How soon one request was answered, in seconds."""

    first_token_s: float  # after the request was due
    per_token_s: float  # of those after the first, their mean; of none, what the end of the stream takes


@dataclass(frozen=True, slots=True)
class Run:
    """One workload, once."""

    seconds: float
    num_tokens: int  # that came out
    latencies: tuple[Latency, ...] = ()  # of each request, where the system is one that streams over HTTP

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


class System(Protocol):
    """Something that serves workloads."""

    @property
    def name(self) -> str: ...

    @property
    def versions(self) -> dict[str, str]: ...

    def run(self, workload: str) -> Run: ...

    def close(self) -> None: ...


class Child:
    """A process, its standard output as lines, and its standard error in a file for when it goes wrong."""

    def __init__(self, command: Sequence[str], what: str, *, merged: bool = False) -> None:
        self._what = what
        self._log: TextIO = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the child)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else self._log,
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()  # "" is the end
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Reads the child's output all the time: a child that fills the pipe with its log would else stand still."""
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):  # closed
            for line in self.process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `hear` says why it is gone
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def hear(self) -> str:
        """The next line. Ends this program with the child's last words where there is none."""
        if line := self._lines.get():
            return line
        self.process.wait(QUIT_S)
        self._log.seek(0)
        last_words = self._log.read()[-3000:]
        self.close()
        raise SystemExit(f"{self._what} ended with status {self.process.returncode}:\n{last_words}")

    def hear_until(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """The first match in what it prints. Ends this program with the child's last words where none comes."""
        heard = ""
        while (found := pattern.search(heard)) is None:
            try:
                heard += self.hear()
            except SystemExit as end:
                raise SystemExit(f"{end}{heard[-3000:]}") from None
        return found

    def close(self) -> None:
        """Ends the child. Closing twice is fine."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.terminate()
        try:
            self.process.wait(QUIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._log.close()


class PipedSystem:
    """A runner of peers/lines.py's protocol."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._child = Child(command, name)
        self.versions: dict[str, str] = json.loads(self._child.hear())["versions"]

    def run(self, workload: str) -> Run:
        self._child.say(workload)
        reply = json.loads(self._child.hear())
        return Run(reply["seconds"], reply["tokens"])

    def close(self) -> None:
        self._child.close()


def engine_command(
    inputs: Path,
    *,
    lora: bool = True,
    isa: str | None = None,
    flags: Sequence[str] = (),
    checkout: Path | None = None,
) -> list[str]:
    """Command line of inprocess.py; with a `checkout`, that of the checkout's code."""
    switch = [*(() if lora else ("--lora-off",)), *(() if isa is None else ("--isa", isa))]
    script = (HERE if checkout is None else checkout / "benchmarks") / "inprocess.py"
    return [*python_of(checkout), str(script), str(inputs), *switch, *flags]


def python_of(checkout: Path | None) -> list[str]:
    """This Python, with the packages of another checkout where one is given."""
    if checkout is None:
        return [sys.executable]
    folders = sorted({package.parent for package in checkout.glob("*/loraplex*") if package.is_dir()})
    return ["env", f"PYTHONPATH={os.pathsep.join(map(str, folders))}", sys.executable]


def vllm_command(
    python: Path,
    preload: str,
    inputs: Path,
    *,
    lora: bool,
    isa: str | None = None,
    dtype: str = "bfloat16",
    slots: int | None = None,
) -> list[str]:
    switch = [*(() if lora else ("--lora-off",)), *(() if isa is None else ("--isa", isa))]
    switch += [] if slots is None else ["--slots", str(slots)]
    return [*preloaded(preload), str(python), str(HERE / "peers/with_vllm.py"), str(inputs), "--dtype", dtype, *switch]


def peft_command(python: Path, inputs: Path) -> list[str]:
    return [str(python), str(HERE / "peers/with_peft.py"), str(inputs)]


class Server:
    """`loraplex worker` or `loraplex router` as a process; `address` is where it answers."""

    def __init__(self, *arguments: str, checkout: Path | None = None) -> None:
        """Starts `loraplex ARGUMENTS` and waits until it is ready; with a `checkout`, the code of the checkout."""
        command = [*python_of(checkout), "-m", "loraplex", *arguments, "--host", "127.0.0.1", "--port", "0"]
        self._child = Child(command, f"loraplex {arguments[0]}", merged=True)
        self.address = self._child.hear_until(READY)[1]

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def close(self) -> None:
        self._child.close()


class StreamedSystem:
    """A server, asked by the SDK's asyncio client: a stream for each request, sent when it is due."""

    def __init__(self, name: str, address: str, inputs: Path) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._inputs = inputs
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._connect(address))

    async def _connect(self, address: str) -> AsyncClient:
        client = AsyncClient(address, timeout_s=600, retries=0)
        await client.info()
        return client

    def run(self, workload: str) -> Run:
        items = read_workload(self._inputs, workload)
        start = time.perf_counter()
        num_tokens = self._runner.run(self._all(start, items))
        return Run(time.perf_counter() - start, num_tokens)

    async def _all(self, start: float, items: Sequence[WorkItem]) -> int:
        return sum(await asyncio.gather(*(self._one(start + item.arrival_s, item) for item in items)))

    async def _one(self, due: float, item: WorkItem) -> int:
        await asyncio.sleep(due - time.perf_counter())
        options: dict[str, Any] = {"max_tokens": item.max_tokens, "ignore_eos": True, "adapter_id": item.adapter_id}
        options |= item.sampling
        num_tokens = 0
        async for chunk in self._client.stream(token_ids=item.prompt_ids, **options):
            num_tokens += len(chunk.token_ids)
        return num_tokens

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


class HttpSystem:
    """A server of the OpenAI routes: each request has a connection of its own and is sent when it is due.

    Takes the number of tokens from the usage at the end of each stream and reads nothing before it, so that the client
    takes little of the cores that it shares with the server. The first token has come with the first event.
    """

    def __init__(self, name: str, child: Child, address: str, inputs: Path) -> None:
        """`child`: the server, which listens on `address`. Owned from here on."""
        self.name = name
        self.versions: dict[str, str] = {}
        self._child = child
        self._inputs = inputs
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._runner = asyncio.Runner()
        try:
            models = json.loads(self._runner.run(self._exchange("GET", "/v1/models"))[0])["data"]
        except BaseException:
            self.close()
            raise
        self._base = models[0]["id"]

    def run(self, workload: str) -> Run:
        items = read_workload(self._inputs, workload)
        bodies = [self._body(item) for item in items]
        start = time.perf_counter()
        served = self._runner.run(self._all([start + item.arrival_s for item in items], bodies))
        seconds = time.perf_counter() - start
        return Run(seconds, sum(num for num, _ in served), tuple(latency for _, latency in served))

    def _body(self, item: WorkItem) -> bytes:
        fields = {
            "model": item.adapter_id or self._base,
            "prompt": item.prompt_ids,
            "max_tokens": item.max_tokens,
            "temperature": 0,
            **item.sampling,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(fields).encode()

    async def _all(self, due: Sequence[float], bodies: Sequence[bytes]) -> list[tuple[int, Latency]]:
        return await asyncio.gather(*map(self._stream, due, bodies))

    async def _stream(self, due: float, body: bytes) -> tuple[int, Latency]:
        await asyncio.sleep(due - time.perf_counter())
        content, first = await self._exchange("POST", "/v1/completions", body)
        end = time.perf_counter()
        events = [line for line in content.splitlines() if line.startswith(b"data: {")]
        num_tokens = json.loads(events[-1].removeprefix(b"data: "))["usage"]["completion_tokens"]
        return num_tokens, Latency(first - due, (end - first) / max(1, num_tokens - 1))

    async def _exchange(self, method: str, path: str, body: bytes = b"") -> tuple[bytes, float]:
        """The answer to one request, and when its content began; of one in chunks, with the chunks' lengths among its
        lines."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        try:
            answer = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            raise SystemExit(f"{self.name} answered {error.partial[:1000].decode(errors='replace')}") from None
        content = await reader.read(1 << 16)
        began = time.perf_counter()
        content += await reader.read()
        writer.close()
        if b" 200 " not in answer.partition(b"\r\n")[0]:
            raise SystemExit(f"{self.name} answered {(answer + content)[:1000].decode(errors='replace')}")
        return content, began

    def close(self) -> None:
        self._runner.close()
        self._child.close()


def http_server(name: str, inputs: Path, flags: Sequence[str], checkout: Path | None = None) -> HttpSystem:
    """`loraplex serve` with these flags. Its ports are free ones."""
    ports = ["--host", "127.0.0.1", "--port", "0", "--http-port", "0"]
    child = Child([*python_of(checkout), "-m", "loraplex", "serve", *flags, *ports], "loraplex serve", merged=True)
    return HttpSystem(name, child, child.hear_until(HTTP_READY)[1], inputs)


def vllm_http_server(
    name: str,
    python: Path,
    preload: str,
    inputs: Path,
    *,
    lora: bool,
    dtype: str = "bfloat16",
    slots: int | None = None,
) -> HttpSystem:
    """vLLM's server on a free port, with the settings of peers/with_vllm.py, in processes of its own."""
    port, adapters = _free_port(), sorted((inputs / "adapters").iterdir())
    settings = [f"{key}={value}" for key, value in VLLM_SERVER.items() if key not in os.environ]
    settings.append(f"VLLM_CPU_OMP_THREADS_BIND=0-{(os.cpu_count() or 1) - 1}")
    options = ["--served-model-name", "base", "--dtype", dtype, "--max-model-len", "1024", "--max-num-seqs", "32"]
    options += ["--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port)]
    if lora:
        rank = max(json.loads((path / "adapter_config.json").read_text())["r"] for path in adapters)
        options += ["--enable-lora", "--max-lora-rank", str(rank), "--max-cpu-loras", str(len(adapters))]
        options += ["--max-loras", str(slots or 32), "--lora-modules", *(f"{path.name}={path}" for path in adapters)]
    serve = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(inputs / "model"), *options]
    child = Child([*preloaded(preload), *settings, *serve], "vllm serve", merged=True)
    child.hear_until(VLLM_READY)
    _wait_until_listening(port)
    return HttpSystem(name, child, f"127.0.0.1:{port}", inputs)


def preloaded(libraries: str) -> list[str]:
    """The beginning of a command that loads these libraries first, separated by colons."""
    return ["env", f"LD_PRELOAD={libraries}"] if libraries else ["env"]


def _wait_until_listening(port: int) -> None:
    """A server that says that it has started may listen a moment later."""
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
