"""Manifests for Kubernetes: their schemas, and their agreement with the program and each other."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.command_lines import check_arguments
from support.exported_metrics import worker_metrics

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = ("cpu", "gpu")
VERSION = "1.37"
# Kustomize's own kind is no object of the cluster.
BASE = sorted(path for path in (FOLDER / "base").glob("*.yaml") if path.name != "kustomization.yaml")
PORTS = {"worker": {"grpc": 50051, "metrics": 9090}, "router": {"grpc": 50051, "http": 8000, "metrics": 9090}}
SUPERVISOR_S = 10.0  # that a server may take beyond --drain
DNS_INTERVAL_S = 5.0

Object = dict[str, Any]


KUSTOMIZE = next((one for one in (("kubectl", "kustomize"), ("kustomize", "build")) if shutil.which(one[0])), ())


@cache
def rendered(overlay: str) -> list[Object]:
    """The objects of an overlay, as far as its kustomization goes. Fails where that has a field unknown here."""
    given = yaml.safe_load((FOLDER / overlay / "kustomization.yaml").read_text())
    shared = yaml.safe_load((FOLDER / "base/kustomization.yaml").read_text())
    assert given.keys() == {"apiVersion", "kind", "resources", "images", "patches"}
    assert given["resources"] == ["../base"]
    assert shared.keys() == {"apiVersion", "kind", "resources", "namespace", "labels"}
    assert set(shared["resources"]) == {path.name for path in BASE}
    objects = base()
    for one in objects:
        if one["kind"] != "Namespace":
            one["metadata"]["namespace"] = shared["namespace"]
        for labels in shared["labels"]:
            assert labels.keys() == {"pairs"}, "selectors and templates would have them too"
            one["metadata"].setdefault("labels", {}).update(labels["pairs"])
    for patch in given["patches"]:
        if "path" in patch:
            change = yaml.safe_load((FOLDER / overlay / patch["path"]).read_text())
            target = find(objects, change["kind"], change["metadata"]["name"])
            target.update(merged(target, change))
        else:
            apply(find(objects, patch["target"]["kind"], patch["target"]["name"]), yaml.safe_load(patch["patch"]))
    images = {one["name"]: f"{one['newName']}:{one['newTag']}" for one in given["images"]}
    for pod in pods(objects).values():
        for container in pod["containers"]:
            container["image"] = images[container["image"]]
    return objects


def merged(value: Any, change: Any) -> Any:
    """A strategic merge: of lists, containers are told by their names, and others are replaced."""
    if isinstance(value, dict) and isinstance(change, dict):
        return {**value, **{key: merged(value.get(key), one) for key, one in change.items()}}
    if isinstance(value, list) and all("name" in one for one in change):
        names = {one["name"]: one for one in value}
        return list((names | {one["name"]: merged(names.get(one["name"]), one) for one in change}).values())
    return change


def apply(target: Object, operations: list[Object]) -> None:
    """A JSON patch that adds to the ends of lists."""
    for one in operations:
        *parents, last = one["path"].strip("/").split("/")
        assert (one["op"], last) == ("add", "-")
        place: Any = target
        for key in parents:
            place = place[int(key)] if isinstance(place, list) else place[key]
        place.append(one["value"])


@pytest.mark.skipif(not KUSTOMIZE, reason="neither kubectl nor kustomize is installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_renders_the_same(overlay: str) -> None:
    said = subprocess.run([*KUSTOMIZE, str(FOLDER / overlay)], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr

    def by_name(objects: list[Object]) -> dict[tuple[str, str], Object]:
        return {(one["kind"], one["metadata"]["name"]): one for one in objects}

    assert by_name(list(yaml.safe_load_all(said.stdout))) == by_name(rendered(overlay))


def base() -> list[Object]:
    return [one for path in BASE for one in yaml.safe_load_all(path.read_text())]


def find(objects: list[Object], kind: str, name: str) -> Object:
    (found,) = (one for one in objects if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def pods(objects: list[Object]) -> dict[str, Object]:
    """Specifications of the pods, by component."""
    owners = {"worker": ("StatefulSet", "loraplex-worker"), "router": ("Deployment", "loraplex-router")}
    return {name: find(objects, *owner)["spec"]["template"]["spec"] for name, owner in owners.items()}


def arguments(objects: list[Object], component: str) -> dict[str, Any]:
    """Values of the command's flags, those not given at their defaults. Fails where the command would not start."""
    (container,) = pods(objects)[component]["containers"]
    line = [re.sub(r"\$\((\w+)\)", r"\1", argument).replace("_", "-") for argument in container["args"]]
    assert line[0] == component
    return check_arguments(line)


