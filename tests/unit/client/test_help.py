"""Help of the commands."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest
import typer

from loraplex.cli.help import OPTIONS, panels, paragraphs
from loraplex.cli.main import KNOWN, main
from loraplex_runtime.flags import HTTP, LOGS, NETWORK, STARTING

OF_MODELS = ["Arguments", OPTIONS, "Base model and kernels"]
SERVE, WORKER = (pytest.param(name, marks=pytest.mark.server) for name in ("serve", "worker"))
OF_SERVE = (
    "--adapters", "--auth-file", "--device", "--host", "--http-port", "--max-context", "--port", "--quantize",
    "--speculate", "--workers",
)  # fmt: skip


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def parameters_of(command: str) -> list[Any]:
    module, _, name = KNOWN[command].target.partition(":")
    app = typer.Typer(add_completion=False)
    app.command(command)(getattr(import_module(module), name))
    found: Any = typer.main.get_command(app)
    return found.params


@pytest.mark.parametrize("columns", ["50", "80", "200"])
@pytest.mark.parametrize("command", [SERVE, WORKER, "router", "http", "generate", "bench"])
def test_every_option_has_its_full_name(
    command: str, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = help_of(capsys, command, "-h")
    assert max(map(len, text.splitlines())) <= int(columns)
    shown = set(re.findall(r"--(?:\[no-\])?[a-z0-9-]+", text))
    for parameter in parameters_of(command):
        names = [name for name in parameter.opts if name.startswith("--")]
        if names and not parameter.hidden:
            assert names[0] in shown or names[0].replace("--", "--[no-]", 1) in shown, names


@pytest.mark.parametrize("columns", ["0", "1", "-5", "x"])
def test_a_terminal_that_does_not_know_its_size(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for command in ([], ["bench"]):
        lines = help_of(capsys, *command, "-h").splitlines()
        assert lines[1].startswith(" Usage: loraplex")
        assert max(map(len, lines)) == 80


def test_short_and_long_help_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], ["router"], ["adapters"], ["adapters", "list"], ["config", "show"]):
        assert help_of(capsys, *command, "-h") == help_of(capsys, *command, "--help")


@pytest.mark.server
def test_the_options_that_matter_come_first() -> None:
    found = panels(parameters_of("serve"))
    assert list(found)[:2] == ["Arguments", OPTIONS]
    first = {one.opts[0] for one in found[OPTIONS]}
    assert first == {*OF_SERVE, "--config"}
    assert {"HTTP", "KV cache and states", "Batch and queue", "Chats", "Network and credentials"} <= found.keys()


@pytest.mark.parametrize(
    ("command", "first"),
    [
        pytest.param("serve", OF_MODELS, marks=pytest.mark.server),
        pytest.param("worker", OF_MODELS, marks=pytest.mark.server),
        ("router", [OPTIONS, HTTP, "Spreading requests"]),
        ("http", [OPTIONS, HTTP, "Spreading requests"]),
    ],
)
def test_panels_that_all_servers_have_come_last(command: str, first: list[str]) -> None:
    found = [*panels(parameters_of(command))]
    assert found[: len(first)] == first
    assert found[-3:] == [NETWORK, LOGS, STARTING]
    assert HTTP in found[:-3] or command == "worker"


@pytest.mark.parametrize("command", [SERVE, WORKER, "router", "http"])
def test_no_panel_is_longer_than_a_screen(command: str) -> None:
    assert max(map(len, panels(parameters_of(command)).values())) <= 16


def test_examples_keep_their_lines() -> None:
    text = "One sentence\nin two lines.\n\n    More.\n\n    Example: loraplex a\n    Example: loraplex b\n"
    assert paragraphs(text) == ["One sentence in two lines.", "More.", "Example: loraplex a", "Example: loraplex b"]


@pytest.mark.server
def test_errors_name_arguments_as_the_help_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "Usage: loraplex serve [OPTIONS] MODEL" in capsys.readouterr().err
