"""Command `loraplex`: its subcommands, exit codes and imports."""

from __future__ import annotations

import errno
import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

import loraplex
from loraplex.cli import doctor, main
from loraplex.cli.main import KNOWN, build_app, find_commands
from loraplex_contracts.errors import InvalidAdapterId, QueueFull

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_command_of_the_table_exists() -> None:
    for name, known in KNOWN.items():
        assert callable(EntryPoint(name, known.target, main.GROUP).load()), name


@pytest.mark.parametrize("extra", doctor.EXTRAS)
def test_the_extras_are_pyprojects(extra: str) -> None:
    wanted = {one.partition(">")[0].strip() for one in PYPROJECT["project"]["optional-dependencies"][extra]}
    own = set(main.DISTRIBUTIONS.values())
    assert {name for name in wanted if not name.startswith("loraplex[")} == set(doctor.EXTRAS[extra]) - own
    assert (extra == "router") != bool(own & set(doctor.EXTRAS[extra]))


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys; from loraplex.cli.main import main; code = main(['--help']); "
        "bad = [m for m in ('torch', 'transformers', 'loraplex_server', 'loraplex_router', 'loraplex.cli.generate') "
        "if m in sys.modules]; sys.exit(str(bad) if bad or code else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    for name, known in KNOWN.items():
        assert f" {name} " in run.stdout
        assert known.summary[:30] in run.stdout


def test_each_command_loads_and_explains_itself() -> None:
    for name in ("generate", "adapters", "doctor"):
        result = CliRunner().invoke(build_app(find_commands(), name), [name, "--help"])
        assert result.exit_code == 0
        assert KNOWN[name].summary.split()[0] in result.output


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"loraplex {loraplex.__version__}\n"


