"""Chaos run: a cluster under load with random faults.

Clients send at 70 % of what the cluster can do. Every request has to end once, within its deadline, with the right text
or a typed error; at the end nothing may be left.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import psutil

from loraplex import AsyncClient
from loraplex_contracts.errors import Internal, LoraplexError
from loraplex_proto.v1 import worker_pb2, worker_pb2_grpc
from support.processes import Running, loraplex, wait_until
from support.tcp_proxy import TcpProxy
from support.world import TinyWorld

HOT = "hot"  # the adapter whose files are replaced while it is in use
NUM_WORKERS = 3
NUM_TOKENS = 24
DEADLINES_S = (3.0, 6.0, 12.0)
LATE_S = 1.0
LAG_LOOK_S = 0.1
SHARE_OF_CAPACITY = 0.7
SHARE_OF_LEAVERS = 0.1
PAUSE_S = (1.0, 12.0)  # how long something stays frozen
BETWEEN_FAULTS_S = (1.0, 4.0)


@dataclass(frozen=True)
class Job:
    """One request as a client sends it."""

    prompt: str
    adapter_id: str
    options: tuple[tuple[str, Any], ...] = ()

    def arguments(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "adapter_id": self.adapter_id,
            "max_tokens": NUM_TOKENS,
            "ignore_eos": True,
            **dict(self.options),
        }


KINDS: tuple[tuple[tuple[str, Any], ...], ...] = (
    (),
    (("temperature", 0.8), ("seed", 11)),
    (("speculation", "prompt_lookup"),),
)


@dataclass
class Tally:
    """Counts of requests by end, and of faults. `wrong` has a line for each request that did not end as it must."""

    ends: collections.Counter[str] = field(default_factory=collections.Counter[str])
    wrong: list[str] = field(default_factory=list)
    faults: collections.Counter[str] = field(default_factory=collections.Counter[str])
    longest_s: float = 0.0
    longest_overrun_s: float = float("-inf")

    def report(self) -> str:
        """One line of what happened and one of how requests ended."""
        faults = ", ".join(f"{count} x {name}" for name, count in sorted(self.faults.items()))
        ends = ", ".join(f"{count} {name}" for name, count in self.ends.most_common())
        longest = (
            f"longest request: {self.longest_s:.1f} s; latest end: {self.longest_overrun_s:+.2f} s of its deadline"
        )
        return f"faults: {faults}\nrequests: {sum(self.ends.values())}: {ends}\n{longest}"


class Member:
    """A process that is started again on its port when it has died. Owns the process."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._stack = contextlib.ExitStack()
        self.running: Running | None = None
        self.port = 0

    def start(self) -> None:
        self.running = self._stack.enter_context(loraplex(*self._arguments, "--port", str(self.port)))
        self.port = int(self.running.address.rpartition(":")[2])

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        return self.running is not None and self.running.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        assert self.running is not None
        self.running.process.send_signal(number)

    def signal_engine(self, number: signal.Signals) -> None:
        assert self.running is not None
        with contextlib.suppress(ProcessLookupError, ValueError, psutil.NoSuchProcess):  # it may just be going
            os.kill(self.running.engine_pid(), number)

    def close(self) -> None:
        self._stack.close()


