"""Fleets on Ray: up, status, down; each row of the table of failures."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.certificates import new_pair
from support.credentials import credential, write_credentials
from support.fleet import HEAD, SECOND, Fleet, ray_is_missing, ray_nodes, runs, wait_for
from support.world import TinyWorld

from loraplex import AsyncClient, Client, LoraplexError, Tls, Unauthenticated

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(ray_is_missing()), reason=ray_is_missing()),
]
PROMPT = "hello"
NUM_TOKENS = 400


def spec_of(world: TinyWorld, folder: Path, **worker: Any) -> dict[str, Any]:
    return {
        "model": str(world.model),
        "adapters": str(world.adapters),
        "worker": {
            "count": 2,
            "resources": {"cpu": 1},
            "store": str(folder / "store"),
            "flags": {"dtype": "float64", "kv-memory": "64MiB"},
            **worker,
        },
        "router": {"port": 0, "resources": {"front": 1}},
        "drain": 60,
    }


def text_of(address: str, adapter_id: str) -> str:
    with Client(address) as client:
        return client.generate(PROMPT, adapter_id=adapter_id, max_tokens=12, ignore_eos=True).text


@pytest.mark.slow
def test_a_fleet_comes_up_answers_and_leaves_nothing(tiny_world: TinyWorld, tmp_path: Path) -> None:
    with ray_nodes(tmp_path, spec_of(tiny_world, tmp_path), (2,)) as fleet:
        done = fleet.up("--wait", "120")
        assert "serves on 127.0.0.2:" in done.stdout
        before = fleet.status()
        workers, routers = (part["replicas"] for part in before["parts"])
        assert sorted(one["name"] for one in workers) == ["w0", "w1"]
        for name in tiny_world.names[:2]:
            assert len({text_of(one["address"], name) for one in (*workers, *routers)}) == 1
        assert "serves on" in fleet.up().stdout
        assert "is available" in fleet.logs("router"), "what the router's process wrote"
        assert "tokens of KV cache" in fleet.logs("worker")
        pids = [one["pid"] for part in fleet.status()["parts"] for one in part["replicas"]]
        assert pids == [one["pid"] for one in (*workers, *routers)], "what is the same stays"
        ended = fleet.command("down", "--address", fleet.spec["address"])
        assert "fleet loraplex has ended" in ended.stdout, ended.stderr
        assert not [pid for pid in pids if runs(pid)]
        assert fleet.command("status", "--address", fleet.spec["address"]).returncode == 1
    assert fleet.outlived == []


@pytest.mark.slow
def test_a_fleet_with_credentials_and_tls(tiny_world: TinyWorld, tmp_path: Path) -> None:
    """A fleet set up as beyond loopback: workers take calls of its routers alone, and every connection has TLS."""
    pair, token_file = new_pair(tmp_path, "fleet", [HEAD]), tmp_path / "token"
    token_file.write_text("of the routers\n")
    auth_file = write_credentials(tmp_path / "auth.json", credential("alice", "a", "*"))
    spec = spec_of(tiny_world, tmp_path, count=1)
    spec["secrets"] = {"auth-file": str(auth_file), "worker-token-file": str(token_file)}
    spec["tls"] = {"cert": str(pair.cert), "key": str(pair.key), "ca": str(pair.cert)}
    spec["router"]["flags"] = {"tls-cert": str(pair.cert), "tls-key": str(pair.key)}
    tls = Tls(root_certificates=pair.cert.read_bytes())
    with ray_nodes(tmp_path, spec, (2,)) as fleet:
        fleet.up("--wait", "120")
        (worker,), (router,) = (fleet.serving(kind) for kind in ("worker", "router"))
        with Client(router["address"], tls=tls, token="alice") as client:
            assert client.generate(PROMPT, adapter_id=tiny_world.names[0], max_tokens=4, ignore_eos=True).text
        for address, token in ((router["address"], ""), (worker["address"], "alice"), (worker["address"], "")):
            with Client(address, tls=tls, token=token) as client, pytest.raises(Unauthenticated):
                client.generate(PROMPT, max_tokens=4)
        with Client(worker["address"], retries=0, timeout_s=5) as client, pytest.raises(LoraplexError):
            client.generate(PROMPT, max_tokens=4)
        for process in (psutil.Process(one["pid"]) for one in (worker, router)):
            assert "of the routers" not in " ".join([*process.cmdline(), *process.environ().values()])
        time.sleep(3)
        assert fleet.serving() == [worker], "probes have the token and trust the certificate"
    assert fleet.outlived == []


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two nodes with room for two workers each, the router on the first."""
    folder = tmp_path_factory.mktemp("fleet")
    with ray_nodes(folder, spec_of(tiny_world, folder), (2, 2)) as made:
        made.up()
        yield made
    assert made.outlived == []