def faults(objects: list[Object]) -> list[str]:
    """Faults for which the API server would refuse the objects."""
    found: list[str] = []
    for one in objects:
        try:
            kubernetes_validate.validate(one, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{one['kind']} {one['metadata']['name']}: {error.message}")
    return found


def test_the_schemas_refuse_what_is_wrong() -> None:
    objects = base()
    find(objects, "StatefulSet", "loraplex-worker")["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    find(objects, "Service", "loraplex")["spec"]["ports"][0]["port"] = "many"
    assert len(faults(objects)) == 2


def test_the_base_fits_the_schemas() -> None:
    assert len(base()) >= 13
    assert not faults(base())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_fit_the_schemas(overlay: str) -> None:
    objects = rendered(overlay)
    assert len(objects) == len(base())
    assert not faults(objects)
    assert all(one["metadata"].get("namespace") == "loraplex" for one in objects if one["kind"] != "Namespace")
    worker = pods(objects)["worker"]["containers"][0]
    assert worker["image"].endswith("-cpu") == (overlay == "cpu")
    assert ("nvidia.com/gpu" in worker["resources"]["limits"]) == (overlay == "gpu")
    # A patch that replaced a list in the place of adding to it would lose these.
    assert worker["readinessProbe"]
    assert arguments(objects, "worker")["adapter_store"] == Path("/var/lib/loraplex/store")


@pytest.mark.parametrize("component", ["worker", "router"])
def test_commands_and_flags_exist(component: str) -> None:
    given = arguments(base(), component)
    assert given["metrics_port"] == PORTS[component]["metrics"]
    assert given["port"] == PORTS[component]["grpc"]
    assert given.get("http_port") == PORTS[component].get("http")
    for overlay in OVERLAYS:
        arguments(rendered(overlay), component)


@pytest.mark.parametrize("component", ["worker", "router"])
def test_pods_are_locked_down(component: str) -> None:
    pod = pods(base())[component]
    (container,) = pod["containers"]
    user = re.search(r"useradd --uid (\d+)", (ROOT / "docker/Dockerfile").read_text())
    assert user is not None
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == int(user[1])
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    # With a read-only root everything that is written has a volume.
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert "/tmp" in mounts
    for flag in ("adapter_store",):
        path = arguments(base(), component).get(flag)
        assert path is None or any(path.is_relative_to(place) for place in mounts if not mounts[place].get("readOnly"))
    volumes = {volume["name"] for volume in pod["volumes"]} | {"state"}
    assert {mount["name"] for mount in mounts.values()} <= volumes


@pytest.mark.parametrize("component", ["worker", "router"])
def test_pods_ask_for_credentials_that_are_mounted(component: str) -> None:
    pod, given = pods(base())[component], arguments(base(), component)
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"]}
    secrets = {volume["secret"]["secretName"]: volume["name"] for volume in pod["volumes"] if "secret" in volume}
    readme = (FOLDER / "README.md").read_text()
    for flag in ("auth_file", "worker_token_file"):
        if path := given.get(flag):
            (secret,) = (one for one, volume in secrets.items() if mounts[volume] == path.parent)
            assert re.search(rf"create secret generic {secret} .*--from-file={path.name}=", readme), secret
    assert given["auth_file"]


@pytest.mark.parametrize("component", ["worker", "router"])
def test_probes_ask_what_servers_answer(component: str) -> None:
    (container,) = pods(base())[component]["containers"]
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert named == PORTS[component]
    assert container["readinessProbe"]["grpc"] == {"port": named["grpc"], "service": "loraplex.v1.InferenceService"}
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["grpc"] == {"port": named["grpc"]}, "alive while it loads, drains or has no worker"


@pytest.mark.parametrize("component", ["worker", "router"])
def test_requests_end_before_a_pod_is_killed(component: str) -> None:
    pod, given = pods(base())[component], arguments(base(), component)
    sleep_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    # Routers have looked for their workers, and balancers for their routers, before SIGTERM.
    assert sleep_s >= 2 * DNS_INTERVAL_S
    assert pod["terminationGracePeriodSeconds"] > sleep_s + given["announce"] + given["drain"] + SUPERVISOR_S


def test_routers_find_the_workers() -> None:
    objects = base()
    service = find(objects, "Service", "loraplex-worker")
    assert service["spec"]["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in service["spec"]
    (port,) = service["spec"]["ports"]
    where = arguments(objects, "router")["workers_from"]
    assert where == f"dns:{service['metadata']['name']}.NAMESPACE.svc:{port['port']}"
    assert find(objects, "StatefulSet", "loraplex-worker")["spec"]["serviceName"] == service["metadata"]["name"]


def test_quotas_are_shared_among_the_routers() -> None:
    replicas = find(base(), "Deployment", "loraplex-router")["spec"]["replicas"]
    assert replicas * arguments(base(), "router")["quota_share"] == 1


def test_selectors_meet_pods_and_named_ports_exist() -> None:
    objects = base()
    labels = {
        name: find(objects, kind, f"loraplex-{name}")["spec"]["template"]["metadata"]["labels"]
        for name, kind in (("worker", "StatefulSet"), ("router", "Deployment"))
    }

    def component(selector: dict[str, str]) -> str:
        (found,) = (name for name, has in labels.items() if selector.items() <= has.items())
        return found

    for one in objects:
        spec = one.get("spec", {})
        match one["kind"]:
            case "Service":
                ports = PORTS[component(spec["selector"])]
                assert all(ports[port["targetPort"]] == port["port"] for port in spec["ports"])
            case "PodDisruptionBudget" | "StatefulSet" | "Deployment":
                assert component(spec["selector"]["matchLabels"]) in one["metadata"]["name"]
            case "NetworkPolicy" if spec["podSelector"]:
                ports = PORTS[component(spec["podSelector"]["matchLabels"])]
                assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} <= ports.keys()
            case _:
                pass


def test_only_routers_reach_workers() -> None:
    policy = find(base(), "NetworkPolicy", "loraplex-worker")["spec"]
    (calls,) = (rule for rule in policy["ingress"] if {"port": "grpc"} in rule["ports"])
    assert calls["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": "router"}}}]
    assert find(base(), "NetworkPolicy", "deny-all")["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress", "Egress"],
    }


def test_the_autoscaler_reads_a_metric_that_there_is() -> None:
    (metric,) = find(base(), "HorizontalPodAutoscaler", "loraplex-worker")["spec"]["metrics"]
    rules = yaml.safe_load((FOLDER / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    (rule,) = (rule for rule in rules if rule["name"]["as"] == metric["pods"]["metric"]["name"])
    series = re.search(r'__name__="(loraplex:\w+)"', rule["seriesQuery"])
    assert series is not None
    assert worker_metrics()[series[1]].kind == "gauge"