class Chaos:
    """Owns the cluster of one run, its load and its faults."""

    def __init__(self, world: TinyWorld, root: Path, seed: int) -> None:
        self._random = Random(seed)
        self._adapters = root / "adapters"
        shutil.copytree(world.adapters, self._adapters)
        self._names = world.names[:8]
        self._versions = [world.adapters / name for name in world.names[:2]]
        self._place_hot(0)
        self._workers = [Member(*_worker(world, self._adapters)) for _ in range(NUM_WORKERS)]
        self._proxies: list[TcpProxy] = []
        self._router: Member | None = None
        self._expected: dict[tuple[str, Job], str] = {}
        self._digests: dict[str, str] = {}
        self._repairs: set[asyncio.Task[None]] = set()
        self._lags: collections.deque[tuple[float, float]] = collections.deque(
            maxlen=int(2 * DEADLINES_S[-1] / LAG_LOOK_S)
        )
        self.tally = Tally()

    # --- the cluster ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await asyncio.gather(*(asyncio.to_thread(worker.start) for worker in self._workers))
        for worker in self._workers:
            proxy = TcpProxy("127.0.0.1", worker.port)
            await proxy.start()
            self._proxies.append(proxy)
        arguments = [argument for proxy in self._proxies for argument in ("--worker", proxy.address)]
        self._router = Member("router", *arguments)
        await asyncio.to_thread(self._router.start)

    async def close(self) -> None:
        await asyncio.gather(*self._repairs, return_exceptions=True)
        for member in (*self._workers, self._router):
            if member is not None:
                await asyncio.to_thread(member.close)
        for proxy in self._proxies:
            await proxy.close()

    @property
    def address(self) -> str:
        assert self._router is not None
        return self._router.address

    def _place_hot(self, version: int) -> None:
        """Puts other files in the adapter's place, as an operator does: aside, then renamed."""
        target, new, old = self._adapters / HOT, self._adapters / ".new", self._adapters / ".old"
        shutil.copytree(self._versions[version], new)
        if target.exists():
            target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)

    # --- right texts and capacity ----------------------------------------------------------------------------------

    async def learn(self) -> float:
        """Asks one worker for every text while nothing is wrong. Returns how many requests a second the cluster can
        do."""
        prompts = [f"request {number} says {'x' * (7 * number)}" for number in range(4)]
        jobs = [Job(prompt, name, kind) for prompt in prompts for name in self._names for kind in KINDS]
        async with AsyncClient(self._workers[0].address) as client:
            for job in jobs:
                answer = await client.generate(**job.arguments(), timeout_s=60)
                self._digests[job.adapter_id] = answer.adapter_digest
                self._expected[answer.adapter_digest, _nameless(job)] = answer.text
        async with AsyncClient(self.address) as client:
            many = jobs * 3
            started_s = time.monotonic()
            await asyncio.gather(*(client.generate(**job.arguments(), timeout_s=120) for job in many))
            return len(many) / (time.monotonic() - started_s)

    def _draw(self) -> Job:
        digest, job = self._random.choice(list(self._expected))
        name = next(name for name, known in self._digests.items() if known == digest)
        is_hot = name in self._names[:2] and self._random.random() < 0.5
        return Job(job.prompt, HOT if is_hot else name, job.options)

    # --- clients ----------------------------------------------------------------------------------------------------

    async def load(self, seconds: float, per_second: float) -> None:
        """Requests come independently of each other and of how earlier ones fare."""
        requests: list[asyncio.Task[None]] = []
        end_s = time.monotonic() + seconds
        watching = asyncio.create_task(self._watch_lag())
        async with AsyncClient(self.address) as client:
            while time.monotonic() < end_s:
                requests.append(asyncio.create_task(self._request(client)))
                await asyncio.sleep(self._random.expovariate(per_second))
            await asyncio.gather(*requests)
        watching.cancel()

    async def _watch_lag(self) -> None:
        """Records how late this process itself is: on a busy machine its clients' clocks run behind."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LAG_LOOK_S)
            now_s = time.monotonic()
            self._lags.append((now_s, now_s - before_s - LAG_LOOK_S))

    def _lag_s(self, since_s: float) -> float:
        return max((lag_s for at_s, lag_s in self._lags if at_s >= since_s), default=0.0)

    async def _request(self, client: AsyncClient) -> None:
        job, deadline_s = self._draw(), self._random.choice(DEADLINES_S)
        ask = self._stream if self._random.random() < 0.7 else self._generate
        started_s = time.monotonic()
        try:
            end = await ask(client, job, deadline_s)
        except LoraplexError as error:
            end = error.reason
            if isinstance(error, Internal) or not error.reason or end == "CANCELLED":
                self.tally.wrong.append(f"{job}: {end}: {error}")
        except Exception as error:  # whatever reaches a client without a type is a finding
            end = type(error).__name__
            self.tally.wrong.append(f"{job}: {error!r}")
        elapsed_s = time.monotonic() - started_s
        elapsed_s -= self._lag_s(started_s)
        overrun_s = elapsed_s - deadline_s
        self.tally.longest_s = max(self.tally.longest_s, elapsed_s)
        self.tally.longest_overrun_s = max(self.tally.longest_overrun_s, overrun_s)
        if overrun_s > LATE_S:
            self.tally.wrong.append(f"{job}: ended {overrun_s:.1f} s behind its deadline")
        self.tally.ends[end] += 1

    async def _generate(self, client: AsyncClient, job: Job, deadline_s: float) -> str:
        answer = await client.generate(**job.arguments(), timeout_s=deadline_s)
        return self._compare(job, answer.adapter_digest, answer.text)

    async def _stream(self, client: AsyncClient, job: Job, deadline_s: float) -> str:
        leaves = self._random.random() < SHARE_OF_LEAVERS
        text, digest, reasons = "", "", list[str]()
        async with contextlib.aclosing(client.stream(**job.arguments(), timeout_s=deadline_s)) as chunks:
            async for chunk in chunks:
                text += chunk.text
                digest = chunk.adapter_digest or digest
                reasons += [chunk.finish_reason] if chunk.finish_reason else []
                if leaves:
                    return "left"
        if len(reasons) != 1:
            self.tally.wrong.append(f"{job}: ended {len(reasons)} times")
        return self._compare(job, digest, text)

    def _compare(self, job: Job, digest: str, text: str) -> str:
        expected = self._expected.get((digest, _nameless(job)))
        if text != expected:
            self.tally.wrong.append(f"{job}: {text!r} in place of {expected!r}")
            return "wrong text"
        return "right text"

    # --- faults -----------------------------------------------------------------------------------------------------

    async def break_things(self, seconds: float) -> None:
        """One fault after the other, each repaired by itself after a while."""
        faults: list[tuple[str, int, Callable[[], Awaitable[None]]]] = [
            ("front end killed", 2, self._kill_front_end),
            ("engine killed", 2, self._kill_engine),
            ("front end frozen", 3, self._freeze_front_end),
            ("engine frozen", 3, self._freeze_engine),
            ("proxy stopped", 3, self._stop_proxy),
            ("worker restarted", 2, self._restart),
            ("adapter replaced", 4, self._replace_adapter),
            ("adapter unloaded", 1, self._unload),
            ("router killed", 1, self._kill_router),
        ]
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            name, _, fault = self._random.choices(faults, [weight for _, weight, _ in faults])[0]
            self.tally.faults[name] += 1
            task = asyncio.create_task(self._repaired(fault))
            self._repairs.add(task)
            task.add_done_callback(self._repairs.discard)
            await asyncio.sleep(self._random.uniform(*BETWEEN_FAULTS_S))
        await asyncio.gather(*self._repairs)

    async def _repaired(self, fault: Callable[[], Awaitable[None]]) -> None:
        await fault()
        for member in (*self._workers, self._router):
            if member is not None and not member.is_alive:
                await self._start_again(member)

    async def _start_again(self, member: Member) -> None:
        """Starts a worker again as a supervisor does. Several faults may have found it dead."""
        if member.running is None:
            return
        member.running = None
        for _ in range(20):
            try:
                await asyncio.to_thread(member.start)
            except AssertionError:  # the port is not free yet, or it was told to end while it started
                await asyncio.sleep(0.5)
            else:
                return
        self.tally.wrong.append(f"worker on port {member.port} could not be started again")

    def _victim(self) -> Member | None:
        """A worker that runs; one at least is left in peace."""
        alive = [worker for worker in self._workers if worker.is_alive]
        return self._random.choice(alive) if len(alive) > 1 else None

    def _pause_s(self) -> float:
        return self._random.uniform(*PAUSE_S)

    async def _kill_front_end(self) -> None:
        if victim := self._victim():
            victim.signal(signal.SIGKILL)
            await asyncio.to_thread(_await_end, victim)

    async def _kill_engine(self) -> None:
        if victim := self._victim():
            victim.signal_engine(signal.SIGKILL)
            await asyncio.to_thread(_await_end, victim)

    async def _freeze_front_end(self) -> None:
        if victim := self._victim():
            victim.signal(signal.SIGSTOP)
            await asyncio.sleep(self._pause_s())
            if victim.is_alive:
                victim.signal(signal.SIGCONT)

    async def _freeze_engine(self) -> None:
        if victim := self._victim():
            victim.signal_engine(signal.SIGSTOP)
            await asyncio.sleep(self._pause_s())
            if victim.is_alive:
                victim.signal_engine(signal.SIGCONT)

    async def _stop_proxy(self) -> None:
        proxy = self._random.choice(self._proxies)
        proxy.stop_forwarding()
        await asyncio.sleep(self._pause_s())
        proxy.resume()

    async def _restart(self) -> None:
        if victim := self._victim():
            victim.signal(signal.SIGTERM)
            await asyncio.to_thread(_await_end, victim)

    async def _kill_router(self) -> None:
        assert self._router is not None
        if self._router.is_alive:
            self._router.signal(signal.SIGKILL)
            await asyncio.to_thread(_await_end, self._router)

    async def _replace_adapter(self) -> None:
        self._place_hot(self._random.randrange(2))
        with contextlib.suppress(LoraplexError):  # a worker may be away
            async with AsyncClient(self.address) as client:
                await client.adapters.load(HOT, timeout_s=5)

    async def _unload(self) -> None:
        with contextlib.suppress(LoraplexError):
            async with AsyncClient(self.address) as client:
                await client.adapters.unload(self._random.choice(self._names), timeout_s=5)

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_nothing_is_left(self) -> None:
        """Workers are idle and have their memory back; processes end with status 0 and leave none behind."""
        for worker in self._workers:
            wait_until(lambda worker=worker: _is_idle(worker.address), 20, f"the worker {worker.address} is idle")
        family = [child for worker in self._workers for child in _family(worker)]
        for member in (self._router, *self._workers):
            assert member is not None
            assert member.running is not None
            assert member.running.end(timeout_s=30) == 0, member.running.output
            assert "unaccounted" not in member.running.output
            assert "internal error" not in member.running.output
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, "processes are left"


def _worker(world: TinyWorld, adapters: Path) -> tuple[str, ...]:
    # float64: its sums do not depend on the batch, so texts are comparable token for token.
    return (
        "worker", str(world.model), "--adapters", str(adapters), "--dtype", "float64", "--threads", "1",
        "--adapter-slots", "6", "--max-running", "16", "--kv-memory", "8MiB", "--drain", "5", "--announce", "0",
    )  # fmt: skip


def _nameless(job: Job) -> Job:
    """The text depends on the adapter's content, not on its name."""
    return Job(job.prompt, "", job.options)


def _await_end(member: Member) -> None:
    running = member.running
    if running is not None:
        with contextlib.suppress(Exception):
            running.process.wait(30)


def _is_idle(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        load = worker_pb2_grpc.WorkerServiceStub(channel).GetLoad(worker_pb2.GetLoadRequest(), timeout=5).load
    # One block is never handed out; cached prefixes count as free.
    is_free = load.free_kv_blocks >= load.total_kv_blocks - 1
    return load.running_requests == 0 and load.queued_requests == 0 and is_free


def _family(member: Member) -> list[psutil.Process]:
    assert member.running is not None
    return psutil.Process(member.running.process.pid).children(recursive=True)


async def run_chaos(world: TinyWorld, root: Path, seconds: float, seed: int) -> Tally:
    """The whole run. Raises AssertionError when something is left at its end."""
    chaos = Chaos(world, root, seed)
    try:
        await chaos.start()
        capacity = await chaos.learn()
        loading = asyncio.create_task(chaos.load(seconds + PAUSE_S[1], SHARE_OF_CAPACITY * capacity))
        await chaos.break_things(seconds)
        await loading
        await asyncio.to_thread(chaos.check_nothing_is_left)
        return chaos.tally
    finally:
        await chaos.close()