@pytest.fixture
def whole(fleet: Fleet) -> Fleet:
    fleet.wait_whole()
    return fleet


def said(what: str, seconds: float) -> None:
    print(f"\nfleet: {what}: {seconds:.1f} s")


@asynccontextmanager
async def asking(
    address: str,
    num_clients: int,
    adapters: tuple[str, ...] = ("",),
    num_tokens: int = NUM_TOKENS,
    *,
    rest_s: float = 0.0,
) -> AsyncGenerator[dict[str, int]]:
    """Clients that ask again and again, each after a rest, which leaves processes that start a share of the cores; how
    their requests ended."""
    ends, is_over = dict[str, int](), False

    async def ask(client: AsyncClient, number: int) -> None:
        while not is_over:
            try:
                chunks = [
                    chunk
                    async for chunk in client.stream(
                        PROMPT, adapter_id=adapters[number % len(adapters)], max_tokens=num_tokens, ignore_eos=True
                    )
                ]
                end = "ok" if sum(len(one.token_ids) for one in chunks) == num_tokens else "short"
            except LoraplexError as error:
                end = error.reason
                await asyncio.sleep(0.2)
            ends[end] = ends.get(end, 0) + 1
            if not is_over:
                await asyncio.sleep(rest_s)

    async with AsyncClient(address) as client:
        tasks = [asyncio.create_task(ask(client, number)) for number in range(num_clients)]
        try:
            yield ends
        finally:
            is_over = True
            await asyncio.gather(*tasks)


def replaced(fleet: Fleet, pid: int) -> bool:
    workers = fleet.serving()
    return len(workers) == 2 and pid not in [one["pid"] for one in workers]


@pytest.mark.slow
async def test_engine_killed(whole: Fleet) -> None:
    victim = whole.serving()[0]
    (engine,) = [one for one in psutil.Process(victim["pid"]).children() if "spawn_main" in " ".join(one.cmdline())]
    async with asking(whole.router, 4, rest_s=3) as ends:
        engine.kill()
        said(
            "engine killed to served again",
            await asyncio.to_thread(wait_for, lambda: replaced(whole, victim["pid"]), 90, "another worker"),
        )
    assert set(ends) <= {"ok", "ENGINE_LOST", "WORKER_LOST"}, ends
    assert "status 1" in " ".join(one["text"] for one in whole.part("worker")["failures"])
    assert victim["name"] in [one["name"] for one in whole.serving()], "the name and its adapters stay"


@pytest.mark.slow
def test_worker_killed(whole: Fleet) -> None:
    victim = whole.serving()[0]
    psutil.Process(victim["pid"]).kill()
    said("worker killed to served again", wait_for(lambda: replaced(whole, victim["pid"]), 90, "another worker"))


@pytest.mark.nightly
async def test_worker_frozen(whole: Fleet) -> None:
    victim = whole.serving()[1]
    frozen = psutil.Process(victim["pid"])
    async with asking(whole.router, 4, rest_s=3) as ends:
        frozen.suspend()
        said(
            "worker frozen to served again",
            await asyncio.to_thread(wait_for, lambda: replaced(whole, victim["pid"]), 120, "another worker"),
        )
    assert set(ends) <= {"ok", "WORKER_LOST"}, ends
    assert not frozen.is_running()


@pytest.mark.slow
async def test_replica_killed(whole: Fleet) -> None:
    """A killed replica's child ends its requests, and the next replica waits for the folder of its store."""
    victim = whole.serving()[0]
    async with AsyncClient(victim["address"]) as client:
        stream = client.stream(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True)
        first = await anext(stream)
        psutil.Process(victim["pid"]).parent().kill()
        chunks = [first, *[chunk async for chunk in stream]]
    assert sum(len(one.token_ids) for one in chunks) == NUM_TOKENS
    said(
        "replica killed to served again",
        await asyncio.to_thread(wait_for, lambda: replaced(whole, victim["pid"]), 90, "another worker"),
    )
    await asyncio.to_thread(wait_for, lambda: not runs(victim["pid"]), 30, "the end of the child")


@pytest.mark.slow
def test_router_killed(whole: Fleet, tiny_world: TinyWorld) -> None:
    router = whole.serving("router")[0]
    psutil.Process(router["pid"]).kill()

    def is_back() -> bool:
        found = whole.serving("router")
        return len(found) == 1 and found[0]["pid"] != router["pid"]

    said("router killed to another", wait_for(is_back, 60, "another router"))
    address = whole.router

    def answers() -> bool:
        try:
            return bool(text_of(address, tiny_world.names[0]))
        except LoraplexError:
            return False

    wait_for(answers, 30, "an answer")


