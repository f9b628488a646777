"""gRPC in a router's process: its poller, and the environment behind it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from loraplex_router.grpc_library import EVENT_ENGINE, EXPERIMENTS, import_with, knows_experiments

OLDER = "-event_engine_client,-event_engine_listener"
PROGRAM = """
import json, os, sys
seen = {}
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            seen["at import"] = os.environ.get("GRPC_EXPERIMENTS")
sys.meta_path.insert(0, Finder())
import loraplex_router.cli
assert "grpc" not in sys.modules
from loraplex_router import grpc_library
if sys.argv[1:]:
    grpc_library.EVENT_ENGINE = tuple(sys.argv[1:])
grpc_library.import_with(os.environ, is_silent=False)
print(json.dumps([seen["at import"], os.environ.get("GRPC_EXPERIMENTS"), "grpc" in sys.modules]))
"""


def imported(*event_engine: str, **variables: str) -> list[object]:
    """GRPC_EXPERIMENTS when gRPC was imported and after that, and whether it was. gRPC wrote nothing."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *event_engine],
        check=True, capture_output=True, text=True, timeout=60, env={**environment, **variables},
    )  # fmt: skip
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_the_pinned_version_has_the_older_poller() -> None:
    """Without it, a router takes a third more CPU time for a message: measure it (benchmarks/router.py), see ADR 21."""
    assert knows_experiments(EVENT_ENGINE)


def test_names_that_no_library_has_are_unknown() -> None:
    assert not knows_experiments(("no_such_experiment",))
    assert not knows_experiments((*EVENT_ENGINE, "no_such_experiment"))
    assert not knows_experiments(("event_engine_clien",)), "whole names only"


def test_only_the_library_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stubs lie beside it, before or behind it as the file system likes."""
    package = ModuleSpec("grpc", None, is_package=True)
    package.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    (tmp_path / "_cython").mkdir()
    (tmp_path / "_cython/cygrpc.pyi").write_bytes(b"\0one\0")
    assert not knows_experiments(("one",))
    (tmp_path / "_cython/cygrpc.cpython-313-x86_64-linux-gnu.so").write_bytes(b"\0other\0")
    assert knows_experiments(("other",))
    assert not knows_experiments(("one",))


@pytest.mark.parametrize("names", [(), ("no_such_experiment",)])
def test_the_variable_is_there_for_the_import_alone(names: tuple[str, ...]) -> None:
    assert imported(*names) == [None if names else OLDER, None, True]


OF_A_COMMAND = """
import os, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc" and "GRPC_EXPERIMENTS" in os.environ:
            print(os.environ["GRPC_EXPERIMENTS"], end="", flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
from loraplex.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "command",
    [
        ("router", "--worker", "127.0.0.1:1", "--worker-token-file", "/nowhere"),
        ("http", "--server", "127.0.0.1:1", "--server-token-file", "/nowhere"),
        pytest.param(("serve", "/nowhere"), marks=pytest.mark.server),
    ],
)
def test_commands_import_grpc_so(command: tuple[str, ...]) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", OF_A_COMMAND, *command],
        check=False, capture_output=True, text=True, timeout=100, env=environment,
    )  # fmt: skip
    assert done.stdout == OLDER, done.stderr


@pytest.mark.parametrize("given", ["", "event_engine_fork"])
def test_what_an_operator_has_set_stays(given: str) -> None:
    assert imported(**{EXPERIMENTS: given}) == [given, given, True]


@pytest.mark.parametrize(
    ("given", "is_silent", "expected"),
    [({}, False, "ERROR"), ({}, True, "NONE"), ({"GRPC_VERBOSITY": "DEBUG"}, True, "DEBUG")],
)
def test_lines_of_the_library(given: dict[str, str], is_silent: bool, expected: str) -> None:
    environment = dict(given)
    import_with(environment, is_silent=is_silent)
    assert environment == {"GRPC_VERBOSITY": expected}
