"""Generator of docs/images/dashboard.png: the dashboard's queries over a real Prometheus.

python scripts/dashboard_screenshot.py    # after a change to deploy/grafana/loraplex.json; takes two minutes

Serves the demo's world with two workers and two tenants, sends a load, has Prometheus scrape it, asks Prometheus each
query of the dashboard and draws the answers. Grafana itself is not part of it. Needs prometheus and chromium.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import html
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "docs/images/dashboard.png"
DASHBOARD = ROOT / "deploy/grafana/loraplex.json"
RULES = ROOT / "deploy/prometheus/alerts.yaml"
sys.path.insert(0, str(ROOT / "tests"))

from support import browser  # noqa: E402
from support.processes import loraplex  # noqa: E402

from loraplex import AsyncClient, LoraplexError  # noqa: E402
from loraplex_demo.world import World, committed_world  # noqa: E402

LOAD_S = 100.0
WIDTH, HEIGHT = 390, 150  # of a panel, in pixels
INTERVAL = "10s"  # $__rate_interval
COLOURS = ("#3274d9", "#e0752d", "#299c46", "#a352cc", "#e02f44", "#0a9da3", "#b7950b", "#705da0", "#6d6d6d", "#d683ce")
TENANTS = {"acme": {}, "umbrella": {"max_concurrent_requests": 4}}
PROMETHEUS = """\
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
  - {{job_name: loraplex-routers, static_configs: [{{targets: ["127.0.0.1:{router}"]}}]}}
  - {{job_name: loraplex-workers, static_configs: [{{targets: [{workers}]}}]}}
