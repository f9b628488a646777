"""Life cycle of adapters through a router and a live worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from support.adapter_files import write_adapter
from support.credentials import credential, write_credentials
from support.fake_workers import router_for, until
from support.inline_worker import inline_worker, small_engine
from support.world import TinyWorld

from loraplex import (
    AdapterInUse,
    AdapterInvalid,
    AdapterNotFound,
    AdapterVersionNotFound,
    AsyncClient,
    DigestMismatch,
    InvalidAdapterId,
)
from loraplex_router.server import Router
from loraplex_server.config import AdaptersConfig, WorkerConfig

pytestmark = pytest.mark.timeout(300)
PROMPT = "the same beginning of a prompt, for the prefix cache " * 2


@pytest.fixture(scope="module")
def root(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("life")
    for folder, name in (("v1", tiny_world.names[0]), ("v2", tiny_world.names[1]), ("team/v3", tiny_world.names[2])):
        copy(tiny_world.adapters / name, root / folder)
    return root


def copy(folder: Path, to: Path) -> None:
    to.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        temporary = to / f".{file.name}"
        temporary.write_bytes(file.read_bytes())
        temporary.replace(to / file.name)


def worker_config(tiny_world: TinyWorld, adapters: AdaptersConfig) -> WorkerConfig:
    return WorkerConfig(small_engine(tiny_world.model, adapters), port=0)


@pytest.fixture(scope="module")
def address(tiny_world: TinyWorld, root: Path) -> Iterator[str]:
    adapters = AdaptersConfig(root=root, num_device_slots=4, preload=("nowhere", "team/v3"))
    with inline_worker(worker_config(tiny_world, adapters)) as worker:
        yield worker.address


async def text(client: AsyncClient, adapter_id: str) -> str:
    return (await client.generate(PROMPT, adapter_id=adapter_id, max_tokens=12, ignore_eos=True)).text


async def test_adapters_are_preloaded(address: str) -> None:
    async with AsyncClient(address) as client:
        (row,) = await client.adapters.get("team/v3")
        assert (row.state, row.uses) == ("on_device", 0)


async def test_versions_under_one_name(address: str, root: Path, tiny_world: TinyWorld) -> None:
    async with router_for([address]) as (router, _), AsyncClient(router.address) as client:
        expected = {name: await text(client, name) for name in ("v1", "v2")}
        assert len(set(expected.values())) == 2
        copy(tiny_world.adapters / tiny_world.names[0], root / "sql")
        config = root / "sql/adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "tiny"}))
        assert await text(client, "sql") == expected["v1"]
        (old,) = await client.adapters.get("sql")
        assert old.uses > 0
        assert old.base == "tiny"
        assert old.tasks == ("generate", "embed")
        running = client.stream(PROMPT, adapter_id="sql", max_tokens=60, ignore_eos=True)
        first = await anext(running)
        with pytest.raises(AdapterInUse):
            await client.adapters.unload("sql", if_unused=True)
        # Another content in its place: new requests get it, and the running one goes on with the old one.
        copy(tiny_world.adapters / tiny_world.names[1], root / "sql")
        assert await text(client, "sql") == expected["v1"]
        with pytest.raises(DigestMismatch):
            await client.adapters.load("sql", expected_digest=old.digest)
        async with asyncio.timeout(20):  # the worker may be idle by now
            with pytest.raises(DigestMismatch):
                await client.adapters.load("sql", if_absent=True, expected_digest="0" * 64)
        (kept,) = await client.adapters.load("sql", if_absent=True)
        assert (kept.digest, kept.last_error_reason) == (old.digest, "DIGEST_MISMATCH")
        (new,) = await client.adapters.load("sql")
        assert new.digest != old.digest
        assert new.last_error == ""
        assert await text(client, "sql") == expected["v2"]
        assert await text(client, f"sql@{old.digest[:12]}") == expected["v1"]
        assert await text(client, f"sql@{new.digest}") == expected["v2"]
        whole = first.text + "".join([chunk.text async for chunk in running])
        assert whole.startswith(expected["v1"])
        with pytest.raises(AdapterVersionNotFound):
            await text(client, "sql@00000000")
        with pytest.raises(InvalidAdapterId):
            await client.adapters.load(f"sql@{old.digest}")
        await client.adapters.unload("sql", if_unused=True)
        with pytest.raises(AdapterVersionNotFound):
            await text(client, f"sql@{old.digest[:12]}")


async def test_versions_after_a_restart(tiny_world: TinyWorld, root: Path, tmp_path: Path) -> None:
    config = worker_config(tiny_world, AdaptersConfig(root=root, num_device_slots=4, store_dir=tmp_path / "store"))
    copy(tiny_world.adapters / tiny_world.names[0], root / "kept")
    with inline_worker(config) as worker:
        async with AsyncClient(worker.address) as client:
            expected = await text(client, "kept")
            (old,) = await client.adapters.get("kept")
            copy(tiny_world.adapters / tiny_world.names[1], root / "kept")
            await client.adapters.load("kept")
            await client.adapters.load("v1")
    with inline_worker(config) as worker:
        async with router_for([worker.address]) as (router, _), AsyncClient(router.address) as client:
            assert await text(client, f"kept@{old.digest[:12]}") == expected
            assert await text(client, "kept") != expected
            with pytest.raises(AdapterVersionNotFound):  # the same content under a name that never had it
                await text(client, f"v2@{old.digest[:12]}")


async def test_a_folder_under_another_name(address: str, root: Path) -> None:
    async with router_for([address]) as (router, _), AsyncClient(router.address) as client:
        (row,) = await client.adapters.load("mine", source="team/v3", pin=True)
        assert (row.adapter_id, row.source, row.pinned) == ("mine", "team/v3", True)
        assert await text(client, "mine") == await text(client, "team/v3")
        (row,) = await client.adapters.load("mine", source=f"{root}/v1")
        assert await text(client, "mine") == await text(client, "v1")
        for source in ("/etc", "nowhere"):
            with pytest.raises(AdapterNotFound):
                await client.adapters.load("mine", source=source)
        assert await text(client, "mine") == await text(client, "v1")
        await client.adapters.unload("mine")
        with pytest.raises(AdapterNotFound):
            await text(client, "mine")


async def test_near_names_are_the_callers_own(address: str, root: Path, tiny_world: TinyWorld, tmp_path: Path) -> None:
    """The worker suggests among all names; the router among those of its client, and over HTTP none are told."""
    for name in ("acme/orders", "globex/orders"):
        copy(tiny_world.adapters / tiny_world.names[0], root / name)
    rows = [credential(tenant, tenant, f"{tenant}/*", roles=("user", "admin")) for tenant in ("acme", "globex")]
    auth_file = write_credentials(tmp_path / "auth.json", *rows)
    async with router_for([address], auth_file=auth_file, worker_token="w", http_port=0) as (router, _):
        assert router.http is not None
        for tenant in ("acme", "globex"):
            other = {"acme": "globex", "globex": "acme"}[tenant]
            async with AsyncClient(router.address, token=tenant) as client:
                await client.adapters.load(f"{tenant}/orders")
                await until(lambda tenant=tenant: is_reported(router, f"{tenant}/orders"))
                for name in (f"{tenant}/order", f"{tenant}/oders", f"{other}/order", f"{other}/orders"):
                    with pytest.raises(AdapterNotFound) as caught:
                        await text(client, name)
                    error = caught.value
                    assert f"{other}/orders" not in error.message.replace(f"adapter '{name}'", "")
                    assert f"{other}/orders" not in error.metadata.get("near_names", "")
                    if name.startswith(tenant):
                        assert f"did you mean '{tenant}/orders'" in error.message
            async with httpx2.AsyncClient(
                base_url=f"http://{router.http.address}", headers={"authorization": f"Bearer {tenant}"}, trust_env=False
            ) as http:
                for body in (
                    {"model": f"{tenant}/order", "prompt": "x"},
                    {"inputs": "x", "parameters": {"adapter_id": f"{tenant}/order"}},
                ):
                    answer = await http.post("/v1/completions" if "prompt" in body else "/generate", json=body)
                    assert (answer.status_code, "orders" in answer.text) == (404, False), answer.text


def is_reported(router: Router, adapter_id: str) -> bool:
    """True if a worker has reported the adapter to the router."""
    return any(adapter_id in view.tiers for view in router.replicas.views())


async def test_a_failed_load_stays_listed(address: str, root: Path) -> None:
    write_adapter(root / "broken", r=0)
    async with router_for([address]) as (router, _), AsyncClient(router.address) as client:
        with pytest.raises(AdapterInvalid):
            await text(client, "broken")
        (row,) = await client.adapters.list(prefix="broken")
        assert (row.state, row.last_error_reason, row.last_error) == ("failed", row.error_reason, row.error)
        await client.adapters.unload("broken")
        assert not await client.adapters.list(prefix="broken")