@pytest.mark.parametrize(
    "argv", [["nonsense"], ["generate", "a", "b"], ["--nonsense"], ["generate", "x", "--max-tokens", "a"]]
)
def test_a_wrong_command_line_is_2(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert "Usage" in captured.err


def test_nothing_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    captured = capsys.readouterr()
    assert "generate" in captured.out + captured.err


# --- where something is missing -------------------------------------------------------------------------------------


@pytest.fixture
def extra_command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A command `thing` of another package; the test says what it does."""
    module = ModuleType("other_package.cli")
    monkeypatch.setitem(sys.modules, "other_package", ModuleType("other_package"))
    monkeypatch.setitem(sys.modules, "other_package.cli", module)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [EntryPoint("thing", "other_package.cli:thing", group)]
    )
    return module


def test_other_packages_may_add_commands(extra_command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def thing(name: str) -> None:
        typer.echo(f"hello {name}")

    extra_command.thing = thing  # type: ignore[attr-defined]
    assert main.main(["thing", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"
    assert main.main(["--help"]) == 0
    assert "other_package" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "missing", "expected"),
    [
        ("loraplex_server.cli.x", "torch", "pip install 'loraplex[server]'"),
        ("loraplex_router.x", "grpc_health.v1", "pip install 'loraplex[router]'"),
        ("loraplex_demo.cli", "torch", "pip install 'loraplex[demo]'"),
        ("loraplex_training.cli", "torch", "pip install 'loraplex[server]'"),
        ("loraplex.cli.x", "safetensors", "pip install 'loraplex[server]'"),
        ("loraplex_server.cli.x", "loraplex_server", "needs loraplex-server, which is not installed; get it with: pip"),
        ("loraplex.cli.doctor", "loraplex_server", "pip install loraplex-server"),
        ("loraplex_training.cli", "loraplex_training", "pip install loraplex-server"),
        ("loraplex_demo.cli", "loraplex_demo", "pip install loraplex-demo"),
        ("loraplex_server.cli.x", "loraplex_router", "not part of this installation"),
        ("somebody.elses", "numpy", "needs the Python package numpy"),
    ],
)
@pytest.mark.parametrize("when", ["loading", "running"])
def test_a_missing_extra_is_a_sentence(
    module: str,
    missing: str,
    expected: str,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    class Entry:
        name = "thing"

        def load(self) -> object:
            if when == "loading":
                fail()
            return fail

    entry = Entry()
    entry.module = module  # type: ignore[attr-defined]
    monkeypatch.setattr(main, "find_commands", lambda: {"thing": entry, "other": entry})
    assert main.main(["thing"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert expected in captured.err
    assert captured.err.count("\n") == 1


def test_help_names_the_distribution_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    here = CliRunner().invoke(build_app(find_commands(), None), ["--help"]).output
    assert "Needs loraplex" not in here
    monkeypatch.setattr(main, "find_spec", lambda package: None)
    lines = CliRunner().invoke(build_app(find_commands(), None), ["--help"]).output.splitlines()
    for name, known in KNOWN.items():
        (line,) = [line for line in lines if f"│ {name} " in line]
        distribution = main.DISTRIBUTIONS.get(known.target.partition(".")[0])
        assert (f"{known.summary} Needs {distribution}." in line) == (distribution is not None)
        assert known.summary in line


def test_no_torch_no_traceback() -> None:
    """The real thing: a process in which the server's packages cannot be imported."""
    code = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "class Without(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        gone = name.partition('.')[0] in ('torch', 'transformers', 'grpc_health', 'numpy')\n"
        "        return None if gone else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Without\n"
        "from loraplex.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    for argv, extra in ((["worker", "x"], "server"), (["serve", "x"], "server")):
        run = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
        assert run.returncode == 1, run.stderr
        assert run.stderr.startswith("error: "), run.stderr
        assert f"loraplex[{extra}]" in run.stderr
    run = subprocess.run([sys.executable, "-c", code, "doctor", "--json"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "PyTorch does not load" in run.stdout


def test_from_a_source_tree_that_is_not_installed() -> None:
    """No metadata to find entry points in: isolated from site-packages but for what the SDK itself needs."""
    code = (
        "import importlib.metadata as m, runpy, sys\n"
        "m.entry_points = lambda group: []\n"
        "sys.argv = ['loraplex', 'generate', '--help']\n"
        "runpy.run_module('loraplex', run_name='__main__')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "--adapter" in run.stdout


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("doctor >&-", 0, ""),
        ("doctor --json >&-", 0, ""),
        ("config show router >&-", 0, ""),
        ("adapters load a --server localhost:1 >&-", 1, "error: the server at localhost:1 cannot be reached"),
        ("adapters load a --server localhost:1 2>&-", 1, ""),
        ("chat --server localhost:1 <&-", 1, "error: the server at localhost:1 cannot be reached"),
    ],
)
def test_streams_that_are_closed(words: str, code: int, says: str) -> None:
    command = f"{sys.executable} -m loraplex {words}"
    run = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (code, "")
    assert run.stderr.startswith(says)
    assert run.stderr.count("\n") == bool(says)


# --- how it ends ----------------------------------------------------------------------------------------------------


def ends_with(error: BaseException, extra_command: ModuleType) -> int:
    def thing() -> None:
        raise error

    extra_command.thing = thing  # type: ignore[attr-defined]
    return main.main(["thing"])


def test_typed_errors_are_one_sentence(extra_command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with(QueueFull("too many wait;\n try again in 2 s\x1b[2J"), extra_command) == 1
    assert capsys.readouterr().err == "error: too many wait; try again in 2 s\\x1b[2J\n"


def test_what_can_never_work_is_2(extra_command: ModuleType) -> None:
    assert ends_with(InvalidAdapterId("'../x' is not a name"), extra_command) == 2


def test_a_full_disk_is_one_sentence(extra_command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with(OSError(errno.ENOSPC, "No space left on device"), extra_command) == 1
    assert capsys.readouterr().err == "error: No space left on device; make room, or name another place\n"
    assert ends_with(PermissionError(errno.EACCES, "Permission denied", "/x"), extra_command) == 1
    assert capsys.readouterr().err.startswith("error: /x: Permission denied")
    with pytest.raises(OSError, match="Bad file descriptor"):
        ends_with(OSError(errno.EBADF, "Bad file descriptor"), extra_command)


def test_ctrl_c_is_130(extra_command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_with(KeyboardInterrupt(), extra_command) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("module", ["typer", "importlib.metadata", "loraplex.types", "loraplex_contracts.errors"])
def test_ctrl_c_during_an_import_is_130(module: str) -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        f"sys.modules.pop({module!r}, None)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from loraplex.cli.main import main\n"
        "sys.exit(main(['generate', '--help']))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (130, "")


@pytest.mark.parametrize("words", ["router --worker", "http --server"])
def test_ctrl_c_while_a_server_starts_is_130(words: str) -> None:
    code = (
        "import os, signal, sys\n"
        "from loraplex_router.config import import_grpc\n"
        "import_grpc()\n"
        "from grpc.aio import _server\n"
        "start = _server.Server.start\n"
        "async def interrupted(self):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    await start(self)\n"
        "_server.Server.start = interrupted\n"
        "from loraplex.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    argv = [*words.split(), "127.0.0.1:1", "--port", "0"]
    run = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 130
    assert "Event loop is closed" not in run.stderr
    assert "never awaited" not in run.stderr


@pytest.mark.parametrize(("end", "code"), [(SystemExit(3), 3), (SystemExit(None), 0), (typer.Exit(4), 4)])
def test_exit_codes_pass(extra_command: ModuleType, end: BaseException, code: int) -> None:
    assert ends_with(end, extra_command) == code


def test_a_bug_is_not_hidden(extra_command: ModuleType) -> None:
    with pytest.raises(ZeroDivisionError):
        ends_with(ZeroDivisionError(), extra_command)
