"""The RayService that comes with the project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from loraplex_fleet.deploying import serve_config
from loraplex_fleet.spec import from_plain, load_spec

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "ray"
DOCUMENTS: dict[str, Any] = {
    one["kind"]: one for one in yaml.safe_load_all((FOLDER / "rayservice.yaml").read_text())
}  # fmt: skip
SPEC = load_spec(FOLDER / "cluster.yaml")


def test_it_has_what_up_would_deploy() -> None:
    config = yaml.safe_load(DOCUMENTS["RayService"]["spec"]["serveConfigV2"])
    wanted = serve_config(SPEC)
    for application in wanted["applications"]:
        del application["args"]["version"]  # there the pods' image says it
    assert config == wanted
    for application in config["applications"]:
        from_plain(application["args"])


def test_the_pods_have_room_and_the_files() -> None:
    groups = {one["groupName"]: one for one in DOCUMENTS["RayService"]["spec"]["rayClusterConfig"]["workerGroupSpecs"]}
    workers, routers = groups["workers"], groups["routers"]
    (container,) = workers["template"]["spec"]["containers"]
    assert float(container["resources"]["limits"]["nvidia.com/gpu"]) == SPEC.worker.resources.gpu
    assert float(container["resources"]["requests"]["cpu"]) == SPEC.worker.resources.cpu
    mounts = tuple(one["mountPath"] for one in container["volumeMounts"])
    for path in (SPEC.model, SPEC.adapters, SPEC.worker.store, SPEC.secrets.worker_token_file):
        assert path.startswith(mounts), path
    assert (workers["minReplicas"], workers["maxReplicas"]) == (SPEC.worker.count.min, SPEC.worker.count.max)
    assert routers["replicas"] == SPEC.router.count
    assert '"router": 1' in routers["rayStartParams"]["resources"]
    for group in groups.values():
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > SPEC.drain_s


def test_the_service_finds_the_routers() -> None:
    service = DOCUMENTS["Service"]["spec"]
    assert service["selector"] == {"ray.io/group": "routers"}
    assert service["ports"][0]["targetPort"] == SPEC.router.port
    SPEC.check_reach(["10.0.0.1"])
