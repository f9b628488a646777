"""Options of the worker's commands."""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from loraplex.cli.main import main
from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.flags import configure, flags_of, option, parse_bytes, with_raw_flags
from loraplex_server import config as config_module
from loraplex_server.cli.serve import ROUTER_ONLY, worker_arguments
from loraplex_server.cli.worker import FLAGS
from loraplex_server.config import DraftModelConfig, EngineConfig, ModelConfig, WorkerConfig


def configured(*arguments: str) -> WorkerConfig:
    seen: list[WorkerConfig] = []

    @with_raw_flags(FLAGS)
    def body(model: str, **given: object) -> None:
        seen.append(configure(WorkerConfig, FLAGS, given, {("engine", "model", "model"): model}))

    app = typer.Typer()
    app.command()(body)
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
        "--hub-adapters", "--hub-endpoint", "https://hub.invalid:8443", "--hub-endpoint", "https://b.invalid",
        "--s3-bucket", "models", "--s3-bucket", "more=http://127.0.0.1:9000",
    )  # fmt: skip
    assert config.engine.kv.memory_bytes == 3 << 30
    assert config.engine.kv.prefix_caching is False
    assert config.engine.adapters.root == tmp_path
    assert config.engine.adapters.hub is True
    assert config.engine.adapters.hub_endpoints == ("https://hub.invalid:8443", "https://b.invalid")
    assert config.engine.adapters.buckets == {"models": "", "more": "http://127.0.0.1:9000"}
    assert config.engine.batch.max_running == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--kv-memory", "lots"), "is not a size"),
        (("--adapters", "/does/not/exist"), "not a directory"),
        (("--hub-adapters", "--hub-endpoint", "file:///x"), "must be an address such as https://HOST"),
        (("--hub-endpoint", "https://hub.invalid"), "is of use with --hub-adapters only"),
        (("--hub-adapters", "--hub-access-ttl", "0.5"), "must be 1 second to a day"),
        (("--watch-adapters",), "is of use with --adapters only"),
        (("--s3-bucket", "models=ftp://x"), "takes NAME or NAME=https://HOST"),
        (("--s3-bucket", "../x"), "takes NAME or NAME=https://HOST"),
        (("--s3-bucket", "models", "--s3-bucket", "models=https://x"), "names models twice"),
        (("--max-running", "0"), "--max-running"),
        (("--max-running", "100", "--max-step-tokens", "50"), "--max-step-tokens"),
        (("--dtype", "int3"), "--dtype"),
        (("--quantize", "int3"), "--quantize must be none, int8 or int4"),
        *(
            (("--device", name), "--device must be auto, cpu, cuda or cuda:N")
            for name in ("foo", "cuda:", "cuda:01", "cuda:128", "CPU")
        ),
        (("--attention", "flash"), "--attention must be auto, flashinfer, triton, native or torch"),
        (("--cpu-kernels", "fast"), "--cpu-kernels must be auto, native, torch"),
        (("--lora-kernels", "fast"), "--lora-kernels must be auto, triton, punica, reference"),
        (("--kv-block-size", "100000"), "--kv-block-size"),
        (("--speculate", "-1"), "--speculate must be at least 0"),
        (("--speculative-tokens", "17"), "--speculate must be at most --max-draft-tokens, 16"),
        (("--max-draft-tokens", "0"), "--max-draft-tokens must be 1 to 64"),
        (("--max-draft-tokens", "65"), "--max-draft-tokens must be 1 to 64"),
        (("--draft-kv-memory", "0"), "--draft-kv-memory"),
        (("--lookup-history", "-1"), "--lookup-history must be 0 to 1048576"),
        (("--adapter-disk", "0"), "--adapter-disk must be at least 1 byte"),
        (("--adapter-host-memory", "0"), "--adapter-host-memory must be at least 1 byte"),
        (("--adapter-device-memory", "0"), "--adapter-device-memory must be at least 1 byte"),
        (("--max-message", "10"), "--max-message must be 1024 bytes to less than 2GiB"),
        (("--max-message", "2GiB"), "--max-message must be 1024 bytes to less than 2GiB"),
        (("--kv-memory", "9" * 400), f"--kv-memory '{'9' * 40}' is not a size"),
        (("--adapter-host-memory", "8388608TiB"), "--adapter-host-memory '8388608TiB' is not a size"),
        (("--max-unread", "0"), "--max-unread must be at least 1"),
        (("--max-queue-wait", "nan"), "--max-queue-wait must be a number from 0 on"),
        (("--stream-wait", "-1"), "--stream-wait must be a number from 0 on"),
        (("--default-medusa", "../heads"), "--default-medusa '../heads' is not a valid name"),
        (("--draft-model", "/models/tiny"), "--draft-model takes NAME=MODEL, not '/models/tiny'"),
        (("--draft-model", "tiny="), "--draft-model takes NAME=MODEL"),
        (("--draft-model", "=/models/tiny"), "--draft-model takes NAME=MODEL"),
        (("--draft-model", "a b=/models/tiny"), "--draft-model 'a b' is not valid"),
        (("--draft-model", "t=/a", "--draft-model", "t=/b"), "--draft-model names t twice"),
        (("--draft-tokenizer", "t=/a"), "--draft-tokenizer names t, which no --draft-model declares; there is none"),
        (
            ("--draft-model", "t=/a", "--draft-model", "u=/b", "--draft-adapter", "x=/c"),
            "--draft-adapter names x, which no --draft-model declares; there is t, u",
        ),
        (
            ("--draft-model", "t=/a", "--draft-tokenizer", "t=/b", "--draft-tokenizer", "t=/c"),
            "--draft-tokenizer names t twice",
        ),
    ],
)
def test_bad_values_name_their_flag(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        configured(*arguments)


def test_draft_models_with_what_belongs_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = configured(
        "--draft-model", "tiny=~/tiny", "--draft-model", "small=org/small", "--draft-model", "odd=/a=b",
        "--draft-tokenizer", "small=/tokenizer", "--draft-adapter", "small=~/lora",
    )  # fmt: skip
    assert config.engine.speculation.drafts == (
        DraftModelConfig("tiny", f"{tmp_path}/tiny"),
        DraftModelConfig("small", "org/small", "/tokenizer", f"{tmp_path}/lora"),
        DraftModelConfig("odd", "/a=b"),
    )
    assert configured().engine.speculation.drafts == ()


def test_an_alias_is_the_flag_itself() -> None:
    for flag in ("--speculate", "--speculative-tokens"):
        assert configured(flag, "5").engine.speculation.default_draft_tokens == 5
    (speculate,) = [flag for flag in FLAGS if flag.flag == "--speculate"]
    assert speculate.aliases == ("--speculative-tokens",)


def test_an_alias_of_a_switch_has_its_opposite_too() -> None:
    @dataclasses.dataclass(frozen=True)
    class Switches:
        lamp: bool = option(True, "A lamp.", "--lamp", "--light")

    seen: list[object] = []
    flags = list(flags_of(Switches))
    app = typer.Typer()
    app.command()(with_raw_flags(flags)(lambda **given: seen.append(configure(Switches, flags, given, {}))))
    for argument in ("--no-light", "--light", "--no-lamp"):
        assert CliRunner().invoke(app, [argument]).exit_code == 0
    assert seen == [Switches(False), Switches(True), Switches(False)]


def test_flags_are_unique_and_explained() -> None:
    names = [name for flag in flags_of(WorkerConfig) for name in (flag.flag, *flag.aliases)]
    assert len(names) == len(set(names))
    assert all(flag.help.endswith(".") for flag in FLAGS)


def test_serve_passes_everything_on_but_what_is_the_routers(tmp_path: Path) -> None:
    given = {flag.parameter: flag.default for flag in FLAGS}
    given |= {"adapters": tmp_path, "prefix_caching": False, "port": 1, "adapter_device_memory": "1GiB"}
    arguments = worker_arguments("m", given)
    assert configured(*(a for a in arguments[1:] if a != "--json")).engine.adapters.root == tmp_path
    assert "--no-prefix-caching" in arguments
    several = worker_arguments(
        "m", given | {"draft_model": ["a=/x", "b=/y"], "speculate": 3, "adaptive_drafts": False, "default_medusa": "h"}
    )
    speculation = configured(*(a for a in several[1:] if a != "--json")).engine.speculation
    assert speculation.draft_models == ("a=/x", "b=/y")
    assert (speculation.default_draft_tokens, speculation.adaptive, speculation.default_medusa) == (3, False, "h")
    assert not {f"--{name.replace('_', '-')}" for name in ROUTER_ONLY - {"host", "metrics_host", "announce"}} & set(
        arguments
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("1k", 1024), ("2KiB", 2048), ("1.5g", 3 << 29), ("3 MB", 3 << 20), (str(2**63 - 1), 2**63 - 1)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Commands set up the process's logging."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("command", ["worker", "serve"])
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-running", "0"], "--max-running"),
        (["--tls-cert", "x"], "--tls-key"),
        (["--tls-client-ca", "x"], "needs --tls-cert"),
    ],
)
def test_a_wrong_command_line_is_status_2(
    command: str, flags: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "some/model", *flags]) == 2
    assert says in capfd.readouterr().err


@pytest.mark.usefixtures("own_logging")
@pytest.mark.parametrize("command", ["worker", "serve"])
@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_taken_port_is_told_before_the_model_is_loaded(
    command: str, flag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([command, "/no/such/model", "--port", "0", flag, str(port)]) == 1
    said = capfd.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "/no/such/model" not in said


def test_children_that_work_on_user_text_get_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN"):
        monkeypatch.setenv(name, "secret")
    assert "secret" not in config_module.bare_environment().values()
