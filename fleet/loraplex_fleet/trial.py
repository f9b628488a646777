"""Trial of a router: new settings start beside the one that serves.

Routers share a port with their successors, so Serve ends the one before it starts the other. What would not start is
found out first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import ray.util

from loraplex_contracts.errors import LoraplexError
from loraplex_fleet.commands import router_command
from loraplex_fleet.deploying import router_arguments
from loraplex_fleet.entries import members_text
from loraplex_fleet.spec import ClusterSpec, RouterSpec, from_plain
from loraplex_fleet.supervisor import Child

PORT_FLAGS: Final = ("--http-port", "--metrics-port")


def trial_of(spec: ClusterSpec, running: Mapping[str, Any] | None) -> ClusterSpec | None:
    """Settings to try beside the routers that run with the arguments `running`; None where they are the same, or none
    runs. Ports that those may have are left to them."""
    if running is None or running == router_arguments(spec):
        return None
    router = spec.router
    # Of `running` nothing more is read: another release may have written it.
    port = 0 if router.port == running.get("router", {}).get("port", RouterSpec().port) else router.port
    free = [part for flag in PORT_FLAGS if flag in router.flags for part in (flag, "0")]  # of two, the last one holds
    return replace(spec, router=replace(router, port=port, flags=(*router.flags, *free)))


def try_router(plain: dict[str, Any]) -> str:
    """Starts a router of `ClusterSpec.plain()` on this node and ends it. Returns why it does not start; empty where it
    does."""
    spec = from_plain(plain)
    with tempfile.TemporaryDirectory(prefix="loraplex-trial-") as folder:
        members = Path(folder) / "members"
        members.write_text(members_text({}), encoding="ascii")
        child = Child(router_command(spec, ray.util.get_node_ip_address(), members))
        try:
            child.start()
        except LoraplexError as error:
            return error.message
        finally:
            child.kill()
    return ""
