"""Directory actor: the one place where replicas of a fleet find each other.

A named, detached actor of Ray, which starts it again where it dies; heartbeats then fill it again.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from loraplex_fleet.entries import Entries, View, entry_of, view_of

NAMESPACE: Final = "loraplex"
CALL_S: Final = 3.0


class Directory:
    """Owns the entries. Entries and views cross as plain data, so that replicas of two releases understand each
    other."""

    def __init__(self) -> None:
        self._entries = Entries(time.monotonic())

    async def beat(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Renews a replica's lease. Returns its `name`, empty while it has none, and the `view`."""
        now_s = time.monotonic()
        name = self._entries.beat(entry_of(entry), now_s)
        return {"name": name, "view": self._entries.view(now_s).plain()}

    async def drop(self, replica_id: str, reason: str) -> None:
        self._entries.drop(replica_id, reason)

    async def view(self) -> dict[str, Any]:
        return self._entries.view(time.monotonic()).plain()


def actor_name(fleet: str) -> str:
    return f"{fleet}-directory"


def find_directory(fleet: str) -> Any:
    """The directory; None where there is none."""
    try:
        return ray.get_actor(actor_name(fleet), namespace=NAMESPACE)
    except ValueError:
        return None


def have_directory(fleet: str) -> Any:
    """The directory, started where there is none. Blocks."""
    kind: Any = ray.remote(Directory)
    return kind.options(
        name=actor_name(fleet),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        num_cpus=0,
    ).remote()


def read_view(fleet: str) -> View:
    """The directory's view; an empty one where there is no directory, or where it does not answer."""
    directory = find_directory(fleet)
    if directory is None:
        return View()
    try:
        plain: Any = ray.get(directory.view.remote(), timeout=CALL_S)
    except (RayActorError, GetTimeoutError):
        return View()
    return view_of(plain)


class DirectoryClient:
    """Owns a replica's handle on the directory. While Ray cannot be reached, calls fail within seconds and the next
    one tries again."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._handle: Any = None

    async def beat(self, entry: dict[str, Any]) -> tuple[str, View]:
        """Renews the replica's lease. Returns its name and the view. Raises RayError or TimeoutError."""
        answer = await self._call("beat", entry)
        return answer["name"], view_of(answer["view"])

    async def drop(self, replica_id: str, reason: str = "") -> None:
        """Takes a replica out of the directory. Raises RayError or TimeoutError."""
        await self._call("drop", replica_id, reason)

    async def _call(self, method: str, *arguments: Any) -> Any:
        handle = self._handle
        if handle is None:
            handle = self._handle = await asyncio.to_thread(have_directory, self._fleet)
        try:
            return await asyncio.wait_for(getattr(handle, method).remote(*arguments), CALL_S)
        except RayActorError:
            self._handle = None  # it may have been ended for good, and is then started again
            raise
