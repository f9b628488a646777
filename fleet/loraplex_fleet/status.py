"""Status of a fleet: Serve's view and the directory's, put together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from loraplex_fleet.entries import READY, WORKER, Entry, Failure, View

# What placing a replica takes where there is room for it.
PLACED_S: Final = 3.0
MAX_MESSAGE: Final = 400
# Serve has given up; everything else may still become well.
_FAILED: Final = "DEPLOY_FAILED"


@dataclass(frozen=True, slots=True)
class Part:
    """The workers, or the routers."""

    kind: str
    wanted: int
    running: int  # that serve
    state: str  # Serve's: RUNNING, DEPLOYING, DEPLOY_FAILED, …; NOT_STARTED where there is none
    replicas: tuple[Entry, ...]
    pending: tuple[str, ...]  # why replicas do not run yet, a sentence for each
    failures: tuple[Failure, ...]  # the last ones
    message: str = ""  # Serve's

    @property
    def is_complete(self) -> bool:
        serving = [one for one in self.replicas if one.state == READY and not one.text]
        return self.state == "RUNNING" and len(serving) >= self.wanted

    @property
    def has_failed(self) -> bool:
        return self.state == _FAILED

    @property
    def why(self) -> str:
        """The best answer to why it is not complete."""
        if self.has_failed:
            return self.failures[-1].text if self.failures else " ".join(self.message.split())[-MAX_MESSAGE:]
        starting = [f"{one.node}: {one.text}" for one in self.replicas if one.text]
        return "; ".join([*self.pending, *starting]) or f"{self.running} of {self.wanted} run"


@dataclass(frozen=True, slots=True)
class Status:
    """Everything that `loraplex status` shows."""

    fleet: str
    parts: tuple[Part, ...]
    nodes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def exists(self) -> bool:
        return any(part.state != "NOT_STARTED" for part in self.parts)

    @property
    def is_complete(self) -> bool:
        return all(part.is_complete for part in self.parts)

    @property
    def router_addresses(self) -> list[str]:
        return [one.address for part in self.parts if part.kind != WORKER for one in part.replicas if one.address]


def part_of(kind: str, details: Mapping[str, Any] | None, view: View, free: str, now_s: float) -> Part:
    """Of Serve's details of an application, and what its nodes have `free`. `now_s` since the epoch."""
    entries = tuple(one for one in view.entries if one.kind == kind)
    failures = tuple(one for one in view.failures if one.kind == kind)
    running = sum(one.state == READY for one in entries)
    if details is None:
        return Part(kind, 0, running, "NOT_STARTED", entries, (), failures)
    wanted, pending = 0, list[str]()
    for deployment in details["deployments"].values():
        wanted += deployment["target_num_replicas"]
        needs = _text(deployment["required_resources"])
        unplaced = [
            one
            for one in deployment["replicas"]
            if _plain(one["state"]) == "STARTING" and not one.get("node_id") and now_s - one["start_time_s"] > PLACED_S
        ]
        if unplaced:
            what = "replica waits" if len(unplaced) == 1 else "replicas wait"
            pending.append(f"{len(unplaced)} {what} for a node with {needs}; the cluster has {free} left")
    return Part(kind, wanted, running, _plain(details["status"]), entries, tuple(pending), failures, details["message"])


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()) if amount) or "nothing special"


def _plain(value: Any) -> str:
    return str(getattr(value, "value", value))
