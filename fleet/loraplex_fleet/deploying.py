"""Deployment: what a specification asks of Ray Serve, as data.

The same that a RayService of Kubernetes takes as `serveConfigV2`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from loraplex_fleet.spec import AUTO, VERSION, ClusterSpec, CountSpec, RouterSpec, ScaleSpec, SecretSpec, WorkerSpec
from loraplex_proto import __version__

WORKERS, ROUTERS = "workers", "routers"
DELETING: Final = "DELETING"  # Serve's state of what is being ended
IMPORT_PATH: Final = "loraplex_fleet.app:"
POLICY: Final = "loraplex_fleet.app:ScalingPolicy"
METRICS_INTERVAL_S: Final = 2.0


def app_name(fleet: str, part: str) -> str:
    return f"{fleet}-{part}"


def fleets_of(applications: Iterable[str]) -> list[str]:
    """Names of the fleets that applications of these names belong to."""
    split = (name.rpartition("-") for name in applications)
    return sorted({fleet for fleet, _, part in split if fleet and part in (WORKERS, ROUTERS)})


def serve_config(spec: ClusterSpec) -> dict[str, Any]:
    """Serve's declarative configuration. Counts are no arguments of the applications: they change without a restart."""
    return {
        "proxy_location": "Disabled",
        "applications": [
            _application(spec, WORKERS, worker_arguments(spec), {"name": "Worker", **_count(spec.worker)}),
            _application(spec, ROUTERS, router_arguments(spec), {"name": "Router", "num_replicas": spec.router.count}),
        ],
    }


def with_others(wanted: Mapping[str, Any], applications: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration `wanted`, and beside it what else Serve runs, which it would end otherwise. `applications`:
    Serve's details. What is being ended is left out; it would come back."""
    names = {one["name"] for one in wanted["applications"]}
    others = [
        one["deployed_app_config"]
        for name, one in applications.items()
        if name not in names and one["deployed_app_config"] and not is_ending(one)
    ]
    return {**wanted, "applications": [*others, *wanted["applications"]]}


def has_taken(wanted: Mapping[str, Any], applications: Mapping[str, Any]) -> bool:
    """True if Serve, by its details, runs what is wanted."""

    def is_there(one: Mapping[str, Any]) -> bool:
        details = applications.get(one["name"])
        return details is not None and not is_ending(details)

    return all(map(is_there, wanted["applications"])) and not is_replaced(wanted, applications)


def is_replaced(wanted: Mapping[str, Any], applications: Mapping[str, Any]) -> bool:
    """True if Serve, by its details, runs an application of these with other arguments."""

    def differs(one: Mapping[str, Any]) -> bool:
        details = applications.get(one["name"])
        if details is None or is_ending(details):
            return False
        return (details["deployed_app_config"] or {}).get("args") != one["args"]

    return any(map(differs, wanted["applications"]))


def is_ending(details: Mapping[str, Any]) -> bool:
    return plain_state(details["status"]) == DELETING


def plain_state(value: Any) -> str:
    """A state of Serve's, which is a string or an enum of strings."""
    return str(getattr(value, "value", value))


def worker_arguments(spec: ClusterSpec) -> dict[str, Any]:
    """Settings of workers, and the version: a change of anything here rolls them."""
    worker = replace(spec.worker, count=CountSpec(), scale=ScaleSpec())
    secrets = SecretSpec(worker_token_file=spec.secrets.worker_token_file)
    return _arguments(replace(spec, address=AUTO, worker=worker, router=RouterSpec(), secrets=secrets))


def router_arguments(spec: ClusterSpec) -> dict[str, Any]:
    """Settings of routers, and the version: a change of anything here rolls them."""
    router, tls = replace(spec.router, count=1), replace(spec.tls, cert="", key="")
    return _arguments(replace(spec, model="", address=AUTO, adapters="", worker=WorkerSpec(), router=router, tls=tls))


def _arguments(spec: ClusterSpec) -> dict[str, Any]:
    return {VERSION: __version__, **spec.plain()}


def _application(spec: ClusterSpec, part: str, arguments: dict[str, Any], deployment: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": app_name(spec.name, part),
        "route_prefix": None,
        "import_path": IMPORT_PATH + part,
        "args": arguments,
        "deployments": [deployment],
    }


def _count(worker: WorkerSpec) -> dict[str, Any]:
    count, scale = worker.count, worker.scale
    if count.is_fixed:
        return {"num_replicas": count.min}
    kwargs = {
        "target": scale.target_pending_tokens,
        "up_after_s": scale.up_after_s,
        "down_after_s": scale.down_after_s,
        "settle_s": scale.settle_s,
    }
    return {
        "num_replicas": "auto",
        "autoscaling_config": {
            "min_replicas": count.min,
            "max_replicas": count.max,
            # The policy has the delays, and Serve none of its own.
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "metrics_interval_s": METRICS_INTERVAL_S,
            "look_back_period_s": 2 * METRICS_INTERVAL_S,
            "policy": {"policy_function": POLICY, "policy_kwargs": kwargs},
        },
    }
