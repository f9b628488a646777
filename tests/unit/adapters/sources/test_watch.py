"""Folders that are replaced: the decision, and a cache with a watch."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.adapter_files import Engine, write_adapter

from loraplex_adapters.io.source_files import AdapterFiles
from loraplex_adapters.sources import watch
from loraplex_adapters.sources.directory import DirectorySource, Fingerprint, FolderSource
from loraplex_adapters.sources.watch import RETRY_S, Looks, ReplacedFolders
from loraplex_contracts.adapters import OWN_ORIGIN, AdapterId, AdapterInfo, AdapterOrigin, LoadOptions
from loraplex_contracts.errors import AdapterInvalid

WEIGHTS = "adapter_model.safetensors"
OLD: Fingerprint = ((WEIGHTS, 10, 1, 1, 1),)
NEW: Fingerprint = ((WEIGHTS, 10, 1, 2, 2),)
NEWER: Fingerprint = ((WEIGHTS, 11, 1, 2, 3),)


class Folder:
    """One watched name, and a clock."""

    def __init__(self) -> None:
        self.folders = ReplacedFolders(quiet_s=3.0)
        self.folders.loaded("sql", OWN_ORIGIN, OLD)

    def due(self, *looks: tuple[float, Fingerprint | None]) -> list[float]:
        """Times of the looks at which a load is due."""
        return [now for now, files in looks if self.folders.is_due("sql", files, now)]


def test_files_that_stay_are_not_loaded() -> None:
    assert Folder().due((0, OLD), (10, OLD), (100, OLD)) == []


def test_other_files_are_loaded_once_when_they_have_stayed() -> None:
    assert Folder().due((0, OLD), (1, NEW), (3, NEW), (4, NEW), (5, NEW), (6, NEW)) == [4]
    assert Folder().due((0, NEW), (2, NEWER), (4, NEWER), (5, NEWER)) == [5]  # changed again meanwhile


def test_a_folder_that_is_gone_changes_nothing() -> None:
    assert Folder().due((0, OLD), (1, None), (100, None), (101, OLD), (110, OLD)) == []
    assert Folder().due((0, NEW), (2, None), (4, NEW), (6, NEW), (7, NEW)) == [7]


def test_what_has_failed_is_tried_again_when_it_changes() -> None:
    folder = Folder()
    assert folder.due((0, NEW), (3, NEW)) == [3]
    folder.folders.failed("sql", OWN_ORIGIN, NEW, may_retry=False)
    assert folder.due((4, NEW), (1000, NEW), (1001, NEWER), (1004, NEWER)) == [1004]
    folder.folders.failed("sql", OWN_ORIGIN, NEWER, may_retry=False)
    assert folder.due((1005, OLD), (1008, OLD)) == [1008]  # put back: the error in the listing ends


def test_what_may_succeed_later_is_tried_again_later() -> None:
    folder = Folder()
    assert folder.due((0, NEW), (3, NEW)) == [3]
    folder.folders.failed("sql", OWN_ORIGIN, NEW, may_retry=True)
    assert folder.due((4, NEW), (3 + RETRY_S, NEW), (4 + RETRY_S, NEW)) == [3 + RETRY_S]
    folder.folders.loaded("sql", OWN_ORIGIN, NEW)
    assert folder.due((200, NEW), (300, NEW)) == []


def test_a_load_from_elsewhere_that_has_failed_says_nothing_of_the_folder() -> None:
    folder = Folder()
    folder.folders.failed("sql", AdapterOrigin("v2"), NEW, may_retry=False)
    assert folder.due((0, OLD), (10, OLD), (11, NEW), (14, NEW)) == [14]


def test_names_without_a_folder_are_not_looked_at() -> None:
    folders = ReplacedFolders(quiet_s=0.0)
    folders.loaded("org/sql", OWN_ORIGIN, None)  # from the Hub
    assert not folders.origins()
    assert not folders.is_due("org/sql", NEW, 0.0)
    folders.failed("org/sql", OWN_ORIGIN, NEW, may_retry=True)
    folders.loaded("mine", AdapterOrigin("v1"), OLD)
    assert folders.origins() == {"mine": AdapterOrigin("v1")}
    folders.forget("mine")
    assert not folders.origins()


# --- looks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("works", [False, True])
def test_a_look_is_followed_by_a_rest_for_what_it_worked(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that is paused, or waits for a core, soon comes again."""
    rests_s: list[float] = []
    closed = threading.Event()

    def rest(seconds: float) -> bool:
        rests_s.append(seconds)
        closed.set()
        return True

    def look() -> None:
        if not works:
            time.sleep(0.1)
        started_s = time.thread_time()
        while works and time.thread_time() < started_s + 0.1:
            pass

    monkeypatch.setattr(closed, "wait", rest)
    monkeypatch.setattr(watch, "threading", SimpleNamespace(Event=lambda: closed, Thread=threading.Thread))
    looks = Looks("looks", look, interval_s=0.01)
    looks._thread.join(10)  # pyright: ignore[reportPrivateUsage]
    (rest_s,) = rests_s
    assert (rest_s > 0.5) == works
    assert rest_s >= 0.1