@pytest.mark.nightly
def test_router_frozen(whole: Fleet, tiny_world: TinyWorld) -> None:
    frozen = whole.serving("router")[0]
    psutil.Process(frozen["pid"]).suspend()

    def is_replaced() -> bool:
        found = whole.serving("router")
        return len(found) == 1 and found[0]["pid"] != frozen["pid"]

    said("router frozen to another", wait_for(is_replaced, 120, "another router"))
    assert text_of(whole.router, tiny_world.names[0])
    assert not runs(frozen["pid"])


@pytest.mark.nightly
async def test_controller_of_serve_killed(whole: Fleet) -> None:
    """Ray starts it again, and it finds the replicas that there are."""
    (controller,) = [one for node in whole.nodes for one in node.processes("ray::ServeController")]
    pids = {one["pid"] for kind in ("worker", "router") for one in whole.serving(kind)}
    async with asking(whole.router, 4) as ends:
        controller.kill()
        await asyncio.sleep(15)  # longer than three checks of its health
    await asyncio.to_thread(whole.up)
    assert {one["pid"] for kind in ("worker", "router") for one in whole.serving(kind)} == pids
    assert set(ends) == {"ok"}, ends


@pytest.mark.slow
async def test_directory_killed(whole: Fleet) -> None:
    (directory,) = [one for node in whole.nodes for one in node.processes("ray::Directory")]
    names = {one["pid"]: one["name"] for one in whole.serving()}
    async with asking(whole.router, 4) as ends:
        directory.kill()
        filled_s = await asyncio.to_thread(wait_for, lambda: len(whole.serving()) == 2, 30, "the directory")
        said("directory killed to filled again", filled_s)
        await asyncio.sleep(7)  # longer than a lease
    assert set(ends) == {"ok"}, ends
    assert {one["pid"]: one["name"] for one in whole.serving()} == names


@pytest.mark.slow
def test_no_resources(whole: Fleet) -> None:
    done = whole.up("--wait", "8", count=5, succeeds=False)
    assert "not all of it serves" in done.stderr
    (sentence,) = whole.part("worker")["pending"]
    assert "waits for a node with 1 CPU" in sentence
    whole.up(count=2)
    assert whole.part("worker")["pending"] == []


@pytest.mark.slow
async def test_scale_up_and_down(whole: Fleet) -> None:
    start_s = time.monotonic()
    await asyncio.to_thread(whole.up, count=3)
    said("scale up by one", time.monotonic() - start_s)
    router = whole.router
    async with asking(router, 12) as ends:
        await asyncio.sleep(2)
        start_s = time.monotonic()
        await asyncio.to_thread(whole.up, count=2)
        await asyncio.to_thread(wait_for, lambda: len(whole.part("worker")["replicas"]) == 2, 60, "two workers")
        said("scale down by one under load", time.monotonic() - start_s)
    assert set(ends) == {"ok"}, ends


@pytest.mark.nightly
async def test_workers_follow_the_load(whole: Fleet) -> None:
    scale = {"target-pending-tokens": 600, "up-after": "1s", "down-after": "5s", "settle": "2s"}
    await asyncio.to_thread(whole.up, count={"min": 1, "max": 3}, scale=scale)
    async with asking(whole.router, 12) as ends:
        start_s = time.monotonic()
        await asyncio.to_thread(wait_for, lambda: len(whole.serving()) == 3, 90, "three workers")
        said("load to three workers", time.monotonic() - start_s)
    start_s = time.monotonic()
    await asyncio.to_thread(wait_for, lambda: len(whole.part("worker")["replicas"]) == 1, 90, "one worker")
    said("no load to one worker", time.monotonic() - start_s)
    assert set(ends) == {"ok"}, ends
    await asyncio.to_thread(whole.up, count=2, scale={})


@pytest.mark.nightly
async def test_workers_that_do_not_start_leave_the_old_ones(whole: Fleet) -> None:
    pids = sorted(one["pid"] for one in whole.serving())
    good = dict(whole.spec["worker"]["flags"])
    async with asking(whole.router, 4, rest_s=3) as ends:
        done = await asyncio.to_thread(whole.up, succeeds=False, timeout_s=300, flags={**good, "kv-memory": "1KiB"})
    assert "workers do not start" in done.stderr
    assert "--kv-memory" in done.stderr, "the child's own words"
    assert sorted(one["pid"] for one in whole.serving()) == pids
    assert set(ends) == {"ok"}, ends
    whole.up(flags=good)


@pytest.mark.slow
async def test_routers_that_would_not_start_are_not_rolled(whole: Fleet) -> None:
    pids = [one["pid"] for one in whole.serving("router")]
    whole.spec["router"]["flags"] = {"tls-cert": "/nowhere/cert", "tls-key": "/nowhere/key"}
    try:
        async with asking(whole.router, 4) as ends:
            done = await asyncio.to_thread(whole.up, succeeds=False)
    finally:
        del whole.spec["router"]["flags"]
    assert "routers would not start" in done.stderr
    assert "/nowhere/cert" in done.stderr, "the child's own words"
    assert [one["pid"] for one in whole.serving("router")] == pids
    assert set(ends) == {"ok"}, ends


