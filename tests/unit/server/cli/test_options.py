from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loraplex_proto.errors import InvalidArgument
from loraplex_server.cli.options import command, configure, flags_of
from loraplex_server.cli.serving import ROUTER_ONLY, worker_arguments
from loraplex_server.cli.worker import FLAGS, MODEL
from loraplex_server.config import EngineConfig, ModelConfig, WorkerConfig, parse_bytes


def configured(*arguments: str) -> WorkerConfig:
    seen: list[WorkerConfig] = []

    def body(*, model: str, **given: object) -> None:
        seen.append(configure(WorkerConfig, FLAGS, given, {("engine", "model", "model"): model}))

    app = typer.Typer()
    app.command()(command(FLAGS, [MODEL], body, "For a test."))
    result = CliRunner().invoke(app, ["some/model", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return seen[0]


def test_defaults_are_those_of_the_dataclasses() -> None:
    assert configured() == WorkerConfig(EngineConfig(ModelConfig("some/model")))


def test_every_kind_of_flag(tmp_path: Path) -> None:
    config = configured(
        "--kv-memory", "3GiB", "--no-prefix-caching", "--adapters", str(tmp_path), "--max-running", "7",
        "--hub-adapters",
    )  # fmt: skip
    assert config.engine.kv.memory_bytes == 3 << 30
    assert config.engine.kv.prefix_caching is False
    assert config.engine.adapters.root == tmp_path
    assert config.engine.adapters.hub is True
    assert config.engine.batch.max_running == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kv-memory", "lots"), "is not a size"),
        (("--adapters", "/does/not/exist"), "not a directory"),
        (("--max-running", "0"), "--max-running"),
        (("--max-running", "100", "--max-step-tokens", "50"), "--max-step-tokens"),
        (("--dtype", "int3"), "--dtype"),
        (("--kv-block-size", "100000"), "--kv-block-size"),
    ],
)
def test_bad_values_name_their_flag(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        configured(*arguments)


def test_flags_are_unique_and_explained() -> None:
    names = [flag.flag for flag in flags_of(WorkerConfig)]
    assert len(names) == len(set(names))
    assert all(flag.help.endswith(".") for flag in FLAGS)


def test_serve_passes_everything_on_but_what_is_the_routers(tmp_path: Path) -> None:
    given = {flag.parameter: flag.default for flag in FLAGS}
    given |= {"adapters": tmp_path, "prefix_caching": False, "port": 1, "adapter_device_memory": "1GiB"}
    arguments = worker_arguments("m", given)
    assert configured(*(a for a in arguments[1:] if a != "--json")).engine.adapters.root == tmp_path
    assert "--no-prefix-caching" in arguments
    several = worker_arguments("m", given | {"draft_model": ["a=/x", "b=/y"]})
    assert configured(*(a for a in several[1:] if a != "--json")).engine.speculation.draft_models == ("a=/x", "b=/y")
    assert not {f"--{name.replace('_', '-')}" for name in ROUTER_ONLY - {"host"}} & set(arguments)


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("1k", 1024), ("2KiB", 2048), ("1.5g", 3 << 29), ("3 MB", 3 << 20)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size
