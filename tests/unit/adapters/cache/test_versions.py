"""Versions of adapters, and the file that keeps them."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from pathlib import Path

import pytest

from loraplex_adapters.cache import versions as module
from loraplex_adapters.cache.versions import MAX_VERSIONS, SPARE_LINES, VersionLog, Versions
from loraplex_contracts.adapters import OWN_ORIGIN, AdapterKey, AdapterOrigin


def key(number: int) -> AdapterKey:
    return AdapterKey("lora", f"{number:064x}"[::-1])


LOG_NAME = "versions-2-base"


def opened(folder: Path, base: str = "base") -> VersionLog:
    return VersionLog(folder, base, lambda _: True)


def test_a_new_process_knows_them(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for number in (1, 2, 1):
        log.versions.remember("team/sql", key(number))
    log.versions.remember("gone", key(3))
    log.save()
    log.versions.forget("gone")
    log.save()
    log.close()
    again = opened(tmp_path)
    assert list(again.versions) == [("team/sql", key(2)), ("team/sql", key(1))]
    assert again.versions.find("team/sql", key(2).digest[:8]) == key(2)
    assert again.versions.find("gone", key(3).digest[:8]) is None
    again.close()


def test_a_new_process_knows_where_loads_bound_names_from(tmp_path: Path) -> None:
    log = opened(tmp_path)
    folder = AdapterOrigin('with "quotes" and \\ é/v2')
    branch = AdapterOrigin("hub:org/x", "main", "secret")
    for name, origin in (("sql", folder), ("org/x", branch), ("gone", folder), ("back", folder), ("own", folder)):
        log.versions.keep_origin(name, origin)
        log.versions.remember(name, key(1))
    log.save()
    log.versions.forget("gone")
    log.versions.keep_origin("back", AdapterOrigin())
    log.versions.keep_origin("own", AdapterOrigin("own"))
    log.save()
    log.close()
    assert "secret" not in (tmp_path / LOG_NAME).read_text()
    for _ in range(2):
        again = opened(tmp_path)
        found = {name: again.versions.origin_of(name) for name in ("sql", "org/x", "gone", "back", "own")}
        assert found.pop("sql") == folder
        assert found.pop("org/x") == AdapterOrigin("hub:org/x", "main")
        assert set(found.values()) == {OWN_ORIGIN}
        again.versions.remember("another", key(2))
        again.save()  # which writes the file anew
        again.close()


def test_only_contents_that_the_store_has(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for number in (1, 2):
        log.versions.remember("a", key(number))
    log.save()
    log.close()
    one = VersionLog(tmp_path, "base", lambda found: found == key(2))
    assert list(one.versions) == [("a", key(2))]
    one.close()


def test_each_base_model_has_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that was started with another model, or another release, must not lose them for the next one."""
    log = opened(tmp_path)
    log.versions.remember("a", key(1))
    log.save()
    log.close()
    assert not caplog.text
    other = opened(tmp_path, "another")
    assert list(other.versions) == []
    assert caplog.text.count("no earlier version of an adapter") == 1
    other.versions.remember("a", key(2))
    other.save()
    other.close()
    for base, number in (("base", 1), ("another", 2)):
        again = opened(tmp_path, base)
        assert list(again.versions) == [("a", key(number))]
        again.close()


def test_a_file_of_a_later_format_stays(tmp_path: Path) -> None:
    later = tmp_path / "versions-3-base"
    later.write_text("something else")
    log = opened(tmp_path)
    log.versions.remember("a", key(1))
    log.save()
    log.close()
    assert later.read_text() == "something else"


def test_contents_that_may_be_wrong_are_not_known(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "versions-1-base").write_text(f"a lora-{key(1).digest}")
    log = opened(tmp_path)
    assert list(log.versions) == []
    assert "no earlier version of an adapter" in caplog.text
    log.close()


def test_lines_that_were_cut_spoil_no_others(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.versions.remember("a", key(1))
    log.save()
    with (tmp_path / LOG_NAME).open("ab") as file:
        file.write(b"\nb lora-00")
    log.versions.remember("c", key(2))
    log.save()
    log.close()
    again = opened(tmp_path)
    assert list(again.versions) == [("a", key(1)), ("c", key(2))]
    again.close()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a lora-" + b"0" * 63, b"a: lora-" + b"0" * 64])
def test_a_file_that_is_none_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOG_NAME).write_bytes(content)
    log = opened(tmp_path)
    assert list(log.versions) == []
    log.close()


def test_the_file_is_bounded(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for number in range(2 * SPARE_LINES):
        log.versions.remember("a", key(number))
        log.save()
    assert len((tmp_path / LOG_NAME).read_text().split("\n")) <= SPARE_LINES + MAX_VERSIONS + 2
    log.close()
    again = opened(tmp_path)
    assert list(again.versions) == [("a", key(number)) for number in range(2 * SPARE_LINES)[-MAX_VERSIONS:]]
    again.close()


def test_a_file_that_cannot_be_read_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / LOG_NAME).mkdir()
    log = opened(tmp_path)
    assert list(log.versions) == []
    assert LOG_NAME in caplog.text
    log.close()


@pytest.mark.parametrize("room", [0, 30])
def test_a_full_disk_is_logged_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    log = opened(tmp_path)
    log.versions.remember("first", key(0))
    log.save()
    write = os.write

    def fill_up(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left")
        return write(fd, data[:room])

    with monkeypatch.context() as full:
        full.setattr(module.os, "write", fill_up)
        log.versions.remember("a", key(1))
        log.save()
    assert "No space left" in caplog.text
    log.versions.remember("b", key(2))
    log.save()
    log.close()
    again = opened(tmp_path)
    assert list(again.versions) == [("first", key(0)), ("a", key(1)), ("b", key(2))]
    again.close()


def test_the_number_of_lines_is_counted_as_they_come_and_go() -> None:
    versions = Versions()
    for number in range(MAX_VERSIONS + 2):
        versions.remember("sql", key(number))
        versions.remember("sql", key(number))
    versions.remember("sql", key(5))  # again
    versions.remember("team/sql", key(1))
    versions.keep_origin("team/sql", AdapterOrigin("v1"))
    assert len(versions) == len(list(versions)) == MAX_VERSIONS + 2
    versions.drop("sql", key(7))
    versions.drop("sql", key(7))
    versions.drop("unknown", key(7))
    assert len(versions) == len(list(versions)) == MAX_VERSIONS + 1
    versions.forget("sql")
    versions.forget("unknown")
    assert len(versions) == len(list(versions)) == 2


def test_the_number_of_lines_takes_no_look_at_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0

    class Counted(OrderedDict[AdapterKey, None]):
        def __len__(self) -> int:
            nonlocal num_looks
            num_looks += 1
            return super().__len__()

    monkeypatch.setattr(module, "OrderedDict", Counted)
    versions = Versions((f"name-{number}", key(number)) for number in range(100))
    num_looks = 0
    assert len(versions) == 100
    assert not num_looks