@pytest.mark.nightly
@pytest.mark.timeout(700)  # new workers start beside 200 streams: minutes on two cores
async def test_rolling_three_workers_with_200_streams(whole: Fleet, tiny_world: TinyWorld) -> None:
    await asyncio.to_thread(whole.up, count=3)
    before = {one["pid"] for one in whole.serving()}
    good = dict(whole.spec["worker"]["flags"])
    async with asking(whole.router, 200, ("", *tiny_world.names[:7]), 100) as ends:
        await asyncio.sleep(3)
        start_s = time.monotonic()
        await asyncio.to_thread(whole.up, timeout_s=400, flags={**good, "adapter-slots": 32})
        await asyncio.to_thread(
            wait_for, lambda: not before & {one["pid"] for one in whole.part("worker")["replicas"]}, 120, "new ones"
        )
        said("rolling 3 workers with 200 streams", time.monotonic() - start_s)
    assert set(ends) == {"ok"}, ends
    await asyncio.to_thread(whole.up, count=2)


@pytest.mark.nightly
def test_a_change_where_there_is_no_room_for_one_more(whole: Fleet) -> None:
    whole.up(count=4)
    before = {one["pid"] for one in whole.serving()}
    changed = {**whole.spec["worker"]["flags"], "adapter-slots": 16}
    done = whole.up("--wait", "15", succeeds=False, flags=changed)
    assert "what ran before serves until then" in done.stderr
    assert {one["pid"] for one in whole.serving()} == before
    whole.up(count=3, timeout_s=300)
    assert not before & {one["pid"] for one in whole.part("worker")["replicas"]}
    whole.up(count=2)


async def workers_in_rotation(client: AsyncClient) -> set[str]:
    """Addresses of the workers that the router would send requests to."""
    found = (await client.status()).workers
    return {one.worker_id.rpartition("=")[2] for one in found if one.state in ("serving", "starting")}


@pytest.mark.slow
async def test_node_lost(whole: Fleet) -> None:
    """Everything on the second node dies at once."""
    await asyncio.to_thread(whole.up, count=3)
    second = whole.nodes[1]
    lost = [one for one in whole.serving() if one["node"] == SECOND]
    assert lost, whole.serving()
    pids, addresses = {one["pid"] for one in lost}, {one["address"] for one in lost}
    async with asking(whole.router, 8) as ends, AsyncClient(whole.router) as client:
        await asyncio.sleep(1)
        assert addresses <= await workers_in_rotation(client)
        start_s = time.monotonic()
        for one in [psutil.Process(second.process.pid), *second.processes()]:
            if one.is_running():
                one.send_signal(signal.SIGKILL)
        async with asyncio.timeout(30):
            while addresses & await workers_in_rotation(client):
                await asyncio.sleep(0.02)
        said("node lost to out of rotation", time.monotonic() - start_s)
        await asyncio.to_thread(
            wait_for, lambda: not pids & {one["pid"] for one in whole.part("worker")["replicas"]}, 60, "out"
        )
        said("node lost to out of the directory", time.monotonic() - start_s)
        num_lost = sum(number for end, number in ends.items() if end != "ok")
    assert set(ends) <= {"ok", "WORKER_LOST"}, ends
    assert num_lost <= 8, "each stream that ran there once, and no new one"
    assert all(one["node"] == HEAD for one in whole.serving())
    second.process.wait()
    whole.nodes.remove(second)
    await asyncio.to_thread(whole.up, count=2)


@pytest.mark.slow
async def test_gcs_killed(fleet: Fleet, tiny_world: TinyWorld) -> None:
    """Serving goes on; when Ray gives up its nodes, children drain and end."""
    await asyncio.to_thread(fleet.wait_whole)
    router, pids = fleet.router, [one["pid"] for kind in ("worker", "router") for one in fleet.serving(kind)]
    (gcs,) = fleet.nodes[0].processes("gcs_server")
    fleet.nodes[0].process.send_signal(signal.SIGSTOP)  # it would end the whole node at once
    async with asking(router, 4) as ends:
        gcs.kill()
        await asyncio.sleep(4)
        assert set(ends) <= {"ok"}, ends
        start_s = time.monotonic()
    assert await asyncio.to_thread(text_of, router, tiny_world.names[0])
    await asyncio.to_thread(wait_for, lambda: not any(map(runs, pids)), 90, "the end")
    said("GCS killed to the orderly end of all", 4 + time.monotonic() - start_s)
