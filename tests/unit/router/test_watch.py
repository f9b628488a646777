"""Lines of the log about a watched worker."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex_proto.v1 import worker_pb2
from loraplex_router.config import WatchConfig
from loraplex_router.replicas import Replicas
from loraplex_router.watch import WorkerWatch

A = "a:1"


def test_a_worker_that_leaves_is_said_to_be_available_once(caplog: pytest.LogCaptureFixture) -> None:
    replicas = Replicas([A])
    watch = WorkerWatch(cast("Any", SimpleNamespace(worker_id=A)), replicas, WatchConfig())
    with caplog.at_level(logging.INFO):
        for number in range(4):
            load = worker_pb2.Load(pending_tokens=number)
            watch._log_changes(load)  # pyright: ignore[reportPrivateUsage]
            replicas.on_report(A, load, time.monotonic())
            replicas.leave(A)
    assert [record.message for record in caplog.records] == ["worker a:1 is available"]
