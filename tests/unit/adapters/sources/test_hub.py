"""The Hub source against a Hub on 127.0.0.1."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from support.adapter_files import Engine, write_adapter
from support.hub_server import COMMIT, HubServer, Repository, hub_server
from support.medusa_files import (
    base_config,
    base_tensors,
    medusa_config,
    sequential_tensors,
    vllm_config,
    vllm_tensors,
    write_heads,
    write_shards,
)

from loraplex_adapters.formats.files import POOLING_NAME
from loraplex_adapters.formats.pooling import read_pooling
from loraplex_adapters.io.source_files import read_all
from loraplex_adapters.sources.chain import ChainSource, make_source
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.sources.hub import HubSource
from loraplex_contracts.adapters import (
    OWN_ORIGIN,
    AdapterId,
    AdapterOrigin,
    LoadOptions,
    check_adapter_source,
    check_on_hub,
    check_revision,
)
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    DiskFull,
    InvalidAdapterId,
    InvalidArgument,
    SourceUnavailable,
    Unimplemented,
    UnsafeFormat,
)
from loraplex_proto import validate
from loraplex_proto.v1 import adapter_pb2


class FakeHub:
    """Serves one folder as the repository `org/sql`."""

    def __init__(self, server: HubServer, folder: Path, temporary: Path) -> None:
        self.server = server
        self.folder = folder
        self.temporary = temporary
        temporary.mkdir()
        self.repository = server.repositories["org/sql"] = Repository(folder)

    @property
    def downloads(self) -> list[str]:
        return self.server.downloads()

    @property
    def left_over(self) -> list[Path]:
        return list(self.temporary.iterdir())


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with hub_server() as server:
        yield FakeHub(server, write_adapter(tmp_path / "hub"), tmp_path / "temporary")


def source_of(hub: FakeHub, **options: Any) -> HubSource:
    return HubSource([hub.server.endpoint], temporary=hub.temporary, **options)


WEIGHTS = "adapter_model.safetensors"


def test_only_the_wanted_files_of_one_revision_are_fetched(hub: FakeHub) -> None:
    (hub.folder / "model-00001-of-00090.safetensors").write_bytes(b"x" * 100)
    (hub.folder / "chat_template.jinja").write_text("{{ evil }}")
    (hub.folder / "run.py").write_text("evil")
    with source_of(hub, token="hf_x").open("org/sql") as files:
        assert files.names == {"adapter_config.json", WEIGHTS}
        assert read_all(files.open(WEIGHTS), 1 << 20) == (hub.folder / WEIGHTS).read_bytes()
        assert len(hub.left_over) == 1
    assert hub.server.asked == [
        ("/api/models/org/sql?blobs=true", "hf_x"),
        (f"/org/sql/resolve/{COMMIT}/adapter_config.json", "hf_x"),
        (f"/org/sql/resolve/{COMMIT}/{WEIGHTS}", "hf_x"),
        (f"/cdn/org/sql/{WEIGHTS}", "hf_x"),  # on the same host
    ]
    assert not hub.left_over


def test_pooling_lies_in_a_folder_of_its_own(hub: FakeHub) -> None:
    (hub.folder / "1_Pooling").mkdir()
    (hub.folder / POOLING_NAME).write_text('{"pooling_mode": "mean"}')
    with source_of(hub).open("org/sql") as files:
        assert read_pooling(files) == "mean"
    assert not hub.left_over


def test_a_pickle_is_refused_before_it_is_fetched(hub: FakeHub) -> None:
    (hub.folder / WEIGHTS).rename(hub.folder / "adapter_model.bin")
    with pytest.raises(UnsafeFormat, match="loraplex adapters convert"):
        source_of(hub).open("org/sql")
    assert not hub.downloads


def test_a_whole_model_is_no_adapter(hub: FakeHub) -> None:
    for path in hub.folder.iterdir():
        path.unlink()
    (hub.folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(AdapterInvalid):
        source_of(hub).open("org/sql")
    assert not hub.downloads


def emptied(folder: Path) -> Path:
    for path in folder.iterdir():
        path.unlink()
    return folder


def test_heads_and_their_configuration_are_fetched(hub: FakeHub) -> None:
    write_heads(emptied(hub.folder), sequential_tensors(), medusa_config())
    (hub.folder / "medusa_lm_head.pt").write_bytes(b"evil")
    with source_of(hub).open("org/sql") as files:
        assert files.names == {"config.json", "medusa_lm_head.safetensors"}
    assert hub.downloads == ["medusa_lm_head.safetensors", "config.json"]


def test_pickled_heads_are_refused_before_they_are_fetched(hub: FakeHub) -> None:
    (emptied(hub.folder) / "medusa_lm_head.pt").write_bytes(b"evil")
    (hub.folder / "config.json").write_text("{}")
    with pytest.raises(UnsafeFormat):
        source_of(hub).open("org/sql")
    assert not hub.downloads


@pytest.mark.parametrize("is_sharded", [False, True])
def test_weights_under_a_models_names_are_fetched_when_the_model_is_heads(hub: FakeHub, is_sharded: bool) -> None:
    tensors = vllm_tensors()
    if is_sharded:
        write_shards(emptied(hub.folder), [tensors], vllm_config())
    else:
        write_heads(emptied(hub.folder), tensors, vllm_config(), "model.safetensors")
    (hub.folder / "training_args.bin").write_bytes(b"evil")
    (hub.folder / "model-optimizer.safetensors").write_bytes(b"x" * 100)
    with source_of(hub).open("org/sql") as files:
        wanted = {path.name for path in hub.folder.iterdir() if path.name.startswith(("config", "model.", "model-0"))}
        assert files.names == wanted
    assert hub.downloads[0] == "config.json"
    assert not hub.left_over
    with pytest.raises(AdapterInvalid, match="at most 2000"):
        source_of(hub, max_bytes=2000).open("org/sql")


@pytest.mark.parametrize("config", [base_config(), base_config(medusa_num_heads=5), {"model_type": ["medusa"]}])
def test_of_a_whole_model_only_the_configuration_is_fetched(hub: FakeHub, config: dict[str, Any]) -> None:
    write_heads(emptied(hub.folder), base_tensors(), config, "model.safetensors")
    with pytest.raises(AdapterInvalid, match="a whole model on the Hub"):
        source_of(hub).open("org/sql")
    assert hub.downloads == ["config.json"]
    assert not hub.left_over


def test_the_size_is_checked_before_the_download(hub: FakeHub) -> None:
    with pytest.raises(AdapterInvalid, match="at most 100"):
        source_of(hub, max_bytes=100).open("org/sql")
    assert not hub.downloads


def test_a_disk_that_it_never_fits_is_not_tried(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=100))
    with pytest.raises(DiskFull, match="the disk of temporary files has 100") as raised:
        source_of(hub).open("org/sql")
    assert raised.value.retry_after_s is None
    assert raised.value.metadata == {"can_ever_fit": "false"}
    assert not hub.downloads


@pytest.mark.parametrize("adapter_id", ["sql", "local-name"])
def test_names_without_an_organisation_are_not_asked_for(hub: FakeHub, adapter_id: str) -> None:
    with pytest.raises(AdapterNotFound):
        source_of(hub).open(adapter_id)


@pytest.mark.parametrize("adapter_id", ["../x", "https://hub/x", "a/b/c", "org/sql@main"])
def test_ids_that_are_no_names(hub: FakeHub, adapter_id: str) -> None:
    with pytest.raises(InvalidAdapterId):
        source_of(hub).open(adapter_id)


@pytest.mark.parametrize("status", [400, 418, 429, 500, 503])
def test_refusals_of_the_hub(hub: FakeHub, status: int) -> None:
    hub.server.status = status
    with pytest.raises(SourceUnavailable, match=f"the Hub answered {status} for 'org/sql'") as raised:
        source_of(hub).open("org/sql")
    assert raised.value.retry_after_s
    assert "secret" not in str(raised.value)
    assert not hub.left_over


def test_a_hub_that_is_away(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(hub)
    hub.server.close()
    with pytest.raises(SourceUnavailable, match=r"did not give out 'org/sql' \(ConnectError\)") as raised:
        source.open("org/sql")
    assert "127.0.0.1" not in str(raised.value)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceUnavailable, match="HF_HUB_OFFLINE is set"):
        source.open("org/sql")


def test_nothing_else_of_the_hubs_library_has_to_be_there() -> None:
    code = "from loraplex_adapters.sources.hub import HubSource; HubSource().open('org/sql')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "HF_HUB_OFFLINE is set" in done.stderr


def test_a_hub_that_hangs(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex_adapters.sources.remote.TIMEOUT_S", 0.1)
    hub.server.hold.clear()
    with pytest.raises(SourceUnavailable, match="ReadTimeout"):
        source_of(hub).open("org/sql")


def test_a_hub_that_drips(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex_adapters.sources.remote.START_S", 0.3)
    for part in ("api", WEIGHTS):
        hub.server.drips = part
        with pytest.raises(SourceUnavailable, match="'org/sql' came too slowly from the Hub"):
            source_of(hub).open("org/sql")
    assert not hub.left_over


def test_a_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("loraplex_adapters.sources.hub._Repository.download", full)
    with pytest.raises(DiskFull, match="the disk is full for now"):
        source_of(hub).open("org/sql")
    assert not hub.left_over


def test_private_and_gated_repositories(hub: FakeHub) -> None:
    hub.repository.tokens = frozenset({"hf_a"})
    with source_of(hub).open("org/sql", AdapterOrigin(token="hf_a")):
        pass
    hub.server.asked.clear()
    for origin in (OWN_ORIGIN, AdapterOrigin(token="hf_b")):
        with pytest.raises(AdapterNotFound, match="the Hub has no 'org/sql' that this caller may see") as raised:
            source_of(hub).open("org/sql", origin)
        assert "hf_" not in str(raised.value)
    assert [token for _, token in hub.server.asked] == [None, "hf_b"]
    hub.repository.tokens, hub.repository.is_gated = None, True
    with pytest.raises(AdapterNotFound, match=r"does not give out 'org/sql' to everybody; send a token"):
        source_of(hub).open("org/sql")
    assert not hub.left_over


def test_revisions_and_places(hub: FakeHub) -> None:
    other = "f" * 40
    hub.repository.revisions["refs/pr/1"] = other
    with source_of(hub).open("org/sql", AdapterOrigin(revision="refs/pr/1")):
        assert hub.server.asked[0][0] == "/api/models/org/sql/revision/refs%2Fpr%2F1?blobs=true"
        assert hub.server.asked[1][0] == f"/org/sql/resolve/{other}/adapter_config.json"
    with pytest.raises(AdapterNotFound, match="'org/sql' at revision 'v9'"):
        source_of(hub).open("org/sql", AdapterOrigin(revision="v9"))
    for source in ("hub:org/sql", f"{hub.server.endpoint}/org/sql"):
        source_of(hub).open("mine", AdapterOrigin(source)).close()
    for source in ("https://elsewhere.invalid/org/sql", "/srv/org/sql"):
        with pytest.raises(AdapterNotFound):
            source_of(hub).open("mine", AdapterOrigin(source))
    for source in ("hub:../../etc", "hub:sql", f"{hub.server.endpoint}/org"):
        with pytest.raises(InvalidArgument, match="write hub:ORG/NAME") as raised:
            source_of(hub).open("mine", AdapterOrigin(source))
        assert raised.value.field == "source"


def test_the_operators_token_is_for_the_first_endpoint(hub: FakeHub) -> None:
    endpoint = hub.server.endpoint
    source = HubSource(["https://hub.invalid", endpoint], "hf_operator", temporary=hub.temporary)
    source.open("mine", AdapterOrigin(f"{endpoint}/org/sql")).close()
    assert {token for _, token in hub.server.asked} == {None}


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("https://evil.invalid/x", "'https://evil.invalid:443' .* allow the host .--hub-redirect-host"),
        ("https://127.0.0.1:1/x", "'https://127.0.0.1:1' .* allow the host .--hub-redirect-host"),
        ("http://127.0.0.1:1/x", "'http://127.0.0.1:1' .*; only https is followed"),
        ("http://named.invalid/x", "'http://named.invalid:80' .*; only https is followed"),
        ("//evil/x", "'http://evil:80' .*; only https is followed"),
        ("file:///etc/passwd", "'file://' .*; only https is followed"),
    ],
)
def test_redirects_to_other_hosts_are_not_followed(hub: FakeHub, target: str, says: str) -> None:
    hub.repository.redirects[WEIGHTS] = target
    with pytest.raises(SourceUnavailable, match=f"redirected to {says}"):
        source_of(hub, redirect_hosts=["named.invalid"]).open("org/sql")


def test_redirects_that_go_round(hub: FakeHub) -> None:
    hub.repository.redirects[WEIGHTS] = f"/org/sql/resolve/{COMMIT}/{WEIGHTS}"
    with pytest.raises(SourceUnavailable, match="more than 5 times"):
        source_of(hub).open("org/sql")


def test_named_hosts_get_no_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server stands for the host that keeps the files; TLS is left out."""
    with hub_server() as files:
        files.repositories = hub.server.repositories
        hub.repository.redirects[WEIGHTS] = f"{files.endpoint}/cdn/org/sql/{WEIGHTS}"
        monkeypatch.setattr("loraplex_adapters.sources.hub.TLS", "http")
        source = source_of(hub, token="hf_x", redirect_hosts=["127.0.0.1"])
        source.open("org/sql").close()
        assert files.asked == [(f"/cdn/org/sql/{WEIGHTS}", None)]


