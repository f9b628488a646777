"""The directory's index: equal to a fresh look, reading changes only."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loraplex_adapters.io.confined_folder import Folder
from loraplex_adapters.sources import directory
from loraplex_adapters.sources.directory import FULL_LOOK_EVERY, MAX_MISNAMED, DirectoryIndex, DirectorySource
from loraplex_adapters.sources.watch import SourceWatch
from loraplex_contracts.errors import SourceUnavailable

LONG_AGO_S = 1_000_000_000.0
STEP_S = 0.02
MINUTE_NS = 60 * 10**9
MARK = "adapter_config.json"


class Index:
    """An index over a root, and the names of the folders that a look has read."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.read: list[str] = []
        self._index = DirectoryIndex(self._holds_adapter)

    def _holds_adapter(self, folder: Folder, names: set[str], adapter_id: str) -> bool:
        self.read.append(adapter_id)
        return MARK in names

    def look(self) -> list[str]:
        self.read.clear()
        root = Folder.root(self.root)
        try:
            return list(self._index.look(root))
        finally:
            root.close()


@pytest.fixture(autouse=True)
def _steps_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "TIME_STEP_NS", int(STEP_S * 1e9))


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / MARK).touch()
        settle()
        return tmp_path / name

    return make


def settle() -> None:
    """Waits until the next change of a folder has another time than the last one."""
    time.sleep(2 * STEP_S)


def test_nothing_is_read_twice(tmp_path: Path, make: Callable[[str], Path]) -> None:
    for name in ("b", "a", "org/x", "org/y"):
        make(name)
    index = Index(tmp_path)
    assert index.look() == ["a", "b", "org/x", "org/y"]
    assert sorted(index.read) == ["a", "b", "org", "org/x", "org/y"]
    for _ in range(2 * FULL_LOOK_EVERY):
        assert index.look() == ["a", "b", "org/x", "org/y"]
        assert index.read == []
    make("c")
    make("org/z")
    assert index.look() == ["a", "b", "c", "org/x", "org/y", "org/z"]
    assert sorted(set(index.read) - {"org"}) == ["c", "org/z"]
    shutil.rmtree(tmp_path / "b")
    shutil.rmtree(tmp_path / "org" / "x")
    assert index.look() == ["a", "c", "org/y", "org/z"]


