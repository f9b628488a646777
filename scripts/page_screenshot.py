"""Generator of docs/images/page.png: the browser's page with the demo's models, in headless Chromium.

python scripts/page_screenshot.py    # after a change to router/loraplex_router/http/page
"""

from __future__ import annotations

import base64
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "docs/images/page.png"
sys.path.insert(0, str(ROOT / "tests"))

from support import browser  # noqa: E402
from support.processes import loraplex  # noqa: E402

from loraplex_demo.world import committed_world  # noqa: E402

MODELS = ("json", "sql", "yaml")
SPECULATIONS = ("off", "medusa:json-heads")
WIDTH = 860  # pixels


def take(url: str) -> bytes:
    """The page as PNG when its answers are there."""
    choose = (
        "document.querySelectorAll('#models input, #speculations input').forEach(box => {"
        f"  if (box.checked !== {json.dumps([*MODELS, 'off'])}.includes(box.value)) box.click(); }});"
        f"document.getElementById('others').value = {json.dumps(', '.join(SPECULATIONS[1:]))};"
    )
    with browser.page() as page:
        page.ask("Emulation.setDeviceMetricsOverride", width=WIDTH, height=900, deviceScaleFactor=1, mobile=False)
        page.open(url)
        page.until("document.querySelectorAll('#models input').length > 4")
        page.run(choose)
        for _ in range(2):  # the first time loads the adapters
            page.run("document.getElementById('send').click()")
            page.until("document.getElementById('status').textContent === 'done'", 120)
        height = page.run("document.documentElement.scrollHeight")
        page.ask("Emulation.setDeviceMetricsOverride", width=WIDTH, height=height, deviceScaleFactor=1, mobile=False)
        return base64.b64decode(page.ask("Page.captureScreenshot", format="png")["data"])


def main() -> None:
    world = committed_world()
    arguments = ("serve", str(world.base_path), "--adapters", str(world.adapters_root), "--served-model-name", "demo")
    with loraplex(
        *arguments, "--port", "0", "--http-port", "0", "--stream-wait", "0", "--no-adaptive-drafts"
    ) as running:
        found = re.search(r"HTTP on ([\d.:]+\d)", running.output)
        assert found, running.output
        image = take(f"http://{found[1]}/")
    IMAGE.parent.mkdir(exist_ok=True)
    IMAGE.write_bytes(image)
    print(f"wrote {IMAGE.relative_to(ROOT)}, {len(image) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
