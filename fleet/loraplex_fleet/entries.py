"""Directory of a fleet: who runs where, as its replicas report it.

Soft state, with leases: what is lost comes back with the next heartbeats. Pure; time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

HEARTBEAT_S: Final = 1.0
LEASE_S: Final = 5.0
NUM_FAILURES: Final = 20

WORKER: Final = "worker"
ROUTER: Final = "router"
# States: it waits for its process, it serves, it ends its requests.
STARTING, READY, DRAINING = "starting", "ready", "draining"


@dataclass(frozen=True, slots=True)
class Entry:
    """One replica, as its heartbeat describes it."""

    replica_id: str
    kind: str
    node: str  # its address
    state: str = STARTING
    name: str = ""  # given by the directory, then repeated by the replica
    address: str = ""  # host:port, once it serves
    http: str = ""
    metrics_ports: tuple[int, ...] = ()
    pid: int = 0  # of the child process
    text: str = ""  # the last thing that the child said
    running: int = 0
    queued: int = 0
    pending_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """The cause of a replica's end."""

    replica_id: str
    kind: str
    node: str
    text: str


@dataclass(frozen=True, slots=True)
class View:
    """Members that the directory knows. It has `settled` once every replica has had the time for a heartbeat: until
    then replicas may be missing."""

    entries: tuple[Entry, ...] = ()
    settled: bool = False
    failures: tuple[Failure, ...] = ()

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def replica_ids(self) -> frozenset[str]:
        """Replicas that it knows, those that have failed included."""
        return frozenset(one.replica_id for one in (*self.entries, *self.failures))

    def without_failures_of(self, replica_ids: Collection[str]) -> View:
        return replace(self, failures=tuple(one for one in self.failures if one.replica_id not in replica_ids))

    @property
    def members(self) -> dict[str, str]:
        """Addresses of workers by name."""
        return {one.name: one.address for one in self.entries if one.kind == WORKER and one.state == READY and one.name}


@dataclass(slots=True)
class _Lease:
    entry: Entry
    until_s: float


class Entries:
    """Owns the leases and the names. A worker's name stays with it; one that is free goes to the next newcomer, first
    to one on the node where it was last, whose store may hold the adapters that are sent to this name."""

    def __init__(self, now_s: float) -> None:
        self._settled_at_s = now_s + LEASE_S
        self._leases: dict[str, _Lease] = {}
        self._last_node: dict[tuple[str, str], str] = {}  # by kind and name
        self._failures: deque[Failure] = deque(maxlen=NUM_FAILURES)

    def beat(self, entry: Entry, now_s: float) -> str:
        """Renews the lease. Returns the replica's name, empty while it has none."""
        self._expire(now_s)
        taken = {
            lease.entry.name
            for lease in self._leases.values()
            if lease.entry.kind == entry.kind and lease.entry.replica_id != entry.replica_id
        }
        known = self._leases.get(entry.replica_id)
        name = entry.name or (known.entry.name if known else "")
        if name in taken:
            name = ""
        if not name and entry.state == READY and now_s >= self._settled_at_s:
            name = self._free_name(entry, taken)
        if name:
            self._last_node[entry.kind, name] = entry.node
        self._leases[entry.replica_id] = _Lease(replace(entry, name=name), now_s + LEASE_S)
        return name

    def drop(self, replica_id: str, reason: str = "") -> None:
        """Drops a replica that is gone, or that takes no more requests."""
        lease = self._leases.pop(replica_id, None)
        if lease is not None and reason:
            self._failures.append(Failure(replica_id, lease.entry.kind, lease.entry.node, reason))

    def view(self, now_s: float) -> View:
        self._expire(now_s)
        entries = sorted((lease.entry for lease in self._leases.values()), key=_order)
        return View(tuple(entries), now_s >= self._settled_at_s, tuple(self._failures))

    def _expire(self, now_s: float) -> None:
        for replica_id in [one for one, lease in self._leases.items() if lease.until_s <= now_s]:
            entry = self._leases.pop(replica_id).entry
            text = f"not heard for {LEASE_S:.0f} s; its node may be lost"
            self._failures.append(Failure(replica_id, entry.kind, entry.node, text))

    def _free_name(self, entry: Entry, taken: set[str]) -> str:
        here = [
            name
            for (kind, name), node in self._last_node.items()
            if kind == entry.kind and node == entry.node and name not in taken
        ]
        numbers = (f"{entry.kind[0]}{number}" for number in range(len(taken) + 1))
        return min(here, key=_in_order, default="") or next(name for name in numbers if name not in taken)


def _in_order(name: str) -> tuple[int, str]:
    return len(name), name


def _order(entry: Entry) -> tuple[str, bool, tuple[int, str], str]:
    return entry.kind, not entry.name, _in_order(entry.name), entry.replica_id


def follow(last: dict[str, str], view: View) -> dict[str, str]:
    """The members that a router is to have, from those that it had: a directory that has just been started again adds
    some and takes none away."""
    return view.members if view.settled else {**last, **view.members}


def entry_of(plain: Mapping[str, Any]) -> Entry:
    """The entry that `asdict` wrote, perhaps in another release: what this one does not know is left out."""
    entry = Entry(**_known(Entry, plain))
    return replace(entry, metrics_ports=tuple(entry.metrics_ports))


def view_of(plain: Mapping[str, Any]) -> View:
    """The view that `View.plain` was made of, perhaps in another release."""
    failures = tuple(Failure(**_known(Failure, one)) for one in plain["failures"])
    return View(tuple(map(entry_of, plain["entries"])), plain["settled"], failures)


def _known(cls: type, plain: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: plain[one.name] for one in fields(cls) if one.name in plain}


def members_text(members: dict[str, str]) -> str:
    """The file that `loraplex router --workers-from file:PATH` follows."""
    lines = ["# written by the router's replica", *(f"{name}={at}" for name, at in sorted(members.items()))]
    return "".join(f"{line}\n" for line in lines)
