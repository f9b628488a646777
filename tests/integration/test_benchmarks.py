"""Benchmarks as commands, on a model too small for meaningful figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.native_kernels import library_or_skip

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("benchmarks") / "inputs"
    run("serving.py", "make", str(out), "--shape", "tiny", "--adapters", "32", "--prompt", "6", "--output", "4")
    return out


def test_serving_in_process(inputs: Path) -> None:
    rows = lines(run("serving.py", str(inputs), "base-1", "distinct-8", "--repeat", "1", "--flags", "--threads 1"))
    assert [(row["workload"], row["tokens"]) for row in rows] == [("base-1", 4), ("distinct-8", 32)]
    (row,) = lines(run("serving.py", "run", str(inputs), "base-8", "--repeat", "1", "--lora-off"))
    assert row["system"] == "loraplex-lora-off"


def test_serving_compared(inputs: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"x.{name}" for name in ("json", "table", "plot")}
    flags = [part for name, path in files.items() for part in (f"--{name}", str(path))]
    ways = ("--through", "engine", "worker", "router", "--peft-python", sys.executable)
    out = run("serving.py", "compare", str(inputs), "base-8", "distinct-8", "--rounds", "1", *ways, *flags)
    written = json.loads(files["json"].read_text())
    assert {name: list(by) for name, by in written["tokens_per_s"].items()} == {
        "loraplex": ["base-8", "distinct-8"],
        "loraplex, LoRA off": ["base-8"],
        "loraplex, mixed ranks": ["distinct-8"],
        "loraplex worker": ["base-8", "distinct-8"],
        "loraplex router": ["base-8", "distinct-8"],
        "PEFT": ["distinct-8"],
    }
    assert all(figure > 0 for by in written["tokens_per_s"].values() for rounds in by.values() for figure in rounds)
    assert written["floor"].keys() == {"base-8", "distinct-8"}
    assert written["machine"]["versions"].keys() >= {"loraplex", "torch", "peft"}
    assert "distinct-8: loraplex / PEFT: " in out
    assert files["table"].read_text() in out
    assert files["plot"].read_text().startswith("<svg")
    assert run("serving.py", "show", str(files["json"])).endswith(files["table"].read_text() + "\n")


def test_serving_open_loop(inputs: Path) -> None:
    (row,) = lines(
        run("serving.py", "open", str(inputs), "--rate", "20", "--seconds", "1", "--popularity", "zipf:1",
            "--adapters", "12", "--slots", "4", "--prompt", "4-8", "--output", "4", "--router")
    )  # fmt: skip
    assert row["completed"] == row["scheduled"] > 5
    assert row["failed"] == 0
    assert row["cold_ttft_s"]["count"] >= 4
    assert (row["load"]["num_adapters"], row["slots"], row["server"]["role"]) == (12, 4, "router")


def test_memory() -> None:
    sizes = ("--shape", "tiny", "--adapters", "30", "--requests", "30", "--prompt", "4", "--output", "3")
    budgets = ("--device-memory", "128KiB", "--host-memory", "256KiB", "--in-flight", "4", "--rounds", "1")
    memory, throughput = lines(run("memory.py", *sizes, *budgets))
    assert (memory["what"], memory["adapters"], memory["allowed_mib"]) == ("memory", 30, 100)
    assert memory["reached"], memory
    assert throughput["ratio"] > 0
    assert throughput["reached"] == (throughput["ratio"] >= 0.8)


def test_rounding(inputs: Path) -> None:
    library_or_skip()
    (row,) = lines(run("rounding.py", str(inputs / "model")))
    assert 0 < row["rounded"]["logits_apart"] < 0.1
    assert 0 <= row["float32"]["divergence_nats"]
    (row,) = lines(run("rounding.py", "demo", "--cases", "4"))
    assert row["right"]["json"].keys() == {"as_it_is", "rounded"}
    assert row["rounded"]["same_token"] > 0.9


@pytest.mark.nightly
def test_engines_that_take_turns(inputs: Path) -> None:
    for what, workloads in (("unused", ["base-8"]), ("ranks", ["distinct-1", "distinct-8"])):
        rows = lines(run("paired.py", str(inputs), what, *workloads, "--output", "5", "--rounds", "1"))
        assert [(row["case"], row["workload"]) for row in rows] == [(what, workload) for workload in workloads]
        assert all(row["ratio"] > 0 and min(row["median_step_ms"]) > 0 for row in rows)
    (row,) = lines(run("speculation_paired.py", str(inputs), "--proposers", "lookup", "--batch", "2", "--output", "6"))
    assert (row["case"], row["batch"]) == ("lookup", 2)
    assert row["ratio"] > 0


@pytest.mark.nightly
def test_hybrids() -> None:
    sizes = ("--shape", "tiny", "--batch", "2", "--adapters", "0", "2", "--prompt", "6", "--rounds", "1")
    rows = lines(run("hybrids.py", "compare", *sizes, "--output", "4"))
    assert [(row["case"], row["adapters"]) for row in rows] == [("tiny-2", 0), ("tiny-2", 2)]
    assert all(row["equal_tokens"] > 0 and min(row["ratios"]) > 0 for row in rows)
    rows = lines(run("hybrids.py", "profile", *sizes, "--output", "12"))
    assert all(row["median_step_ms"] > 0 and row["operations_ms"] for row in rows)


@pytest.mark.nightly
def test_grammars(inputs: Path) -> None:
    flags = ["--device", "cpu", "--kv-memory", "64MiB", "--threads", "1"]
    sizes = ["--rows", "4", "--grammar-rows", "2", "--steps", "4", "--rounds", "1"]
    rows = lines(run("grammars.py", str(inputs / "model"), *sizes, *flags))
    assert [row["measured"] for row in rows] == ["step", "first token"]


def test_cost_of_routers() -> None:
    few = ("--streams", "4", "--seconds", "0.5", "--rounds", "1", "--requests", "4")
    rows = lines(run("router.py", *few, "--routers", "2", "--members", "3", "--adapters", "--in-step"))
    assert [row["case"] for row in rows] == ["cpu of idle routers", "cpu by message", "time to first token"]
    assert rows[1]["us"] > 0
    assert len(rows[1]["shares"]) == 2


@pytest.mark.nightly
def test_affinity() -> None:
    rows = lines(run("affinity.py", "--adapters", "20", "--warm", "1", "--seconds", "2"))
    assert [row["policy"] for row in rows] == ["loraplex", "round robin", "least loaded"]
    assert len({row["requests"] for row in rows}) == 1