def test_damaged_bytes_are_fetched_once_more(hub: FakeHub) -> None:
    whole = (hub.folder / WEIGHTS).read_bytes()
    damaged = {
        "ended after": whole[:-1],
        "has more than": whole + b"x",
        "does not have the digest": whole[:-1] + b"\xff",
    }
    for says, body in damaged.items():
        hub.repository.bodies[WEIGHTS] = [body]
        with source_of(hub).open("org/sql") as files:
            assert read_all(files.open(WEIGHTS), 1 << 20) == whole
        hub.repository.bodies[WEIGHTS] = [body, body]
        with pytest.raises(SourceUnavailable, match=says):
            source_of(hub).open("org/sql")
    hub.repository.bodies.clear()
    hub.repository.digests["adapter_config.json"] = "0" * 40
    with pytest.raises(
        SourceUnavailable, match=r"adapter_config.json of 'org/sql' on the Hub does not have the digest"
    ):
        source_of(hub).open("org/sql")
    assert not hub.left_over


def test_lies_about_sizes(hub: FakeHub) -> None:
    hub.repository.sizes[WEIGHTS] = 10
    with pytest.raises(SourceUnavailable, match="more than the 10 bytes"):
        source_of(hub).open("org/sql")
    hub.repository.sizes[WEIGHTS] = 1 << 20
    with pytest.raises(SourceUnavailable, match=r"ended after \d+ of 1048576 bytes"):
        source_of(hub).open("org/sql")


