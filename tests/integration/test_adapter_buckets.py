"""Adapters of a bucket through a router and a live worker."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator

import grpc.aio
import pytest
from safetensors.torch import load_file, save_file
from support.fake_workers import router_for
from support.inline_worker import inline_worker, small_engine
from support.s3_server import KEYS, S3Server, s3_server
from support.world import TinyWorld

from loraplex import (
    AdapterInvalid,
    AdapterNotFound,
    AsyncClient,
    DigestMismatch,
    Generation,
    InvalidArgument,
    Member,
    Merge,
    SourceUnavailable,
)
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import inference_pb2, inference_pb2_grpc
from loraplex_server.config import AdaptersConfig, WorkerConfig

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def bucket(tiny_world: TinyWorld) -> Iterator[S3Server]:
    with s3_server() as server:
        server.put("models")
        for number in (0, 1):
            server.put_folder(f"models/v{number}", tiny_world.adapters / tiny_world.names[number])
            server.put_folder(f"models/m{number}", tiny_world.adapters / tiny_world.names[number])
        yield server


@pytest.fixture(scope="module")
def address(tiny_world: TinyWorld, bucket: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(tiny_world.adapters / tiny_world.names[0], root / "local")
    shutil.copytree(tiny_world.adapters / tiny_world.names[1], root / "second")
    shutil.copytree(tiny_world.adapters / tiny_world.names[0], root / "same-rank")
    weights = root / "same-rank" / "adapter_model.safetensors"
    save_file({name: one.flip(0) for name, one in load_file(weights).items()}, weights)
    buckets = (f"models={bucket.endpoint}", "away=http://127.0.0.1:9")
    adapters = AdaptersConfig(root=root, num_device_slots=4, s3_buckets=buckets)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in KEYS.items():
            patch.setenv(name, value)
        with inline_worker(WorkerConfig(small_engine(tiny_world.model, adapters), port=0)) as worker:
            yield worker.address


async def text(client: AsyncClient, adapter_id: str) -> str:
    return (await client.generate("a prompt", adapter_id=adapter_id, max_tokens=12, ignore_eos=True)).text


async def in_bucket(address: str, folder: str) -> str:
    request = inference_pb2.GenerateRequest(text="a prompt", adapter_id=folder, in_bucket=True)
    request.stopping.max_tokens, request.stopping.ignore_eos = 12, True
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            answer = await inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return answer.completions[0].text


async def test_loads_from_a_bucket(
    address: str, bucket: S3Server, tiny_world: TinyWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with router_for([address]) as (router, _), AsyncClient(router.address) as client:
        (row,) = await client.adapters.load("sql", source="s3:models/v0")
        assert row.source == "s3:models/v0"
        assert row.digest == (await client.adapters.load("local"))[0].digest
        assert await text(client, "sql") == await text(client, "local")
        said: list[str] = []
        for source, kind in (
            ("s3:models/nowhere", AdapterNotFound),
            ("s3:others/v0", AdapterNotFound),
            ("s3:models", InvalidArgument),
            ("s3:models/../v0", InvalidArgument),
            ("s3:away/v0", SourceUnavailable),
        ):
            with pytest.raises(kind) as raised:
                await client.adapters.load("sql", source=source)
            said.append(str(raised.value))
        with pytest.raises(DigestMismatch):
            await client.adapters.load("sql", source="s3:models/v1", expected_digest=row.digest)
        bucket.put("models/broken/adapter_config.json", b"{}")
        bucket.put("models/broken/adapter_model.safetensors", b"x" * 100)
        with pytest.raises(AdapterInvalid):
            await client.adapters.load("sql", source="s3:models/broken")
        assert (await client.adapters.get("sql"))[0].last_error_reason == "ADAPTER_INVALID"
        assert await text(client, "sql") == await text(client, "local")
        bucket.put_folder("models/v0", tiny_world.adapters / tiny_world.names[1])
        (new,) = await client.adapters.load("sql")  # from where it was loaded before
        assert (new.source, new.last_error) == ("s3:models/v0", "")
        assert new.digest != row.digest
        # Of a request, without a load.
        assert await in_bucket(router.address, "models/v1") == await text(client, "sql")
        for folder, kind in (("models/nowhere", AdapterNotFound), ("others/v0", AdapterNotFound)):
            with pytest.raises(kind) as raised:
                await in_bucket(router.address, folder)
            assert raised.value.field == "adapter_id"
            said.append(str(raised.value))
        assert "models/v1" not in {one.adapter_id for one in await client.adapters.list()}
    said.append(caplog.text)
    for secret in (*KEYS.values(), "X-Amz-"):
        assert all(secret not in one for one in said), secret


async def test_mixtures_take_members_from_a_bucket(
    address: str, bucket: S3Server, tiny_world: TinyWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Sums and merges are those of the same adapters in the directory, and follow the bucket's contents."""
    caplog.set_level(logging.DEBUG)

    async with router_for([address]) as (router, _), AsyncClient(router.address) as client:

        async def mixed(adapters: dict[str, float | Member], merge: Merge | None = None) -> Generation:
            return await client.generate("a prompt", adapters=adapters, merge=merge, max_tokens=12, ignore_eos=True)

        first, second = Member(0.75, in_bucket=True), Member(-0.5, in_bucket=True)
        want = await mixed({"local": 0.75, "second": -0.5})
        assert want.text != await text(client, "local")
        for members in (
            {"models/m0": first, "second": -0.5},
            {"local": 0.75, "models/m1": second},
            {"models/m0": first, "models/m1": second},
        ):
            found = await mixed(members)
            assert (found.text, found.adapter_digest) == (want.text, want.adapter_digest), members
        merge = Merge("dare_ties", 0.5, seed=3)
        merged = await mixed({"local": 0.75, "same-rank": 1.5}, merge)
        found = await mixed({"models/m0": first, "same-rank": 1.5}, merge)
        assert (found.text, found.adapter_digest) == (merged.text, merged.adapter_digest)
        assert merged.text != (await mixed({"local": 0.75, "same-rank": 1.5})).text
        for members, named in (
            ({"models/nowhere": first, "second": 1.0}, "models/nowhere"),
            ({"local": 1.0, "others/m0": first}, "no bucket 'others'"),
        ):
            with pytest.raises(AdapterNotFound, match=named):
                await mixed(members)
        with pytest.raises(SourceUnavailable, match="away/m0"):
            await mixed({"away/m0": first, "second": 1.0})
        listed = {one.adapter_id for one in await client.adapters.list()}
        assert not any("m0" in name or "m1" in name for name in listed)
    assert all(secret not in caplog.text for secret in KEYS.values())
