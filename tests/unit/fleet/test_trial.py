"""Trial of a router before the one that serves ends."""

from __future__ import annotations

from typing import Any

import pytest
from support.fleet import ray_is_missing

from loraplex_fleet.deploying import router_arguments
from loraplex_fleet.spec import ClusterSpec, parse_spec

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own modules
    pytest.mark.skipif(bool(ray_is_missing()), reason=ray_is_missing()),
]


def spec_of(**router: Any) -> ClusterSpec:
    return parse_spec({"model": "m", "router": {"host": "127.0.0.1", **router}})


def test_the_same_settings_are_not_tried() -> None:
    from loraplex_fleet.trial import trial_of

    spec = spec_of(port=5)
    assert trial_of(spec, router_arguments(spec)) is None
    assert trial_of(spec, None) is None


def test_ports_are_left_to_the_router_that_serves() -> None:
    from loraplex_fleet.trial import trial_of

    before = router_arguments(spec_of(port=5))
    trial = trial_of(spec_of(port=5, flags={"http-port": 8000, "quota-share": 0.5}), before)
    assert trial is not None
    assert trial.router.port == 0
    assert trial.router.flags[-2:] == ("--http-port", "0")
    moved = trial_of(spec_of(port=6), before)
    assert moved is not None
    assert moved.router.port == 6, "one that it may find taken"


def test_what_another_release_runs_need_not_be_understood() -> None:
    from loraplex_fleet.trial import trial_of

    spec = spec_of(port=5)
    trial = trial_of(spec, {"model": "", "new": 1, "router": {"port": 5, "newer": True}})
    assert trial is not None
    assert trial.router.port == 0


@pytest.mark.parametrize("given", [{}, {"port": 50051}])
def test_the_port_by_default_is_left_as_well(given: dict[str, int]) -> None:
    from loraplex_fleet.trial import trial_of

    trial = trial_of(spec_of(**given, flags={"quota-share": 0.5}), router_arguments(spec_of(**given)))
    assert trial is not None
    assert trial.router.port == 0


def test_a_router_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet import trial

    monkeypatch.setattr(trial.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    assert trial.try_router(router_arguments(spec_of(port=0, flags={"http-port": 0}))) == ""
    wrong = router_arguments(spec_of(port=0, flags={"tls-cert": "/nowhere/cert", "tls-key": "/nowhere/key"}))
    assert "/nowhere/cert" in trial.try_router(wrong)
