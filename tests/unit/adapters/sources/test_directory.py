"""The directory source of adapters."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from pathlib import Path

import pytest
from support.adapter_files import write_adapter

from loraplex_adapters.io import source_files
from loraplex_adapters.io.source_files import AdapterSource, read_all
from loraplex_adapters.sources.chain import ChainSource
from loraplex_adapters.sources.directory import DirectorySource, FolderSource
from loraplex_contracts.adapters import AdapterOrigin
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterNotFound,
    AdapterOutsideRoot,
    InvalidAdapterId,
    SourceUnavailable,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "root" / "sql")
    write_adapter(tmp_path / "root" / "org" / "json")
    write_adapter(tmp_path / "outside" / "secret")
    return tmp_path / "root"


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def read(source: AdapterSource, adapter_id: str, name: str = "adapter_config.json") -> bytes:
    with source.open(adapter_id) as files:
        return read_all(files.open(name), 1 << 20)


def test_found_by_name(root: Path) -> None:
    source = DirectorySource(root)
    assert read(source, "sql") == (root / "sql" / "adapter_config.json").read_bytes()
    assert read(source, "org/json") == (root / "org" / "json" / "adapter_config.json").read_bytes()
    with source.open("sql") as files:
        assert files.names == {"adapter_config.json", "adapter_model.safetensors"}


def test_list(root: Path) -> None:
    (root / "empty").mkdir()
    (root / "a file").write_text("x")
    (root / "not-safe").mkdir()
    (root / "not-safe" / "adapter_model.bin").write_bytes(b"x")  # listed: whoever asks for it hears why it is refused
    (root / "bad..name").mkdir()
    (root / "link").symlink_to(root / "sql")
    (root / "evil").symlink_to(root.parent / "outside" / "secret")
    (root / "dangling").symlink_to("nothing")
    os.mkfifo(root / "fifo")
    before = open_fds()
    assert DirectorySource(root).list() == ["link", "not-safe", "org/json", "sql"]
    assert open_fds() == before


def test_places_in_buckets_are_not_folders(root: Path) -> None:
    write_adapter(root / "s3:models" / "sql")
    for source in (DirectorySource(root), ChainSource([])):
        with pytest.raises(AdapterNotFound, match=r"reads no buckets.*--s3-bucket"):
            source.open("sql", AdapterOrigin("s3:models/sql"))


@pytest.mark.parametrize("adapter_id", ["nothing", "sql/deeper", "org/nothing"])
def test_unknown(root: Path, adapter_id: str) -> None:
    before = open_fds()
    with pytest.raises(AdapterNotFound):
        DirectorySource(root).open(adapter_id)
    assert open_fds() == before


@pytest.mark.parametrize(
    "adapter_id",
    [
        "..",
        "../outside/secret",
        "sql/../../outside/secret",
        "/etc",
        "a/b/c",
        "",
        ".",
        "./sql",
        "sql/",
        "sql\x00",
        "https://example.com/x",
        "s3://bucket/x",
        "ѕql",  # a Cyrillic letter  # noqa: RUF001
        "x" * 129,
        "~root",
        "sql\n",
        "a\\b",
    ],
)
def test_ids_that_are_no_names(root: Path, adapter_id: str) -> None:
    with pytest.raises(InvalidAdapterId):
        DirectorySource(root).open(adapter_id)


@pytest.mark.parametrize("is_there", [True, False], ids=["to something", "to nothing"])
def test_links_out_of_the_root_are_not_followed_and_told(root: Path, is_there: bool) -> None:
    """The message is the same whether or not there is anything at the link's end."""
    outside = root.parent / "outside"
    (root / "evil").symlink_to(outside / "secret")
    (root / "evil-org").symlink_to(outside)
    (root / "inner").mkdir()
    (root / "inner" / "adapter_config.json").symlink_to(outside / "secret" / "adapter_config.json")
    if not is_there:
        shutil.rmtree(outside)
    source = ChainSource([DirectorySource(root), FolderSource("evil", root / "sql")])
    before = open_fds()
    for adapter_id in ("evil", "evil-org/secret"):
        with pytest.raises(AdapterOutsideRoot, match="its folder is a link that leads out of the") as caught:
            source.open(adapter_id)
        assert caught.value.resource == adapter_id
        assert str(outside) not in caught.value.message
    with pytest.raises(AdapterOutsideRoot, match=r"adapter_config\.json is a link that leads out"):
        read(DirectorySource(root), "inner")
    assert open_fds() == before
    assert not any(name.startswith("evil") for name in DirectorySource(root).list())


