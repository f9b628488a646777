"""Comparison results as a JSON document, as tables and as plot data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from compare import OWN, OWN_OFF, PEFT, VLLM, VLLM_OFF, ratios
from systems import Latency

from loraplex.bench import percentile

FLOOR = "hardware floor"


def document(
    figures: Mapping[str, Mapping[str, Sequence[float]]],
    workloads: Sequence[str],
    floor: Mapping[str, float],
    machine: Mapping[str, object],
    latencies: Mapping[str, Mapping[str, Sequence[Latency]]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Plain data, for json."""
    found = ratios(figures, workloads)
    return {
        "machine": dict(machine),
        "workloads": list(workloads),
        "tokens_per_s": {
            system: {workload: [round(figure, 2) for figure in rounds] for workload, rounds in by_workload.items()}
            for system, by_workload in figures.items()
        },
        "floor": {workload: round(value, 1) for workload, value in floor.items()},
        "latency_ms": {
            system: {workload: _latency(requests) for workload, requests in by_workload.items()}
            for system, by_workload in latencies.items()
        },
        "ratios": [
            {
                "what": one.what,
                "value": round(one.value, 3),
                "spread": [round(one.least, 3), round(one.most, 3)],
                "to_reach": one.to_reach,
                "better": one.better,
                "reached": one.is_reached,
            }
            for one in found
        ],
    }


def _latency(requests: Sequence[Latency]) -> dict[str, list[float]]:
    """The median and the 99th percentile, in milliseconds."""
    ordered = {
        "first_token": sorted(one.first_token_s for one in requests),
        "per_token": sorted(one.per_token_s for one in requests),
    }
    return {
        name: [round(1000 * percentile(found, share), 1) for share in (0.5, 0.99)] for name, found in ordered.items()
    }


def medians(written: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """System -> workload -> tokens per second, out of a document."""
    return {
        system: {workload: statistics.median(rounds) for workload, rounds in by_workload.items()}
        for system, by_workload in written["tokens_per_s"].items()
    }


def ratio_lines(written: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for one in written["ratios"]:
        line = f"{one['what']}: {one['value']:.2f}x ({one['spread'][0]:.2f} to {one['spread'][1]:.2f})"
        if one["to_reach"] is not None:
            better = "" if one["better"] is None else f", better still {one['better']:g}"
            line += f", {'reached' if one['reached'] else 'MISSED'}: {one['to_reach']:g}{better}"
        lines.append(line)
    return lines


def markdown(written: Mapping[str, Any]) -> str:
    """Tokens per second of every system, and how Loraplex compares with the best set-up of vLLM for the workload."""
    found = medians(written)
    known = [name for name in (OWN, OWN_OFF, VLLM_OFF, VLLM, PEFT) if name in found]
    systems = [*known, *(name for name in found if name not in known)]
    has_ratio = VLLM in found or VLLM_OFF in found
    head = ["workload", *systems, *([FLOOR] if written["floor"] else []), *(["Loraplex / vLLM"] if has_ratio else [])]
    lines = [_row(head), _row(["---"] * len(head))]
    for workload in written["workloads"]:
        cells = [workload, *(_cell(found[system].get(workload)) for system in systems)]
        if written["floor"]:
            cells.append(_cell(written["floor"].get(workload)))
        if has_ratio:
            cells.append(_against_vllm(written, workload))
        lines.append(_row(cells))
    return "\n".join(lines) + "\n"


def latency_table(written: Mapping[str, Any]) -> str:
    """How soon requests were answered, for the systems that tell it; "" where none does."""
    found = written.get("latency_ms", {})
    if not found:
        return ""
    head = ["workload", "system", "first token, ms", "99th percentile", "each further token, ms", "99th percentile"]
    lines = [_row(head), _row(["---"] * len(head))]
    for workload in written["workloads"]:
        for system, by_workload in found.items():
            if (one := by_workload.get(workload)) is not None:
                lines.append(_row([workload, system, *map(_milliseconds, one["first_token"] + one["per_token"])]))
    return "\n".join(lines) + "\n"


def _against_vllm(written: Mapping[str, Any], workload: str) -> str:
    """Base workloads with LoRA off on both sides, the others with it on."""
    pair = f"{OWN_OFF} / {VLLM_OFF}" if workload.startswith("base-") else f"{OWN} / {VLLM}"
    for one in written["ratios"]:
        if one["what"] == f"{workload}: {pair}":
            return f"{one['value']:.2f}x ({one['spread'][0]:.2f} to {one['spread'][1]:.2f})"
    return ""


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
