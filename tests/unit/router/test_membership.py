"""Members of a router: fixed, in a file, in DNS."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import loraplex_router.membership
from loraplex_contracts.errors import InvalidArgument
from loraplex_router.membership import (
    DnsMembership,
    FileMembership,
    Member,
    members_of,
    open_membership,
    parse_member,
    parse_members,
)

INTERVAL_S = 0.01


async def following(changes: AsyncIterator[tuple[Member, ...]], timeout_s: float = 5.0) -> tuple[Member, ...]:
    async with asyncio.timeout(timeout_s):
        return await anext(changes)


def members(*texts: str) -> tuple[Member, ...]:
    return parse_members(texts)


# --- one member -------------------------------------------------------------------------------------------------------


def test_a_member_has_a_name_of_its_own_or_its_address() -> None:
    assert parse_member("10.0.0.1:5") == Member("10.0.0.1:5", "10.0.0.1:5")
    assert parse_member("w-1=[::1]:50051") == Member("w-1", "[::1]:50051")
    assert parse_member("[fe80::1%br-1.2]:5").address == "[fe80::1%br-1.2]:5"
    assert parse_member("10.0.0.1:5").worker_id == "10.0.0.1:5"
    assert parse_member("w1=h:5").worker_id == "w1=h:5"


@pytest.mark.parametrize(
    "text",
    ["", "h", "h:", "h:0", "h:70000", ":5", "=h:5", "a b=h:5", "a=b=h:5", "x" * 65 + "=h:5", "h:5\n", "[::1%]:5"],
)
def test_what_is_no_member(text: str) -> None:
    with pytest.raises(InvalidArgument, match="HOST:PORT"):
        parse_member(text)


@pytest.mark.parametrize(
    ("texts", "what"), [(["a=h:1", "a=h:2"], "name a"), (["a=h:1", "b=h:1"], "address h:1"), (["h:1", "h:1"], "h:1")]
)
def test_a_member_comes_once(texts: list[str], what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        parse_members(texts)


@pytest.mark.parametrize("text", ["", "file:", "file", "dns:host", "dns:host:0", "ray:x", "h:1"])
def test_where_members_cannot_come_from(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        open_membership(text)
    assert refused.value.field == "--workers-from"


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_of_members() -> None:
    assert members_of(b"# two\nw0=h:1  # the first\n\n  h:2\r\n") == members("w0=h:1", "h:2")
    assert members_of(b"# nobody\n") == ()


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "cut off"),
        (b"\n", "blank"),
        (b" \r\n\n", "blank"),
        (b"w0=h:1", "cut off"),
        (b"h:1\nh:1\n", "two workers"),
        (b"\xff\n", "ASCII"),
    ],
)
def test_files_that_are_not_taken(raw: bytes, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        members_of(raw)


@given(st.binary(max_size=200) | st.text("w0=h:1\n# ", max_size=60).map(str.encode))
def test_any_file_is_taken_or_refused(raw: bytes) -> None:
    try:
        found = members_of(raw)
    except InvalidArgument:
        return
    assert len({member.name for member in found}) == len({member.address for member in found}) == len(found)


def test_a_file_that_is_not_there_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="No such file") as refused:
        FileMembership(tmp_path / "none").first()
    assert refused.value.field == "--workers-from"


async def test_a_file_is_followed_and_keeps_the_last_view(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "members"
    path.write_text("h:1\n")
    membership = FileMembership(path, INTERVAL_S)
    assert membership.first() == members("h:1")
    changes = membership.changes()
    path.write_text("h:1\nw=h:2\n")
    assert await following(changes) == members("h:1", "w=h:2")
    waiting = asyncio.ensure_future(following(changes))
    with caplog.at_level(logging.WARNING):
        for raw in (b"", b"h:3", b"h:1\nh:1\n", b"\xff\n"):
            (tmp_path / "next").write_bytes(raw)
            (tmp_path / "next").replace(path)  # never seen half written
            await asyncio.sleep(10 * INTERVAL_S)
        for make in (path.unlink, partial(os.mkfifo, path), path.unlink, path.mkdir):
            make()
            await asyncio.sleep(10 * INTERVAL_S)
    assert not waiting.done()
    said = [record.message for record in caplog.records]
    assert len(said) == 7, said  # the first two are the same fault
    assert any("not a regular file" in one for one in said)
    path.rmdir()
    path.write_text("# nobody\n")
    assert await waiting == ()


# --- DNS --------------------------------------------------------------------------------------------------------------


class Resolver:
    """Answers that are set."""

    def __init__(self) -> None:
        self.answer: Sequence[str] | Exception = []
        self.num_asked = 0

    async def __call__(self, host: str, port: int) -> Sequence[Any]:
        assert host == "workers.svc"
        self.num_asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return [
            (socket.AF_INET6, 1, 6, "", (one, port, 0, 0)) if ":" in one else (socket.AF_INET, 1, 6, "", (one, port))
            for one in self.answer
        ]


async def nameless(host: str, port: int) -> str:
    raise socket.gaierror(socket.EAI_NONAME, "unknown")


async def test_addresses_of_a_name_are_followed(caplog: pytest.LogCaptureFixture) -> None:
    resolver = Resolver()
    resolver.answer = socket.gaierror(socket.EAI_NONAME, "unknown")
    membership = DnsMembership("workers.svc", 5, INTERVAL_S, resolver, nameless)
    assert membership.first() == ()
    changes = membership.changes()
    waiting = asyncio.ensure_future(following(changes))
    with caplog.at_level(logging.WARNING):
        await asyncio.sleep(10 * INTERVAL_S)
    assert len(caplog.records) == 1
    resolver.answer = ["10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1"]
    assert await waiting == members("10.0.0.1:5", "10.0.0.2:5", "[fd00::1]:5")
    waiting = asyncio.ensure_future(following(changes))
    for answer in (["10.0.0.1", "10.0.0.2", "fd00::1"], socket.gaierror(socket.EAI_AGAIN, "later"), OSError("down")):
        resolver.answer, asked = answer, resolver.num_asked
        while resolver.num_asked < asked + 3:
            await asyncio.sleep(INTERVAL_S)
    assert not waiting.done()
    resolver.answer = ["10.0.0.3"]
    assert await waiting == members("10.0.0.3:5")


async def test_members_have_the_names_that_dns_gives_their_addresses() -> None:
    resolver, asked = Resolver(), list[str]()
    names = {
        "10.0.0.1": "worker-0.workers.svc.cluster.local",
        "10.0.0.2": "ip-10-0-0-2.internal",  # of another service
        "10.0.0.4": "worker-0.workers.svc.cluster.local",
        "10.0.0.5": "a/b.workers.svc",
    }

    async def reverse(host: str, port: int) -> str:
        asked.append(host)
        if host == "10.0.0.3":
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return names[host]

    changes = DnsMembership("workers.svc", 5, INTERVAL_S, resolver, reverse).changes()
    resolver.answer = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.5"]
    found = await following(changes)
    assert [member.name for member in found] == ["worker-0", "10.0.0.2:5", "10.0.0.3:5", "10.0.0.5:5"]
    assert found[0].worker_id == "worker-0=10.0.0.1:5"
    # The pod is replaced. A name is asked for once.
    resolver.answer = ["10.0.0.2", "10.0.0.3", "10.0.0.4"]
    assert [member.name for member in await following(changes)] == ["10.0.0.2:5", "10.0.0.3:5", "worker-0"]
    assert sorted(asked) == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5"]
    # An address that went and comes again may be another pod's.
    resolver.answer = ["10.0.0.1", "10.0.0.4"]
    assert [member.name for member in await following(changes)] == ["worker-0", "worker-0"]
    assert asked.count("10.0.0.1") == 2


async def test_a_name_that_dns_does_not_say_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loraplex_router.membership, "REVERSE_TIMEOUT_S", 0.05)
    resolver, asked, answers = Resolver(), Counter[str](), asyncio.Event()
    failures: dict[str, int] = {"10.0.0.1": socket.EAI_AGAIN, "10.0.0.2": socket.EAI_NONAME}

    async def reverse(host: str, port: int) -> str:
        asked[host] += 1
        if host in failures:
            raise socket.gaierror(failures[host], "no")
        await answers.wait()
        return f"worker-{host[-1]}.workers.svc"

    changes = DnsMembership("workers.svc", 5, INTERVAL_S, resolver, reverse).changes()
    resolver.answer = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert [member.name for member in await following(changes)] == ["10.0.0.1:5", "10.0.0.2:5", "10.0.0.3:5"]
    waiting = asyncio.ensure_future(following(changes))
    while asked["10.0.0.1"] < 3:
        await asyncio.sleep(INTERVAL_S)
    assert not waiting.done()
    assert asked["10.0.0.2"] == asked["10.0.0.3"] == 1, "known to have none; not answered yet"
    answers.set()
    assert [member.name for member in await waiting] == ["10.0.0.1:5", "10.0.0.2:5", "worker-3"]
    failures.clear()
    assert [member.name for member in await following(changes)] == ["worker-1", "10.0.0.2:5", "worker-3"]


async def test_a_name_with_addresses_of_both_families_is_one_worker() -> None:
    resolver = Resolver()
    names = {"10.0.0.1": "w-0", "fd00::1": "w-0", "10.0.0.2": "w-1", "10.0.0.3": "w-1", "fd00::4": "w-2"}

    async def reverse(host: str, port: int) -> str:
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return f"{names[host]}.workers.svc"

    changes = DnsMembership("workers.svc", 5, INTERVAL_S, resolver, reverse).changes()
    resolver.answer = [*names, "10.0.0.9", "fd00::9"]
    assert [member.worker_id for member in await following(changes)] == [
        "w-0=10.0.0.1:5",
        "w-1=10.0.0.2:5",  # one takes the place of the other
        "w-1=10.0.0.3:5",
        "10.0.0.9:5",
        "w-2=[fd00::4]:5",
        "[fd00::9]:5",
    ]


@pytest.mark.parametrize("host", ["workers.svc.", "Workers.SVC"])
async def test_a_host_name_means_the_same_with_a_final_dot_and_in_capitals(host: str) -> None:
    async def resolve(host: str, port: int) -> Sequence[Any]:
        return [(socket.AF_INET, 1, 6, "", ("10.0.0.1", port))]

    async def reverse(host: str, port: int) -> str:
        return "worker-0.workers.Svc.cluster.local."

    changes = DnsMembership(host, 5, INTERVAL_S, resolve, reverse).changes()
    assert await following(changes) == members("worker-0=10.0.0.1:5")


async def test_an_address_in_brackets_resolves() -> None:
    assert await following(open_membership("dns:[::1]:5").changes()) in (
        members("[::1]:5"),
        members("localhost=[::1]:5"),
    )


async def test_this_machines_own_name_resolves() -> None:
    changes = DnsMembership("localhost", 5).changes()
    assert set(await following(changes)) <= set(members("127.0.0.1:5", "[::1]:5"))


@pytest.mark.parametrize("silent", ["getaddrinfo", "getnameinfo"])
def test_a_resolver_that_is_silent_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    is_asked, may_answer = threading.Event(), threading.Event()

    def wait(*_: object, **__: object) -> None:
        is_asked.set()
        may_answer.wait(30.0)

    monkeypatch.setattr(socket, silent, wait)

    async def run() -> None:
        following_it = asyncio.ensure_future(following(DnsMembership("127.0.0.1", 5).changes()))
        await asyncio.to_thread(is_asked.wait, 10.0)
        following_it.cancel()

    before_s = time.monotonic()
    try:
        asyncio.run(run())
        assert is_asked.is_set()
        assert time.monotonic() - before_s < 10.0
    finally:
        may_answer.set()
