"""`--watch-adapters` through a router and a live worker."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.fake_workers import router_for
from support.inline_worker import inline_worker, small_engine
from support.world import TinyWorld

from loraplex import AsyncClient
from loraplex.types import Adapter
from loraplex_adapters.sources import watch
from loraplex_server.config import AdaptersConfig, WorkerConfig

pytestmark = pytest.mark.timeout(300)
PROMPT = "the same beginning of a prompt, for the prefix cache " * 2
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("watched") / "root"


@pytest.fixture(scope="module")
def address(tiny_world: TinyWorld, root: Path) -> Iterator[str]:
    for number, name in enumerate(tiny_world.names[:3], start=1):
        shutil.copytree(tiny_world.adapters / name, root / f"v{number}")
    adapters = AdaptersConfig(root=root, num_device_slots=4, watch=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch, "INTERVAL_S", 0.02)
        patch.setattr(watch, "QUIET_S", 0.2)
        with inline_worker(WorkerConfig(small_engine(tiny_world.model, adapters), port=0)) as worker:
            yield worker.address


async def text(client: AsyncClient, adapter_id: str) -> str:
    return (await client.generate(PROMPT, adapter_id=adapter_id, max_tokens=12, ignore_eos=True)).text


async def row_when(client: AsyncClient, is_so: Callable[[Adapter], bool]) -> Adapter:
    async def look() -> Adapter:
        while True:
            for row in await client.adapters.get("sql"):
                if row.state != "draining" and is_so(row):
                    return row
            await asyncio.sleep(0.02)

    return await asyncio.wait_for(look(), 20)


async def test_replaced_folders(
    address: str, root: Path, tiny_world: TinyWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "loraplex.audit")

    def fresh(number: int) -> Path:
        """A whole copy, beside the root."""
        return Path(shutil.copytree(root / f"v{number}", root.parent / "fresh"))

    async with router_for([address]) as (router, _), AsyncClient(router.address) as client:
        expected = {number: await text(client, f"v{number}") for number in (1, 2, 3)}
        assert len(set(expected.values())) == 3

        async def still(number: int) -> None:
            assert await text(client, "sql") == expected[number]

        fresh(1).rename(root / "sql")
        await still(1)
        (first,) = await client.adapters.load("sql", pin=True)
        running = client.stream(PROMPT, adapter_id="sql", max_tokens=100, ignore_eos=True)
        begun = (await anext(running)).text

        # Replaced by renames.
        (root / "sql").rename(root.parent / "old")
        fresh(2).rename(root / "sql")
        second = await row_when(client, lambda row: row.digest != first.digest)
        assert (second.pinned, second.last_error) == (True, "")
        await still(2)
        assert (begun + "".join([chunk.text async for chunk in running])).startswith(expected[1])
        assert await text(client, f"sql@{first.digest[:12]}") == expected[1]

        # Copied over it: half of it, for longer than the watch waits, then all of it.
        whole = (root / "v3" / WEIGHTS).read_bytes()
        shutil.copy(root / "v3/adapter_config.json", root / "sql")
        (root / "sql" / WEIGHTS).write_bytes(whole[: len(whole) // 2])
        half = await row_when(client, lambda row: bool(row.last_error))
        assert (half.digest, half.last_error_reason, half.pinned) == (second.digest, "ADAPTER_INVALID", True)
        await still(2)
        (root / "sql" / WEIGHTS).write_bytes(whole)
        third = await row_when(client, lambda row: not row.last_error)
        assert third.digest not in (first.digest, second.digest)
        await still(3)

        # Broken, and led out of the root.
        (root / "sql/adapter_config.json").write_text("{")
        broken = await row_when(client, lambda row: bool(row.last_error))
        assert (broken.digest, broken.last_error_reason) == (third.digest, "ADAPTER_INVALID")
        await still(3)
        shutil.rmtree(root / "sql")
        (root / "sql").symlink_to(fresh(1))
        outside = await row_when(client, lambda row: row.last_error_reason == "ADAPTER_OUTSIDE_ROOT")
        assert outside.digest == third.digest
        await still(3)
        (root / "sql").unlink()
        (root.parent / "fresh").rename(root / "sql")
        assert (await row_when(client, lambda row: row.digest == first.digest)).last_error == ""
        await still(1)
    lines = [record.getMessage() for record in caplog.records if record.name == "loraplex.audit"]
    assert sum("and loaded" in line for line in lines) == 3
    assert sum("goes on serving" in line for line in lines) >= 3
