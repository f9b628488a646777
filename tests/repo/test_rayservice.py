"""RayService for KubeRay: fields and rules of its API, and the pods' schemas.

KubeRay publishes its schema as a definition for a cluster, not as a package. The fields below are those of `ray.io/v1`
in KubeRay's API reference, and the rules those that its operator checks.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

FILE = Path(__file__).resolve().parents[2] / "deploy/ray/rayservice.yaml"
VERSION: Final = "1.37"  # of Kubernetes
# It makes names of pods and Services out of it.
MAX_NAME: Final = 47

Object = dict[str, Any]
_OPTIONS: Final = ("labels", "resources", "rayStartParams")
SERVICE: Final = {
    "deploymentUnhealthySecondThreshold": int, "excludeHeadPodFromServeSvc": bool, "managedBy": str,
    "rayClusterConfig": dict, "rayClusterDeletionDelaySeconds": int, "serveConfigV2": str, "serveService": dict,
    "serviceUnhealthySecondThreshold": int, "suspend": bool, "upgradeStrategy": dict,
}  # fmt: skip
CLUSTER: Final = {
    "authOptions": dict, "autoscalerOptions": dict, "enableInTreeAutoscaling": bool, "gcsFaultToleranceOptions": dict,
    "headGroupSpec": dict, "headServiceAnnotations": dict, "managedBy": str, "networkPolicy": dict, "rayVersion": str,
    "suspend": bool, "tlsOptions": dict, "upgradeStrategy": dict, "workerGroupSpecs": list,
}  # fmt: skip
HEAD: Final = {
    **dict.fromkeys(_OPTIONS, dict), "enableIngress": bool, "headService": dict, "serviceType": str, "template": dict,
}  # fmt: skip
GROUP: Final = {
    **dict.fromkeys(_OPTIONS, dict), "groupName": str, "idleTimeoutSeconds": int, "maxReplicas": int,
    "minReplicas": int, "numOfHosts": int, "priority": int, "replicas": int, "scaleStrategy": dict, "suspend": bool,
    "template": dict,
}  # fmt: skip


def documents() -> dict[str, Object]:
    return {one["kind"]: one for one in yaml.safe_load_all(FILE.read_text())}


def fields_wrong(given: Object, known: dict[str, type], needed: tuple[str, ...], at: str) -> list[str]:
    found = [f"{at} lacks {name}" for name in needed if name not in given]
    for name, value in given.items():
        if name not in known:
            found.append(f"{at} has the unknown field {name}")
        elif type(value) is not known[name]:
            found.append(f"{at}.{name} must be {known[name].__name__}")
    return found


def pod_wrong(group: Object, at: str) -> list[str]:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "any"}, "spec": group["template"]["spec"]}
    found = [
        f"{at}.rayStartParams.{name} must be a text"
        for name, value in group.get("rayStartParams", {}).items()
        if not isinstance(value, str)
    ]
    try:
        kubernetes_validate.validate(pod, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        found.append(f"{at}: {error.message}")
    return found


def faults(service: Object) -> list[str]:
    """Faults for which the API server or KubeRay's operator would refuse the service."""
    found: list[str] = []
    name = service["metadata"]["name"]
    if service["apiVersion"] != "ray.io/v1" or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        found.append("apiVersion or name")
    if len(name) > MAX_NAME:
        found.append("the name is too long")
    found += fields_wrong(service["spec"], SERVICE, ("rayClusterConfig",), "spec")
    cluster = service["spec"]["rayClusterConfig"]
    found += fields_wrong(cluster, CLUSTER, ("headGroupSpec",), "cluster")
    head = cluster["headGroupSpec"]
    found += [*fields_wrong(head, HEAD, ("template",), "head"), *pod_wrong(head, "head")]
    for group in cluster["workerGroupSpecs"]:
        at = group["groupName"]
        wrong = fields_wrong(group, GROUP, ("groupName", "minReplicas", "maxReplicas", "template"), at)
        if not wrong and not 0 <= group["minReplicas"] <= group.get("replicas", 0) <= group["maxReplicas"]:
            wrong.append(f"{at} has bounds without its replicas")
        found += [*wrong, *pod_wrong(group, at)]
    return found


def test_it_fits() -> None:
    found = documents()
    assert faults(found["RayService"]) == []
    for kind in ("Service", "NetworkPolicy"):
        kubernetes_validate.validate(found[kind], VERSION, strict=True)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("spec.excludeHeadPod", True, "unknown field excludeHeadPod"),
        ("spec.serveConfigV2", {"applications": []}, "spec.serveConfigV2 must be str"),
        ("spec.rayClusterConfig.rayVersion", 2.6, "cluster.rayVersion must be str"),
        ("spec.rayClusterConfig.headGroupSpec.replicas", 1, "head has the unknown field replicas"),
        ("spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus", 0, "rayStartParams.num-cpus must be a text"),
        ("spec.rayClusterConfig.workerGroupSpecs.0.maxReplicas", 1, "bounds without its replicas"),
        ("spec.rayClusterConfig.workerGroupSpecs.0.template.spec.containers.0.imagee", "x", "workers: "),
        ("metadata.name", "a" * 48, "too long"),
    ],
)
def test_what_is_wrong_is_seen(path: str, value: Any, said: str) -> None:
    service = copy.deepcopy(documents()["RayService"])
    *parents, last = path.split(".")
    place: Any = service
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value
    (found,) = faults(service)
    assert said in found


def test_pods_have_a_readiness_of_their_own() -> None:
    """KubeRay's would ask for Serve's proxy, so that no pod would ever be ready and the Service have no address."""
    service = documents()["RayService"]["spec"]
    assert yaml.safe_load(service["serveConfigV2"])["proxy_location"] == "Disabled"
    probes = {
        group["groupName"]: container.get("readinessProbe", {})
        for group in service["rayClusterConfig"]["workerGroupSpecs"]
        for container in group["template"]["spec"]["containers"]
    }
    port = documents()["Service"]["spec"]["ports"][0]["targetPort"]
    assert probes["routers"]["grpc"] == {"port": port, "service": "loraplex.v1.InferenceService"}
    assert "httpGet" in probes["workers"]
