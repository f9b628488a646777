"""Generator of docs/images: pages in headless Chromium and `loraplex top`, with the demo's models.

python scripts/page_screenshot.py page      # page.png, after a change to router/loraplex_router/http/page
python scripts/page_screenshot.py status    # status.png and top.svg: the same, and client/loraplex/cli/top.py
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Generator
from io import StringIO
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs/images"
sys.path.insert(0, str(ROOT / "tests"))

from support import browser  # noqa: E402
from support.processes import loraplex  # noqa: E402

from loraplex import Client, LoraplexError  # noqa: E402
from loraplex.cli.top import screen  # noqa: E402
from loraplex_demo.world import committed_world  # noqa: E402

MODELS = ("json", "sql", "yaml")
SPECULATIONS = ("off", "medusa:json-heads")
WIDTH = 860  # pixels
STATUS_WIDTH = 1500
TOP_WIDTH, TOP_LINES = 150, 36  # characters
LOAD_S = 35.0
NUM_CLIENTS = 6


def _shot(url: str, width: int, prepare: Callable[[browser.Page], None]) -> bytes:
    """The whole page as PNG, once `prepare` has returned."""
    with browser.page() as page:
        page.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        page.open(url)
        prepare(page)
        height = page.run("document.documentElement.scrollHeight")
        page.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        return base64.b64decode(page.ask("Page.captureScreenshot", format="png")["data"])


def _answers(page: browser.Page) -> None:
    choose = (
        "document.querySelectorAll('#models input, #speculations input').forEach(box => {"
        f"  if (box.checked !== {json.dumps([*MODELS, 'off'])}.includes(box.value)) box.click(); }});"
        f"document.getElementById('others').value = {json.dumps(', '.join(SPECULATIONS[1:]))};"
    )
    page.until("document.querySelectorAll('#models input').length > 4")
    page.run(choose)
    for _ in range(2):  # the first time loads the adapters
        page.run("document.getElementById('send').click()")
        page.until("document.getElementById('status').textContent === 'done'", 120)


@contextlib.contextmanager
def _demo(*flags: str) -> Generator[tuple[str, str]]:
    """Addresses of a server of the demo's models: gRPC, HTTP."""
    world = committed_world()
    arguments = ("serve", str(world.base_path), "--adapters", str(world.adapters_root), "--served-model-name", "demo")
    with loraplex(*arguments, "--port", "0", "--http-port", "0", *flags) as running:
        http = re.search(r"HTTP on ([\d.:]+\d)", running.output)
        grpc = re.search(r"ready on ([\d.:]+\d)", running.output)
        assert http, running.output
        assert grpc, running.output
        yield grpc[1], http[1]


def _generate(address: str, index: int, end_s: float) -> None:
    """Requests in turns until `end_s`, one of forty for an adapter that is not there."""
    names = ("json", "sql", "yaml", "xml", "toml", "json-heads")
    prompt = "We have purchase FG-8644, now delivered, 42 pieces, costing 118.48, for a thin wall. =>"
    with Client(address) as client:
        number = index
        while time.monotonic() < end_s:
            number += 1
            name = "jsno" if number % 40 == 0 else names[number % len(names)]
            with contextlib.suppress(LoraplexError):
                list(client.stream(prompt, adapter_id=name, max_tokens=64, speculation="auto"))


def _write(name: str, image: bytes) -> None:
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / name).write_bytes(image)
    print(f"wrote docs/images/{name}, {len(image) / 1000:.0f} kB")


def page() -> None:
    with _demo("--stream-wait", "0", "--no-adaptive-drafts") as (_, http):
        _write("page.png", _shot(f"http://{http}/", WIDTH, _answers))


def status() -> None:
    """Two workers under load."""
    with _demo(
        "--workers",
        "2",
    ) as (grpc, http):
        end_s = time.monotonic() + LOAD_S + 10
        clients = [threading.Thread(target=_generate, args=(grpc, number, end_s)) for number in range(NUM_CLIENTS)]
        for client in clients:
            client.start()
        time.sleep(LOAD_S)
        shown = "document.querySelectorAll('#adapters td').length > 0"
        _write("status.png", _shot(f"http://{http}/status", STATUS_WIDTH, lambda page: page.until(shown)))
        console = Console(record=True, width=TOP_WIDTH, file=StringIO(), color_system="truecolor", force_terminal=True)
        with Client(grpc) as client:
            console.print(screen(client.status(), TOP_LINES))
        _write("top.svg", console.export_svg(title="loraplex top").encode())
        for one in clients:
            one.join()


if __name__ == "__main__":
    {"page": page, "status": status}[sys.argv[1]]()
