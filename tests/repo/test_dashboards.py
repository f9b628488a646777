"""The dashboard and the alert rules: their queries against the metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.exported_metrics import Exported, router_metrics, worker_metrics

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/grafana/loraplex.json"
RULES = ROOT / "deploy/prometheus/alerts.yaml"
PROMTOOL = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)")

# Prometheus' own, of every target that it scrapes.
OF_PROMETHEUS = {"up": {"job", "instance"}}
OF_TARGETS = {"job", "instance", "le"}
_METRIC = re.compile(r"\b(?:loraplex:|process_|up\b)[a-z0-9_:]*")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def queries() -> list[tuple[str, str]]:
    """The place of each query, and its expression."""
    shown = [(panel["title"], target["expr"]) for panel in panels() for target in panel["targets"]]
    return shown + [(rule["alert"], rule["expr"]) for rule in rules()]


def known() -> dict[str, set[str]]:
    """Labels by the name of a series."""
    found = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    metrics: list[Exported] = [*worker_metrics().values(), *router_metrics().values()]
    for metric in metrics:
        for series in metric.series:
            found.setdefault(series, set()).update(metric.labels, OF_TARGETS)
    return found


def labels_in(query: str) -> set[str]:
    """Labels that a query groups, joins or selects by."""
    lists = re.findall(r"\b(?:by|on|without|group_left|group_right) ?\(([^)]*)\)", query)
    named = {label.strip() for one in lists for label in one.split(",")}
    return named | set(re.findall(r"([a-z_]+) ?(?:=~|!~|!=|=)\"?", re.sub(r"==", "", query)))


@pytest.mark.parametrize(("place", "query"), queries())
def test_metrics_and_labels_of_a_query_are_exported(place: str, query: str) -> None:
    series = known()
    used = set(_METRIC.findall(query))
    assert used, query
    assert used <= set(series), f"{place}: nothing exports {used - set(series)}"
    labels = set().union(*(series[name] for name in used))
    assert labels_in(query) <= labels, f"{place}: {labels_in(query) - labels} are no labels of {used}"


def test_a_wrong_name_would_be_noticed() -> None:
    assert "loraplex:step_seconds" not in known()  # a histogram has no such series
    assert labels_in('sum by (le, nowhere) (rate(x_bucket{code=~"a|b"}[5m])) == 0') == {"le", "nowhere", "code"}


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in panels():
        for target in panel["targets"]:
            wanted = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            kept = labels_in(target["expr"]) | (OF_TARGETS if not re.search(r"\bby\b", target["expr"]) else set())
            assert wanted <= kept, panel["title"]


def test_panels_do_not_overlap() -> None:
    taken = set[tuple[int, int]]()
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_every_metric_of_our_own_is_documented() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    assert all(f"`{name}`" in page for name in (*worker_metrics(), *router_metrics()))


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    cases = yaml.safe_load((RULES.parent / "alerts_test.yaml").read_text())["tests"]
    fired = {one["alertname"] for case in cases for one in case["alert_rule_test"] if one["exp_alerts"]}
    assert {rule["alert"] for rule in rules()} == fired


@PROMTOOL
def test_the_rules_are_valid_and_fire() -> None:
    for arguments in (["check", "rules", RULES.name], ["test", "rules", "alerts_test.yaml"]):
        said = subprocess.run(["promtool", *arguments], cwd=RULES.parent, capture_output=True, text=True, timeout=60)
        assert said.returncode == 0, said.stdout + said.stderr


@PROMTOOL
def test_queries_of_the_dashboard_are_promql(tmp_path: Path) -> None:
    alerts = {rule["alert"] for rule in rules()}
    shown = [query.replace("$__rate_interval", "1m") for place, query in queries() if place not in alerts]
    recorded = [{"record": f"x:{number}", "expr": query} for number, query in enumerate(shown)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": recorded}]}))
    said = subprocess.run(
        ["promtool", "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert said.returncode == 0, said.stdout + said.stderr
