"""Ray cluster of the commands: join or start one, deploy, ask, end."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any, Final

import grpc
import ray
from ray import serve
from ray._private import grpc_utils, services
from ray.exceptions import RayError, RayTaskError
from ray.serve.schema import ServeDeploySchema
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from loraplex_contracts.errors import FailedPrecondition, Unavailable
from loraplex_fleet.changing import changing
from loraplex_fleet.deploying import (
    ROUTERS,
    WORKERS,
    app_name,
    has_taken,
    is_ending,
    is_replaced,
    serve_config,
    with_others,
)
from loraplex_fleet.directory import NAMESPACE, find_directory, read_view
from loraplex_fleet.entries import READY, ROUTER, WORKER
from loraplex_fleet.spec import AUTO, ClusterSpec, check_address
from loraplex_fleet.status import Ended, Status, part_of, unplaced_actors
from loraplex_fleet.trial import trial_of, try_router
from loraplex_runtime.config import child_environment
from loraplex_runtime.locks import try_hold

log = logging.getLogger(__name__)

START_S: Final = 60.0
TRIAL_S: Final = 60.0
START_LOOK_S: Final = 0.3
END_S: Final = 40.0
LOCK_S: Final = START_S + END_S
END_LOOK_S: Final = 0.2
CONNECT_S: Final = 3.0
HEAD_S: Final = 10.0  # a head with much to do may take seconds
# The first thing that Ray's own clients ask a head node for.
HEAD_METHOD: Final = "/ray.rpc.NodeInfoGcsService/GetClusterId"
# Label of a head node that `up` has started: its process, which ends Ray on this machine with itself.
STARTED_LABEL: Final = "loraplex-up-pid"
# Ray takes 127.0.0.1 for the address of a network card, and this one, which is loopback on Linux as well, as it is.
LOOPBACK: Final = "127.0.0.2"
SERVE_NAMESPACE: Final = "serve"
# `ray start` prints it once other processes can join.
ADDRESS: Final = re.compile(rf"--address='({re.escape(LOOPBACK)}:\d+)'")


@contextlib.contextmanager
def joined(address: str, *, may_start: bool = False) -> Generator[bool]:
    """Connects to Ray for a block. Yields True where it was started for this, and stays when this process ends. Raises
    Unavailable, also where Ray ends during the block, or an actor of it."""
    try:
        started = _join_or_start(address) if may_start and address == AUTO else _join(address)
    except ConnectionError as error:
        raise Unavailable(
            "no Ray runs on this machine; `loraplex up` starts one here, `ray start` joins machines"
            if address == AUTO
            else f"no Ray answers at {address}: {error}; `ray start --head` starts one, on port 6379 by default"
        ) from error
    try:
        yield started
    except RayError as error:
        if isinstance(error, RayTaskError) and not isinstance(error.cause, RayError):
            raise  # the actor is there and refuses
        raise Unavailable("Ray or the fleet has ended meanwhile; `loraplex status` shows what runs") from error
    finally:
        ray.shutdown()


def _join_or_start(address: str) -> bool:
    """Joins Ray, and starts one on this machine where there is none; only one command of a user does so at a time. True
    where it has started one. Raises ConnectionError and FailedPrecondition."""
    with _starting():
        try:
            return _join(address)
        except ConnectionError:
            if child_environment().get("RAY_ADDRESS", AUTO) not in ("", AUTO):
                raise  # the next command would look there, too
        _join(_start_here())
    return True


@contextlib.contextmanager
def _starting() -> Generator[None]:
    """Holds the lock under which a user's commands start and end Ray on this machine. Raises Unavailable."""
    path = Path(tempfile.gettempdir()) / f"loraplex-ray-{os.getuid()}.lock"
    until_s = time.monotonic() + LOCK_S
    while (lock := try_hold(path, "Ray on this machine")) is None:
        if time.monotonic() > until_s:
            raise Unavailable(f"another command has been starting or ending Ray here for {LOCK_S:.0f} s; try again")
        time.sleep(START_LOOK_S)
    try:
        yield
    finally:
        os.close(lock)


def _join(address: str) -> bool:
    """Joins Ray. Returns False, as it has started none. Raises ConnectionError soon: Ray itself would look for a minute
    for one that has ended."""
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(
        address=_find(address),
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
        configure_logging=False,
    )
    return False


