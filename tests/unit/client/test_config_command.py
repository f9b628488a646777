"""Command `loraplex config`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex.cli.main import main
from loraplex_runtime.config import COMMANDS

OF_SERVER = ("serve", "worker")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, object]]:
    assert main(["config", "show", "--json", *arguments]) == 0
    return {row["setting"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    "command", [pytest.param(one, marks=pytest.mark.server if one in OF_SERVER else ()) for one in COMMANDS]
)
def test_all_settings_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, command)
    assert {"log-level", "drain", "auth-file"} <= rows.keys()
    assert {row["from"] for row in rows.values()} == {"default"}
    assert not rows.keys() & {"config", "help", "placement", "router-digest"}


@pytest.mark.server
def test_each_source(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "loraplex.toml"
    file.write_text('[serve]\nmodel = "m"\nmax-running = 9\nauth-file = "/secrets/credentials.toml"\n')
    monkeypatch.setenv("LORAPLEX_SERVE_DRAIN", "5")
    rows = shown(capsys, "serve", "--config", str(file), "--port", "0", "--draft-model", "a=/b")
    assert rows["model"] == {"setting": "model", "value": "m", "from": "file", "where": str(file)}
    assert rows["max-running"]["value"] == 9
    assert rows["auth-file"]["value"] == "/secrets/credentials.toml"
    assert (rows["drain"]["from"], rows["drain"]["where"]) == ("environment", "LORAPLEX_SERVE_DRAIN")
    assert (rows["port"]["value"], rows["port"]["from"]) == (0, "command line")
    assert rows["draft-model"]["value"] == ["a=/b"]
    assert rows["host"]["from"] == "default"


def test_a_table_of_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "http", "--server", "a:1", "--no-request-log"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["SETTING", "VALUE", "FROM"]
    assert ["server", "a:1", "command line"] in lines
    assert ["request-log", "false", "command line"] in lines
    assert ["tls-key", "-", "default"] in lines


def test_no_password_of_an_address_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    rows = shown(capsys, "router", "--otlp-traces-endpoint", "http://user:secret@collector:4318")
    assert rows["otlp-traces-endpoint"]["value"] == "http://***@collector:4318"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate",), "'generate' has no settings; there are serve, worker, router, http"),
        (("sreve",), "did you mean serve?"),
        (("router", "--prot", "1"), "--prot"),
        (("router", "--config", "/no/such.toml"), "/no/such.toml cannot be read"),
        (("router", "--port", "99999"), "--port must be 0 (any free port) to 65535"),
        (("router", "--worker", "nohost"), "--worker takes [NAME=]HOST:PORT"),
        (("http", "--server", "a:1", "--port", "99999"), "--port must be 0 (any free port) to 65535"),
        (("http", "--server", "a"), "--server must be given as host:port"),
    ],
)
def test_wrong_names_are_2(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.server
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("serve", "--port", "99999"), "--port must be 0 (any free port) to 65535"),
        (("serve", "--workers", "2", "--adapter-store", "/s"), "--adapter-store belongs to one worker"),
        (("serve", "--workers", "3", "--metrics-port", "65533"), "--metrics-port must be at most 65532"),
        (("serve", "--openai-compat", "1"), "--openai-compat"),
        (("worker", "--on-orphan", "drain=1"), "--on-orphan goes with --supervised"),
        (("worker", "--kv-memory", "lots"), "--kv-memory 'lots' is not a size"),
    ],
)
def test_values_that_the_server_refuses(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "show", *arguments]) == 2
    told = capsys.readouterr().err
    assert main([arguments[0], "model", *arguments[1:]]) == 2
    assert says in told
    assert says in capsys.readouterr().err


def test_a_refused_value_of_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "loraplex.toml"
    file.write_text("[router]\nport = 99999\n")
    assert main(["config", "show", "router", "--config", str(file)]) == 2
    assert f"(its value is from {file})" in capsys.readouterr().err