"""


# --- what is measured -------------------------------------------------------------------------------------------------


async def load(address: str, world: World) -> None:
    """Two tenants, all adapters, some speculation; in the middle more than a tenant may have, and wrong names."""
    draw, began_s = random.Random(0), time.monotonic()
    names = [adapter.name for adapter in world.adapters]
    cases = world.showcase(12)
    clients = {tenant: AsyncClient(address, token=tenant) for tenant in TENANTS}
    tasks = set[asyncio.Task[None]]()
    while (elapsed_s := time.monotonic() - began_s) < LOAD_S:
        is_peak = LOAD_S / 2 < elapsed_s < 0.8 * LOAD_S
        tenant = draw.choice([*TENANTS, "acme"])
        name = draw.choices([*names, "", "nobody"], [1 / (rank + 1) for rank in range(len(names))] + [0.3, 0.05])[0]
        kind = draw.choice(["prompt_lookup", "auto", "off"])
        task = asyncio.create_task(one(clients[tenant], draw.choice(cases).prompt, name, kind))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(draw.expovariate(30.0 if is_peak else 8.0))
    await asyncio.gather(*tasks)
    for client in clients.values():
        await client.close()


async def one(client: AsyncClient, prompt: str, adapter_id: str, speculation: str) -> None:
    with contextlib.suppress(LoraplexError):
        async for _ in client.stream(prompt, adapter_id=adapter_id, speculation=speculation, max_tokens=48):
            pass


@contextlib.contextmanager
def measured(folder: Path) -> Iterator[str]:
    """Prometheus' address, after a load."""
    world, metrics_port = committed_world(), free_ports(4)
    credentials = [
        {"sha256": hashlib.sha256(tenant.encode()).hexdigest(), "tenant": tenant, "adapters": ["*"]}
        for tenant in TENANTS
    ]
    auth_file, config_file = folder / "auth.json", folder / "prometheus.yaml"
    auth_file.write_text(json.dumps({"credentials": credentials, "tenants": TENANTS}))
    workers = ", ".join(f'"127.0.0.1:{metrics_port + number}"' for number in (1, 2))
    config_file.write_text(PROMETHEUS.format(rules=RULES, router=metrics_port, workers=workers))
    flags = ["--adapters", str(world.adapters_root), "--workers", "2", "--adapter-slots", "2", "--port", "0"]
    flags += ["--adapter-host-memory", "1MiB"]  # so that adapters have to come and go
    flags += ["--metrics-port", str(metrics_port), "--auth-file", str(auth_file), "--no-request-log"]
    address = f"127.0.0.1:{metrics_port + 3}"
    prometheus = [
        "prometheus",
        *(f"--config.file={config_file}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address={address}", "--log.level=error"),
    ]
    with loraplex("serve", str(world.base_path), *flags) as running, subprocess.Popen(prometheus) as scraping:
        try:
            time.sleep(3)
            asyncio.run(load(running.address, world))
            time.sleep(2)
            yield f"http://{address}"
        finally:
            scraping.terminate()


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on."""
    for first in range(29100, 29900, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise RuntimeError("no free ports between 29100 and 29900")


def ask(address: str, path: str, **parameters: Any) -> Any:
    with urllib.request.urlopen(f"{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
        return json.load(answer)["data"]


# --- what is drawn ----------------------------------------------------------------------------------------------------

Series = tuple[str, list[tuple[float, float]]]


def series_of(address: str, panel: dict[str, Any], start_s: float, end_s: float) -> list[Series]:
    found: list[Series] = []
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", INTERVAL)
        for one in ask(address, "query_range", query=query, start=start_s, end=end_s, step=1)["result"]:
            legend = re.sub(r"{{(\w+)}}", lambda match, of=one: of["metric"].get(match[1], ""), target["legendFormat"])
            points = [(float(at), float(value)) for at, value in one["values"] if value not in ("NaN", "+Inf")]
            if points:
                found.append((legend, points))
    return found


def shown(value: float, unit: str) -> str:
    match unit:
        case "percentunit":
            return f"{100 * value:.0f} %"
        case "s":
            return f"{1000 * value:.3g} ms" if value < 1 else f"{value:.3g} s"
        case "bytes" | "Bps":
            return f"{value / 1e6:.3g} MB" + ("/s" if unit == "Bps" else "")
        case _:
            return f"{value:.3g}" + ("/s" if unit == "reqps" else "")


def drawn(panel: dict[str, Any], series: Sequence[Series], start_s: float, end_s: float) -> str:
    """A panel as HTML."""
    defaults = panel["fieldConfig"]["defaults"]
    most = defaults.get("max") or max((value for _, points in series for _, value in points), default=0) or 1
    lines = [
        f'<polyline fill="none" stroke="{COLOURS[number % len(COLOURS)]}" points="'
        + " ".join(
            f"{(at - start_s) / (end_s - start_s) * WIDTH:.1f},{HEIGHT - 4 - value / most * (HEIGHT - 12):.1f}"
            for at, value in points
        )
        + '"/>'
        for number, (_, points) in enumerate(series)
    ]
    legend = " ".join(
        f'<span style="color:{COLOURS[number % len(COLOURS)]}">{html.escape(name)}</span>'
        for number, (name, _) in enumerate(series)
    )
    text = f'<text x="2" y="10">{shown(most, defaults["unit"])}</text>' if series else '<text x="2" y="10">none</text>'
    return (
        f'<div class="panel"><b>{html.escape(panel["title"])}</b><svg width="{WIDTH}" height="{HEIGHT}">{text}'
        f'{"".join(lines)}</svg><div class="legend">{legend}</div></div>'
    )


def page(address: str, start_s: float, end_s: float) -> str:
    parts: list[str] = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        if panel["type"] == "row":
            parts.append(f"<h2>{html.escape(panel['title'])}</h2>")
        else:
            parts.append(drawn(panel, series_of(address, panel, start_s, end_s), start_s, end_s))
    style = (
        "html{overflow:hidden} body{font:11px sans-serif;margin:8px;background:#fff} "
        "h2{clear:both;font-size:14px;margin:6px 0 2px}"
        f".panel{{float:left;width:{WIDTH}px;margin:3px;border:1px solid #ddd;padding:3px}}"
        "svg{display:block;background:#fafafa} text{font-size:9px;fill:#666} .legend{height:26px;overflow:hidden}"
    )
    parts.append('<div style="clear:both"></div>')  # so that the page is as high as its last panels
    return f"<!doctype html><meta charset=utf-8><title>Loraplex</title><style>{style}</style>{''.join(parts)}"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with measured(folder) as address:
            end_s = time.time()
            (folder / "page.html").write_text(page(address, end_s - LOAD_S, end_s), encoding="utf-8")
            broken = [
                one for group in ask(address, "rules")["groups"] for one in group["rules"] if one["health"] == "err"
            ]
            assert not broken, broken
        with browser.page() as shot:
            width = 3 * (WIDTH + 16) + 24
            shot.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
            shot.open((folder / "page.html").as_uri())
            height = shot.run("Math.ceil(document.body.getBoundingClientRect().bottom) + 16")
            shot.ask(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
            )
            image = base64.b64decode(shot.ask("Page.captureScreenshot", format="png")["data"])
    IMAGE.write_bytes(image)
    print(f"wrote {IMAGE.relative_to(ROOT)}, {len(image) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
