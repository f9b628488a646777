"""Metrics as a real Prometheus has them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.exported_metrics import end_two

from loraplex_contracts.load import Load
from loraplex_runtime.telemetry import MetricsEndpoint, describe_process, new_registry
from loraplex_server.engine.client import EngineState
from loraplex_server.grpc.metrics import WorkerCollector, WorkerMetrics

CONFIG = """\
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: loraplex, static_configs: [{{targets: ["127.0.0.1:{port}"]}}]}}]
"""


def ask(port: int, query: str) -> list[Any]:
    with contextlib.suppress(OSError):  # it is starting
        question = urllib.parse.urlencode({"query": query})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{question}", timeout=5) as answer:
            return json.load(answer)["data"]["result"]
    return []


@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (Debian: prometheus)")
async def test_names_and_labels_are_those_of_the_dashboard(tmp_path: Path) -> None:
    registry = new_registry()
    describe_process(registry, "worker", "1.0")
    WorkerCollector(registry, lambda: EngineState(Load(num_running=3)))
    end_two(WorkerMetrics(registry))
    endpoint = await MetricsEndpoint.start("127.0.0.1", 0, registry)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    (tmp_path / "prometheus.yaml").write_text(CONFIG.format(port=endpoint.port))
    arguments = [f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
    arguments += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen(["prometheus", *arguments])
    try:
        async with asyncio.timeout(30):
            while not (found := await asyncio.to_thread(ask, port, "loraplex:num_requests_running")):
                await asyncio.sleep(0.2)
        assert found[0]["value"][1] == "3"
        for query in ('loraplex:adapter_generation_tokens_total{adapter="sql"}', "loraplex:step_seconds_bucket"):
            assert await asyncio.to_thread(ask, port, query), query
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 10)
        await endpoint.stop()
