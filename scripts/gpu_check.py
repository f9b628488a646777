"""Tests and benchmarks on a machine with a GPU, without downloads.

Needs torch, triton, transformers, safetensors and numpy; uses pytest, peft, google-re2, llguidance and what servers
need where they are installed.

    python scripts/gpu_check.py tests [--out DIR]    # the tests of tests/gpu, in processes of their own
    python scripts/gpu_check.py bench [--out DIR]    # steps of Llama-3.1-8B's shape against the bars, and prompts
    python scripts/gpu_check.py bench --shape tiny --device cpu    # the same code, where there is no GPU
    python scripts/gpu_check.py launches [--out DIR] # LoRA's kernels by block sizes and warps, to tune them

Each takes at most --limit seconds (480), prints tables last, says what was left out, and writes tests.json,
bench.json or launches.json into DIR (benchmarks/out). Exit status: 0 when all is well, 1 when something failed or a bar
was missed, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [
    str(ROOT / name) for name in ("contracts", "proto", "runtime", "client", "router", "adapters", "server", "tests")
]
sys.path[:0] = FOLDERS

LIMIT_S = 480.0
RESERVE_S = 15.0  # of the limit, for what is left to do after the deadline
POLL_S = 0.1


@dataclass(frozen=True)
class Part:
    """The tests of a file that one process runs: every `num`th."""

    idx: int
    num: int

    def of(self, tests: list[Any]) -> list[Any]:
        return tests[self.idx :: self.num]


@dataclass
class FileReport:
    """One file of tests."""

    file: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    left_out: int = 0
    seconds: float = 0.0
    problem: str = ""  # of the file as a whole


@dataclass
class Child:
    """A part of a file that is being run."""

    report: FileReport
    process: subprocess.Popen[bytes]
    results: Path
    start_s: float = field(default_factory=time.monotonic)


def main() -> int:
    args = parse_args()
    if args.command == "run-file":
        return run_file(args.file, args.results, Part(args.part, args.num_parts))
    needs_gpu = args.device != "cpu" if args.command == "bench" else not getattr(args, "files", None)
    if needs_gpu and not has_gpu():
        print("no GPU here: torch.cuda.is_available() is false; nothing was checked", file=sys.stderr)
        return 2
    if args.command == "bench":
        return bench(args)
    if args.command == "launches":
        return launches(args)
    return tests(args.files or sorted((ROOT / "tests/gpu").glob("test_*.py")), args)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("tests", "bench", "launches"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=ROOT / "benchmarks/out", help="folder of the JSON file")
        command.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that it may take at most")
    num_jobs = max(1, min(16, os.cpu_count() or 1))  # most of the time kernels are compiled, by one thread each
    for name in ("tests", "launches"):
        commands.choices[name].add_argument("--jobs", type=int, default=num_jobs, help="processes at the same time")
    commands.choices["launches"].add_argument("--compile", type=int, nargs=2, help=argparse.SUPPRESS)
    commands.choices["tests"].add_argument("--parts", type=int, default=min(4, num_jobs), help="processes for one file")
    commands.choices["tests"].add_argument("--files", type=Path, nargs="+", help="other files of tests")
    commands.choices["bench"].add_argument("--shape", choices=("llama-8b", "tiny"), default="llama-8b")
    commands.choices["bench"].add_argument("--device", default="cuda")
    commands.choices["bench"].add_argument("--max-rank", type=int, help="of the server; its default otherwise")
    commands.choices["bench"].add_argument("--end", type=float, help=argparse.SUPPRESS)
    one = commands.add_parser("run-file")
    one.add_argument("file", type=Path)
    one.add_argument("results", type=Path)
    one.add_argument("part", type=int)
    one.add_argument("num_parts", type=int)
    return parser.parse_args()


# What takes seconds to import is imported where it is needed: this file is started once for every file of tests.


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def provide_bench() -> None:
    """Makes `gpu_bench` importable, and of its folder nothing else: Transformers looks for a package named `kernels`,
    which is there too."""
    if "gpu_bench" in sys.modules:
        return
    folder = ROOT / "benchmarks/gpu_bench"
    spec = spec_from_file_location("gpu_bench", folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    sys.modules["gpu_bench"] = module_from_spec(spec)


# --- bench ------------------------------------------------------------------------------------------------------------


def bench(args: argparse.Namespace) -> int:
    """Runs the benchmark in a process of its own and kills it at the limit: its file has what was measured by then."""
    if args.end is not None:
        return run_bench(args.shape, args.device, args.out, args.end - time.time() - RESERVE_S, args.max_rank)
    process = subprocess.Popen([sys.executable, *sys.argv, "--end", str(time.time() + args.limit)])
    try:
        return process.wait(args.limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        print(f"ended after {args.limit:.0f} s; {args.out} has what was measured by then", file=sys.stderr)
        return 1


def run_bench(shape: str, device: str, out: Path, limit_s: float, max_rank: int | None = None) -> int:
    provide_bench()
    import torch
    from gpu_bench.main import run

    return 0 if run(shape, torch.device(device), out, limit_s, max_rank) else 1


def launches(args: argparse.Namespace) -> int:
    provide_bench()
    from gpu_bench.launches import compile_some, run

    if args.compile is not None:
        compile_some(*args.compile)
        return 0
    return 0 if run(args.out, args.limit - RESERVE_S, args.jobs) else 1


# --- tests ------------------------------------------------------------------------------------------------------------


def tests(files: list[Path], args: argparse.Namespace) -> int:
    deadline_s = time.monotonic() + args.limit - RESERVE_S
    waiting = [(path, Part(idx, args.parts)) for path in files for idx in range(args.parts)]
    running: list[Child] = []
    reports = {path.name: FileReport(path.name) for path in files}
    failures: list[dict[str, str]] = []
    skips: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            is_late = time.monotonic() >= deadline_s
            while waiting and len(running) < args.jobs and not is_late:
                path, part = waiting.pop(0)
                running.append(start(path, part, reports[path.name], Path(folder)))
            if is_late:
                for path, _ in waiting:
                    reports[path.name].problem = "not begun in time"
                waiting = []
            for child in list(running):
                if is_late and child.process.poll() is None:
                    child.process.kill()
                    child.process.wait()
                    child.report.problem = "not done in time"
                if child.process.poll() is not None:
                    running.remove(child)
                    take(child, failures, skips)
                    print(f"{child.report.seconds:6.1f} s  {line_of(child.report)}", flush=True)
            time.sleep(POLL_S)
    tell(args.out, list(reports.values()), failures, skips)
    return 0 if all(not report.failed and not report.problem for report in reports.values()) else 1


def start(path: Path, part: Part, report: FileReport, folder: Path) -> Child:
    results = folder / f"{path.stem}-{part.idx}.jsonl"
    command = [sys.executable, str(Path(__file__).resolve()), "run-file", str(path), str(results)]
    command += [str(part.idx), str(part.num)]
    with results.with_suffix(".log").open("wb") as log:
        # Tests start processes of the packages, which need not be installed. Threads of its own for each process took
        # three times as long on 16 cores.
        paths = os.pathsep.join([*FOLDERS, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
    return Child(report, process, results)


def take(child: Child, failures: list[dict[str, str]], skips: Counter[str]) -> None:
    """Reads what a child has written, however it ended."""
    report = child.report
    report.seconds += time.monotonic() - child.start_s
    lines = child.results.read_text().splitlines() if child.results.exists() else []
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    results = [row for row in rows if "outcome" in row]
    counts = Counter(row["outcome"] for row in results)
    report.passed += counts["passed"]
    report.skipped += counts["skipped"]
    report.failed += counts["failed"]
    report.left_out += sum(len(row["collected"]) for row in rows if "collected" in row) - len(results)
    skips.update(row["text"] for row in results if row["outcome"] == "skipped")
    failures += [
        {"test": f"{report.file}::{row['name']}", "text": row["text"]} for row in results if row["outcome"] == "failed"
    ]
    is_broken = not rows or (child.process.returncode and not counts["failed"])
    if is_broken and not report.problem:
        log = child.results.with_suffix(".log").read_text(errors="replace")
        report.problem = f"ended with status {child.process.returncode}"
        failures.append({"test": report.file, "text": log[-6000:]})


def line_of(report: FileReport) -> str:
    counts = f"{report.passed} passed, {report.failed} failed, {report.skipped} skipped, {report.left_out} left out"
    return f"{report.file}: {counts}" + (f"; {report.problem}" if report.problem else "")


def tell(out: Path, reports: list[FileReport], failures: list[dict[str, str]], skips: Counter[str]) -> None:
    """Writes the report of the tests to a file, and prints it."""
    provide_bench()
    from gpu_bench.machine import describe
    from gpu_bench.report import table, write_json

    report: dict[str, Any] = {
        **describe("cuda" if has_gpu() else "cpu"),
        "runner": "pytest" if find_spec("pytest") else "built in",
        "files": [asdict(report) for report in reports],
        "failures": failures,
        "skips": dict(skips),
    }
    write_json(out, "tests.json", report)
    for failure in failures:
        print(f"\n--- {failure['test']}\n{failure['text'][-3000:]}")
    for reason, num in skips.items():
        print(f"skipped {num}: {reason}")
    columns = ("file", "passed", "failed", "skipped", "left out", "seconds", "")
    rows = [(r.file, r.passed, r.failed, r.skipped, r.left_out, r.seconds, r.problem) for r in reports]
    print(table("\nTests", columns, rows))


def run_file(path: Path, results: Path, part: Part) -> int:
    """Runs a part of one file in this process. Writes a line of JSON for every test as it ends: what is written stays,
    whatever follows."""
    has_failed = False
    with results.open("w", buffering=1) as file:

        def write(row: dict[str, Any]) -> None:
            nonlocal has_failed
            has_failed |= row.get("outcome") == "failed"
            file.write(json.dumps(row) + "\n")

        if find_spec("pytest") is not None:
            from support.recorded_pytest import run_file as with_pytest

            return with_pytest(path, part.of, write)
        from support import mini_pytest

        mini_pytest.install()
        collected: Callable[[list[str]], None] = lambda names: write({"collected": names})  # noqa: E731
        mini_pytest.run_file(path, part.of, collected, lambda result: write(asdict(result)))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
