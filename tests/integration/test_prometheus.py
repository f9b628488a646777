"""Metrics as a real Prometheus has them, and the dashboard's queries over it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.exported_metrics import router_registry, worker_registry
from support.fleet import free_port

from loraplex_runtime.metrics import MetricsEndpoint

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CONFIG = """\
global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs:
  - {{job_name: loraplex-routers, static_configs: [{{targets: ["127.0.0.1:{router}"]}}]}}
  - {{job_name: loraplex-workers, static_configs: [{{targets: ["127.0.0.1:{worker}"]}}]}}
"""


def ask(port: int, path: str, **parameters: str) -> Any:
    question = urllib.parse.urlencode(parameters)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}?{question}", timeout=5) as answer:
        return json.load(answer)["data"]


def dashboard() -> Iterator[tuple[str, str]]:
    for panel in json.loads((DEPLOY / "grafana/loraplex.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"].replace("$__rate_interval", "10s")


@contextlib.contextmanager
def prometheus(folder: Path, router: int, worker: int) -> Iterator[int]:
    """A running Prometheus; yields its port."""
    port, config = free_port(), folder / "prometheus.yaml"
    config.write_text(CONFIG.format(rules=DEPLOY / "prometheus/alerts.yaml", router=router, worker=worker))
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", "--log.level=error"]
    process = subprocess.Popen(["prometheus", *arguments, f"--web.listen-address=127.0.0.1:{port}"])
    try:
        yield port
    finally:
        process.terminate()
        process.wait(10)


async def until_scraped(port: int, num: int) -> None:
    """Each target so often, without which there are no rates."""
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(OSError):  # it is starting
                query = f'count_over_time(up{{job=~"loraplex-.*"}}[1m]) >= {num}'
                if len((await asyncio.to_thread(ask, port, "query", query=query))["result"]) == 2:
                    return
            await asyncio.sleep(0.2)


@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (Debian: prometheus)")
async def test_every_query_of_the_dashboard_has_an_answer(tmp_path: Path) -> None:
    """The queries and rules are run over a router and a worker that have had everything happen once."""
    async with contextlib.AsyncExitStack() as stack:
        ports: list[int] = []
        for registry in (router_registry()[0], worker_registry()):
            endpoint = await MetricsEndpoint.start("127.0.0.1", 0, registry)
            stack.push_async_callback(endpoint.stop)
            ports.append(endpoint.port)
        port = stack.enter_context(prometheus(tmp_path, *ports))
        await until_scraped(port, 3)
        for title, query in dashboard():
            assert (await asyncio.to_thread(ask, port, "query", query=query))["result"], f"{title}: {query}"
        rules = [rule for group in (await asyncio.to_thread(ask, port, "rules"))["groups"] for rule in group["rules"]]
        assert len(rules) > 10
        assert {rule["health"] for rule in rules} == {"ok"}
