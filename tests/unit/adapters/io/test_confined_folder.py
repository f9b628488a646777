"""Paths confined to a root, links included.

Whoever swaps links meanwhile gets nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loraplex_adapters.io.confined_folder import MAX_LINKS, BadPath, Folder

INSIDE, OUTSIDE = b"inside", b"secret"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "blobs").mkdir(parents=True)
    (tmp_path / "root" / "blobs" / "b").write_bytes(INSIDE)
    (tmp_path / "root" / "a" / "deep").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "b").write_bytes(OUTSIDE)
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def no_descriptor_is_left(root: Path) -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def read(root: Path, folder: str, name: str) -> bytes:
    top = Folder.root(root)
    try:
        inner = top.open_folder(folder)
        try:
            fd = inner.open_file(name)
        finally:
            inner.close()
    finally:
        top.close()
    try:
        return os.read(fd, 100)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "target",
    [
        "../blobs/b",
        "./../a/./../blobs//b",
        "deep/../../blobs/b",
        "../other/link",
        "{root}/blobs/b",
        "{real}/blobs/b",
    ],
)
def test_links_that_stay_inside(root: Path, target: str) -> None:
    alias = root.parent / "alias"
    alias.symlink_to(root)  # the operator's own root may be a link, and its links may say either
    (root / "other").mkdir()
    (root / "other" / "link").symlink_to("../blobs/b")
    (root / "a" / "file").symlink_to(target.format(root=alias, real=root))
    assert read(alias, "a", "file") == INSIDE


def test_folders_may_be_links_and_dots_count_from_where_they_lead(root: Path) -> None:
    (root / "snapshots" / "abc").mkdir(parents=True)
    (root / "snapshots" / "abc" / "file").symlink_to("../../blobs/b")
    (root / "name").symlink_to("snapshots/abc")
    assert read(root, "name", "file") == INSIDE


LEADS_OUT = ["../../outside/b", "/etc/passwd", "/", "../..", "../../root/blobs/b", "{root}/../outside/b", "{root}x"]


@pytest.mark.parametrize("target", LEADS_OUT)
@pytest.mark.parametrize("is_there", [True, False])
def test_links_that_lead_out(root: Path, target: str, is_there: bool) -> None:
    """The error is the same whether or not there is anything at the link's end."""
    if not is_there:
        (root.parent / "outside" / "b").unlink()
    (root / "a" / "file").symlink_to(target.format(root=root))
    (root / "folder").symlink_to("../outside")
    with pytest.raises(BadPath, match="leads out") as caught:
        read(root, "a", "file")
    assert caught.value.leads_out
    with pytest.raises(BadPath, match="leads out"):
        read(root, "folder", "b")


def test_links_that_lead_nowhere(root: Path) -> None:
    (root / "a" / "dangling").symlink_to("nothing")
    (root / "a" / "round").symlink_to("round")
    (root / "a" / "0").symlink_to("../blobs/b")
    for number in range(MAX_LINKS):
        (root / "a" / f"{number + 1}").symlink_to(f"{number}")
    assert read(root, "a", f"{MAX_LINKS - 1}") == INSIDE
    for name, why in (("dangling", "to nothing"), ("round", "in a circle"), (f"{MAX_LINKS}", "too many")):
        with pytest.raises(BadPath, match=why) as caught:
            read(root, "a", name)
        assert not caught.value.leads_out
    with pytest.raises(FileNotFoundError):
        read(root, "a", "nothing")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:  # its address has room for 100 bytes
        bound.bind(path.name)


@pytest.mark.parametrize(
    ("make", "why"), [(fifo, "is a FIFO"), (bound_socket, "is a socket"), (Path.mkdir, "is a folder")]
)
@pytest.mark.parametrize("is_linked", [False, True])
def test_only_regular_files_are_opened(root: Path, make: Callable[[Path], None], why: str, is_linked: bool) -> None:
    make(root / "a" / "thing")
    (root / "a" / "link").symlink_to("thing")
    with pytest.raises(BadPath, match=why):
        read(root, "a", "link" if is_linked else "thing")


