"""Generator of docs/metrics.md from the metrics that router and worker export.

python scripts/metrics_page.py    # after a change to a metric
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/metrics.md"
sys.path.insert(0, str(ROOT / "tests"))

from support.exported_metrics import Exported, router_metrics, worker_metrics  # noqa: E402

INTRODUCTION = """\
# Metrics

What `--metrics-port` serves at `/metrics`, made by `scripts/metrics_page.py` from the code. How to read it is in
[operations.md](operations.md#metrics); `deploy/grafana/loraplex.json` is a dashboard of it and
`deploy/prometheus/alerts.yaml` has alerts.

Counters count since the process started. A histogram `x` is the series `x_bucket`, `x_sum` and `x_count`, a summary
the last two. Metrics by `adapter` and by `tenant` name the hundred that are used most; what the others do is
`(other)`, and requests without an adapter are `(base)`. A name that loses its place loses its series; rates stay right.
Where no completion came to its end, a router counts the prompt by an estimate: a token for four bytes.
"""
WORKER = "\n## Worker\n\n"
ROUTER = "\n## Router\n\n"
HTTP = """
## Router's HTTP port

The router's own, and these of all workers together, for endpoint pickers (`docs/http.md`; with `--metrics-names vllm`
under vLLM's names too):

"""


def table(metrics: dict[str, Exported]) -> str:
    rows = ["| metric | kind | labels | meaning |\n|---|---|---|---|\n"]
    for one in sorted(metrics.values(), key=lambda one: one.name):
        labels = ", ".join(f"`{label}`" for label in one.labels)
        rows.append(f"| `{one.name}` | {one.kind} | {labels} | {one.text} |\n")
    return "".join(rows)


def page() -> str:
    worker, router = worker_metrics(), router_metrics(with_http=False)
    http = {name: one for name, one in router_metrics().items() if name not in router}
    return INTRODUCTION + WORKER + table(worker) + ROUTER + table(router) + HTTP + table(http)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