def test_a_folder_that_was_written_to_just_now_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder's times may stay as they are at the next change."""
    state = directory._state

    def coarse(found: os.stat_result) -> tuple[int, int, int, int]:
        """As a file system that counts minutes has it."""
        device, inode, *times = state(found)
        modified, changed = (time_ns // MINUTE_NS * MINUTE_NS for time_ns in times)
        return device, inode, modified, changed

    monkeypatch.setattr(directory, "_state", coarse)
    monkeypatch.setattr(directory, "TIME_STEP_NS", 2 * MINUTE_NS)
    index = Index(tmp_path)
    (tmp_path / "a").mkdir()
    assert index.look() == []
    (tmp_path / "a" / MARK).touch()
    assert index.look() == ["a"]


def test_folders_without_a_time_of_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems in user space give none."""
    state = directory._state
    monkeypatch.setattr(directory, "_state", lambda found: (*state(found)[:3], 0))
    index = Index(tmp_path)
    (tmp_path / "a").mkdir()
    settle()
    assert index.look() == []
    (tmp_path / "a" / MARK).touch()
    settle()
    assert index.look() == ["a"]


def test_a_folder_in_another_ones_place(tmp_path: Path, make: Callable[[str], Path]) -> None:
    make("a")
    index = Index(tmp_path)
    assert index.look() == ["a"]
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "a").mkdir()
    assert index.look() == ["b"]


def test_an_adapter_that_loses_its_files_is_noticed_after_a_while(tmp_path: Path, make: Callable[[str], Path]) -> None:
    folder = make("a")
    index = Index(tmp_path)
    index.look()
    (folder / MARK).unlink()
    looks = [index.look() for _ in range(FULL_LOOK_EVERY)]
    assert looks[0] == ["a"]
    assert looks[-1] == []


def test_links_are_followed_inside_and_looked_after(tmp_path: Path, make: Callable[[str], Path]) -> None:
    make("root/org/a")
    make("root/other/b")
    make("outside/c")
    root = tmp_path / "root"
    (root / "link").symlink_to("org/a")
    (root / "out").symlink_to(tmp_path / "outside" / "c")
    index = Index(root)
    assert index.look() == ["link", "org/a", "other/b"]
    shutil.rmtree(root / "org")
    (root / "org").symlink_to("other")
    assert [index.look() for _ in range(FULL_LOOK_EVERY)][-1] == ["org/b", "other/b"]


def test_links_to_folders_with_equal_times(tmp_path: Path, make: Callable[[str], Path]) -> None:
    """Unpacked archives and images may give all folders and links one time."""
    for name in ("v1/one", "v2/one", "v2/two", "v2/other/inner"):
        make(name)

    def point(link: Path, target: str) -> None:
        (tmp_path / "fresh").symlink_to(target)
        (tmp_path / "fresh").rename(link)
        for path in [tmp_path, *tmp_path.rglob("*")]:
            os.utime(path, (LONG_AGO_S, LONG_AGO_S), follow_symlinks=False)
        settle()

    point(tmp_path / "current", "v1")
    index = Index(tmp_path / "current")
    assert index.look() == ["one"]
    point(tmp_path / "current", "v2")
    point(tmp_path / "v2" / "link", "one")
    assert index.look() == ["link", "one", "other/inner", "two"]
    index.look()
    assert index.read == []
    point(tmp_path / "v2" / "link", "other")  # the folder that it is in has its time of before
    looks = [index.look() for _ in range(FULL_LOOK_EVERY)]
    assert looks[-1] == ["link/inner", "one", "other/inner", "two"]


def test_folders_whose_times_are_set(tmp_path: Path) -> None:
    """`tar --mtime` gives folders equal times, and unpacking one archive after the other leaves those as they were."""

    def unpack(*files: str) -> None:
        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).touch()
        for folder in (tmp_path, *tmp_path.iterdir()):
            os.utime(folder, (LONG_AGO_S, LONG_AGO_S))
        settle()

    index = Index(tmp_path)
    unpack("a/README.md")
    assert index.look() == []
    unpack("b/README.md", f"a/{MARK}")
    assert index.look() == ["a"]
    unpack(f"b/{MARK}")
    assert index.look() == ["a", "b"]
    to_come_s = time.time() + 1e6
    os.utime(tmp_path / "a", (to_come_s, to_come_s))
    settle()
    read = list[str]()
    for _ in range(3 * FULL_LOOK_EVERY):
        index.look()
        read += index.read
    assert read == ["a"], "once, also with a time that is to come"


def test_folders_whose_names_are_no_ids_are_logged_once(
    tmp_path: Path, make: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("sql", "my adapter", "org/-x", "new\nline", "a" * 129, ".hidden", "org/..data"):
        make(name)
    (tmp_path / "read me").touch()
    index = Index(tmp_path)
    for seconds in range(3):
        os.utime(tmp_path, (LONG_AGO_S, LONG_AGO_S + seconds))  # read anew
        assert index.look() == ["sql"]
    names = [record.getMessage().partition(" the folder ")[2].partition(" is not ")[0] for record in caplog.records]
    assert sorted(names) == sorted(["'my adapter'", "'org/-x'", r"'new\nline'", f"'{'a' * 40}'..."])
    caplog.clear()
    for number in range(2 * MAX_MISNAMED):
        (tmp_path / f"no id {number}").mkdir()
    assert index.look() == ["sql"]
    assert len(names) + len(caplog.records) == MAX_MISNAMED


@pytest.fixture
def watch(tmp_path: Path, make: Callable[[str], Path]) -> Iterator[SourceWatch]:
    make("root/a")
    watch = SourceWatch(DirectorySource(tmp_path / "root"), interval_s=0.01)
    yield watch
    watch.close()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.01)


def test_a_watch_sees_what_comes_and_keeps_what_was_there(
    watch: SourceWatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    until(lambda: watch.names == ["a"])
    assert watch.has_looked
    (tmp_path / "root" / "b").mkdir()
    (tmp_path / "root" / "b" / MARK).touch()
    until(lambda: watch.names == ["a", "b"])
    before = watch.names
    time.sleep(0.05)
    assert watch.names is before, "the same object while nothing changes"
    (tmp_path / "root").rename(tmp_path / "away")
    with pytest.raises(SourceUnavailable):
        DirectorySource(tmp_path / "root").list()
    until(lambda: "cannot be listed" in caplog.text)
    time.sleep(0.05)
    assert watch.names == ["a", "b"]
    assert caplog.text.count("cannot be listed") == 1
