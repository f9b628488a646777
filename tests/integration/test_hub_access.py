"""Adapters on the Hub by callers' own tokens, through a live server."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file
from support.credentials import credential, write_credentials
from support.fake_workers import router_for
from support.hub_server import COMMIT, HubServer, Repository, hub_server
from support.inline_worker import inline_worker, small_engine
from support.world import TinyWorld

from loraplex import (
    AdapterNotFound,
    AsyncClient,
    Generation,
    Hub,
    InvalidArgument,
    LoraplexError,
    Member,
    Merge,
    SourceUnavailable,
    Unimplemented,
)
from loraplex_runtime.auth import token_digest
from loraplex_server.config import AdaptersConfig, WorkerConfig

pytestmark = pytest.mark.timeout(300)
TTL_S = 1.5
ALICE, BOB = Hub(token="hf_secret_alice"), Hub(token="hf_secret_bob")
OLDER = "89abcdef" * 5


@pytest.fixture(scope="module")
def hub(tiny_world: TinyWorld) -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture(autouse=True)
def repositories(hub: HubServer, tiny_world: TinyWorld) -> None:
    folders = [tiny_world.adapters / name for name in tiny_world.names[:3]]
    hub.repositories = {
        "org/private": Repository(folders[0], frozenset({ALICE.token, "hf_operator"})),
        "org/bobs": Repository(folders[0], frozenset({BOB.token})),  # the same content
        "org/public": Repository(folders[1]),
        "other/public": Repository(folders[1]),
    }
    hub.asked.clear()


@pytest.fixture(scope="module")
def address(tiny_world: TinyWorld, hub: HubServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("root")
    shutil.copytree(tiny_world.adapters / tiny_world.names[0], root / "private")
    shutil.copytree(tiny_world.adapters / tiny_world.names[2], root / "org" / "public")  # of a repository's name
    shutil.copytree(tiny_world.adapters / tiny_world.names[0], root / "org" / "same-rank")
    weights = root / "org" / "same-rank" / "adapter_model.safetensors"
    save_file({name: one.flip(0) for name, one in load_file(weights).items()}, weights)
    adapters = AdaptersConfig(
        root=root, num_device_slots=4, hub=True, hub_endpoints=(hub.endpoint,), hub_access_s=TTL_S
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        patch.delenv("HF_TOKEN", raising=False)
        with inline_worker(
            WorkerConfig(small_engine(tiny_world.model, adapters), port=0, router_digest=token_digest("w"))
        ) as worker:
            yield worker.address


@pytest.fixture
def auth_file(tmp_path: Path) -> Path:
    acme = credential("acme", "acme", "org/*", "private", roles=("user", "admin"))
    return write_credentials(tmp_path / "auth.json", acme, credential("other", "other", "other/*", "org/*"))


async def text(client: AsyncClient, adapter_id: str, hub: Hub | None = None) -> str:
    return (await client.generate("a prompt", adapter_id=adapter_id, hub=hub, max_tokens=8, ignore_eos=True)).text


async def refused(client: AsyncClient, adapter_id: str, hub: Hub | None = None) -> LoraplexError:
    with pytest.raises(LoraplexError) as caught:
        await text(client, adapter_id, hub)
    assert "hf_secret" not in str(caught.value) + repr(caught.value) + repr(caught.value.metadata)
    assert ":" not in (caught.value.resource or "")
    return caught.value


async def test_two_tokens_with_different_access(
    address: str, hub: HubServer, auth_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with (
        router_for([address], auth_file=auth_file, worker_token="w") as (router, _),
        AsyncClient(router.address, token="acme") as client,
        AsyncClient(router.address, token="other") as other,
    ):
        expected = await text(client, "private")  # the same files in the folder
        assert await text(client, "org/private", ALICE) == expected
        assert ("/api/models/org/private?blobs=true", ALICE.token) in hub.asked
        num_asked = len(hub.asked)
        assert await text(client, "org/private", ALICE) == expected  # for a while the Hub is not asked again
        assert len(hub.asked) == num_asked
        # Others see none of it: with another token, without one, by name, by version, of another tenant.
        digest = (await client.adapters.get("private"))[0].digest
        unknown = await refused(client, "org/nothing", BOB)
        for adapter_id, token in (
            ("org/private", BOB),
            ("org/private", Hub()),
            ("org/private", Hub(token="hf_secret_alice2")),
            ("org/private", None),
            (f"org/private@{digest[:12]}", None),
        ):
            error = await refused(client, adapter_id, token)
            assert type(error) is AdapterNotFound, (adapter_id, error)
        theirs = await refused(client, "org/private", BOB)
        assert theirs.message.replace("org/private", "org/nothing") == unknown.message
        assert isinstance(await refused(other, "org/private", BOB), AdapterNotFound)
        # Access to the same content by another name is access to that name.
        assert await text(client, "org/bobs", BOB) == expected
        assert isinstance(await refused(client, "org/private", BOB), AdapterNotFound)
        # No listing shows it, and no name near it is told.
        names = {row.adapter_id for row in await client.adapters.list(include_unloaded=True)}
        assert names == {"private", "org/public", "org/same-rank"}
        assert "org/private" not in str((await refused(client, "org/privat")).metadata)
        with pytest.raises(AdapterNotFound):
            await client.adapters.get("org/private")
        # A token is sent with its own request only.
        for path, token in hub.asked:
            assert token != ALICE.token or "org/private" in path
        # A tenant may name what its credential allows.
        hub.asked.clear()
        assert isinstance(await refused(client, "other/public", ALICE), AdapterNotFound)
        assert not hub.asked
    assert "hf_secret" not in caplog.text


async def test_revoked_access_ends(address: str, hub: HubServer, auth_file: Path) -> None:
    repository = hub.repositories["org/private"]
    mine = Hub("main", "hf_secret_revoked")
    repository.tokens = frozenset({mine.token})
    async with (
        router_for([address], auth_file=auth_file, worker_token="w") as (router, _),
        AsyncClient(router.address, token="acme") as client,
    ):
        started_s = time.monotonic()
        await text(client, "org/private", mine)
        repository.tokens = frozenset()
        if time.monotonic() - started_s < TTL_S / 2:
            await text(client, "org/private", mine)
        while time.monotonic() - started_s < TTL_S + 30:
            try:
                await text(client, "org/private", mine)
            except AdapterNotFound:
                break
        assert TTL_S / 2 < time.monotonic() - started_s < TTL_S + 20
        assert isinstance(await refused(client, "org/private", mine), AdapterNotFound)


async def test_the_hub_is_meant_and_a_revision(address: str, hub: HubServer, tiny_world: TinyWorld) -> None:
    hub.repositories["org/public"].revisions["older"] = OLDER
    async with router_for([address], worker_token="w") as (router, _), AsyncClient(router.address) as client:
        in_folder = await text(client, "org/public")
        on_hub = await text(client, "org/public", Hub())
        assert in_folder != on_hub
        assert await text(client, "org/public", Hub("older")) == on_hub
        assert any(OLDER in path for path, _ in hub.asked)
        assert any(COMMIT in path for path, _ in hub.asked)
        assert isinstance(await refused(client, "org/public", Hub("nowhere")), AdapterNotFound)
        vectors = await client.embed("a prompt", adapter_id="org/private", hub=ALICE)
        assert vectors.adapter_digest == (await client.adapters.get("private"))[0].digest
        for adapter_id, given in (
            ("private", Hub()),
            ("", Hub()),
            ("org/public@01234567", Hub()),
            ("org/public", Hub("../main")),
        ):
            assert isinstance(await refused(client, adapter_id, given), InvalidArgument), (adapter_id, given)
        with pytest.raises(InvalidArgument):
            await client.generate("x", adapters={"org/public": 1.0}, hub=Hub())


MERGES = [None, Merge("linear")]


async def test_mixtures(address: str, hub: HubServer, auth_file: Path) -> None:
    """Members by their own accesses are the folder's members, for their own callers only."""
    async with (
        router_for([address], auth_file=auth_file, worker_token="w") as (router, _),
        AsyncClient(router.address, token="acme") as client,
    ):

        async def mixed(adapters: dict[str, float | Member], merge: Merge | None = None) -> Generation:
            return await client.generate("a prompt", adapters=adapters, merge=merge, max_tokens=8, ignore_eos=True)

        for merge in MERGES:
            expected = await mixed({"private": 0.75, "org/same-rank": -0.5}, merge)
            on_hub: dict[str, float | Member] = {"org/private": Member(0.75, ALICE), "org/same-rank": -0.5}
            found = await mixed(on_hub, merge)
            assert (found.text, found.adapter_digest) == (expected.text, expected.adapter_digest)
            for token in (
                BOB,
                Hub(),
                None,
            ):  # what another's token has fetched is not there, nor is what was made of it
                theirs: dict[str, float | Member] = {"org/private": Member(0.75, token), "org/same-rank": -0.5}
                with pytest.raises(AdapterNotFound, match="org/private") as caught:
                    await mixed(theirs, merge)
                assert "hf_secret" not in str(caught.value) + repr(caught.value)
        with pytest.raises(AdapterNotFound):  # a name that the credential does not allow
            await mixed({"other/public": Member(1.0, Hub()), "private": 1.0})
        assert {row.adapter_id for row in await client.adapters.list()} <= {"private", "org/same-rank", "org/public"}