def _find(address: str) -> str:
    """HOST:PORT of a Ray that listens there. Raises ConnectionError, and InvalidArgument for a wrong RAY_ADDRESS."""
    if address == AUTO:
        address = services.get_ray_address_from_environment(AUTO, None)
        check_address(address, "RAY_ADDRESS")
    if address.startswith("ray://"):
        return address
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as error:
        raise ConnectionError("nothing listens there") from error
    _check_is_head(address)
    return address


def _check_is_head(address: str) -> None:
    """Raises ConnectionError unless a head of Ray listens there. Ray itself would try for a minute to talk to whatever
    does, such as a router or the dashboard."""
    connection: Any = grpc_utils.init_grpc_channel(address)
    with connection:
        try:
            connection.unary_unary(HEAD_METHOD)(b"", timeout=HEAD_S)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ConnectionError(f"what listens there has not answered for {HEAD_S:g} s") from error
            if error.code() is not grpc.StatusCode.UNAUTHENTICATED:  # Ray says why, better
                raise ConnectionError("what listens there is not the head of a Ray") from error


def _start_here() -> str:
    """Starts Ray on this machine's loopback, as a process of its own. Returns its address once it can be joined. Raises
    FailedPrecondition."""
    log_path = Path(tempfile.gettempdir()) / f"loraplex-ray-{os.getuid()}.log"
    command = [
        *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--node-ip-address", LOOPBACK),
        *("--port", "0", "--include-dashboard", "false", "--disable-usage-stats"),
    ]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            # The shell becomes Ray: $$ is the process id of both.
            ["/bin/sh", "-c", f'exec "$0" "$@" --labels={STARTED_LABEL}=$$', *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise FailedPrecondition(f"Ray does not start on this machine; {log_path} says why")
        # Another user's may have started later: `auto` would be that one.
        if found := ADDRESS.search(log_path.read_text(errors="replace")):
            with contextlib.suppress(ConnectionError):
                _join(found[1])
                ray.shutdown()
                return found[1]
        time.sleep(START_LOOK_S)
    process.terminate()
    raise FailedPrecondition(f"Ray did not start within {START_S:.0f} s; {log_path} says why")


def node_addresses() -> list[str]:
    return sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})


def try_routers(spec: ClusterSpec) -> None:
    """Starts the router once beside each that serves with other settings. Raises FailedPrecondition where it does not
    start."""
    found = _applications(_serve_client(start=False)).get(app_name(spec.name, ROUTERS)) or {}
    trial = trial_of(spec, (found.get("deployed_app_config") or {}).get("args"))
    if trial is None:
        return
    serving = {one.node for one in read_view(spec.name).entries if one.kind == ROUTER and one.state == READY}
    task: Any = ray.remote(try_router)
    tries = {
        node["NodeManagerAddress"]: task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(trial.plain())
        for node in ray.nodes()
        if node["Alive"] and node["NodeManagerAddress"] in serving
    }
    for address, tried in tries.items():
        try:
            why = ray.get(tried, timeout=TRIAL_S)
        except RayError as error:  # then Serve is to find out
            log.warning("routers could not be tried on %s: %s", address, type(error).__name__)
            continue
        if why:
            raise FailedPrecondition(f"routers would not start on {address}: {why}; nothing was changed")


def deploy(spec: ClusterSpec) -> frozenset[str]:
    """Tells Serve what is wanted, and returns at once the replicas that were there before: why these fail is no answer
    to why it does not start. What else Serve runs stays as it is. Raises InvalidArgument where the nodes' addresses ask
    for more than the specification has, and Unavailable where something else changes Serve meanwhile."""
    spec.check_reach(node_addresses())
    wanted = serve_config(spec)
    with changing():
        before = read_view(spec.name).replica_ids
        client = _serve_client(start=True)
        client.deploy_apps(ServeDeploySchema.model_validate(with_others(wanted, _applications(client))))
        if not has_taken(wanted, _applications(client)):  # by one that does not know the lock
            raise Unavailable("Serve was told something else meanwhile, or is being ended; run `loraplex up` again")
    return before