def test_a_snapshot_of_the_hubs_cache(root: Path) -> None:
    """All files are links into the folder of blobs, and the operator has given the snapshot a name."""
    blobs, snapshot = root / "models--org--sql" / "blobs", root / "models--org--sql" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted((root / "sql").iterdir())):
        path.rename(blobs / f"{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (root / "sql").rmdir()
    (root / "sql").symlink_to("models--org--sql/snapshots/abc")
    source = DirectorySource(root)
    before = open_fds()
    assert read(source, "sql") == (blobs / "0").read_bytes()
    assert "sql" in source.list()
    assert open_fds() == before


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert read(DirectorySource(link), "sql")


@pytest.mark.parametrize("is_named", [False, True], ids=["in a root", "named by the operator"])
def test_only_regular_files_are_opened(root: Path, is_named: bool) -> None:
    folder = root / "odd"
    folder.mkdir()
    os.mkfifo(folder / "adapter_config.json")  # opening it for reading would wait for ever
    (folder / "adapter_model.safetensors").mkdir()
    (folder / "dangling").symlink_to("nothing")
    with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as bound:  # its address has room for 100 bytes
        bound.bind("socket")
    source = FolderSource("odd", folder) if is_named else DirectorySource(root)
    before = open_fds()
    for name, why in (
        ("adapter_config.json", "is a FIFO"),
        ("adapter_model.safetensors", "is a folder"),
        ("dangling", "is a link to nothing"),
        ("socket", "is a socket"),
    ):
        with pytest.raises(AdapterInvalid, match=f"{name} {why}; put a regular") as caught, source.open("odd") as files:
            files.open(name)
        assert caught.value.resource == "odd"
    assert open_fds() == before


def test_a_folder_full_of_files_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "MAX_FILES", 1)
    before = open_fds()
    with pytest.raises(AdapterInvalid):
        DirectorySource(root).open("sql")
    assert open_fds() == before


def test_a_root_that_is_away_is_unavailable_and_not_empty(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path / "nothing")
    with pytest.raises(SourceUnavailable) as raised:
        source.open("sql")
    assert raised.value.retry_after_s
    assert str(tmp_path) not in str(raised.value)
    with pytest.raises(SourceUnavailable):
        source.list()


def test_a_file_that_ends_early_is_invalid(root: Path) -> None:
    with DirectorySource(root).open("sql") as files:
        file = files.open("adapter_model.safetensors")
        os.truncate(root / "sql" / "adapter_model.safetensors", 100)
        with pytest.raises(AdapterInvalid, match="cut short"):
            file.read_into(memoryview(bytearray(200)), 0)
        with pytest.raises(SourceUnavailable, match="written to"):
            file.check_unchanged()


def test_a_file_that_is_replaced_is_read_as_it_was(root: Path) -> None:
    before = (root / "sql" / "adapter_config.json").read_bytes()
    with DirectorySource(root).open("sql") as files:
        file = files.open("adapter_config.json")
        (root / "sql" / "new").write_bytes(b"other")
        (root / "sql" / "new").replace(root / "sql" / "adapter_config.json")
        assert read_all(file, 1 << 20) == before
        file.check_unchanged()


def test_files_that_are_replaced_one_by_one_do_not_belong_together(root: Path) -> None:
    """As rsync does it: each by a rename."""
    with DirectorySource(root).open("sql") as files:
        files.open("adapter_config.json")
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(root / "sql" / name, root / "new")
            (root / "new").replace(root / "sql" / name)
        files.open("adapter_model.safetensors")
        with pytest.raises(SourceUnavailable, match="replaced while") as raised:
            files.check_unchanged()
    assert raised.value.retry_after_s


def test_a_folder_that_is_replaced_is_read_as_it_was(root: Path) -> None:
    with DirectorySource(root).open("sql") as files:
        files.open("adapter_config.json")
        (root / "sql").rename(root / "old")
        write_adapter(root / "sql", seed=1)
        files.open("adapter_model.safetensors")
        files.check_unchanged()


def test_a_file_that_is_written_to_is_told_by_more_than_its_size_and_time(root: Path) -> None:
    weights = root / "sql" / "adapter_model.safetensors"
    os.utime(weights, ns=(5, 5))
    with DirectorySource(root).open("sql") as files:
        file = files.open(weights.name)
        time.sleep(0.02)  # file systems count time in steps
        with weights.open("r+b") as opened:
            opened.write(b"other")
        os.utime(weights, ns=(5, 5))
        with pytest.raises(SourceUnavailable, match="written to"):
            file.check_unchanged()


def test_a_large_small_file_is_refused(root: Path) -> None:
    with DirectorySource(root).open("sql") as files, pytest.raises(AdapterInvalid, match="at most 3"):
        read_all(files.open("adapter_config.json"), 3)
