"""The benchmark from beginning to end: what is most wanted first, a file after every part, and what was left out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpu_bench import kernels, peft_batch, profile
from gpu_bench.adapters import linears
from gpu_bench.deadline import Deadline
from gpu_bench.floors import adapter_bytes, weight_bytes
from gpu_bench.machine import describe, read_bandwidth
from gpu_bench.report import table, write_json
from gpu_bench.shapes import SHAPES, Shape, make_model
from gpu_bench.stepper import Stepper
from gpu_bench.steps import StepFigure, all_steps, check_bars
from loraplex_server.model.loader import adopt_model

FILE = "bench.json"


def run(shape_name: str, device: torch.device, out: Path, limit_s: float) -> bool:
    """Measures, prints and writes. True when no bar was missed."""
    deadline = Deadline(limit_s)

    def say(text: str) -> None:
        print(f"[{deadline.used_s:5.0f} s] {text}", flush=True)

    shape = SHAPES[shape_name]
    report: dict[str, Any] = {
        "shape": shape.name,
        "rank": shape.rank,
        "context": shape.context,
        **describe(str(device)),
    }
    say("read bandwidth")
    bandwidth = read_bandwidth(device)
    report["read_bytes_s"] = bandwidth
    say(f"{bandwidth / 1e9:.0f} GB/s; a random model of shape {shape.name}, on the device")
    stepper = _make_stepper(shape, device, say)
    report |= _describe_engine(stepper)
    try:
        figures = all_steps(stepper, bandwidth, deadline, say)
        report |= {"steps": [asdict(figure) for figure in figures], "bars": check_bars(figures)}
        write_json(out, FILE, report)
        _measure_parts(stepper, bandwidth, deadline, say, report, lambda: write_json(out, FILE, report))
    finally:
        stepper.close()
    del stepper
    gc.collect()
    _measure_peft(shape, device, deadline, say, report)
    report |= {"left_out": deadline.left_out, "seconds": deadline.used_s}
    write_json(out, FILE, report)
    print(text_of(report, figures))
    return all(bar["is_reached"] is not False for bar in report["bars"])


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


def _measure_parts(
    stepper: Stepper,
    bandwidth: float,
    deadline: Deadline,
    say: Callable[[str], None],
    report: dict[str, Any],
    save: Callable[[], None],
) -> None:
    report["kernels"] = [asdict(figure) for figure in kernels.all_kernels(stepper, bandwidth, deadline, say)]
    save()
    report["profiles"] = {}
    if deadline.allows("profile", profile.NEEDED_S):
        say("profile")
        report["profiles"] = {name: [asdict(row) for row in rows] for name, rows in profile.profiles(stepper).items()}
    save()


def _measure_peft(
    shape: Shape, device: torch.device, deadline: Deadline, say: Callable[[str], None], report: dict[str, Any]
) -> None:
    report["peft"] = None
    if problem := peft_batch.problem():
        deadline.left_out.append(f"PEFT's mixed batch ({problem})")
    elif deadline.allows("PEFT's mixed batch", peft_batch.NEEDED_S):
        say("PEFT's mixed batch")
        report["peft"] = peft_batch.mixed_batch(shape, device)


def text_of(report: dict[str, Any], figures: Sequence[StepFigure]) -> str:
    machine = ", ".join(f"{name} {report[name]}" for name in ("device", "torch", "triton", "transformers"))
    parts = [
        f"\n{machine}\nshape {report['shape']}, rank {report['rank']}, context {report['context']}, "
        f"{report['read_bytes_s'] / 1e9:.0f} GB/s read, attention {report['attention']}, lora {report['lora']}, "
        f"{report['num_graphs']} CUDA graphs\n",
        table(
            "Steps (milliseconds; ratios of rounds in turns)",
            ("batch", "scenario", "adapters", "step", "min", "max", "ratio", "floor", "x floor"),
            [
                (f.batch, f.scenario, f.num_distinct, f.step_ms, f.min_ms, f.max_ms, f.ratio, f.floor_ms,
                 f.times_floor)
                for f in figures
            ],
        ),
        table(
            "Kernels",
            ("kernel", "case", "calls", "us", "GB/s", "of bandwidth", "graph"),
            [
                (k["kernel"], k["case"], k["calls"], k["total_us"], k["gb_s"], k["of_bandwidth"], k["is_graph"])
                for k in report["kernels"]
            ],
        ),
    ]  # fmt: skip
    for name, rows in report["profiles"].items():
        lines = [(row["kernel"][:90], row["calls"], row["us"]) for row in rows]
        parts.append(table(f"Profile: {name} (per step)", ("kernel", "calls", "us"), lines))
    if peft := report["peft"]:
        lines = [(peft["batch"], peft["base_ms"], peft["distinct_ms"])]
        parts.append(table("PEFT (milliseconds per step)", ("batch", "base", "distinct"), lines))
    bars = [
        (bar["scenario"], bar["batch"], "floor" if bar["is_of_floor"] else "plain step", bar["found"], bar["limit"],
         bar["better"], {None: "not measured", True: "pass", False: "FAIL"}[bar["is_reached"]],
         "yes" if bar["is_better"] else "")
        for bar in report["bars"]
    ]  # fmt: skip
    parts.append(table("Bars", ("scenario", "batch", "over", "found", "limit", "hoped", "", "as hoped"), bars))
    if report["left_out"]:
        parts.append("Left out:\n" + "\n".join(f"  {what}" for what in report["left_out"]) + "\n")
    return "\n".join(parts)
