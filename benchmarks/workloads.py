"""Workloads that every system under comparison is given, as JSON files:

    [{"prompt_ids": [...], "max_tokens": 64, "adapter": 3 | null}, ...]        all arriving at once
    [{..., "arrival_s": 0.25}, ...]                                            each so long after the start, in order
    [{..., "sampling": {"temperature": 0.8, "top_p": 0.9, "seed": 0}}, ...]    drawn; greedy without it

in IN_DIR/workloads/NAME.json, beside IN_DIR/model (a Hugging Face checkpoint) and IN_DIR/adapters/* (PEFT directories,
the number in a request is the position in their sorted list). NAME is KIND-BATCH, such as distinct-32.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KINDS = ("base", "identical", "uniform", "skewed", "distinct")
BATCHES = (1, 8, 32)
FIRST_PROMPT_ID = 10  # ids below are for special tokens
SKEW = 1.5


@dataclass(frozen=True, slots=True)
class WorkItem:
    prompt_ids: tuple[int, ...]
    max_tokens: int
    adapter_id: str  # "": the base model
    arrival_s: float = 0.0  # after the start
    sampling: Mapping[str, float] = field(default_factory=dict[str, float])  # empty: greedy


def adapter_names(inputs: Path) -> list[str]:
    return [path.name for path in sorted((inputs / "adapters").iterdir())]


def read_workload(inputs: Path, name: str) -> list[WorkItem]:
    names = adapter_names(inputs)
    path = inputs / "workloads" / f"{name}.json"
    if not path.is_file():
        raise SystemExit(f"there is no workload {name} in {inputs}; there is {', '.join(workload_names(inputs))}")
    rows = json.loads(path.read_text())
    return [
        WorkItem(
            tuple(row["prompt_ids"]),
            row["max_tokens"],
            "" if row["adapter"] is None else names[row["adapter"]],
            row.get("arrival_s", 0.0),
            row.get("sampling", {}),
        )
        for row in rows
    ]


def workload_names(inputs: Path) -> list[str]:
    """All of them, small batches first."""
    found = [path.stem for path in (inputs / "workloads").glob("*.json")]
    return sorted(found, key=lambda name: (int(name.rpartition("-")[2]), _order(name), name))


def _order(name: str) -> int:
    kind = name.rpartition("-")[0]
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


# --- making them ------------------------------------------------------------------------------------------------------


def shares(kind: str, batch: int) -> list[int]:
    """Number of a batch's requests for each adapter: the popularities of the Punica paper (arXiv 2310.18547)."""
    match kind:
        case "base":
            return []
        case "identical":
            return [batch]
        case "distinct":
            return [1] * batch
        case "uniform":  # the root of the batch, rounded up, in equal shares
            num_adapters = math.isqrt(batch - 1) + 1
            return [len(range(first, batch, num_adapters)) for first in range(num_adapters)]
        case "skewed":  # 1.5 times as many for each as for the next, at least one, until the batch is full
            found: list[int] = []
            while (left := batch - sum(found)) > 0:
                found.append(max(1, round(left * (1 - 1 / SKEW))))
            return found
        case _:
            raise ValueError(f"there is no popularity {kind!r}; there is {', '.join(KINDS)}")


def make_workload(
    kind: str, batch: int, *, prompt_tokens: int | tuple[int, int], max_tokens: int, vocab_size: int
) -> list[dict[str, object]]:
    """The rows of one file; the same arguments give the same rows. `prompt_tokens`: of every prompt, or from which to
    which, any as likely."""
    rng = random.Random(f"{kind} {batch}")
    owners: list[int | None] = [adapter for adapter, num in enumerate(shares(kind, batch)) for _ in range(num)]
    owners = owners or [None] * batch
    rng.shuffle(owners)
    ids = range(FIRST_PROMPT_ID, vocab_size)
    lengths = [prompt_tokens if isinstance(prompt_tokens, int) else rng.randint(*prompt_tokens) for _ in owners]
    return [
        {"prompt_ids": rng.choices(ids, k=length), "max_tokens": max_tokens, "adapter": owner}
        for owner, length in zip(owners, lengths, strict=True)
    ]


def drawn(rows: list[dict[str, object]], temperature: float, top_p: float) -> list[dict[str, object]]:
    """The rows with a temperature, where there is one, and a seed each."""
    if temperature <= 0.0:
        return rows
    return [
        {**row, "sampling": {"temperature": temperature, "top_p": top_p, "seed": seed}} for seed, row in enumerate(rows)
    ]


def make_arrivals(
    num_requests: int,
    rate: float,
    num_adapters: int,
    *,
    prompt_tokens: int | tuple[int, int],
    max_tokens: int,
    vocab_size: int,
) -> list[dict[str, object]]:
    """Poisson arrivals, `rate` a second, each for any of the adapters; otherwise as make_workload."""
    rng = random.Random(f"arrivals {num_requests}")
    rows = make_workload(
        "base", num_requests, prompt_tokens=prompt_tokens, max_tokens=max_tokens, vocab_size=vocab_size
    )
    now_s, found = 0.0, list[dict[str, object]]()
    for row in rows:
        now_s += rng.expovariate(rate)
        found.append({**row, "adapter": rng.randrange(num_adapters), "arrival_s": now_s})
    return found