def end(fleet: str, timeout_s: float) -> Ended:
    """Ends the fleet, after its drain. The last application takes Serve with it, and the Ray that `up` has started.
    Raises Unavailable where it takes longer."""
    client = _serve_client(start=False)
    # Routers first: they end requests, workers have none then.
    names = [app_name(fleet, part) for part in (ROUTERS, WORKERS)]
    ended = [_end_application(client, name, timeout_s) for name in names if client]
    with changing():
        left = tuple(_applications(client))  # read again: another fleet, or this one, may have come up during the drain
        directory = None if {*left} & {*names} else find_directory(fleet)
        if directory is not None:
            ray.kill(directory)
        if not left and client is not None:
            serve.shutdown()
        return Ended(fleet=any(ended), ray=not left and _end_own_ray(), left=left)


def _end_application(client: Any, name: str, timeout_s: float) -> bool:
    """Ends an application of Serve. False where there is none. Raises Unavailable where it takes longer, or where
    another command has started it again."""
    with changing():
        application = _applications(client).get(name)
        if application is None:
            return False
        client.delete_apps([name], blocking=False)
        _wait_for(client, name, lambda found: found is None or is_ending(found), END_S)  # it takes calls in any order
        for actor in unplaced_actors(application):  # Serve would give them the drain, which they cannot begin
            with contextlib.suppress(ValueError):  # it is gone
                ray.kill(ray.get_actor(actor, namespace=SERVE_NAMESPACE))

    def has_ended(found: Any) -> bool:
        if found is not None and not is_ending(found):
            raise Unavailable(f"{name} was started again meanwhile, by another `loraplex up`")
        return found is None

    _wait_for(client, name, has_ended, timeout_s)
    return True


def _wait_for(client: Any, name: str, is_so: Callable[[Any], bool], timeout_s: float) -> None:
    """Waits until Serve's details of an application, None where there is none, are as wanted. Raises Unavailable."""
    until_s = time.monotonic() + timeout_s
    while not is_so(_applications(client).get(name)):
        if time.monotonic() > until_s:
            raise Unavailable(f"{name} has not ended within {timeout_s:.0f} s; `loraplex status` shows what runs")
        time.sleep(END_LOOK_S)


def _applications(client: Any) -> dict[str, Any]:
    """Serve's details of its applications, by name."""
    return {} if client is None else client.get_serve_details()["applications"]


def _end_own_ray() -> bool:
    """Ends Ray where `up` has started it on this machine. False where it is not ours to end."""
    pids = [
        int(pid)
        for node in ray.nodes()
        if node["Alive"] and (pid := node.get("Labels", {}).get(STARTED_LABEL, "")).isdecimal()
    ]
    if not pids:
        return False
    with _starting():
        ray.shutdown()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        until_s = time.monotonic() + END_S
        while any(_runs(pid) for pid in pids) and time.monotonic() < until_s:
            time.sleep(0.1)
    return True


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def status(fleet: str, before: Collection[str] = ()) -> Status:
    """State of the fleet: what runs, and what does not and why. Failures of the replicas `before` are left out."""
    client = _serve_client(start=False)
    applications = _applications(client)
    view = read_view(fleet).without_failures_of(before)
    free = _free_resources()
    parts = tuple(
        part_of(kind, applications.get(app_name(fleet, part)), view, free, time.time())
        for kind, part in ((WORKER, WORKERS), (ROUTER, ROUTERS))
    )
    return Status(fleet, parts, tuple(node_addresses()))


def was_replaced(spec: ClusterSpec) -> bool:
    """True if another `loraplex up` has given the fleet other settings than these."""
    return is_replaced(serve_config(spec), _applications(_serve_client(start=False)))


def _free_resources() -> str:
    free = ray.available_resources()
    shown = {name: amount for name, amount in free.items() if not name.startswith(("node:", "memory", "object_store"))}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(shown.items())) or "nothing"


def _serve_client(*, start: bool) -> Any:
    """Serve's client, which takes a whole configuration. The public interface has the same over HTTP only, and that
    needs Ray's dashboard."""
    from ray.serve._private.api import serve_start
    from ray.serve.context import _get_global_client  # pyright: ignore[reportPrivateUsage]

    if start:
        return serve_start(proxy_location="Disabled")
    return _get_global_client(raise_if_no_controller_running=False)
