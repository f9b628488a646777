"""Workloads that every system under comparison is given, as JSON files:

    [{"prompt_ids": [...], "max_tokens": 64, "adapter": 3 | null}, ...]        all arriving at once

in IN_DIR/workloads/NAME.json, beside IN_DIR/model (a Hugging Face checkpoint) and IN_DIR/adapters/* (PEFT directories,
the number in a request is the position in their sorted list).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkItem:
    prompt_ids: tuple[int, ...]
    max_tokens: int
    adapter_id: str  # "": the base model


def adapter_names(inputs: Path) -> list[str]:
    return [path.name for path in sorted((inputs / "adapters").iterdir())]


def read_workload(inputs: Path, name: str) -> list[WorkItem]:
    names = adapter_names(inputs)
    rows = json.loads((inputs / "workloads" / f"{name}.json").read_text())
    return [
        WorkItem(tuple(row["prompt_ids"]), row["max_tokens"], "" if row["adapter"] is None else names[row["adapter"]])
        for row in rows
    ]
