"""Membership: the workers of a router, fixed or followed in a file or DNS.

A member's name is what adapters are hashed by, so that a replacement at another address inherits the adapters of its
predecessor. A source that cannot be read keeps the last view: a resolver or a writer that is down takes no worker away.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_runtime.regular_files import read_regular

log = logging.getLogger(__name__)

FLAG: Final = "--workers-from"
# Seconds between two looks.
FILE_INTERVAL_S: Final = 1.0
DNS_INTERVAL_S: Final = 5.0
REVERSE_TIMEOUT_S: Final = 2.0  # for the name of an address
MAX_FILE_BYTES: Final = 1 << 20
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[A-Za-z0-9._-]+):([0-9]{1,5})\Z")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A worker that a router is to have."""

    name: str  # its address where it has no name of its own
    address: str  # host:port

    @property
    def worker_id(self) -> str:
        """The worker's id, where its name is known when it comes. One name at two addresses has two: both may run while
        the old one ends its requests."""
        return self.address if self.name == self.address else f"{self.name}={self.address}"


def parse_member(text: str) -> Member:
    """The member of [NAME=]HOST:PORT. Raises InvalidArgument."""
    name, separator, address = text.rpartition("=")
    if not is_address(address) or (separator and not _NAME.match(name)):
        raise InvalidArgument(f"{text!a} is not [NAME=]HOST:PORT")
    return Member(name or address, address)


def is_address(text: str) -> bool:
    """True for host:port."""
    found = _ADDRESS.match(text)
    return found is not None and 1 <= int(found[2]) <= 65535


def parse_members(texts: Iterable[str]) -> tuple[Member, ...]:
    """The members of such texts. Raises InvalidArgument, also where a name or an address comes twice."""
    members = tuple(parse_member(text) for text in texts)
    for what in ("name", "address"):
        seen: set[str] = set()
        for member in members:
            value: str = getattr(member, what)
            if value in seen:
                raise InvalidArgument(f"there are two workers with the {what} {value}")
            seen.add(value)
    return members


class Membership(Protocol):
    """A source of the list of members."""

    def first(self) -> tuple[Member, ...]:
        """The members at the start, none where they come later. Raises InvalidArgument where they never will."""
        ...

    def changes(self) -> AsyncIterator[tuple[Member, ...]]:
        """Yields the members, whenever they are others than before. Runs until cancelled."""
        ...


def open_membership(text: str) -> Membership:
    """The membership that the flag names: file:PATH or dns:HOST:PORT. Raises InvalidArgument."""
    kind, _, rest = text.partition(":")
    if kind == "file" and rest:
        return FileMembership(Path(rest), FILE_INTERVAL_S)
    if kind == "dns" and is_address(rest):
        host, _, port = rest.rpartition(":")
        return DnsMembership(host.strip("[]"), int(port), DNS_INTERVAL_S)
    raise InvalidArgument(f"{FLAG} takes file:PATH or dns:HOST:PORT, not {text!a}", field=FLAG)


class FileMembership:
    """Lines of [NAME=]HOST:PORT, with comments from # on; rewritten and renamed into place by whoever knows.

    The last line ends with a line feed, or the file is not complete: one that is empty or blank has been cut off, and a
    list without members is a comment.
    """

    def __init__(self, path: Path, interval_s: float = FILE_INTERVAL_S) -> None:
        self._path = path
        self._interval_s = interval_s
        self._raw = b""

    def first(self) -> tuple[Member, ...]:
        try:
            raw = self._read()
            members = members_of(raw)
        except (OSError, LoraplexError) as error:
            raise InvalidArgument(f"{FLAG} file:{self._path} cannot be used: {_reason(error)}", field=FLAG) from error
        self._raw = raw
        return members

    async def changes(self) -> AsyncIterator[tuple[Member, ...]]:
        last_warning = ""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                raw = await asyncio.to_thread(self._read)
                if raw == self._raw:
                    last_warning = ""
                    continue
                members = members_of(raw)
            except (OSError, LoraplexError) as error:
                last_warning = _warn_once(last_warning, f"{self._path} cannot be used: {_reason(error)}")
                continue
            self._raw, last_warning = raw, ""
            yield members

    def _read(self) -> bytes:
        raw = read_regular(self._path, MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise InvalidArgument(f"it is larger than {MAX_FILE_BYTES} bytes")
        return raw


def members_of(raw: bytes) -> tuple[Member, ...]:
    """The members that a file lists. Raises InvalidArgument."""
    if not raw.endswith(b"\n"):
        raise InvalidArgument("it does not end with a line feed, so it may be cut off")
    try:
        text = raw.decode("ascii")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"it is not plain ASCII (byte {error.start})") from None
    if not text.strip():
        raise InvalidArgument("it is blank, so it may be cut off; a list without workers is a comment (#)")
    lines = (line.partition("#")[0].strip() for line in text.split("\n"))
    return parse_members(line for line in lines if line)