def test_devices_are_not_opened(tmp_path: Path) -> None:
    dev = Folder.root(Path("/dev"))
    try:
        with pytest.raises(BadPath, match="is a device"):
            dev.open_file("null")
    finally:
        dev.close()


def test_a_file_is_no_folder(root: Path) -> None:
    for path in ("blobs/b", "blobs/b/c"):
        with pytest.raises(NotADirectoryError):
            read(root, path, "x")


def make_file(path: Path) -> None:
    path.write_bytes(INSIDE)


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "b").write_bytes(INSIDE)


# The path, what it is, and what somebody makes of it again and again.
SWAPS: dict[str, tuple[str, Callable[[Path], None], Callable[[Path], None]]] = {
    "a file for a link out": ("a/file", make_file, lambda path: path.symlink_to("../../outside/b")),
    "a link in for a link out": (
        "a/file",
        lambda path: path.symlink_to("../blobs/b"),
        lambda path: path.symlink_to("../../outside/b"),
    ),
    "a folder on the way for a link out": ("blobs", make_folder, lambda path: path.symlink_to("../outside")),
    "a file for a FIFO": ("a/file", make_file, fifo),
}


class Swap:
    """Two things that change places at `path` by renaming: what the good one's maker made, and the bad one's."""

    def __init__(self, root: Path, case: str) -> None:
        path, make_good, make_bad = SWAPS[case]
        self.place, self.aside, self.other = root / path, root / "aside", root.parent / "other"
        if self.place.exists():
            self.place.rename(root.parent / "removed")
        make_bad(self.place)
        self.place.rename(self.other)
        make_good(self.place)
        if path == "blobs":
            (root / "a" / "file").symlink_to("../blobs/b")

    def __call__(self) -> None:
        self.place.rename(self.aside)
        self.other.rename(self.place)
        self.aside.rename(self.other)


@pytest.mark.parametrize("case", SWAPS)
@pytest.mark.parametrize("is_good_first", [True, False])
def test_a_swap_at_any_moment(root: Path, case: str, is_good_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap comes before the first call to the system, before the second, and so on: every moment there is."""
    swap = Swap(root, case)
    num_calls, moment = 0, -1

    def at_the_moment(name: str) -> Callable[..., object]:
        call = getattr(os, name)

        def swapping(*args: object, **kwargs: object) -> object:
            nonlocal num_calls
            num_calls += 1
            if num_calls == moment:
                swap()
            return call(*args, **kwargs)

        return swapping

    if not is_good_first:
        swap()
    outcomes: list[str] = []
    for name in ("stat", "open", "readlink"):
        monkeypatch.setattr(os, name, at_the_moment(name))
    while num_calls >= moment:
        num_calls, moment = 0, moment + 1
        try:
            outcomes.append(read(root, "a", "file").decode())
        except (BadPath, OSError) as error:
            outcomes.append(type(error).__name__)
        if 0 < moment <= num_calls:
            swap()  # back
    assert OUTSIDE.decode() not in outcomes
    assert {INSIDE.decode(), "BadPath"} <= set(outcomes)


@pytest.mark.parametrize("case", SWAPS)
def test_whoever_swaps_links_meanwhile_gets_nothing(root: Path, case: str) -> None:
    """Another thread swaps the links as fast as it can."""
    swap = Swap(root, case)
    is_done = threading.Event()

    def swap_for_ever() -> None:
        while not is_done.is_set():
            swap()

    swapper = threading.Thread(target=swap_for_ever)
    swapper.start()
    outcomes: set[str] = set()
    try:
        until_s = time.monotonic() + 30
        for count in itertools.count():
            if (count >= 1000 and len(outcomes) > 1) or time.monotonic() > until_s:
                break
            try:
                outcomes.add(read(root, "a", "file").decode())
            except (BadPath, OSError) as error:
                outcomes.add(type(error).__name__)
    finally:
        is_done.set()
        swapper.join()
    assert OUTSIDE.decode() not in outcomes
    assert len(outcomes) > 1, "the swapping was seen"
