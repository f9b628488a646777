"""Applications of Ray Serve: `workers` and `routers`, to be named as `import_path`.

Two applications, because a change of either's arguments rolls all that is in it.
"""

from __future__ import annotations

from typing import Any, Final

from ray import serve
from ray.serve import Application

from loraplex_fleet import replicas
from loraplex_fleet.commands import ANNOUNCE_S
from loraplex_fleet.scaling import START, Bounds, decide
from loraplex_fleet.spec import ClusterSpec, from_plain
from loraplex_fleet.supervisor import GRACE_S

HEALTH_PERIOD_S: Final = 1.0
HEALTH_TIMEOUT_S: Final = 5.0
# Beyond drain and grace, so that Serve kills no replica that still drains.
MARGIN_S: Final = 8.0
# A worker that does not start is tried so often on the whole; then the ones before it stay.
NUM_TRIES: Final = 3


def workers(arguments: dict[str, Any]) -> Application:
    """Workers of `ClusterSpec.plain()`. How many there are is Serve's `num_replicas` or `autoscaling_config`."""
    spec = from_plain(arguments)
    options: dict[str, Any] = {
        **_common(spec),
        "ray_actor_options": spec.worker.resources.actor_options(),
        # New workers are ready before old ones go, where there is room for one more.
        "max_surge_percent": 1,
        "max_constructor_retry_count": NUM_TRIES,
    }
    deployment: Any = serve.deployment(replicas.Worker, name="Worker", **options)
    return deployment.bind(arguments)


def routers(arguments: dict[str, Any]) -> Application:
    """Routers of `ClusterSpec.plain()`."""
    spec = from_plain(arguments)
    options: dict[str, Any] = {**_common(spec), "ray_actor_options": spec.router.resources.actor_options()}
    if spec.router.port:
        options["max_replicas_per_node"] = 1
    deployment: Any = serve.deployment(replicas.Router, name="Router", **options)
    return deployment.bind(arguments)


def _common(spec: ClusterSpec) -> dict[str, Any]:
    return {
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.1,  # nothing comes through Ray
        "graceful_shutdown_timeout_s": ANNOUNCE_S + spec.drain_s + GRACE_S + MARGIN_S,
        "max_ongoing_requests": 1,
    }


class ScalingPolicy:
    """Serve's policy around `scaling.decide`. Where anything goes wrong, the number stays."""

    def __init__(self, **bounds: float) -> None:
        self._bounds = bounds
        self._state = START

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        count = context.target_num_replicas
        reported = (context.aggregated_metrics or {}).get("pending_tokens") or {}
        if not reported or context.current_time is None:
            return count, {}
        config = context.config
        bounds = Bounds(config.min_replicas, config.max_replicas, **self._bounds)
        count, self._state = decide(self._state, context.current_time, count, sum(reported.values()), bounds)
        return count, {}
