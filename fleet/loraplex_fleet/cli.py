"""`loraplex up`, `down` and `status`: a fleet on Ray, from a file."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex.cli.terminal import write_json, write_table
from loraplex_contracts.errors import DeadlineExceeded, FailedPrecondition, LoraplexError, Unavailable
from loraplex_fleet.deploying import serve_config
from loraplex_fleet.spec import AUTO, ClusterSpec, check_address, load_spec
from loraplex_runtime.logs import LogStyle, setup_logging

if TYPE_CHECKING:
    from loraplex_fleet.status import Status

log = logging.getLogger(__name__)

LOOK_S = 0.5
# Once a part has failed: what the other one gets to fail as well, so that both are told.
OTHER_PART_S = 20.0
# Longer than a drain: what routers and workers take to end.
END_MARGIN_S = 60.0
Say = Callable[[str], None]

FileArgument = Annotated[Path, typer.Argument(help="cluster.yaml; docs/operations.md describes it.", metavar="FILE")]
FleetOption = Annotated[str, typer.Option("--name", help="The fleet's name, as `name` in its file.")]
AddressOption = Annotated[str, typer.Option("--address", help="Ray's HOST:PORT, or auto: the one that runs here.")]
LogFormatOption = Annotated[
    LogStyle, typer.Option("--log-format", help="Of standard error: plain or json, an object a line.")
]


def up(
    file: FileArgument,
    check: Annotated[bool, typer.Option("--check", help="Only check the file and say what would be placed.")] = False,
    serve_config_only: Annotated[
        bool, typer.Option("--serve-config", help="Only print what Ray Serve gets, as serveConfigV2 of a RayService.")
    ] = False,
    wait: Annotated[float, typer.Option("--wait", min=0.0, help="Seconds to wait until all of it serves.")] = 600.0,
    log_format: LogFormatOption = "plain",
) -> None:
    """Start the fleet that FILE describes, or change the one that runs: what is the same stays, the rest is rolled.

    It joins the Ray cluster that the file names; with `address: auto` and none on this machine it starts one here.

    Example: loraplex up cluster.yaml
    """
    with _reporting(log_format) as say:
        spec = load_spec(file)
        if serve_config_only:
            import yaml

            sys.stdout.write(yaml.safe_dump(serve_config(spec), sort_keys=False))
        elif check:
            _say_plan(spec)
        else:
            found = _deploy(spec, wait, say)
            print(f"fleet {spec.name} serves on {', '.join(found.router_addresses)}", flush=True)


def _deploy(spec: ClusterSpec, wait_s: float, say: Say) -> Status:
    from loraplex_fleet import cluster  # late: it imports Ray

    with cluster.joined(spec.address, may_start=True) as started:
        if started:
            say("Ray was started on this machine, for this machine alone; `loraplex down` ends it")
        cluster.try_routers(spec)
        before = cluster.deploy(spec)
        return _wait(spec, before, wait_s, say)


def down(
    fleet: FleetOption = "loraplex",
    address: AddressOption = AUTO,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            min=0.0,
            help="Seconds, and one minute more, to wait for routers, and again for workers, to end. Requests get the "
            "file's `drain`, however long that is.",
        ),
    ] = 600.0,
    log_format: LogFormatOption = "plain",
) -> None:
    """End a fleet: routers and workers drain first. A Ray that `loraplex up` started ends with its last.

    Example: loraplex down
    """
    with _reporting(log_format):
        check_address(address)
        from loraplex_fleet import cluster  # late: it imports Ray

        with cluster.joined(address):
            ended = cluster.end(fleet, wait + END_MARGIN_S)
        if not (ended.fleet or ended.ray):
            raise FailedPrecondition(ended.missing(fleet))
    print(ended.text(fleet), flush=True)


def status(
    fleet: FleetOption = "loraplex",
    address: AddressOption = AUTO,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    log_format: LogFormatOption = "plain",
) -> None:
    """Show a fleet: what is wanted, what runs where, what waits and why, the last failures.

    Example: loraplex status --json
    """
    with _reporting(log_format):
        check_address(address)
        from loraplex_fleet import cluster  # late: it imports Ray

        with cluster.joined(address):
            found = cluster.status(fleet)
        if not found.exists:
            raise FailedPrecondition(f"there is no fleet {fleet}; `loraplex up FILE` starts one")
    if json:
        write_json(found.plain())
    else:
        _show(found)


def _show(found: Status) -> None:
    for part in found.parts:
        print(f"{part.kind}s: {part.running} of {part.wanted} serve ({part.state.lower()})")
        for sentence in part.pending:
            print(f"  {sentence}")
    columns = ("name", "state", "address", "node", "running", "queued", "pending tokens", "says")
    rows = [
        (
            one.name or "-", one.state, one.address or "-", one.node, f"{one.running}", f"{one.queued}",
            f"{one.pending_tokens}", one.text,
        )
        for part in found.parts
        for one in part.replicas
    ]  # fmt: skip
    write_table(columns, rows)
    for part in found.parts:
        for failure in part.failures[-3:]:
            print(f"{failure.kind} {failure.replica_id} on {failure.node} is gone: {failure.text}")


def _say_plan(spec: ClusterSpec) -> None:
    """Says what would be placed and, where Ray runs already, whether its nodes ask for more than the file has."""
    from loraplex_fleet import cluster  # late: it imports Ray

    try:
        with cluster.joined(spec.address):
            nodes = cluster.node_addresses()
    except Unavailable:
        if spec.address != AUTO:
            raise
        nodes = ["127.0.0.1"]
        print("Ray: none runs here; one would be started, for this machine alone")
    else:
        print(f"Ray: nodes {', '.join(nodes)}")
    spec.check_reach(nodes)
    count = spec.worker.count
    number = f"{count.min}" if count.is_fixed else f"{count.min} to {count.max}"
    print(f"workers: {number}, each with {spec.worker.resources.text()}, serving {spec.model}")
    where = f"port {spec.router.port}, one on a node at most" if spec.router.port else "free ports"
    print(f"routers: {spec.router.count}, {where}")


def _wait(spec: ClusterSpec, before: Collection[str], wait_s: float, say: Say) -> Status:
    """Waits until all of it serves. `before`: replicas of earlier deployments. Raises FailedPrecondition where Serve
    gives up, no longer has them or was given others, DeadlineExceeded after `wait_s`."""
    from loraplex_fleet import cluster

    until_s, failed_until_s, reported = time.monotonic() + wait_s, math.inf, ""
    while True:
        found = cluster.status(spec.name, before)
        if cluster.was_replaced(spec):  # asked after the status, which may be the other one's
            raise FailedPrecondition(
                f"another `loraplex up` has changed fleet {spec.name} meanwhile; `loraplex status` shows what runs"
            )
        if found.is_complete:
            return found
        if gone := [f"{part.kind}s" for part in found.parts if part.is_taken_away]:
            raise FailedPrecondition(f"{' and '.join(gone)} were ended meanwhile, by another command")
        if found.failure:
            failed_until_s = min(failed_until_s, time.monotonic() + OTHER_PART_S)
            if found.is_decided or time.monotonic() > min(failed_until_s, until_s):
                raise FailedPrecondition(found.failure)
        missing = [f"{part.kind}s: {part.why}" for part in found.parts if not part.is_complete]
        if (text := "; ".join(missing)) != reported:
            say(text)
            reported = text
        if time.monotonic() > until_s:
            raise DeadlineExceeded(
                f"not all of it serves after {wait_s:.0f} s: {reported}; it goes on, see `loraplex status`"
            )
        time.sleep(LOOK_S)


@contextlib.contextmanager
def _reporting(log_format: LogStyle) -> Generator[Say]:
    """Yields a function that reports progress on standard error. As JSON each line is one of the log, the error that
    ends the command included."""
    if log_format == "plain":
        yield _say
        return
    setup_logging(style=log_format)
    try:
        yield lambda text: log.info("%s", text)
    except LoraplexError as error:
        log.error("%s", error.message, extra={"reason": error.reason})
        sys.exit(error.exit_code)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
