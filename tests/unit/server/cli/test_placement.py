"""Placement of workers on GPUs and cores."""

from __future__ import annotations

import pytest

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.cli.placement import Placement, parse_placement, place

CORES = [frozenset({cpu, cpu + 8}) for cpu in range(8)]  # two threads each


def devices(num_workers: int, device: str, num_gpus: int) -> list[str]:
    return [place(index, num_workers, device, num_gpus, CORES).device for index in range(num_workers)]


@pytest.mark.parametrize(
    ("num_workers", "device", "num_gpus", "expected"),
    [
        (2, "auto", 2, ["cuda:0", "cuda:1"]),
        (3, "cuda", 4, ["cuda:0", "cuda:1", "cuda:2"]),
        (3, "auto", 2, ["cuda:0", "cuda:1", "cuda:0"]),
        (1, "cuda:1", 2, ["cuda:1"]),
        (3, "cuda:1", 4, ["cuda:1", "cuda:2", "cuda:3"]),
        (3, "cuda:2", 4, ["cuda:2", "cuda:3", "cuda:2"]),  # never a GPU before the one that is named
        (2, "cuda:7", 2, ["cuda:7", "cuda:7"]),  # refused when the model is loaded
        (2, "cuda", 0, ["cuda", "cuda"]),
        (2, "tpu", 2, ["tpu", "tpu"]),
        (2, "cpu", 2, ["cpu", "cpu"]),
        (2, "cpu:0", 2, ["cpu:0", "cpu:0"]),
    ],
)
def test_gpus(num_workers: int, device: str, num_gpus: int, expected: list[str]) -> None:
    assert devices(num_workers, device, num_gpus) == expected
    if not device.startswith("cpu"):
        assert not place(0, num_workers, device, num_gpus, CORES).cores


@pytest.mark.parametrize("device", ["auto", "cpu", "cpu:0"])
@pytest.mark.parametrize("num_workers", range(1, 9))
def test_every_core_belongs_to_one_worker(num_workers: int, device: str) -> None:
    placements = [place(index, num_workers, device, 0, CORES) for index in range(num_workers)]
    assert [core for one in placements for core in one.cores] == CORES
    sizes = {len(one.cores) for one in placements}
    assert max(sizes) - min(sizes) <= 1


def test_more_workers_than_cores_share_them() -> None:
    placements = [place(index, 3, "cpu", 0, CORES[:2]) for index in range(3)]
    assert placements == [Placement("cpu", (CORES[index % 2],)) for index in range(3)]


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "a/b", "0/0"])
def test_a_placement_is_an_index_and_a_count(text: str) -> None:
    assert parse_placement("1/2") == (1, 2)
    with pytest.raises(InvalidArgument, match="--placement takes INDEX/COUNT"):
        parse_placement(text)
