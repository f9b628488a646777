"""GPU benchmark from beginning to end; results are written after every part."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from gpu_bench import kernels, peft_batch, profile, prompts
from gpu_bench.adapters import linears
from gpu_bench.deadline import Deadline
from gpu_bench.floors import adapter_bytes, weight_bytes
from gpu_bench.machine import describe, free_memory, read_bandwidth
from gpu_bench.report import table, write_json
from gpu_bench.shapes import SHAPES, Shape, make_model
from gpu_bench.stepper import DEFAULT_MAX_RANK, Stepper
from gpu_bench.steps import StepFigure, all_steps, check_bars
from loraplex_server.model.loader import adopt_model

FILE = "bench.json"


class Bench:
    """One run: what it has found so far, and how much time is left."""

    def __init__(self, shape: Shape, device: torch.device, out: Path, limit_s: float) -> None:
        self.shape = shape
        self.device = device
        self.out = out
        self.deadline = Deadline(limit_s)
        self.figures: list[StepFigure] = []
        self.report: dict[str, Any] = {
            **describe(str(device)),
            "shape": shape.name,
            "rank": shape.rank,
            "max_rank": shape.max_rank or DEFAULT_MAX_RANK,
            "context": shape.context,
            "prompts": [],
            "kernels": [],
            "profiles": {},
            "peft": None,
            "problems": [],
        }

    def say(self, text: str) -> None:
        print(f"[{self.deadline.used_s:5.0f} s] {text}", flush=True)

    def run(self) -> bool:
        """True when no bar was missed, and nothing went wrong."""
        self.say("read bandwidth")
        self.report["read_bytes_s"] = bandwidth = read_bandwidth(self.device)
        free_memory(self.device)
        self.say(f"{bandwidth / 1e9:.0f} GB/s; a random model of shape {self.shape.name}, on the device")
        stepper = _make_stepper(self.shape, self.device, self.say)
        self.report |= _describe_engine(stepper)
        try:
            self._measure(stepper, bandwidth)
        finally:
            stepper.close()
        del stepper
        free_memory(self.device)
        with self._part("PEFT's mixed batch"):
            self._measure_peft()
        self.save()
        print(text_of(self.report))
        return not self.report["problems"] and all(bar["is_reached"] is not False for bar in self.report["bars"])

    def save(self) -> None:
        self.report |= {
            "steps": [asdict(figure) for figure in self.figures],
            "bars": check_bars(self.figures),
            "left_out": self.deadline.left_out,
            "seconds": self.deadline.used_s,
        }
        write_json(self.out, FILE, self.report)

    @contextmanager
    def _part(self, what: str) -> Generator[None]:
        """Reports the failure of one part, so that the others keep their figures."""
        try:
            yield
        except Exception as error:
            self.say(f"{what}: {type(error).__name__}: {error}")
            self.report["problems"].append({"part": what, "text": traceback.format_exc()})

    def _measure(self, stepper: Stepper, bandwidth: float) -> None:
        with self._part("steps"):
            for figure in all_steps(stepper, bandwidth, self.deadline, self.say):
                self.figures.append(figure)
                self.save()
        with self._part("prompts"):
            for prompt in prompts.all_prompts(stepper, self.deadline, self.say):
                self.report["prompts"].append(asdict(prompt))
                self.save()
        with self._part("kernels"):
            for kernel in kernels.all_kernels(stepper, bandwidth, self.deadline, self.say):
                self.report["kernels"].append(asdict(kernel))
                self.save()
        with self._part("profile"):
            if self.deadline.allows("profile", profile.NEEDED_S):
                self.say("profile")
                found = profile.profiles(stepper)
                self.report["profiles"] = {name: [asdict(row) for row in rows] for name, rows in found.items()}

    def _measure_peft(self) -> None:
        if problem := peft_batch.problem():
            self.deadline.left_out.append(f"PEFT's mixed batch ({problem})")
        elif self.deadline.allows("PEFT's mixed batch", peft_batch.NEEDED_S):
            self.say("PEFT's mixed batch")
            self.report["peft"] = peft_batch.mixed_batch(self.shape, self.device)


def run(shape_name: str, device: torch.device, out: Path, limit_s: float, max_rank: int | None = None) -> bool:
    """Measures, prints and writes. True when all is well."""
    return Bench(replace(SHAPES[shape_name], max_rank=max_rank), device, out, limit_s).run()


def _make_stepper(shape: Shape, device: torch.device, say: Callable[[str], None]) -> Stepper:
    model = make_model(shape, device)
    loaded = adopt_model(model, model_id=shape.name, max_context_tokens=shape.max_context, verify=False)
    return Stepper(loaded, shape, say)


def _describe_engine(stepper: Stepper) -> dict[str, Any]:
    loaded = stepper.loaded
    backend = loaded.attention[0].backend
    ops = next(iter(linears(loaded).values())).ops
    return {
        "weight_bytes": weight_bytes(loaded),
        "adapter_bytes": adapter_bytes(loaded, stepper.shape.rank),
        "attention": backend.name if backend is not None else "",
        "lora": ops.name if ops is not None else "",
        "num_graphs": stepper.num_graphs,
    }


# --- in print ---------------------------------------------------------------------------------------------------------


def text_of(report: dict[str, Any]) -> str:
    machine = ", ".join(f"{name} {report[name]}" for name in ("device", "torch", "triton", "transformers"))
    parts = [
        f"\n{machine}\nshape {report['shape']}, rank {report['rank']} of at most {report['max_rank']}, context "
        f"{report['context']}, {report['read_bytes_s'] / 1e9:.0f} GB/s read, attention {report['attention']}, lora "
        f"{report['lora']}, {report['num_graphs']} CUDA graphs\n",
        _rows(
            "Steps (milliseconds; ratios of rounds in turns; batches and what is in them)",
            {
                "batch": "batch", "scenario": "scenario", "num_distinct": "adapters", "step_ms": "step",
                "min_ms": "min", "max_ms": "max", "ratio": "ratio", "floor_ms": "floor", "times_floor": "x floor",
            },
            report["steps"],
        ),
        _rows(
            "Prompts (milliseconds of a step, from graphs and launched one by one)",
            {
                "num_prompts": "prompts", "num_tokens": "tokens", "scenario": "scenario", "graph_ms": "graph",
                "eager_ms": "eager", "ratio": "ratio",
            },
            report["prompts"],
        ),
        _rows(
            "Kernels",
            {
                "kernel": "kernel", "case": "case", "calls": "calls", "total_us": "us", "gb_s": "GB/s",
                "of_bandwidth": "of bandwidth", "is_graph": "graph",
            },
            report["kernels"],
        ),
    ]  # fmt: skip
    for name, rows in report["profiles"].items():
        lines = [(row["kernel"][:90], row["calls"], row["us"]) for row in rows]
        parts.append(table(f"Profile: {name} (per step)", ("kernel", "calls", "us"), lines))
    if peft := report["peft"]:
        columns = {
            "batch": "batch",
            "base_ms": "Transformers",
            "unnamed_ms": "no adapter named",
            "distinct_ms": "distinct",
        }
        parts.append(_rows("PEFT (milliseconds per step)", columns, [peft]))
    parts.append(_bars(report["bars"]))
    if report["left_out"]:
        parts.append("Left out:\n" + "\n".join(f"  {what}" for what in report["left_out"]) + "\n")
    parts += [f"Problem: {problem['part']}\n{problem['text']}" for problem in report["problems"]]
    return "\n".join(parts)


def _rows(title: str, columns: dict[str, str], rows: list[dict[str, Any]]) -> str:
    return table(title, tuple(columns.values()), [[row[name] for name in columns] for row in rows])


def _bars(bars: list[dict[str, Any]]) -> str:
    words = {None: "not measured", True: "pass", False: "FAIL"}
    rows = [
        (
            bar["scenario"],
            bar["batch"] or "all",
            "floor" if bar["is_of_floor"] else "plain step",
            bar["found"],
            bar["limit"],
            bar["better"],
            words[bar["is_reached"]],
            "yes" if bar["is_better"] else "",
        )
        for bar in bars
    ]
    return table("Bars", ("scenario", "batch", "over", "found", "limit", "hoped", "", "as hoped"), rows)
