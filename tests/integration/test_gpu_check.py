"""scripts/gpu_check.py on the CPU, with only the packages that it needs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.as_on_cuda import build_as_on_cuda
from support.backends import PatchedBackend, ReferenceFused
from support.replay import calls_again

ROOT = Path(__file__).resolve().parents[2]
# What a machine with a GPU need not have.
MISSING = (
    "accelerate", "click", "google", "grpc", "grpc_health", "grpc_reflection", "grpc_status", "hypothesis", "jinja2",
    "peft", "prometheus_client", "psutil", "pytest", "rich", "typer",
)  # fmt: skip

SAMPLE = """
import pytest

LOG = []

@pytest.fixture(scope="module")
def shared():
    LOG.append("made")
    yield len(LOG)
    LOG.append("ended")

@pytest.fixture(autouse=True)
def around(request):
    LOG.append(request.node.name)
    yield

@pytest.fixture(params=["x", "y"])
def letter(request):
    return request.param

@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize(("a", "c"), [(1, 2), (3, 4)])
def test_products(a, b, c, shared):
    assert a * b < 6
    assert LOG.count("made") == 1

def test_letters(letter, shared, tmp_path):
    (tmp_path / letter).write_text(letter)
    assert letter == "x"

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="never here")
def test_skipped():
    raise AssertionError

def test_skips_itself():
    pytest.importorskip("a_package_that_nobody_has", reason="nobody has it")

def test_raises(monkeypatch):
    monkeypatch.setattr(pytest, "approx", pytest.approx)
    with pytest.raises(ValueError, match="abc"):
        raise ValueError("xabcx")
    assert 0.1 + 0.2 == pytest.approx(0.3)
    assert [0.1 + 0.2, 1] == pytest.approx([0.3, 1])

@pytest.mark.timeout(100)
def test_last():
    assert "ended" not in LOG
"""
OUTCOMES = {"passed": 6, "failed": 2, "skipped": 2}


def gpu_check(
    *arguments: str, out: Path, missing: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs the script in an environment without some packages; returns what it wrote too."""
    site = out / "site"
    site.mkdir(parents=True)
    # As Python finds it where there is none, in processes that the script starts as well.
    (site / "sitecustomize.py").write_text(f"import sys\nfor name in {missing!r}:\n    sys.modules[name] = None\n")
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "scripts/gpu_check.py"), *arguments, "--out", str(out)]
    run = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=110)
    written = list(out.glob("*.json"))
    assert len(written) <= 1
    return run, json.loads(written[0].read_text()) if written else {}


@pytest.mark.slow
def test_the_benchmark_on_a_cpu(tmp_path: Path) -> None:
    run, report = gpu_check("bench", "--shape", "tiny", "--device", "cpu", out=tmp_path, missing=MISSING)
    assert run.returncode in (0, 1), run.stderr
    assert report, run.stdout + run.stderr
    by_batch = {batch: {row["scenario"] for row in report["steps"] if row["batch"] == batch} for batch in (8, 2)}
    every = {"base", "unused", "identical", "uniform", "skewed", "distinct"}
    assert by_batch == {8: every, 2: every | {"verification", "verification, distinct"}}
    assert all(row["step_ms"] > 0 and row["floor_ms"] > 0 for row in report["steps"])
    assert {row["num_distinct"] for row in report["steps"]} >= {0, 1, 2, 8}
    assert {row["kernel"].partition(" ")[0] for row in report["kernels"]} == {
        "lora", "attention", "base", "medusa", "sampling",
    }  # fmt: skip
    assert all(row["gb_s"] > 0 for row in report["kernels"])
    barred = {"base", "unused", "identical", "distinct", "verification", "verification, distinct"}
    assert {bar["scenario"] for bar in report["bars"]} == barred
    assert any("peft" in what for what in report["left_out"])
    assert len(report["profiles"]) == 2
    assert report["problems"] == []
    for title in ("Steps", "Kernels", "Profile", "Bars", "Left out"):
        assert title in run.stdout
    assert all(bar["is_reached"] is not False for bar in report["bars"]) == (run.returncode == 0)


def test_what_there_is_no_time_for_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    check = importlib.import_module("gpu_check")
    assert check.run_bench("tiny", "cpu", tmp_path, limit_s=0.0) == 0  # no bar was missed
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["steps"] == report["prompts"] == report["kernels"] == []
    assert all(bar["is_reached"] is None for bar in report["bars"])
    assert any("decode steps at batch 8" in what for what in report["left_out"])
    assert any("PEFT" in what for what in report["left_out"])


