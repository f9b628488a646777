"""Command lines of a fleet's processes: `loraplex worker` and `loraplex router`."""

from __future__ import annotations

import sys
from pathlib import Path

from loraplex_fleet.spec import ClusterSpec

ANNOUNCE_S = 2.0
LORAPLEX = (sys.executable, "-m", "loraplex")


def worker_command(spec: ClusterSpec, node: str, store: Path | None, token: str) -> tuple[str, ...]:
    """Command line of a worker on the node's own address. With a token it takes calls of its holders only."""
    command = [*LORAPLEX, "worker", spec.model, "--host", node, "--port", "0", *_supervised(spec)]
    command += ["--take-over", f"{spec.drain_s:g}"]
    flags = spec.worker.flags
    if not spec.worker.resources.gpu and "--threads" not in flags and spec.worker.resources.cpu >= 1:
        command += ["--threads", f"{int(spec.worker.resources.cpu)}"]
    if spec.adapters:
        command += ["--adapters", spec.adapters]
    if store is not None:
        command += ["--adapter-store", str(store)]
    if spec.tls.cert:
        command += ["--tls-cert", spec.tls.cert, "--tls-key", spec.tls.key]
    if token:
        from loraplex_runtime.auth import token_digest  # late: it imports gRPC

        command += ["--router-digest", token_digest(token)]
    return (*command, *flags)


def router_command(spec: ClusterSpec, node: str, members: Path) -> tuple[str, ...]:
    """Command line of a router that follows the file of members."""
    command = [*LORAPLEX, "router", "--host", spec.router.host or node, "--port", f"{spec.router.port}"]
    command += ["--workers-from", f"file:{members}", *_supervised(spec)]
    for flag, path in (
        ("--worker-token-file", spec.secrets.worker_token_file),
        ("--auth-file", spec.secrets.auth_file),
        ("--worker-ca", spec.tls.ca),
    ):
        command += [flag, path] if path else []
    return (*command, *spec.router.flags)


def _supervised(spec: ClusterSpec) -> list[str]:
    drain_s = f"{spec.drain_s:g}"
    flags = ["--json", "--supervised", "--on-orphan", f"drain={drain_s}", "--drain", drain_s]
    return [*flags, "--announce", f"{min(ANNOUNCE_S, spec.drain_s):g}"]
