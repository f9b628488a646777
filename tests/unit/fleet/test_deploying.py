"""Configuration for Ray Serve, and the children's command lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fleet import ray_is_missing

from loraplex_fleet import deploying
from loraplex_fleet.commands import router_command, worker_command
from loraplex_fleet.deploying import (
    has_taken,
    is_replaced,
    router_arguments,
    serve_config,
    with_others,
    worker_arguments,
)
from loraplex_fleet.spec import from_plain, parse_spec

BASE: dict[str, Any] = {"model": "m", "worker": {"count": 2}, "router": {"count": 1}}


def test_two_applications_in_json() -> None:
    config = json.loads(json.dumps(serve_config(parse_spec(BASE))))
    workers, routers = config["applications"]
    assert (workers["name"], routers["name"]) == ("loraplex-workers", "loraplex-routers")
    assert workers["import_path"] == "loraplex_fleet.app:workers"
    assert workers["deployments"] == [{"name": "Worker", "num_replicas": 2}]
    assert from_plain(workers["args"]).model == "m"


def test_counts_and_the_other_part_roll_nothing() -> None:
    before = parse_spec(BASE)
    more = parse_spec({**BASE, "worker": {"count": {"min": 1, "max": 9}}, "router": {"count": 3}, "address": "h:1"})
    assert worker_arguments(more) == worker_arguments(before)
    assert router_arguments(more) == router_arguments(before)
    other_port = parse_spec({**BASE, "router": {"port": 7}})
    assert worker_arguments(other_port) == worker_arguments(before)
    assert router_arguments(other_port) != router_arguments(before)
    other_model = parse_spec({**BASE, "model": "n"})
    assert worker_arguments(other_model) != worker_arguments(before)
    assert router_arguments(other_model) == router_arguments(before)


def test_new_packages_roll_all(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(BASE)
    before = worker_arguments(spec), router_arguments(spec)
    monkeypatch.setattr(deploying, "__version__", "9.9.9")
    after = worker_arguments(spec), router_arguments(spec)
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, False]
    assert list(map(from_plain, before)) == list(map(from_plain, after))


def test_bounds_are_autoscaling() -> None:
    scaled = {"count": {"min": 2, "max": 5}, "scale": {"up-after": 3}}
    (deployment,) = serve_config(parse_spec({"model": "m", "worker": scaled}))["applications"][0]["deployments"]
    config = deployment["autoscaling_config"]
    assert (config["min_replicas"], config["max_replicas"]) == (2, 5)
    assert config["policy"]["policy_kwargs"]["up_after_s"] == 3.0


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own modules
@pytest.mark.skipif(bool(ray_is_missing()), reason=ray_is_missing())
def test_serve_rolls_for_another_policy_and_not_for_other_counts() -> None:
    """As docs/operations.md says under "Grow and shrink" and "Roll"."""
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeDeploySchema

    def version(**worker: Any) -> str:
        config = ServeDeploySchema.model_validate(serve_config(parse_spec({"model": "m", "worker": worker})))
        return get_app_code_version(config.applications[0])

    bounds = {"min": 2, "max": 5}
    assert version(count=2) == version(count=3)
    assert version(count=bounds) == version(count={"min": 1, "max": 9})
    assert len({version(count=2), version(count=bounds), version(count=bounds, scale={"up-after": 3})}) == 3


def test_a_worker_listens_on_its_node_with_a_token_and_tls() -> None:
    spec = parse_spec(
        {
            "model": "m", "adapters": "/a", "drain": 5, "worker": {"resources": {"cpu": 4}, "flags": {"speculate": 3}},
            "tls": {"cert": "/c", "key": "/k", "ca": "/ca"},
        }
    )  # fmt: skip
    command = worker_command(spec, "10.0.0.3", Path("/store/w0"), "secret")
    text = " ".join(command)
    assert "worker m --host 10.0.0.3 --port 0 --json --supervised --on-orphan drain=5 --drain 5" in text
    for part in ("--threads 4", "--adapters /a", "--adapter-store /store/w0", "--tls-cert /c --tls-key /k"):
        assert part in text
    assert "--take-over 5" in text
    assert "secret" not in text, "its digest alone is on the command line"
    assert "--router-digest" in text
    assert text.endswith("--speculate 3")
    on_gpu = replace(spec, worker=replace(spec.worker, resources=replace(spec.worker.resources, gpu=1.0)))
    assert "--threads" not in worker_command(on_gpu, "n", None, "")


def test_a_router_follows_its_file() -> None:
    spec = parse_spec(
        {
            "model": "m", "router": {"port": 50051, "flags": {"http-port": 0}},
            "secrets": {"worker-token-file": "/t"}, "tls": {"cert": "/c", "key": "/k", "ca": "/ca"},
        }
    )  # fmt: skip
    text = " ".join(router_command(spec, "10.0.0.3", Path("/x/members")))
    for part in (
        "router --host 10.0.0.3 --port 50051 --workers-from file:/x/members", "--worker-token-file /t",
        "--worker-ca /ca", "--http-port 0", "--supervised",
    ):  # fmt: skip
        assert part in text
    assert "--tls-cert" not in text, "that is between routers and workers"


def details(name: str, status: str = "RUNNING", **args: str) -> dict[str, dict[str, Any]]:
    return {name: {"status": status, "deployed_app_config": {"name": name, "args": args}}}


def test_what_else_serve_runs_stays_but_for_what_ends() -> None:
    wanted = serve_config(parse_spec(BASE))
    there = details("b-workers") | details("c-workers", "DELETING") | details("loraplex-workers", model="n")
    there["imperative"] = {"status": "RUNNING", "deployed_app_config": None}
    config = with_others(wanted, there)
    assert [one["name"] for one in config["applications"]] == ["b-workers", "loraplex-workers", "loraplex-routers"]
    assert config["applications"][1:] == wanted["applications"]


def test_serve_has_taken_what_it_runs_with_these_arguments() -> None:
    wanted = serve_config(parse_spec(BASE))
    there = {name: one for app in wanted["applications"] for name, one in details(app["name"], **app["args"]).items()}
    assert has_taken(wanted, there)
    assert not has_taken(wanted, {**there, **details("loraplex-routers", model="n")})
    assert not has_taken(wanted, {**there, "loraplex-routers": {**there["loraplex-routers"], "status": "DELETING"}})
    assert not has_taken(wanted, details("loraplex-routers"))
    assert not is_replaced(wanted, there)
    assert is_replaced(wanted, {**there, **details("loraplex-routers", model="n")})
    assert not is_replaced(wanted, {}), "that is ended, not replaced"
