"""First steps with a server that is ready."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.adapter_files import safetensors_bytes

from loraplex_server.cli.first_steps import first_steps
from loraplex_server.config import AdaptersConfig, EngineConfig, ModelConfig, WorkerConfig


def config_of(root: Path | None) -> WorkerConfig:
    return WorkerConfig(EngineConfig(ModelConfig("m"), adapters=AdaptersConfig(root=root)))


def add(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir()
        (root / name / "adapter_config.json").write_text("{}")
        (root / name / "adapter_model.safetensors").write_bytes(safetensors_bytes({}, b""))


def test_without_adapters() -> None:
    assert first_steps(config_of(None), "127.0.0.1:50051", None) == ['  try it: loraplex generate "Hello"']


def test_adapters_that_there_are(tmp_path: Path) -> None:
    assert first_steps(config_of(tmp_path), "127.0.0.1:50051", None)[0].startswith(
        f"  adapters in {tmp_path}: none yet;"
    )
    add(tmp_path, "sql")
    said = first_steps(config_of(tmp_path), "127.0.0.1:50051", None)
    assert said == [
        f"  adapters in {tmp_path}: 1 (sql); more may be added at any time",
        '  try it: loraplex generate "Hello" --adapter sql',
    ]
    add(tmp_path, *"abcdef")
    assert ": 7 (a, b, c, d, e, …);" in first_steps(config_of(tmp_path), "127.0.0.1:50051", None)[0]


def test_a_broken_folder_is_not_named(tmp_path: Path) -> None:
    add(tmp_path, "a", "b")
    (tmp_path / "a/adapter_model.safetensors").write_bytes(b"cut")
    listed, hint = first_steps(config_of(tmp_path), "127.0.0.1:50051", None)
    assert ": 2 (a, b);" in listed  # a request for it is told why
    assert hint.endswith("--adapter b")
    (tmp_path / "b/adapter_config.json").unlink()
    assert first_steps(config_of(tmp_path), "127.0.0.1:50051", None)[1].endswith('"Hello"')


@pytest.mark.parametrize("address", ["127.0.0.1:5", "0.0.0.0:5", "[::]:5", "[::0]:5", "[::ffff:0.0.0.0]:5"])
def test_the_addresses_to_try(address: str) -> None:
    hint, page = first_steps(config_of(None), address, address)
    assert hint.endswith("--server 127.0.0.1:5")
    assert page == "  or open http://127.0.0.1:5/ in a browser"


@pytest.mark.parametrize("address", ["[fd00::1]:5", "example.org:5"])
def test_an_address_of_its_own_stays(address: str) -> None:
    hint, page = first_steps(config_of(None), address, address)
    assert hint.endswith(f"--server {address}")
    assert page == f"  or open http://{address}/ in a browser"


def test_what_credentials_need(tmp_path: Path) -> None:
    for name in ("auth.json", "cert", "key", "ca"):
        (tmp_path / name).write_text("{}")
    files = {"auth_file": tmp_path / "auth.json", "tls_cert": tmp_path / "cert", "tls_key": tmp_path / "key"}
    config = replace(config_of(None), **files)
    command, page = first_steps(config, "127.0.0.1:50051", "127.0.0.1:8000")
    assert command.endswith('"Hello" --tls --token TOKEN')
    assert page == "  or open https://127.0.0.1:8000/ in a browser"
    (command, _) = first_steps(replace(config, tls_client_ca=tmp_path / "ca"), "127.0.0.1:50051", "127.0.0.1:8000")
    assert command.endswith("--tls --client-cert CERT --client-key KEY --token TOKEN")