@pytest.mark.parametrize(
    "missing", [pytest.param((), id="pytest", marks=pytest.mark.slow), pytest.param(MISSING, id="built in")]
)
def test_tests_with_and_without_pytest(tmp_path: Path, missing: tuple[str, ...]) -> None:
    sample = tmp_path / "test_sample.py"
    sample.write_text(SAMPLE)
    broken = tmp_path / "test_broken.py"
    broken.write_text("import os\nos._exit(7)\n")
    options = ("--jobs", "2", "--parts", "1" if missing else "2")
    run, report = gpu_check(
        "tests", "--files", str(sample), str(broken), *options, out=tmp_path / "out", missing=missing
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert report["runner"] == ("built in" if missing else "pytest")
    found = {row["file"]: row for row in report["files"]}
    assert {name: found["test_sample.py"][name] for name in OUTCOMES} == OUTCOMES
    assert "status 7" in found["test_broken.py"]["problem"]
    assert report["skips"] == {"never here": 1, "nobody has it": 1}
    assert {failure["test"].partition("[")[0] for failure in report["failures"]} == {
        "test_sample.py::test_products", "test_sample.py::test_letters", "test_broken.py",
    }  # fmt: skip


@pytest.mark.slow
def test_the_benchmark_as_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark runs on a CPU with graphs that stand-ins replay, and with steps that overlap."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    importlib.import_module("gpu_check").provide_bench()
    main = importlib.import_module("gpu_bench.main")
    build_as_on_cuda(monkeypatch)
    monkeypatch.setattr(
        main,
        "adopt_model",
        partial(main.adopt_model, backend=PatchedBackend(merges=True, fused=ReferenceFused(), capture=calls_again)),
    )
    main.run("tiny", torch.device("cpu"), tmp_path, limit_s=100.0, max_rank=8)
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["problems"] == []
    assert report["num_graphs"] > 10
    assert report["max_rank"] == 8
    prompts = [(row["num_prompts"], row["num_tokens"], row["scenario"]) for row in report["prompts"]]
    assert prompts == [(num, size, name) for num, size in ((1, 24), (2, 20)) for name in ("base", "adapter")]
    assert any("reserved" in row["kernel"] for row in report["kernels"])
    of_base = {row["case"]: row["calls"] for row in report["kernels"] if row["kernel"] == "base product"}
    sizes = ("64->64+32+32", "64->64", "64->128+128", "128->64")
    assert of_base == {f"{found}, batch 2": 2 for found in sizes}, "a layer is four products"
    assert len(report["steps"]) == 14


def test_what_goes_wrong_in_one_part_takes_no_other_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    importlib.import_module("gpu_check").provide_bench()
    main = importlib.import_module("gpu_bench.main")

    def lost(*args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(main.kernels, "all_kernels", lost)
    assert not main.run("tiny", torch.device("cpu"), tmp_path, limit_s=0.0)
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [problem["part"] for problem in report["problems"]] == ["kernels"]
    assert "illegal memory access" in report["problems"][0]["text"]
    assert any("profile" in what for what in report["left_out"])


COLLECT = """
import json, sys
from pathlib import Path
from support import mini_pytest
mini_pytest.install()
print(json.dumps({path.name: len(mini_pytest.collect(path)) for path in map(Path, sys.argv[1:])}))
"""


@pytest.mark.slow
def test_the_tests_for_a_gpu_are_the_same_without_pytest() -> None:
    files = sorted((ROOT / "tests/gpu").glob("test_*.py"))
    without = subprocess.run(
        [sys.executable, "-c", COLLECT, *map(str, files)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        check=True,
        capture_output=True,
        text=True,
    )
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", "gpu", "-p", "no:cacheprovider", *files]
    lines = subprocess.run(collect, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [line.rpartition("/")[2].split(": ") for line in lines if ".py: " in line]
    assert json.loads(without.stdout) == {name: int(num) for name, num in found}


@pytest.mark.slow
def test_a_file_that_hangs_is_ended(tmp_path: Path) -> None:
    hanging = tmp_path / "test_hanging.py"
    hanging.write_text("import time\ndef test_a(): pass\ndef test_b(): time.sleep(600)\ndef test_c(): pass\n")
    run, report = gpu_check("tests", "--files", str(hanging), "--limit", "27", "--parts", "1", out=tmp_path / "out")
    assert run.returncode == 1, run.stdout + run.stderr
    (row,) = report["files"]
    assert (row["passed"], row["left_out"], row["problem"]) == (1, 2, "not done in time")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_claimed(tmp_path: Path) -> None:
    run, report = gpu_check("tests", out=tmp_path)
    assert run.returncode == 2
    assert "no GPU here" in run.stderr
    assert report == {}
