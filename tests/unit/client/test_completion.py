"""Words that a shell completes, by typer's protocol for bash, zsh and fish."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from loraplex.cli import main as command
from loraplex.cli.main import main
from loraplex_contracts.errors import Unauthenticated
from loraplex_proto.v1 import adapter_pb2

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Suggestions for the last word of a command line. Fails where anything else is printed."""

    def run(*words: str, shell: str = "bash") -> list[str]:
        line = ["loraplex", *words]
        monkeypatch.setenv("_LORAPLEX_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", " ".join(line))
        monkeypatch.setenv("COMP_CWORD", str(len(line) - 1))
        if shell != "bash":
            monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(line))
        monkeypatch.setattr("sys.argv", ["loraplex"])
        main()
        captured = capfd.readouterr()
        assert captured.err == ""
        assert logging.getLogger("loraplex").level == logging.NOTSET  # silent for no longer than it takes
        return captured.out.split()

    return run


def test_commands_and_options(complete: Any) -> None:
    assert complete("ser") == ["serve"]
    assert {"--adapter", "--adapters"} <= set(complete("generate", "--adap"))
    assert complete("adapters", "un") == ["unload"]
    assert complete("generate", "x", "--speculation", "p") == ["prompt_lookup"]


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "hello", "-s", "SERVER", "--adapter", "s"),
        ("chat", "--server", "SERVER", "-a", "s"),
        ("adapters", "load", "-s", "SERVER", "s"),
    ],
)
def test_adapters_of_the_server(fake: Any, complete: Any, words: tuple[str, ...]) -> None:
    fake.adapters = [adapter_pb2.Adapter(adapter_id=name) for name in ("sql", "sql-with-heads", "summary")]
    assert complete(*(fake.address if word == "SERVER" else word for word in words)) == [
        "sql",
        "sql-with-heads",
        "summary",
    ]
    (seen,) = fake.seen
    assert seen.request.prefix == "s"


def test_the_server_and_the_token_of_the_environment(fake: Any, complete: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_SERVER", fake.address)
    monkeypatch.setenv("LORAPLEX_TOKEN", "secret")
    fake.adapters = [adapter_pb2.Adapter(adapter_id="sql")]
    assert complete("generate", "--adapter", "", shell="zsh")
    assert fake.seen[0].metadata["authorization"] == "Bearer secret"


def test_a_server_that_refuses_or_is_away_means_no_suggestions(fake: Any, complete: Any) -> None:
    fake.error = Unauthenticated("a token is needed")
    assert complete("generate", "-s", fake.address, "--adapter", "s") == []
    assert complete("generate", "-s", "127.0.0.1:1", "--adapter", "s") == []


def test_a_command_that_is_not_installed_is_silent(complete: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> Any:
        raise ModuleNotFoundError("no torch", name="torch")

    monkeypatch.setattr(command, "build_app", missing)
    assert complete("serve", "--ad") == []
