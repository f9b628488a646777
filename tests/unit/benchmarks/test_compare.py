"""Systems in turns, and their ratios."""

from __future__ import annotations

import json
from collections.abc import Callable
from xml.etree import ElementTree

import compare
import figures
import plot
import pytest
from compare import HTTP, MIXED, OWN, OWN_OFF, PEFT, VLLM, VLLM_OFF, WORKER, Comparison, ratios
from systems import Latency, Run


class Scripted:
    """A system that takes as long as it is told."""

    def __init__(self, name: str, seconds: Callable[[str], float], log: list[tuple[str, str]]) -> None:
        self.name = name
        self.versions: dict[str, str] = {}
        self._seconds = seconds
        self._log = log
        self.latencies: tuple[Latency, ...] = ()

    def run(self, workload: str) -> Run:
        self._log.append((self.name, workload))
        return Run(self._seconds(workload), 100, self.latencies)

    def close(self) -> None:
        pass


def compared(names: list[str], workloads: list[str], num_rounds: int = 2, **more: int) -> tuple[Comparison, list[str]]:
    log: list[tuple[str, str]] = []
    systems = [Scripted(name, lambda workload: 2.0, log) for name in names]
    comparison = Comparison(systems, workloads, num_rounds, more, pause_s=0.0)
    told: list[tuple[str, str]] = []
    comparison.run(lambda system, workload, run: told.append((system, workload)) if run else None)
    assert told == log[len(log) - len(told) :], "the first round is not counted"
    return comparison, [f"{system} {workload}" for system, workload in log]


def test_everybody_runs_in_every_round_and_goes_first_in_turn() -> None:
    comparison, log = compared(["a", "b", "c"], ["distinct-8"])
    assert log == [f"{name} distinct-8" for name in "abc" + "bca" + "cab"]
    assert comparison.figures == {name: {"distinct-8": [50.0, 50.0]} for name in "abc"}


def test_nobody_is_asked_for_what_it_does_not_serve() -> None:
    comparison, _ = compared([OWN, OWN_OFF, VLLM, VLLM_OFF, PEFT, MIXED], ["base-8", "distinct-8", "skewed-8"])
    assert {name: list(by) for name, by in comparison.figures.items()} == {
        OWN: ["base-8", "distinct-8", "skewed-8"],
        OWN_OFF: ["base-8"],
        VLLM: ["base-8", "distinct-8", "skewed-8"],
        VLLM_OFF: ["base-8"],
        PEFT: ["distinct-8", "skewed-8"],
        MIXED: ["distinct-8"],
    }


def test_slow_systems_may_take_part_in_fewer_rounds() -> None:
    comparison, log = compared([OWN, PEFT], ["distinct-8"], 3, PEFT=1)
    assert log.count("PEFT distinct-8") == 2, "warming up, and once"
    assert len(comparison.figures[OWN]["distinct-8"]) == 3


FIGURES = {
    OWN: {"base-32": [98.0, 99.0, 90.0], "distinct-32": [70.0, 90.0, 80.0]},
    OWN_OFF: {"base-32": [100.0, 100.0, 100.0]},
    VLLM: {"distinct-32": [20.0, 20.0, 40.0]},
    VLLM_OFF: {"base-32": [120.0, 100.0, 110.0]},
    PEFT: {"distinct-32": [10.0]},
    WORKER: {"distinct-32": [70.0, 60.0, 80.0]},
}


def test_ratios() -> None:
    found = {one.what: one for one in ratios(FIGURES, ["base-32", "distinct-32"])}
    vllm = found[f"distinct-32: {OWN} / {VLLM}"]
    assert (vllm.value, vllm.least, vllm.most) == pytest.approx((4.0, 2.0, 4.5))
    assert (vllm.to_reach, vllm.better, vllm.is_reached) == (3.0, 3.6, True)
    base = found[f"base-32: {OWN_OFF} / {VLLM_OFF}"]
    assert base.value == pytest.approx(100 / 110)
    assert base.is_reached is False
    no_adapters = found[f"distinct-32: {OWN} / {VLLM_OFF} on base-32"]
    assert no_adapters.value == pytest.approx(80 / 110)
    assert no_adapters.is_reached
    peft = found[f"distinct-32: {OWN} / {PEFT}"]
    assert (peft.value, peft.least, peft.most) == (7.0, 7.0, 7.0), "of the round in which both took part"
    assert (peft.to_reach, peft.is_reached) == (None, None)
    assert found[f"base-32: {OWN} / {OWN_OFF}"].value == pytest.approx(0.98)
    assert found[f"distinct-32: {WORKER} / {OWN}"].value == pytest.approx(0.875)
    assert len(found) == 6, "and no ratio with what was not measured"


