"""The directory source: what is in the root is found, and nothing else, whatever the root holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.adapter_files import write_adapter

from loraplex_adapters.sources import directory
from loraplex_adapters.sources.base import read_all
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_proto.errors import AdapterInvalid, AdapterNotFound, InvalidAdapterId, SourceUnavailable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "root" / "sql")
    write_adapter(tmp_path / "root" / "org" / "json")
    write_adapter(tmp_path / "outside" / "secret")
    return tmp_path / "root"


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def read(source: DirectorySource, adapter_id: str, name: str = "adapter_config.json") -> bytes:
    with source.open(adapter_id) as files:
        return read_all(files.open(name), 1 << 20, name)


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
    assert DirectorySource(root).list() == ["not-safe", "org/json", "sql"]


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


def test_links_are_never_followed(root: Path) -> None:
    outside = root.parent / "outside"
    (root / "evil").symlink_to(outside / "secret")
    (root / "evil-org").symlink_to(outside)
    (root / "inner").mkdir()
    (root / "inner" / "adapter_config.json").symlink_to(outside / "secret" / "adapter_config.json")
    source = DirectorySource(root)
    before = open_fds()
    for adapter_id in ("evil", "evil-org/secret"):
        with pytest.raises(AdapterNotFound):
            source.open(adapter_id)
    with pytest.raises(AdapterNotFound):
        read(source, "inner")
    assert open_fds() == before
    assert not any(name.startswith(("evil", "inner/")) for name in source.list())


def test_the_root_itself_may_be_a_link(root: Path) -> None:
    link = root.parent / "link"
    link.symlink_to(root)
    assert read(DirectorySource(link), "sql")


def test_only_regular_files_are_opened(root: Path) -> None:
    folder = root / "odd"
    folder.mkdir()
    os.mkfifo(folder / "adapter_config.json")  # opening it for reading would wait for ever
    (folder / "adapter_model.safetensors").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        with pytest.raises(AdapterNotFound), DirectorySource(root).open("odd") as files:
            files.open(name)


def test_a_folder_full_of_files_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "MAX_FILES", 1)
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
    assert source.list() == []


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
        assert read_all(file, 1 << 20, "x") == before


def test_a_large_small_file_is_refused(root: Path) -> None:
    with DirectorySource(root).open("sql") as files, pytest.raises(AdapterInvalid, match="at most 3"):
        read_all(files.open("adapter_config.json"), 3, "adapter_config.json")
