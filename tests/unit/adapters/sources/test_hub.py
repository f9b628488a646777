"""The Hub source against fakes of the Hub client's two functions."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import errors
from support.adapter_files import write_adapter
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

from loraplex_adapters.io.source_files import read_all
from loraplex_adapters.sources.chain import ChainSource, make_source
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.sources.hub import HubSource
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    DiskFull,
    InvalidAdapterId,
    LoraplexError,
    SourceUnavailable,
    UnsafeFormat,
)


class FakeHub:
    """Serves one folder as the repository `org/sql`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.downloads: list[dict[str, Any]] = []
        self.targets: list[Path] = []
        self.info_error: Exception | None = None
        self.download_error: Exception | None = None

    def repo_info(self, repo_id: str, **options: Any) -> Any:
        if self.info_error is not None:
            raise self.info_error
        assert repo_id == "org/sql"
        assert options["files_metadata"] is True
        files = [SimpleNamespace(rfilename=p.name, size=p.stat().st_size) for p in self.folder.iterdir()]
        return SimpleNamespace(sha="abc123", siblings=files)

    def download(self, repo_id: str, **options: Any) -> str:
        self.downloads.append({"repo_id": repo_id} | options)
        self.targets.append(options["local_dir"])
        for name in options["allow_patterns"]:
            shutil.copy(self.folder / name, options["local_dir"] / name)
        if self.download_error is not None:
            raise self.download_error
        return str(options["local_dir"])


@pytest.fixture
def hub(tmp_path: Path) -> FakeHub:
    return FakeHub(write_adapter(tmp_path / "hub"))


def source_of(hub: FakeHub, **options: Any) -> HubSource:
    return HubSource(repo_info=hub.repo_info, download=hub.download, **options)


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    response: Any = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("the hub said no at https://hub.invalid/secret-path", response=response)


def test_only_the_wanted_files_of_one_revision_are_fetched(hub: FakeHub) -> None:
    (hub.folder / "model-00001-of-00090.safetensors").write_bytes(b"x" * 100)
    (hub.folder / "chat_template.jinja").write_text("{{ evil }}")
    (hub.folder / "run.py").write_text("evil")
    with source_of(hub, token="hf_x").open("org/sql") as files:
        assert files.names == {"adapter_config.json", "adapter_model.safetensors"}
        assert read_all(files.open("adapter_config.json"), 1 << 20)
        assert hub.targets[0].is_dir()
    (download,) = hub.downloads
    assert download["revision"] == "abc123"
    assert download["token"] == "hf_x"
    assert sorted(download["allow_patterns"]) == ["adapter_config.json", "adapter_model.safetensors"]
    assert not hub.targets[0].exists()  # nothing stays behind


def test_a_pickle_is_refused_before_it_is_fetched(hub: FakeHub) -> None:
    (hub.folder / "adapter_model.safetensors").rename(hub.folder / "adapter_model.bin")
    with pytest.raises(UnsafeFormat):
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
    assert len(hub.downloads) == 1


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
    assert hub.downloads[0]["allow_patterns"] == ["config.json"]
    assert not hub.targets[0].exists()
    with pytest.raises(AdapterInvalid, match="at most 2000"):
        source_of(hub, max_bytes=2000).open("org/sql")


@pytest.mark.parametrize("config", [base_config(), base_config(medusa_num_heads=5), {"model_type": ["medusa"]}])
def test_of_a_whole_model_only_the_configuration_is_fetched(hub: FakeHub, config: dict[str, Any]) -> None:
    write_heads(emptied(hub.folder), base_tensors(), config, "model.safetensors")
    with pytest.raises(AdapterInvalid, match="a whole model on the Hub"):
        source_of(hub).open("org/sql")
    assert [download["allow_patterns"] for download in hub.downloads] == [["config.json"]]
    assert not any(folder.exists() for folder in hub.targets)


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


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (http_error(errors.RepositoryNotFoundError, 404), AdapterNotFound),
        (http_error(errors.GatedRepoError, 403), AdapterNotFound),
        (http_error(errors.RevisionNotFoundError, 404), AdapterNotFound),
        (errors.HFValidationError("no"), AdapterNotFound),
        (http_error(errors.HfHubHTTPError, 500), SourceUnavailable),
        (http_error(errors.HfHubHTTPError, 429), SourceUnavailable),
        (errors.OfflineModeIsEnabled("offline"), SourceUnavailable),
        (errors.LocalEntryNotFoundError("offline"), SourceUnavailable),
        (ConnectionError("no route to hub.invalid"), SourceUnavailable),
        (TimeoutError(), SourceUnavailable),
        (OSError("disk"), SourceUnavailable),
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
@pytest.mark.parametrize("when", ["info", "download"])
def test_errors_are_typed_and_leave_nothing(
    hub: FakeHub, error: Exception, expected: type[LoraplexError], when: str
) -> None:
    if when == "info":
        hub.info_error = error
    else:
        hub.download_error = error
    with pytest.raises(expected) as raised:
        source_of(hub).open("org/sql")
    assert "hub.invalid" not in str(raised.value)
    if expected is SourceUnavailable:
        assert raised.value.retry_after_s
    assert not any(folder.exists() for folder in hub.targets)


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
    with source.open("org/sql"):
        assert len(hub.downloads) == 1
    with pytest.raises(AdapterNotFound):
        source.open("nothing")


def test_a_source_that_is_away_is_not_passed_over(tmp_path: Path, hub: FakeHub) -> None:
    source = ChainSource([DirectorySource(tmp_path / "away"), source_of(hub)])
    with pytest.raises(SourceUnavailable):
        source.open("org/sql")
    assert not hub.downloads