def test_the_document_carries_everything_and_its_tables() -> None:
    workloads = ["base-32", "distinct-32"]
    written = figures.document(FIGURES, workloads, {"base-32": 200.0, "distinct-32": 160.0}, {"threads": 2})
    assert json.loads(json.dumps(written)) == written
    lines = figures.ratio_lines(written)
    assert f"distinct-32: {OWN} / {VLLM}: 4.00x (2.00 to 4.50), reached: 3, better still 3.6" in lines
    assert any("MISSED: 1, better still 1.1" in line for line in lines)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in figures.markdown(written).splitlines()]
    assert rows[0] == [
        "workload", OWN, OWN_OFF, VLLM_OFF, VLLM, PEFT, WORKER, "hardware floor", "Loraplex / vLLM",
    ]  # fmt: skip
    assert rows[2] == ["base-32", "98", "100", "110", "", "", "", "200", "0.91x (0.83 to 1.00)"]
    assert rows[3] == ["distinct-32", "80", "", "", "20", "10", "70", "160", "4.00x (2.00 to 4.50)"]


def test_how_soon_requests_were_answered() -> None:
    latencies = {HTTP: {"arrivals-64": [Latency(ms / 1e3, 0.01) for ms in range(1, 201)]}}
    written = figures.document({HTTP: {"arrivals-64": [1.0]}}, ["arrivals-64"], {}, {}, latencies)
    assert figures.latency_table(written).splitlines()[2] == f"| arrivals-64 | {HTTP} | 100 | 198 | 10 | 10 |"
    assert figures.latency_table(figures.document({}, [], {}, {})) == ""


def test_latencies_of_all_counted_rounds_are_kept() -> None:
    system = Scripted(HTTP, lambda _: 1.0, [])
    system.latencies = (Latency(0.1, 0.01), Latency(0.2, 0.01))
    comparison = Comparison([system], ["arrivals-64"], num_rounds=2, pause_s=0)
    comparison.run(lambda *_: None)
    assert len(comparison.latencies[HTTP]["arrivals-64"]) == 4


def test_without_peers_there_is_no_column_for_them() -> None:
    written = figures.document({OWN: {"base-1": [1.0]}}, ["base-1"], {}, {})
    assert figures.markdown(written).splitlines() == ["| workload | loraplex |", "| --- | --- |", "| base-1 | 1 |"]


def bars_of(text: str) -> list[tuple[str, float]]:
    """Title and height of each bar."""
    space = "{http://www.w3.org/2000/svg}"
    bars = [
        rect for rect in ElementTree.fromstring(text).iter(f"{space}rect") if rect.find(f"{space}title") is not None
    ]
    return [(rect.findtext(f"{space}title") or "", float(rect.attrib["height"])) for rect in bars]


def test_the_plot_is_to_scale() -> None:
    medians = {"a & b": {"base-1": 50.0, "base-8": 25.0}, "c": {"base-8": 100.0}}
    text = plot.svg("<t>", ["base-1", "base-8"], medians, {"base-1": 100.0, "base-8": 100.0})
    assert bars_of(text) == [
        ("a & b, base-1: 50.0 tokens/s", plot.HEIGHT / 2),
        ("a & b, base-8: 25.0 tokens/s", plot.HEIGHT / 4),
        ("c, base-8: 100.0 tokens/s", plot.HEIGHT),
    ]
    assert "floor of the hardware" in text


def test_what_is_above_the_floor_is_shown_above_it() -> None:
    text = plot.svg("t", ["x-1"], {"a": {"x-1": 200.0}, "b": {"x-1": 100.0}}, {"x-1": 100.0})
    assert [height for _, height in bars_of(text)] == [plot.HEIGHT, plot.HEIGHT / 2]
    assert f'y1="{plot.TOP + plot.HEIGHT / 2:.1f}"' in text, "where the floor is"


def test_there_may_be_more_systems_than_colours() -> None:
    many = {f"s{n}": {"x-1": 1.0} for n in range(20)}
    assert len(bars_of(plot.svg("t", ["x-1"], many, {}))) == 20


def test_without_a_floor_the_fastest_is_the_whole() -> None:
    text = plot.svg("t", ["x-1"], {"a": {"x-1": 10.0}, "b": {"x-1": 40.0}}, {})
    assert [height for _, height in bars_of(text)] == [plot.HEIGHT / 4, plot.HEIGHT]
    assert "floor of the hardware" not in text


def test_every_goal_is_of_a_workload_that_is_made() -> None:
    from workloads import BATCHES, KINDS

    made = {f"{kind}-{batch}" for kind in KINDS for batch in BATCHES}
    assert compare._AGAINST_VLLM.keys() <= made
