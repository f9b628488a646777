"""Routes that load and unload adapters, in front of scripted workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.credentials import credential, write_credentials
from support.fake_workers import until
from support.http import Http, http_cluster

from loraplex_contracts.errors import AdapterInvalid, AdapterNotFound, AdapterOutsideRoot, LoraplexError
from loraplex_proto.v1 import adapter_pb2
from loraplex_router.config import HttpOptions

OPEN = HttpOptions(admin=True)
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SGLANG_LOAD, SGLANG_UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"


async def load(http: Http, name: str = "sql", **fields: Any) -> httpx2.Response:
    return await http.post(LOAD, json={"lora_name": name, "lora_path": name, **fields})


async def test_an_adapter_comes_and_goes() -> None:
    async with http_cluster(http=OPEN) as (c, http):
        answer = await load(http, base_model_name="tiny")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
        assert answer.headers["content-type"].startswith("text/plain")
        assert "x-loraplex-ignored" not in answer.headers
        assert "sql" in [one["id"] for one in (await http.get("/v1/models")).json()["data"]]
        again = await load(http)
        assert (again.status_code, "has already been loaded" in again.json()["error"]["message"]) == (400, True)
        assert (await load(http, load_inplace=True)).status_code == 200
        assert c.workers[0].calls.count("LoadAdapter") == 2
        answer = await http.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": None})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
        gone = await http.post(UNLOAD, json={"lora_name": "sql"})
        assert (gone.status_code, gone.json()["error"]["type"]) == (404, "NotFoundError")
        assert "'sql' cannot be found" in gone.json()["error"]["message"]


async def test_an_unload_behind_a_load_that_failed_says_that_nothing_was_loaded() -> None:
    failed = adapter_pb2.Adapter(adapter_id="sql", tier=adapter_pb2.ADAPTER_TIER_SOURCE)  # as workers answer then
    async with http_cluster(2, http=OPEN) as (c, http):
        for worker in c.workers:
            worker.adapters["sql"] = failed
        answer = await http.post(UNLOAD, json={"lora_name": "sql"})
        assert (answer.status_code, "removed" in answer.text) == (200, False)
        assert answer.text == "Success: LoRA adapter 'sql' was not loaded; its failed load is forgotten."
        c.workers[0].adapters["sql"] = failed
        c.workers[1].adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", tier=adapter_pb2.ADAPTER_TIER_HOST)
        answer = await http.post(UNLOAD, json={"lora_name": "sql"})
        assert answer.text == "Success: LoRA adapter 'sql' removed successfully."


async def test_an_adapter_comes_and_goes_as_with_sglang() -> None:
    async with http_cluster(http=OPEN) as (_, http):
        answer = await http.post(SGLANG_LOAD, json={"lora_name": "sql", "lora_path": "sql", "pinned": True})
        assert answer.json() == {"success": True, "error_message": "", "loaded_adapters": {"sql": "sql"}}
        again = await http.post(SGLANG_LOAD, json={"lora_name": "sql", "lora_path": "sql"})
        assert (again.status_code, again.json()["success"]) == (400, False)
        assert again.json()["loaded_adapters"] == {"sql": "sql"}
        answer = await http.post(SGLANG_UNLOAD, json={"lora_name": "sql"})
        assert answer.json() == {"success": True, "error_message": "", "loaded_adapters": {}}
        gone = await http.post(SGLANG_UNLOAD, json={"lora_name": "sql"})
        assert (gone.status_code, gone.json()["error_message"]) == (400, "The lora adapter 'sql' cannot be found.")


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (AdapterInvalid("adapter_config.json has no `r`"), 400, "ADAPTER_INVALID"),
        (AdapterNotFound("x"), 404, "ADAPTER_NOT_FOUND"),
        (AdapterOutsideRoot("its folder is a link that leads out"), 404, "ADAPTER_OUTSIDE_ROOT"),
    ],
)
async def test_a_bad_adapter_is_refused_with_its_reason(error: LoraplexError, status: int, reason: str) -> None:
    async with http_cluster(http=OPEN) as (c, http):
        c.workers[0].load_error = error
        answer = await load(http)
        found = answer.json()["error"]
        assert (answer.status_code, found["reason"]) == (status, reason)
        assert found["message"] == (
            "The lora adapter 'sql' cannot be found." if reason == "ADAPTER_NOT_FOUND" else error.message
        )


async def test_paths_are_folders_below_the_root(tmp_path: Path) -> None:
    async with http_cluster(http=HttpOptions(admin=True, adapter_root=tmp_path)) as (c, http):
        for path in ("sql", f"{tmp_path}/sql", f"{tmp_path}/sql/"):
            assert (await load(http, lora_path=path, load_inplace=True)).status_code == 200, path
        num_loads = c.workers[0].calls.count("LoadAdapter")
        for path in (
            "/etc/passwd", "..", "../sql", f"{tmp_path}/../sql", f"{tmp_path}//sql", "a\0b", f"{tmp_path}x/sql",
            "~/sql", "https://example.com/sql", f"{tmp_path}/sql/../sql",
        ):  # fmt: skip
            answer = await load(http, lora_path=path, load_inplace=True)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path"), path
        for name in ("../sql", "a\0b", "/etc", "a/b/c", "", "tiny"):
            answer = await load(http, name, load_inplace=True)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name"), name
            answer = await http.post(UNLOAD, json={"lora_name": name})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_name"), name
        assert c.workers[0].calls.count("LoadAdapter") == num_loads


async def test_an_adapter_may_come_from_elsewhere(tmp_path: Path) -> None:
    """Workers look whether the folder is below their root, and whether they read the bucket or the Hub."""
    async with http_cluster(http=HttpOptions(admin=True, adapter_root=tmp_path)) as (c, http):
        for path, source in (
            ("team/v2", "team/v2"),
            (f"{tmp_path}/team/v2", f"{tmp_path}/team/v2"),
            ("s3://models/team/v2", "s3:models/team/v2"),
            ("hub:org/sql", "hub:org/sql"),
            (f"{tmp_path}/sql", "sql"),  # from its own place again
            ("sql", ""),
        ):
            assert (await load(http, lora_path=path, load_inplace=True)).status_code == 200, path
            assert c.workers[0].loads[-1].source == source
        c.workers[0].load_error = AdapterOutsideRoot("its folder is a link that leads out", field="source")
        answer = await load(http, lora_path="team/v2", load_inplace=True)
        assert (answer.status_code, answer.json()["error"]["param"]) == (404, "lora_path")
    async with http_cluster(http=OPEN) as (c, http):  # it does not know the workers' root
        assert (await load(http, lora_path="/adapters/sql")).status_code == 200
        assert c.workers[0].loads[-1].source == "/adapters/sql"


async def test_an_adapter_is_loaded_where_those_that_have_it_do_not_respond() -> None:
    async with http_cluster(2, http=OPEN) as (c, http):
        keeper, other = c.workers
        keeper.report(tiers={"sql": 4}, sourced=["sql"])
        await until(lambda: c.router.replicas.keepers(["sql"]) is not None)
        keeper.report(tiers={"sql": 4}, sourced=["sql"], stalled=True)
        await until(lambda: c.router.replicas.num_routable == 1)
        missing = await http.get("/v1/models/sql")
        assert (missing.status_code, missing.json()["error"]["reason"]) == (503, "NO_HEALTHY_WORKER")
        answer = await http.post(LOAD, json={"lora_name": "sql", "lora_path": "v2"})
        assert answer.json()["error"]["reason"] == "WORKER_LOST"  # the keeper may come back with the former one
        assert [one.source for one in other.loads] == ["v2"]


async def test_without_credentials_a_flag_must_allow_it() -> None:
    async with http_cluster() as (c, http):
        for path in (LOAD, UNLOAD, SGLANG_LOAD, SGLANG_UNLOAD):
            answer = await http.post(path, json={"lora_name": "sql", "lora_path": "sql"})
            assert (answer.status_code, "--http-admin" in answer.json()["error"]["message"]) == (403, True)
        assert not {"LoadAdapter", "UnloadAdapter"} & set(c.workers[0].calls)


async def test_admins_only(tmp_path: Path) -> None:
    rows = (credential("alice", "acme", "*"), credential("root", "ops", "acme/*", roles=("admin",)))
    path = write_credentials(tmp_path / "auth.json", *rows)
    async with http_cluster(auth_file=path, worker_token="w") as (c, http):
        alice, root = ({"authorization": f"Bearer {token}"} for token in ("alice", "root"))
        for route in (LOAD, UNLOAD, SGLANG_LOAD, SGLANG_UNLOAD):
            body = {"lora_name": "acme/sql", "lora_path": "acme/sql"}
            assert (await http.post(route, json=body)).status_code == 401
            assert (await http.post(route, json=body, headers=alice)).status_code == 403
        assert not {"LoadAdapter", "UnloadAdapter"} & set(c.workers[0].calls)
        for name, status in (("acme/sql", 200), ("other/sql", 404)):
            answer = await http.post(LOAD, json={"lora_name": name, "lora_path": name}, headers=root)
            assert answer.status_code == status


async def test_the_syncers_sequence() -> None:
    """The Gateway API's adapter syncer can do its calls: health, list, load what is missing, unload what is
    unwanted."""
    async with http_cluster(http=OPEN) as (c, http):
        c.workers[0].adapters["old"] = adapter_pb2.Adapter(adapter_id="old", tier=adapter_pb2.ADAPTER_TIER_DEVICE)
        assert (await http.get("/health")).status_code == 200
        ids = [one["id"] for one in (await http.get("/v1/models")).json()["data"]]
        assert ids == ["tiny", "old"]
        body = {"lora_name": "new", "lora_path": "new", "base_model_name": "tiny"}
        assert (await http.post(LOAD, json=body)).status_code == 200
        assert (await http.post(UNLOAD, json={"lora_name": "old"})).status_code == 200
        ids = [one["id"] for one in (await http.get("/v1/models")).json()["data"]]
        assert ids == ["tiny", "new"]
