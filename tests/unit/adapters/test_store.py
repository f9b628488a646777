"""The disk store: atomic, persistent, bounded and verified."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from loraplex_adapters.io import uncached as once
from loraplex_adapters.store import (
    RETRY_FULL_S,
    AdapterStore,
    WriteFn,
    check_store,
    header_content,
)
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import DiskFull, FailedPrecondition, NonFinite, Unavailable

LAYOUT = {"dtype": "float32", "factors": []}
FILE_BYTES = 4096 + 256


def filler(value: int, num_bytes: int = 256):
    def fill(write: WriteFn) -> None:
        write(memoryview(bytes([value]) * (num_bytes // 2)))
        write(memoryview(bytes([value]) * (num_bytes - num_bytes // 2)))

    return fill


def put(store: AdapterStore, value: int) -> AdapterKey:
    return store.put("lora", LAYOUT, 256, filler(value))


def files(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name != "lock")


def test_put_and_open(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, 1 << 20)
    key = put(store, 7)
    assert key in store
    found = store.open(key)
    assert found is not None
    assert bytes(found.payload) == bytes([7]) * 256
    assert header_content(found.header)["layout"] == LAYOUT
    assert found.payload.readonly
    assert files(tmp_path) == [f"lora-{key.digest}.adapter"]
    assert store.num_bytes == FILE_BYTES == (tmp_path / files(tmp_path)[0]).stat().st_size


def test_identity_is_content(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, 1 << 20)
    assert put(store, 7) == put(store, 7)
    assert store.num_bytes == FILE_BYTES
    assert len({put(store, 7), put(store, 8), store.put("lora", LAYOUT | {"dtype": "float64"}, 256, filler(7))}) == 3


def test_a_restart_finds_the_files(tmp_path: Path) -> None:
    first = AdapterStore(tmp_path, 1 << 20)
    keys = [put(first, value) for value in range(3)]
    assert first.open(keys[0]) is not None  # most recently used
    first.close()
    (tmp_path / ".incoming-9").write_bytes(b"half a file")
    (tmp_path / f"lora-{'0' * 64}.adapter").write_bytes(b"no file of ours")
    (tmp_path / f"lora-{'1' * 64}.adapter").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("somebody's")
    again = AdapterStore(tmp_path, 1 << 20)
    assert sorted(again.keys()) == sorted(keys)
    assert again.keys()[-1] == keys[0]
    assert again.num_bytes == 3 * FILE_BYTES
    assert files(tmp_path) == sorted(["notes.txt", *(f"lora-{key.digest}.adapter" for key in keys)])
    for value, key in enumerate(keys):
        found = again.open(key)
        assert found is not None
        assert found.payload[0] == value


@pytest.mark.parametrize("damage", ["payload", "header", "cut", "longer"])
def test_a_damaged_file_is_dropped_not_used(tmp_path: Path, damage: str) -> None:
    first = AdapterStore(tmp_path, 1 << 20)
    key = put(first, 7)
    first.close()
    path = tmp_path / f"lora-{key.digest}.adapter"
    data = bytearray(path.read_bytes())
    if damage == "payload":
        data[-1] ^= 1
    elif damage == "header":
        data[data.index(b"float32")] ^= 1
    elif damage == "cut":
        del data[-1]
    else:
        data += b"x"
    path.write_bytes(data)
    again = AdapterStore(tmp_path, 1 << 20)
    assert again.open(key) is None
    assert key not in again
    assert files(tmp_path) == []
    assert again.num_bytes == 0
    assert put(again, 7) == key


@pytest.mark.parametrize(("old", "new"), [(b"LPXADPT1", b"LPXADPT2"), (b'"format":1', b'"format":2')])
def test_files_of_a_later_release_stay(
    tmp_path: Path, old: bytes, new: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = AdapterStore(tmp_path, 1 << 20)
    keys = [put(first, value) for value in range(3)]
    first.close()
    for key in keys[1:]:
        path = tmp_path / f"lora-{key.digest}.adapter"
        path.write_bytes(path.read_bytes().replace(old, new))
    before = files(tmp_path)
    again = AdapterStore(tmp_path, 1 << 20)
    assert again.keys() == keys[:1]
    assert again.num_bytes == FILE_BYTES
    assert files(tmp_path) == before
    assert caplog.text.count("a later release (2)") == 1


def test_a_file_that_vanished_is_just_not_there(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, 1 << 20)
    key = put(store, 7)
    (tmp_path / f"lora-{key.digest}.adapter").unlink()
    assert store.open(key) is None
    assert store.num_bytes == 0


def test_the_least_recently_used_goes(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, 3 * FILE_BYTES)
    keys = [put(store, value) for value in range(3)]
    mapped = store.open(keys[0])
    fourth = put(store, 3)
    assert store.keys() == [keys[2], keys[0], fourth]
    put(store, 4)
    put(store, 5)
    assert keys[0] not in store
    assert mapped is not None
    assert bytes(mapped.payload) == bytes(256)  # a mapping outlives its file
    assert store.num_bytes == 3 * FILE_BYTES
    assert len(files(tmp_path)) == 3


def test_what_is_in_use_stays_and_then_the_disk_is_full(tmp_path: Path) -> None:
    in_use: set[AdapterKey] = set()
    store = AdapterStore(tmp_path, 2 * FILE_BYTES, in_use.__contains__)
    keys = [put(store, value) for value in range(2)]
    in_use.add(keys[0])
    third = put(store, 2)
    assert set(store.keys()) == {keys[0], third}
    in_use.add(third)
    with pytest.raises(DiskFull) as raised:
        put(store, 3)
    assert raised.value.retry_after_s == RETRY_FULL_S
    assert raised.value.metadata == {"can_ever_fit": "true"}
    assert set(store.keys()) == {keys[0], third}
    assert store.num_bytes == 2 * FILE_BYTES
    assert len(files(tmp_path)) == 2


def test_larger_than_the_budget(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, FILE_BYTES)
    first = put(store, 1)
    with pytest.raises(DiskFull, match=f"may have {FILE_BYTES} at most") as raised:
        store.put("lora", LAYOUT, 257, filler(1, 257))
    assert raised.value.retry_after_s is None, "no waiting helps"
    assert raised.value.metadata == {"can_ever_fit": "false"}
    assert store.keys() == [first]  # nobody was pushed out in vain


@pytest.mark.parametrize("where", ["fallocate", "write", "fsync"])
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AdapterStore(tmp_path, 1 << 20, lambda key: True)
    put(store, 1)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "write":
        monkeypatch.setattr(once, "write_uncached", full)  # of the payload: the store has its own for the header
    else:
        monkeypatch.setattr(os, "posix_fallocate" if where == "fallocate" else "fsync", full)
    with pytest.raises(DiskFull, match="the disk of the adapter store is full") as raised:
        put(store, 2)
    assert raised.value.retry_after_s == RETRY_FULL_S
    monkeypatch.undo()
    assert len(files(tmp_path)) == 1
    assert store.num_bytes == FILE_BYTES
    put(store, 2)


@pytest.mark.parametrize("what", ["file system", "file"])
def test_a_disk_that_it_never_fits(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AdapterStore(tmp_path, 1 << 20)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC if what == "file system" else errno.EFBIG, "no")

    whole = os.statvfs(tmp_path)
    small = os.statvfs_result((512, 512, 4, *whole[3:]))  # four blocks of 512 bytes
    monkeypatch.setattr(os, "posix_fallocate", full)
    if what == "file system":
        monkeypatch.setattr(os, "statvfs", lambda path: small)
    with pytest.raises(DiskFull, match="has 2048" if what == "file system" else "takes no file of that size") as raised:
        put(store, 1)
    assert raised.value.retry_after_s is None
    assert raised.value.metadata == {"can_ever_fit": "false"}
    assert store.num_bytes == 0


def test_a_disk_smaller_than_the_budget_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AdapterStore(tmp_path, 1 << 20)
    keys = [put(store, value) for value in range(3)]
    real = os.posix_fallocate
    failures = iter([True, True])

    def fallocate(fd: int, offset: int, length: int) -> None:
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    new = put(store, 9)
    assert store.keys() == [keys[2], new]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_nobody_is_pushed_out_for_what_the_disk_cannot_take(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use: set[AdapterKey] = set()
    store = AdapterStore(tmp_path, 1 << 20, in_use.__contains__)
    keys = [put(store, value) for value in range(3)]
    in_use.add(keys[0])

    def full(*args: object) -> None:
        raise OSError(code, "no")

    whole = os.statvfs(tmp_path)
    nearly_full = os.statvfs_result((512, 512, 1000, 15, 15, *whole[5:]))  # 7680 bytes free of 512000
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "statvfs", lambda path: nearly_full)
    with pytest.raises(DiskFull):  # all that is not in use gives 8704 more
        store.put("lora", LAYOUT, 5 * 4096, filler(9, 5 * 4096))
    assert store.keys() == keys
    assert store.num_bytes == 3 * FILE_BYTES


def test_nobody_is_pushed_out_where_others_keep_the_budget(tmp_path: Path) -> None:
    in_use: set[AdapterKey] = set()
    store = AdapterStore(tmp_path, 3 * FILE_BYTES, in_use.__contains__)
    keys = [put(store, value) for value in range(3)]
    in_use.update(keys[:2])
    with pytest.raises(DiskFull, match="in use"):
        store.put("lora", LAYOUT, 4096 + 512, filler(9, 4096 + 512))
    assert store.keys() == keys


def test_a_file_system_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*args: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    store = AdapterStore(tmp_path, 1 << 20)
    found = store.open(put(store, 3))
    assert found is not None
    assert bytes(found.payload) == bytes([3]) * 256


def test_a_fill_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, 1 << 20)

    def fill(write: WriteFn) -> None:
        write(memoryview(bytes(100)))
        raise NonFinite("NaN")

    with pytest.raises(NonFinite):
        store.put("lora", LAYOUT, 256, fill)
    with pytest.raises(AssertionError):
        store.put("lora", LAYOUT, 256, filler(1, 200))
    assert files(tmp_path) == []
    assert store.num_bytes == 0


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
def test_a_store_that_cannot_be_written(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AdapterStore(tmp_path, 1 << 20)

    def broken(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(once, "write_uncached", broken)
    with pytest.raises(Unavailable, match=f"the adapter store .* cannot be written .{os.strerror(code)}") as raised:
        put(store, 1)
    assert (raised.value.resource, raised.value.retry_after_s) == ("adapter store", RETRY_FULL_S)
    assert files(tmp_path) == []
    assert store.num_bytes == 0


def test_a_store_that_vanished(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store", 1 << 20)
    (tmp_path / "store").rename(tmp_path / "moved")
    with pytest.raises(Unavailable, match=r"the adapter store .* cannot be written \(No such file"):
        put(store, 1)
    assert store.num_bytes == 0
    (tmp_path / "moved").rename(tmp_path / "store")
    put(store, 1)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, 1 << 20)
    with pytest.raises(FailedPrecondition, match="another process"):
        AdapterStore(tmp_path, 1 << 20)
    store.close()
    AdapterStore(tmp_path, 1 << 20).close()


def test_a_smaller_budget_after_a_restart(tmp_path: Path) -> None:
    first = AdapterStore(tmp_path, 1 << 20)
    keys = [put(first, value) for value in range(3)]
    first.close()
    again = AdapterStore(tmp_path, 2 * FILE_BYTES)
    assert again.keys() == keys[1:]
    assert len(files(tmp_path)) == 2


def test_the_order_of_use_survives_a_restart_however_quick_it_was(tmp_path: Path) -> None:
    first = AdapterStore(tmp_path, 1 << 20)
    keys = [put(first, value) for value in range(5)]
    for key in reversed(keys):
        first.open(key)
    first.close()
    assert AdapterStore(tmp_path, 1 << 20).keys() == keys[::-1]


def test_a_place_that_cannot_be_used_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FailedPrecondition, match=r"cannot be used: Not a directory; name another .*--adapter-store"):
        AdapterStore(tmp_path / "file" / "store", 1 << 20)


@pytest.mark.timeout(10)
def test_what_is_no_file_of_the_store_does_not_stop_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = AdapterStore(tmp_path, 1 << 20)
    good, unreadable, folder = put(first, 1), put(first, 2), put(first, 3)
    first.close()
    broken = tmp_path / f"lora-{unreadable.digest}.adapter"
    named_like = tmp_path / f"lora-{folder.digest}.adapter"
    named_like.unlink()
    named_like.mkdir()
    fifo = tmp_path / f"lora-{'0' * 64}.adapter"
    os.mkfifo(fifo)
    for name in (".incoming-1", ".incoming-x"):
        (tmp_path / name).mkdir()
    own = os.open

    def failing(path: Path, *args: int, **options: int) -> int:
        if path == broken:
            raise OSError(errno.EIO, "Input/output error")
        return own(path, *args, **options)

    monkeypatch.setattr(os, "open", failing)
    store = AdapterStore(tmp_path, 1 << 20)
    assert store.keys() == [good]
    assert broken.exists()
    assert named_like.is_dir()
    assert not fifo.exists()
    for word in (broken.name, named_like.name, ".incoming-1", ".incoming-x"):
        assert word in caplog.text
    assert put(store, 4) in store  # not under a temporary name that is taken


def test_a_start_without_descriptors_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = AdapterStore(tmp_path, 1 << 20)
    put(first, 1)
    first.close()
    own = os.open

    def failing(path: Path, *args: int, **options: int) -> int:
        if str(path).endswith(".adapter"):
            raise OSError(errno.EMFILE, "Too many open files")
        return own(path, *args, **options)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(OSError, match="Too many open files"):
        AdapterStore(tmp_path, 1 << 20)


def test_a_store_is_checked_without_being_kept(tmp_path: Path) -> None:
    check_store(tmp_path / "new")
    store = AdapterStore(tmp_path / "new", 1 << 20)
    with pytest.raises(FailedPrecondition, match="used by another process"):
        check_store(tmp_path / "new")
    store.close()
    check_store(tmp_path / "new")
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", Path("/proc")):
        with pytest.raises(FailedPrecondition, match=r"cannot be used: .*--adapter-store"):
            check_store(place)


def test_room_is_made_without_a_look_at_every_entry(tmp_path: Path) -> None:
    num_looks = 0

    def is_in_use(key: AdapterKey) -> bool:
        nonlocal num_looks
        num_looks += 1
        return False

    store = AdapterStore(tmp_path, 50 * FILE_BYTES, is_in_use, durable=False)
    for value in range(50):
        put(store, value)
    num_looks = 0
    put(store, 50)
    assert num_looks == 2  # whether room can be made, and the one that leaves