@pytest.mark.parametrize(
    "info",
    [
        b"",
        b"[]",
        b"{}",
        b'{"sha": "../..", "siblings": []}',
        json.dumps({"sha": COMMIT, "siblings": [{"rfilename": WEIGHTS, "size": -1, "blobId": COMMIT}]}).encode(),
        json.dumps({"sha": COMMIT, "siblings": [{"rfilename": WEIGHTS, "size": 1}]}).encode(),
        json.dumps({"sha": COMMIT, "siblings": [{"rfilename": WEIGHTS, "lfs": 1}]}).encode(),
    ],
)
def test_a_hub_that_talks_nonsense(hub: FakeHub, info: bytes) -> None:
    hub.server.info = info
    with pytest.raises(SourceUnavailable, match="did not describe 'org/sql'"):
        source_of(hub).open("org/sql")


def test_tokens_are_in_no_log(hub: FakeHub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    origin = AdapterOrigin(token="hf_caller")
    source_of(hub, token="hf_operator").open("org/sql", origin).close()
    hub.server.status = 500
    with pytest.raises(SourceUnavailable):
        source_of(hub, token="hf_operator").open("org/sql", origin)
    assert "hf_" not in caplog.text
    assert "hf_" not in repr(origin)


def test_the_hub_is_off_unless_enabled(tmp_path: Path, hub: FakeHub) -> None:
    root = tmp_path / "root"
    write_adapter(root / "local")
    without = make_source(root)
    with pytest.raises(AdapterNotFound):
        without.open("org/sql")
    assert without.list() == ["local"]
    assert make_source(None).list() == []
    with pytest.raises(AdapterNotFound):
        make_source(None).open("local")


def test_the_first_source_that_has_the_name_wins(tmp_path: Path, hub: FakeHub) -> None:
    root = tmp_path / "root"
    write_adapter(root / "local")
    source = ChainSource([DirectorySource(root), source_of(hub)])
    with source.open("local"):
        assert not hub.downloads
    with source.open("org/sql") as files:
        assert "adapter_config.json" in files.names
    write_adapter(root / "org" / "sql")
    num_downloads = len(hub.downloads)
    with source.open("org/sql"):
        assert len(hub.downloads) == num_downloads
    with pytest.raises(AdapterNotFound):
        source.open("nothing")


def test_a_source_that_is_away_is_not_passed_over(tmp_path: Path, hub: FakeHub) -> None:
    source = ChainSource([DirectorySource(tmp_path / "away"), source_of(hub)])
    with pytest.raises(SourceUnavailable):
        source.open("org/sql")
    assert not hub.downloads


def test_revisions_on_the_wire() -> None:
    assert check_adapter_source("hub:org/sql") == "hub:org/sql"
    assert check_revision("refs/pr/1") == "refs/pr/1"
    for revision in ("../main", "-x", "a b", "x" * 200, "main\n"):
        with pytest.raises(InvalidArgument, match="not a branch, a tag or a commit"):
            check_revision(revision)
    for field in ("revision", "token"):
        with pytest.raises(Unimplemented, match=f"`{field}` .* hub:ORG/NAME"):
            check_on_hub("folder", field=field)
    request = adapter_pb2.LoadAdapterRequest(adapter_id="sql", source="hub:org/sql", revision="main")
    assert validate.check_adapter_request(request) == "sql"
    load = adapter_pb2.LoadAdapterRequest
    for elsewhere in (load(revision="main"), load(token="hf_secret"), load(token="hf_secret", source="s3:bucket/sql")):
        elsewhere.adapter_id = "sql"
        with pytest.raises(Unimplemented):
            validate.check_adapter_request(elsewhere)
    request.token = "hf_secret \n"
    with pytest.raises(InvalidArgument) as caught:
        validate.check_adapter_request(request)
    assert "hf_secret" not in str(caught.value)


def test_a_load_of_a_revision(hub: FakeHub) -> None:
    engine = Engine(ChainSource([]), remote=source_of(hub))
    try:
        options = LoadOptions(AdapterOrigin("hub:org/sql", "main"))
        row = engine.until(lambda: engine.cache.load(AdapterId("mine"), False, engine.now, options=options))
        assert (row.adapter_id, row.source) == ("mine", "hub:org/sql")
        assert "/revision/main?" in hub.server.asked[0][0]
    finally:
        engine.cache.close()
