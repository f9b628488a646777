"""Workloads: adapters of the requests in a batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import workloads
from workloads import make_arrivals, make_workload, read_workload, shares, workload_names


@pytest.mark.parametrize(
    ("kind", "batch", "expected"),
    [
        ("base", 8, []),
        ("identical", 8, [8]),
        ("distinct", 3, [1, 1, 1]),
        ("uniform", 8, [3, 3, 2]),
        ("uniform", 32, [6, 6, 5, 5, 5, 5]),
        ("uniform", 1, [1]),
        ("skewed", 8, [3, 2, 1, 1, 1]),
        ("skewed", 32, [11, 7, 5, 3, 2, 1, 1, 1, 1]),
    ],
)
def test_shares(kind: str, batch: int, expected: list[int]) -> None:
    assert shares(kind, batch) == expected


@pytest.mark.parametrize("kind", [kind for kind in workloads.KINDS if kind != "base"])
@pytest.mark.parametrize("batch", [1, 2, 7, 8, 32, 100])
def test_shares_fill_the_batch_and_fall(kind: str, batch: int) -> None:
    found = shares(kind, batch)
    assert sum(found) == batch
    assert found == sorted(found, reverse=True)


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    for name in ("x", "a"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    (tmp_path / "workloads").mkdir()
    for kind in ("distinct", "base"):
        rows = make_workload(kind, 2, prompt_tokens=5, max_tokens=7, vocab_size=20)
        assert rows == make_workload(kind, 2, prompt_tokens=5, max_tokens=7, vocab_size=20)
        (tmp_path / "workloads" / f"{kind}-2.json").write_text(json.dumps(rows))
    items = read_workload(tmp_path, "distinct-2")
    assert sorted(item.adapter_id for item in items) == ["a", "x"]
    assert {item.max_tokens for item in items} == {7}
    assert all(len(item.prompt_ids) == 5 and all(10 <= i < 20 for i in item.prompt_ids) for item in items)
    assert {item.adapter_id for item in read_workload(tmp_path, "base-2")} == {""}
    assert workload_names(tmp_path) == ["base-2", "distinct-2"]
    with pytest.raises(SystemExit, match="there is base-2, distinct-2"):
        read_workload(tmp_path, "base-3")


def test_prompts_of_any_length_between_two() -> None:
    rows = make_workload("base", 200, prompt_tokens=(3, 9), max_tokens=1, vocab_size=20)
    assert {len(row["prompt_ids"]) for row in rows} == set(range(3, 10))


def test_arrivals_come_one_after_the_other_for_all_adapters() -> None:
    rows = make_arrivals(400, 8.0, 5, prompt_tokens=2, max_tokens=1, vocab_size=20)
    times = [row["arrival_s"] for row in rows]
    assert times == sorted(times)
    assert 400 / 8 / 1.3 < times[-1] < 400 / 8 * 1.3
    assert {row["adapter"] for row in rows} == set(range(5))