# --- fingerprints -----------------------------------------------------------------------------------------------------


def test_fingerprints(tmp_path: Path) -> None:
    source = DirectorySource(tmp_path)
    assert source.fingerprint("sql") is None
    folder = write_adapter(tmp_path / "sql")
    first = source.fingerprint("sql")
    assert first is not None
    assert [name for name, *_ in first] == ["adapter_config.json", WEIGHTS]
    (folder / "README.md").write_text("about")
    (folder / ".adapter_model.safetensors.part").write_bytes(b"half")
    assert source.fingerprint("sql") == source.fingerprint("mine", AdapterOrigin("sql")) == first
    (folder / "config.json").write_text("{}")
    assert source.fingerprint("sql") != first
    (folder / "config.json").unlink()
    os.utime(folder / WEIGHTS, ns=(5, 5))
    assert source.fingerprint("sql") != first
    before = source.fingerprint("sql")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    assert source.fingerprint("sql") != before
    assert source.fingerprint("sql", AdapterOrigin("/etc")) is None
    assert source.fingerprint("../sql") is None


def test_a_file_with_the_size_and_time_of_the_one_before_is_another_one(tmp_path: Path) -> None:
    """`cp -p` of a build with fixed times, for one."""
    source, weights = DirectorySource(tmp_path), write_adapter(tmp_path / "sql") / WEIGHTS
    os.utime(weights, ns=(5, 5))
    before, found = source.fingerprint("sql"), weights.stat()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    time.sleep(0.02)  # file systems count time in steps
    with weights.open("r+b") as file:
        file.write(content)
    os.utime(weights, ns=(5, 5))
    now = weights.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (found.st_size, found.st_mtime_ns, found.st_ino)
    assert source.fingerprint("sql") != before


