"""A directory is there whole or not at all."""

from __future__ import annotations

import errno
import io
from pathlib import Path
from typing import Any

import pytest

from loraplex_contracts.errors import DiskFull, InvalidArgument
from loraplex_training.output import check_new, new_directory, scratch_directory, write_bytes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_appears_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with new_directory(out) as folder:
        write_bytes(folder / "a", b"1")
        assert not out.exists()
    assert (out / "a").read_bytes() == b"1"
    assert out.stat().st_mode & 0o777 == 0o755
    assert names(tmp_path / "deep") == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_whatever_stops_it_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with (
        pytest.raises(error),
        new_directory(tmp_path / "out") as folder,
        scratch_directory(tmp_path / "out") as scratch,
    ):
        write_bytes(folder / "a", b"1")
        write_bytes(scratch / "b", b"1")
        raise error
    assert names(tmp_path) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    for name in ("file", "full", "link"):
        with pytest.raises(InvalidArgument, match="exists already"):
            check_new(tmp_path / name)
    with new_directory(tmp_path / "empty") as folder:
        write_bytes(folder / "a", b"1")
    assert names(tmp_path / "empty") == ["a"]


def test_where_nothing_can_be_made_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for out in ("file/out", "file/deep/out", "link/out", "n" * 300):
        with pytest.raises(InvalidArgument, match="cannot be written"):
            check_new(tmp_path / out)
    check_new(tmp_path / "new" / "out")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "empty")  # a folder cannot take its place
    with pytest.raises(InvalidArgument, match="exists already"):
        check_new(tmp_path / "other")
    assert names(tmp_path) == ["empty", "file", "link", "other"]


def test_somebody_else_was_faster(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(InvalidArgument, match="cannot be written"), new_directory(out) as folder:
        write_bytes(folder / "a", b"1")
        out.mkdir()
        (out / "theirs").write_text("x")
    assert names(tmp_path) == ["out"]
    assert names(out) == ["theirs"]


class FullFile(io.BytesIO):
    def write(self, _content: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_path: Path, mode: str) -> FullFile:
        assert mode == "wb"
        return FullFile()

    for make in (new_directory, scratch_directory):
        with pytest.raises(DiskFull) as raised, make(tmp_path / "out") as folder, monkeypatch.context() as patch:
            patch.setattr(Path, "open", full)
            write_bytes(folder / "a", b"1")
        assert raised.value.message == f"the disk of {tmp_path} is full; free some space or name another --out"
        assert raised.value.resource == str(tmp_path)
    assert names(tmp_path) == []


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgument, match="cannot be written"), new_directory(tmp_path / "file" / "out"):
        raise AssertionError("there is no folder to fill")