async def test_tokens_of_a_repositorys_texts(address: str, hub: HubServer, auth_file: Path) -> None:
    async with (
        router_for([address], auth_file=auth_file, worker_token="w") as (router, _),
        AsyncClient(router.address, token="acme") as client,
    ):
        expected = await client.tokenize("a prompt")
        assert await client.tokenize("a prompt", adapter_id="org/private", hub=ALICE) == expected
        for token in (BOB, Hub()):
            with pytest.raises(AdapterNotFound):
                await client.tokenize("a prompt", adapter_id="org/private", hub=token)


async def test_redirects_to_other_hosts_are_not_followed(address: str, hub: HubServer) -> None:
    mine = Hub("main", "hf_secret_redirected")
    hub.repositories["org/private"].tokens = frozenset({mine.token})
    hub.repositories["org/private"].redirects["adapter_model.safetensors"] = "http://localhost:9/weights"
    async with router_for([address], worker_token="w") as (router, _), AsyncClient(router.address) as client:
        error = await refused(client, "org/private", mine)
        assert isinstance(error, SourceUnavailable)
        assert "redirected to 'http://localhost:9'" in error.message


async def test_requests_over_http(
    address: str, hub: HubServer, auth_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LoRAX's fields in its own dialect and in OpenAI's."""
    caplog.set_level(logging.DEBUG)
    async with router_for([address], auth_file=auth_file, worker_token="w", http_port=0) as (router, _):
        assert router.http is not None
        headers = {"authorization": "Bearer acme"}
        async with httpx2.AsyncClient(
            base_url=f"http://{router.http.address}", headers=headers, trust_env=False, timeout=60
        ) as http:
            place = {"adapter_id": "org/private", "adapter_source": "hub", "api_token": ALICE.token}
            more = {"max_new_tokens": 4, "ignore_eos_token": True}
            in_hub = {"adapter_source": "hub", "max_new_tokens": 2}
            answer = await http.post("/generate", json={"inputs": "x", "parameters": place | more})
            assert (answer.status_code, answer.headers["x-adapter-source"]) == (200, "hub"), answer.text
            local = {"adapter_id": "private"} | more
            expected = (await http.post("/generate", json={"inputs": "x", "parameters": local})).json()
            assert answer.json()["generated_text"] == expected["generated_text"]
            named = {"model": "org/private", "adapter_source": "hub"}
            body = {**named, "prompt": "x", "max_tokens": 2}
            for path, own in (
                ("/v1/completions", body),
                ("/v1/chat/completions", {**named, "messages": [{"role": "user", "content": "x"}]}),
                ("/v1/embeddings", {**named, "input": "x"}),
                ("/generate", {**named, "text": "x"}),
                ("/embed", {"inputs": "x", "parameters": place}),
            ):
                token = {} if "parameters" in own else {"api_token": ALICE.token}
                answer = await http.post(path, json=own | token)
                # There is no chat template, which is told after the adapter.
                assert answer.status_code == 200 or "chat template" in answer.text, (path, answer.text)
                assert "hf_secret" not in answer.text + str(answer.headers)
                other = {**own, "parameters": {**place, "api_token": BOB.token}} if "parameters" in own else own
                for wrong in (other, {**own, "api_token": BOB.token} if token else other):
                    answer = await http.post(path, json=wrong)
                    assert answer.status_code in (404, 400), (path, answer.text)
                    assert answer.status_code == 404 or "chat template" in answer.text
                    assert "hf_secret" not in answer.text + str(answer.headers)
            answer = await http.post("/v1/completions", json={**body, "api_token": "two hf_secret"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "api_token")
            assert "hf_secret" not in answer.text
            answer = await http.post("/v1/completions", json={**body, "model": "private"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapter_source")
            for path, own in (
                ("/tokenize", {**named, "prompt": "x"}),
                ("/tokenize", {"inputs": "x", "parameters": place}),
                ("/v1/completions", {"prompt": "x", "adapters": [{"id": "org/private"}], "adapter_source": "hub"}),
                ("/generate", {"inputs": "x", "parameters": {"merged_adapters": {"ids": ["org/private"]}, **in_hub}}),
            ):
                for token, status in ((ALICE.token, 200), (BOB.token, 404)):
                    given = {"parameters": own["parameters"] | {"api_token": token}} if "parameters" in own else {}
                    answer = await http.post(path, json={**own, **(given or {"api_token": token})})
                    assert answer.status_code == status, (path, answer.text)
                    assert "hf_secret" not in answer.text + str(answer.headers)
            names = [one["id"] for one in (await http.get("/v1/models")).json()["data"]]
            assert "org/private" not in names
    assert "hf_secret" not in caplog.text


async def test_an_operator_grants_what_a_token_has_loaded(address: str, hub: HubServer, auth_file: Path) -> None:
    """The name is served to those who may use it, and the token is gone after the load."""
    async with (
        router_for([address], auth_file=auth_file, worker_token="w") as (router, _),
        AsyncClient(router.address, token="acme") as client,
        AsyncClient(router.address, token="other") as other,
    ):
        with pytest.raises(AdapterNotFound):
            await client.adapters.load("org/granted", source="hub:org/private")
        (row,) = await client.adapters.load("org/granted", source="hub:org/private", hub_token=ALICE.token)
        assert (row.source, row.digest) == ("hub:org/private", (await client.adapters.get("private"))[0].digest)
        assert await text(other, "org/granted") == await text(client, "private")
        assert await text(other, f"org/granted@{row.digest[:12]}") == await text(client, "private")
        hub.asked.clear()
        with pytest.raises(AdapterNotFound):
            await client.adapters.load("org/granted")  # again, from the same place
        assert {token for _, token in hub.asked} == {None}
        assert await text(other, "org/granted") == await text(client, "private")
        with pytest.raises(Unimplemented):
            await client.adapters.load("private", hub_token=ALICE.token)
        await client.adapters.unload("org/granted")


def test_tokens_are_in_no_repr() -> None:
    assert "hf_secret" not in repr(ALICE)
    for bad in ("two words", "line\nfeed", "x" * 1000, "\u0442\u043e\u043a\u0435\u043d"):
        with pytest.raises(InvalidArgument) as caught:
            Hub(token=bad)
        assert bad not in str(caught.value)
