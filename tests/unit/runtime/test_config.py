"""Settings from a file and from the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.config import child_environment, explained, setting_of, settings_of, source_of, with_settings
from loraplex_runtime.flags import config_of, option, with_flags


@dataclass(frozen=True)
class Memory:
    cache_bytes: int = option(1 << 20, "Memory.", "--cache-memory", is_bytes=True)


@dataclass(frozen=True)
class Config:
    port: int = option(50051, "A port.", "--port")
    share: float = option(1.0, "A share.", "--quota-share")
    folder: Path | None = option(None, "A folder.", "--folder")
    names: tuple[str, ...] = option((), "Names.", "--name", "--alias")
    graphs: bool = option(True, "Graphs.", "--graphs")
    secret: str = option("", "Hidden.", "--traces", metavar="URL")
    memory: Memory = field(default_factory=Memory)

    def __post_init__(self) -> None:
        if self.port < 0:
            raise InvalidArgument("--port must not be negative", field="--port")


class Seen:
    """Settings that the command got, and their sources."""

    def __init__(self) -> None:
        self.config = Config()
        self.model = ""
        self.sources: dict[str, tuple[str, str]] = {}


def run(*arguments: str, file: Path | None = None, **environment: str) -> Seen:
    """Runs the command, and raises what it raises; a wrong command line fails the test."""
    seen = Seen()

    @with_settings("serve", partial(config_of, Config))
    @with_flags
    def body(
        ctx: typer.Context,
        config: Config,
        model: Annotated[str, typer.Argument()] = "",
        internal: Annotated[str, typer.Option("--internal", hidden=True)] = "",
    ) -> None:
        seen.config, seen.model = config, model
        seen.sources = {setting_of(one): source_of(ctx, one) for one in settings_of(ctx)}

    app = typer.Typer()
    app.command()(body)
    given = [*(() if file is None else ("--config", str(file))), *arguments]
    result = CliRunner().invoke(app, given, env={"LORAPLEX_CONFIG": None, **environment})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "loraplex.toml"
    path.write_text(
        """
        [serve]
        model = "/models/base"
        port = 1
        quota_share = 0.5
        folder = "~/adapters"
        name = ["a", "b c"]
        graphs = false
        cache-memory = "2MiB"

        [router]
        whatever = "is another command's"
        """
    )
    return path


def test_the_file_gives_every_kind_of_value(file: Path) -> None:
    seen = run(file=file)
    assert seen.model == "/models/base"
    folder = Path("~/adapters").expanduser()
    assert seen.config == Config(1, 0.5, folder, ("a", "b c"), graphs=False, memory=Memory(2 << 20))
    assert set(seen.sources.values()) == {("file", str(file)), ("default", "")}


def test_the_environment_gives_every_kind_of_value(tmp_path: Path) -> None:
    seen = run(
        LORAPLEX_SERVE_MODEL="m",
        LORAPLEX_SERVE_PORT="7",
        LORAPLEX_SERVE_QUOTA_SHARE="0.25",
        LORAPLEX_SERVE_FOLDER=str(tmp_path),
        LORAPLEX_SERVE_NAME="a b",
        LORAPLEX_SERVE_GRAPHS="0",
        LORAPLEX_SERVE_CACHE_MEMORY="1024",
    )
    assert seen.model == "m"
    assert seen.config == Config(7, 0.25, tmp_path, ("a", "b"), graphs=False, memory=Memory(1024))
    assert seen.sources["port"] == ("environment", "LORAPLEX_SERVE_PORT")


def test_command_line_before_environment_before_file_before_default(file: Path) -> None:
    assert run().config.port == 50051
    assert run(file=file).config.port == 1
    assert run(file=file, LORAPLEX_SERVE_PORT="2").config.port == 2
    seen = run("--port", "3", "--graphs", file=file, LORAPLEX_SERVE_PORT="2")
    assert (seen.config.port, seen.config.graphs) == (3, True)
    assert seen.sources["port"] == ("command line", "")
    assert run(file=file, LORAPLEX_SERVE_PORT="").config.port == 1  # empty: as if it were not there


def test_the_file_may_be_named_by_a_variable(file: Path) -> None:
    assert run(LORAPLEX_CONFIG=str(file)).config.port == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[serve]\nprot = 1", "has no key 'prot'; did you mean port"),
        ("[serve]\nzzzzz = 1", "has no key 'zzzzz'; --help lists the options"),
        ("[serv]\nport = 1", r"no section \[serv\]; did you mean serve"),
        ("port = 1", r"port must be in a section, such as \[serve\]"),
        ("[serve]\nport = true", "must be one value, not True"),
        ("[serve]\nport = [1]", "must be one value"),
        ("[serve]\nport = 1.5", r"\[serve\] port: "),
        ("[serve]\nport = 'abc'", r"\[serve\] port: "),
        ("[serve]\nfolder = ''", r"\[serve\] folder: --folder must not be empty"),
        ("[serve]\ngraphs = 'no'", "must be true or false, not 'no'"),
        ("[serve]\ngraphs = 1", "must be true or false, not 1"),
        ("[serve]\nname = [['a']]", "must be a list of values"),
        ("[serve]\nname = ['a']\nalias = ['b']", "is there twice"),
        ("[serve]\ninternal = 'x'", "has no key 'internal'"),
        ("[serve]\nconfig = 'x'", "has no key 'config'"),
        ("[serve", "is not TOML"),
        pytest.param("[serve]\nport = " + "[" * 9000, "is not TOML", id="nested"),
        pytest.param("[serve]\nport = " + "1" * 5000, "is not TOML", id="digits"),
    ],
)
def test_what_no_option_takes_is_refused_by_name(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=says) as raised:
        run(file=path)
    assert str(path) in raised.value.message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"none.toml cannot be read: No such file"):
        run(file=tmp_path / "none.toml")
    with pytest.raises(InvalidArgument, match="Is a directory"):
        run(file=tmp_path)
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="not text in UTF-8"):
        run(file=binary)


def test_variables_that_no_option_reads_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match=r"LORAPLEX_SERVE_PROT; did you mean LORAPLEX_SERVE_PORT\?"):
        run(LORAPLEX_SERVE_PROT="1")
    with pytest.raises(InvalidArgument, match="variable LORAPLEX_SERVE_PORT: "):
        run(LORAPLEX_SERVE_PORT="abc")
    assert run(LORAPLEX_SERVER="a:1", LORAPLEX_ROUTER_PROT="1").config == Config()  # the client's, another command's


def test_variables_of_a_kubernetes_service_are_no_settings() -> None:
    seen = run(
        LORAPLEX_SERVE_PORT="tcp://10.0.0.1:50051",
        LORAPLEX_SERVE_SERVICE_HOST="10.0.0.1",
        LORAPLEX_SERVE_SERVICE_PORT="50051",
        LORAPLEX_SERVE_SERVICE_PORT_GRPC="50051",
        LORAPLEX_SERVE_PORT_50051_TCP="tcp://10.0.0.1:50051",
        LORAPLEX_SERVE_PORT_50051_TCP_ADDR="10.0.0.1",
    )
    assert seen.config == Config()


def test_an_error_says_where_the_value_is_from(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[serve]\nport = -1")
    with pytest.raises(InvalidArgument, match=r"--port must not be negative \(its value is from .*a\.toml\)$"):
        run(file=path)
    with pytest.raises(InvalidArgument, match=r"--port must not be negative \(its value is from LORAPLEX_SERVE_PORT"):
        run(LORAPLEX_SERVE_PORT="-1")
    with pytest.raises(InvalidArgument, match=r"--port must not be negative$"):
        run("--port", "-1")


def test_children_get_no_settings_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LORAPLEX_SERVE_PORT", "LORAPLEX_WORKER_PORT", "LORAPLEX_ROUTER_PORT", "LORAPLEX_HTTP_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LORAPLEX_CONFIG", "/x")
    monkeypatch.setenv("LORAPLEX_TOKEN", "kept")
    kept = {name: value for name, value in child_environment().items() if name.startswith("LORAPLEX_")}
    assert kept.pop("LORAPLEX_TOKEN") == "kept"
    assert not kept.keys() & {"LORAPLEX_CONFIG"}
    assert not [name for name in kept if name.endswith("_PORT")]
    assert "PATH" in child_environment()


def test_other_errors_stay_as_they_are() -> None:
    error = InvalidArgument("no option", field=None)
    context: Any = type("Context", (), {"command": type("Command", (), {"params": []})})
    assert explained(context, error) is error