def test_fingerprints_of_links(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", write_adapter(tmp_path / "outside")
    source = DirectorySource(root)
    for version in ("v1", "v2"):
        write_adapter(root / version)
    (root / "sql").symlink_to("v1")
    assert source.fingerprint("sql") == source.fingerprint("v1") != source.fingerprint("v2")
    (root / "sql").unlink()
    (root / "sql").symlink_to(outside)
    assert [num_bytes for _, num_bytes, *_ in source.fingerprint("sql") or ()] == [0]  # nothing of what it leads to
    (root / "v2" / WEIGHTS).unlink()
    (root / "v2" / WEIGHTS).symlink_to(outside / WEIGHTS)
    refused = source.fingerprint("v2")
    assert refused is not None
    assert refused[1][1] == -1


# --- a cache with a watch ---------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(watch, "INTERVAL_S", 0.01)
    monkeypatch.setattr(watch, "QUIET_S", 0.05)
    write_adapter(tmp_path / "root" / "sql")
    return tmp_path / "root"


@pytest.fixture
def engine(root: Path) -> Iterator[Engine]:
    engine = Engine(DirectorySource(root), watched=DirectorySource(root))
    yield engine
    engine.close()


def replace(root: Path, seed: int, name: str = "sql") -> None:
    """Replaces an adapter as users are told to: a complete folder, by a rename."""
    fresh = write_adapter(root.parent / "fresh", seed=seed)
    if (root / name).exists():
        (root / name).rename(root.parent / f"old-{seed}")
    fresh.rename(root / name)


def look_again(engine: Engine) -> None:
    """Turns the engine for longer than the watch waits for files to stay as they are."""
    until_s = time.monotonic() + 0.2
    while time.monotonic() < until_s:
        engine.turn(0.02)


def until_reloaded(engine: Engine, name: str, digest: str) -> AdapterInfo:
    def ask() -> AdapterInfo | None:
        row = engine.cache.get(name)
        return row if row.digest != digest else None

    return engine.until(ask)


def until_failed(engine: Engine, name: str, reason: str) -> AdapterInfo:
    def ask() -> AdapterInfo | None:
        row = engine.cache.get(name)
        return row if row.last_error_reason == reason else None

    return engine.until(ask)


def test_a_replaced_folder_is_loaded(engine: Engine, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loraplex.audit")
    old = engine.load("sql", pin=True)
    running = engine.resolve("sql")
    replace(root, seed=1)
    new = until_reloaded(engine, "sql", old.digest)
    assert new.pinned
    following = engine.resolve("sql")
    assert (running.digest, following.digest) == (old.digest, new.digest)
    look_again(engine)
    assert [record.levelname for record in caplog.records if record.name == "loraplex.audit"] == ["INFO"]
    assert new.digest in caplog.text
    engine.cache.drop_hold(running, name="sql")
    engine.cache.drop_hold(following, name="sql")


def test_broken_files_leave_the_version_before(engine: Engine, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = engine.load("sql")
    weights = root / "sql" / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])  # a copy that has stopped half way
    row = until_failed(engine, "sql", "ADAPTER_INVALID")
    assert (row.digest, row.state) == (old.digest, old.state)
    assert "goes on serving" in caplog.text
    num_logged = len(caplog.records)
    look_again(engine)
    assert len(caplog.records) == num_logged  # the same files are not tried again
    weights.write_bytes(whole)
    engine.until(lambda: None if engine.cache.get("sql").last_error else True)
    assert engine.cache.get("sql").digest == old.digest


def test_links_that_lead_out_are_not_followed(engine: Engine, root: Path) -> None:
    old = engine.load("sql")
    outside = write_adapter(root.parent / "outside", seed=2)
    shutil.rmtree(root / "sql")
    look_again(engine)
    assert engine.cache.get("sql").digest == old.digest  # a folder that is gone unloads nothing
    (root / "sql").symlink_to(outside)
    assert until_failed(engine, "sql", "ADAPTER_OUTSIDE_ROOT").digest == old.digest
    (root / "sql").unlink()
    replace(root, seed=3)
    assert until_reloaded(engine, "sql", old.digest).last_error == ""


def test_the_place_of_a_name_stays(engine: Engine, root: Path) -> None:
    write_adapter(root / "v1", seed=1)
    old = engine.load("mine", options=LoadOptions(AdapterOrigin("v1")))
    write_adapter(root / "mine", seed=2)  # a folder of that name is not its place
    look_again(engine)
    assert engine.cache.get("mine").digest == old.digest
    replace(root, seed=3, name="v1")
    assert until_reloaded(engine, "mine", old.digest).source == "v1"


def test_a_load_from_elsewhere_that_has_failed_leads_to_no_other(
    engine: Engine, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "loraplex.audit")
    old = engine.load("sql")
    write_adapter(root / "bad", seed=1)
    os.truncate(root / "bad" / WEIGHTS, 100)
    with pytest.raises(AdapterInvalid):
        engine.load("sql", options=LoadOptions(AdapterOrigin("bad")))
    look_again(engine)
    row = engine.cache.get(AdapterId("sql"))
    assert (row.digest, row.last_error_reason) == (old.digest, "ADAPTER_INVALID")
    assert "was replaced" not in caplog.text


class HangingSource(FolderSource):
    """A source that answers late: it has no adapter."""

    def __init__(self) -> None:
        super().__init__("none", Path())
        self.gate = threading.Event()

    def open(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> AdapterFiles:
        self.gate.wait(10)
        return super().open(adapter_id, origin)


def test_a_name_that_waits_for_another_load_holds_up_no_other(root: Path) -> None:
    write_adapter(root / "a", seed=1)  # looked at before `sql`
    remote = HangingSource()
    engine = Engine(DirectorySource(root), remote=remote, watched=DirectorySource(root))
    try:
        for name in ("a", "sql"):
            engine.load(name)
        old = engine.cache.get(AdapterId("sql"))
        from_hub = LoadOptions(AdapterOrigin("hub:org/a"))
        assert engine.cache.load(AdapterId("a"), False, engine.now, options=from_hub) is None
        replace(root, seed=2, name="a")
        replaced = engine.cache._replaced  # pyright: ignore[reportPrivateUsage]
        engine.until(lambda: True if "a" in replaced else None)
        replace(root, seed=3)
        until_reloaded(engine, "sql", old.digest)
        assert not remote.gate.is_set()
    finally:
        remote.gate.set()
        engine.cache.close()


def test_an_unloaded_name_is_not_loaded(engine: Engine, root: Path) -> None:
    old = engine.load("sql")
    engine.cache.unload(AdapterId("sql"))
    replace(root, seed=1)
    look_again(engine)
    assert [row.adapter_id for row in engine.listed()] == []
    assert engine.load("sql").digest != old.digest
