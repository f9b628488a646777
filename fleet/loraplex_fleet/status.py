"""Status of a fleet: Serve's view and the directory's, put together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from loraplex_fleet.deploying import DELETING, fleets_of, plain_state
from loraplex_fleet.entries import READY, WORKER, Entry, Failure, View

# What placing a replica takes where there is room for it.
PLACED_S: Final = 3.0
MAX_MESSAGE: Final = 400
# Serve has given up; everything else may still become well.
_FAILED: Final = "DEPLOY_FAILED"
_DEPLOYING: Final = "DEPLOYING"
# It is not there.
NOT_STARTED: Final = "NOT_STARTED"
# Before what a replica raised, at the end of the traceback that Serve shows.
_RAISED: Final = "\nRuntimeError: "


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
    def is_taken_away(self) -> bool:
        """True if nothing will start it any more."""
        return self.state in (NOT_STARTED, DELETING)

    @property
    def why(self) -> str:
        """The best answer to why it is not complete."""
        if self.has_failed:
            return self.failures[-1].text if self.failures else _raised(self.message)
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
        return any(part.state != NOT_STARTED for part in self.parts)

    @property
    def is_complete(self) -> bool:
        return all(part.is_complete for part in self.parts)

    @property
    def is_decided(self) -> bool:
        """True if Serve has made of each part what it can."""
        return all(part.state != _DEPLOYING for part in self.parts)

    @property
    def failure(self) -> str:
        """The parts that do not start, why, and how much serves nevertheless; empty where nothing has failed."""
        return "; ".join(
            f"{part.kind}s do not start: {part.why}; "
            + (f"{part.running} serve as before" if part.running else "none serves")
            for part in self.parts
            if part.has_failed
        )

    @property
    def router_addresses(self) -> list[str]:
        return [one.address for part in self.parts if part.kind != WORKER for one in part.replicas if one.address]


@dataclass(frozen=True, slots=True)
class Ended:
    """Outcome of `loraplex down`."""

    fleet: bool  # there was one, and it has ended
    ray: bool  # Ray on this machine, which `up` had started, has ended
    left: tuple[str, ...] = ()  # the applications that Serve still has

    def text(self, fleet: str) -> str:
        """The sentence that tells the fleet's end, and Ray's."""
        if not self.fleet:
            return f"there was no fleet {fleet}; Ray on this machine has ended"
        return f"fleet {fleet} has ended" + (", and so has Ray on this machine" if self.ray else "")

    def missing(self, fleet: str) -> str:
        """The sentence that there is no such fleet, with the names of those that there are."""
        there = f"; there is {', '.join(names)}" if (names := fleets_of(self.left)) else ""
        return f"there is no fleet {fleet}{there}"


def part_of(kind: str, details: Mapping[str, Any] | None, view: View, free: str, now_s: float) -> Part:
    """Status of one kind, from Serve's details of its application. `free`: what its nodes have left; `now_s` since the
    epoch."""
    entries = tuple(one for one in view.entries if one.kind == kind)
    failures = tuple(one for one in view.failures if one.kind == kind)
    running = sum(one.state == READY for one in entries)
    if details is None:
        return Part(kind, 0, running, NOT_STARTED, entries, (), failures)
    wanted, pending = 0, list[str]()
    for deployment in details["deployments"].values():
        wanted += deployment["target_num_replicas"]
        unplaced = [one for one in _unplaced(deployment) if now_s - one["start_time_s"] > PLACED_S]
        if unplaced:
            what = "replica waits" if len(unplaced) == 1 else "replicas wait"
            sentence = f"{len(unplaced)} {what} for {_node_for(deployment)}; the cluster has {free} left"
            if running >= wanted > 1:
                sentence += "; what ran before serves until then, and a count lower by one makes room, too"
            pending.append(sentence)
    return Part(
        kind, wanted, running, plain_state(details["status"]), entries, tuple(pending), failures, details["message"]
    )


def unplaced_actors(details: Mapping[str, Any]) -> list[str]:
    """Names of the actors that wait for a node, in Serve's details of an application."""
    return [one["actor_name"] for deployment in details["deployments"].values() for one in _unplaced(deployment)]


def _unplaced(deployment: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in deployment["replicas"] if plain_state(one["state"]) == "STARTING" and not one.get("node_id")]


def _raised(message: str) -> str:
    """The error of a replica in Serve's message; the message's end where it has none of ours."""
    _, found, text = message.rpartition(_RAISED)
    return " ".join((text if found else message).split())[-MAX_MESSAGE:]


def _node_for(deployment: Mapping[str, Any]) -> str:
    """The resources that a replica needs of its node, in words."""
    resources: Mapping[str, float] = deployment["required_resources"]
    needs = ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()) if amount)
    is_one = (deployment.get("deployment_config") or {}).get("max_replicas_per_node") == 1
    wanted = [f"with {needs}"] if needs else []
    wanted += ["without another one"] if is_one else []
    return " ".join(["a node", " and ".join(wanted)]).rstrip()