Resolve = Callable[[str, int], Awaitable[Sequence[Any]]]
Reverse = Callable[[str, int], Awaitable[str]]


class DnsMembership:
    """All addresses of a host name, asked for again and again.

    Where DNS knows an address as a name below the host name, as it does of the pods of a StatefulSet, that is the
    member's name: a pod that takes the place of another inherits its adapters. Others are named by their addresses. A
    name is looked up when its address comes, and again until DNS has said what it is, or that there is none.
    """

    def __init__(
        self,
        host: str,
        port: int,
        interval_s: float = DNS_INTERVAL_S,
        resolve: Resolve | None = None,
        reverse: Reverse | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._interval_s = interval_s
        self._resolve = resolve or _resolve
        self._reverse = reverse or _reverse
        self._names: dict[str, str] = {}  # by address
        self._asking: dict[str, asyncio.Future[str | None]] = {}  # for the names of addresses
        self._members: tuple[Member, ...] = ()

    def first(self) -> tuple[Member, ...]:
        return ()  # the resolver may take its time, and the name may come later

    async def changes(self) -> AsyncIterator[tuple[Member, ...]]:
        last_warning = ""
        try:
            while True:
                try:
                    members = await self._named(dns_members(await self._resolve(self._host, self._port)))
                except (OSError, UnicodeError) as error:  # UnicodeError: a label of more than 63 characters
                    last_warning = _warn_once(last_warning, f"{self._host} cannot be resolved: {_reason(error)}")
                else:
                    last_warning = ""
                    if members != self._members:
                        self._members = members
                        yield members
                await asyncio.sleep(self._interval_s)
        finally:
            for asking in self._asking.values():
                asking.cancel()

    async def _named(self, members: Sequence[Member]) -> tuple[Member, ...]:
        addresses = [member.address for member in members]
        self._names = {address: name for address, name in self._names.items() if address in addresses}
        for gone in self._asking.keys() - addresses:
            self._asking.pop(gone).cancel()
        for address in addresses:
            # One thread for each address at most, however long the resolver takes.
            if address not in self._names and address not in self._asking:
                self._asking[address] = asyncio.ensure_future(self._name_of(address))
        if self._asking:
            await asyncio.wait(self._asking.values(), timeout=REVERSE_TIMEOUT_S)
        for address in [address for address, asking in self._asking.items() if asking.done()]:
            name = self._asking.pop(address).result()
            if name is not None:
                self._names[address] = name
        return of_one_family(
            [Member(self._names.get(member.address) or member.name, member.address) for member in members]
        )

    async def _name_of(self, address: str) -> str | None:
        """The address's name in DNS; empty where it has none below the host name, None where DNS does not say."""
        host, _, port = address.rpartition(":")
        try:
            full_name = await self._reverse(host.strip("[]"), int(port))
        except UnicodeError:
            return ""
        except OSError as error:
            return "" if error.errno == socket.EAI_NONAME else None
        name, _, parent = full_name.partition(".")
        parent, own = (one.rstrip(".").lower() for one in (parent, self._host))
        is_below = parent == own or parent.startswith(f"{own}.")
        return name if is_below and _NAME.match(name) else ""


async def _reverse(host: str, port: int) -> str:
    return (await _looked_up(lambda: socket.getnameinfo((host, port), socket.NI_NAMEREQD)))[0]


async def _resolve(host: str, port: int) -> Sequence[Any]:
    return await _looked_up(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))


async def _looked_up(look_up: Callable[[], Any]) -> Any:
    """Calls `look_up` in a thread that holds nothing up. A resolver that is silent keeps its thread for half a minute,
    and asyncio waits for the threads of its own pool before a process ends."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = look_up()
        except Exception as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    try:
        threading.Thread(target=run, name="look up", daemon=True).start()
    except RuntimeError as error:  # no more threads: ask again later
        raise OSError(errno.EAGAIN, "no thread could be started to look it up") from error
    return await future


def dns_members(found: Sequence[Any]) -> tuple[Member, ...]:
    """Members at the addresses that getaddrinfo returned."""
    addresses = {
        f"[{where[0]}]:{where[1]}" if family == socket.AF_INET6 else f"{where[0]}:{where[1]}"
        for family, _, _, _, where in found
    }
    return tuple(Member(address, address) for address in sorted(addresses))


def of_one_family(members: Sequence[Member]) -> tuple[Member, ...]:
    """The members without the IPv6 addresses of names that have IPv4 addresses, too: those are one worker.

    Two addresses of one family may have one name for a moment, while a pod is replaced."""
    with_ipv4 = {member.name for member in members if not member.address.startswith("[")}
    return tuple(member for member in members if member.name not in with_ipv4 or not member.address.startswith("["))


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _warn_once(last_warning: str, text: str) -> str:
    if text != last_warning:
        log.warning("%s %s; the workers stay as they are", FLAG, text)
    return text
