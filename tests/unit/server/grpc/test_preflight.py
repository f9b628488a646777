"""What is wrong with ports and files is known before a model is loaded."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument
from loraplex_server.config import EngineConfig, ModelConfig, WorkerConfig
from loraplex_server.grpc.preflight import check_door


def config(**more: Any) -> WorkerConfig:
    return replace(WorkerConfig(EngineConfig(ModelConfig("m")), port=0), **more)


def test_nothing_is_wrong() -> None:
    check_door(config())
    check_door(config(metrics_port=0))
    check_door(config(metrics_host="192.0.2.1"))  # nothing is served there


@pytest.mark.parametrize("flag", ["auth_file", "tls"])
def test_files_that_cannot_be_read(flag: str, tmp_path: Path) -> None:
    none = tmp_path / "none"
    given = {"tls_cert": none, "tls_key": none} if flag == "tls" else {"auth_file": none}
    with pytest.raises(InvalidArgument, match="cannot be read"):
        check_door(config(**given))


def test_ports_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for given in ({"port": port}, {"metrics_port": port}, {"host": "192.0.2.1"}):
            with pytest.raises(FailedPrecondition, match="cannot listen"):
                check_door(config(**given))
