"""Figures of the GPU benchmark: floors, bars and adapters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_bench.adapters import choose_slots
from gpu_bench.deadline import Deadline
from gpu_bench.floors import adapter_bytes, kv_bytes, weight_bytes
from gpu_bench.launches import LaunchFigure, halves, text_of
from gpu_bench.report import table
from gpu_bench.shapes import SHAPES, make_model
from gpu_bench.steps import StepFigure, check_bars, decode_scenarios, verify_scenarios

from loraplex_server.layers.attention import AttentionSpec, ModelSpec
from loraplex_server.layers.linear import AdaptedLinear


def figure(scenario: str, batch: int, ratio: float, times_floor: float = 1.0) -> StepFigure:
    return StepFigure(batch, scenario, 0, 4.0, 4.0, 4.0, ratio, 4.0 / times_floor, times_floor)


def test_floors_of_llama_8b() -> None:
    """Floors equal numbers that were worked out by hand."""
    shape = SHAPES["llama-8b"]
    model = make_model(shape, torch.device("meta"))
    linears: dict[str, Any] = {}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "layers" in path:
            linears[path] = AdaptedLinear(module.weight, None, context=None)  # type: ignore[arg-type]
    spec = ModelSpec((AttentionSpec(32, 8, 128, 128, 0.1),) * 32, 128256, 128256, 4096, 4096)
    loaded: Any = SimpleNamespace(model=model, targets=linears, spec=spec, dtype=torch.bfloat16)
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096
    assert weight_bytes(loaded) == 2 * (32 * layer + 4096 + 128256 * 4096)
    assert kv_bytes(loaded, shape, 8) == 8 * 512 * 32 * 2 * 8 * 128 * 2
    assert adapter_bytes(loaded, 16) == pytest.approx(84e6, rel=0.01)
    assert adapter_bytes(loaded, 16) / weight_bytes(loaded) == pytest.approx(0.0056, abs=0.0002)


def test_who_uses_which_adapter() -> None:
    assert choose_slots("identical", 8) == [0] * 8
    assert choose_slots("distinct", 8) == list(range(8))
    uniform = Counter(choose_slots("uniform", 64))
    assert uniform == dict.fromkeys(range(8), 8)
    skewed = Counter(choose_slots("skewed", 64))
    assert skewed.most_common(1)[0][0] < 3
    assert 3 < len(skewed) < 16
    assert choose_slots("skewed", 64) == choose_slots("skewed", 64)
    with pytest.raises(ValueError, match="nobody"):
        choose_slots("nobody", 8)


def test_scenarios_differ_in_adapters_alone() -> None:
    scenarios = decode_scenarios(8)
    assert {scenario.batch for scenario in scenarios} == {8}
    assert [scenario.num_distinct for scenario in scenarios][:3] == [0, 0, 1]
    assert [scenario.is_installed for scenario in scenarios] == [False] + [True] * 5
    by_name = {scenario.name: scenario for scenario in verify_scenarios(SHAPES["llama-8b"])}
    assert all(scenario.over in by_name for scenario in by_name.values())
    assert by_name["verification"].num_draft_tokens == 4


def test_bars() -> None:
    figures = [
        figure("base", 8, 1.0, times_floor=1.4),
        figure("base", 32, 1.0, times_floor=1.51),
        figure("unused", 8, 1.02),
        figure("identical", 8, 1.05),
        figure("identical", 32, 9.9),  # nobody set a bar for it
        figure("distinct", 8, 1.2),
        figure("verification, distinct", 8, 9.9),
    ]
    found = {(bar["scenario"], bar["batch"]): (bar["is_reached"], bar["is_better"]) for bar in check_bars(figures)}
    assert found == {
        ("base", 8): (True, False),
        ("base", 32): (False, False),
        ("unused", 8): (False, False),
        ("identical", 8): (True, True),
        ("distinct", 8): (True, False),
        ("distinct", 32): (None, None),
        ("verification", 8): (None, None),
        ("verification, distinct", 8): (False, False),
    }


def test_deadlines() -> None:
    deadline = Deadline(100.0)
    assert deadline.allows("a", 50.0)
    assert deadline.left_out == []
    late = replace(deadline, limit_s=-1.0)
    assert not late.allows("b", 2.0)
    assert late.left_out == ["b (2 s needed, 0 s left)"]


def test_tables() -> None:
    text = table("Title", ("name", "n", "x"), [("a", 1, 2.0), ("long", 20, None)])
    assert text == "Title\nname   n      x\na      1  2.000\nlong  20      -\n"
    assert table("Empty", ("name",), []) == "Empty\nname\n"


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize(("num_in", "num_out"), [(4096, 6144), (14336, 4096)])
def test_launches_that_are_timed_have_the_chosen_ones_among_them(num_in: int, num_out: int, batch: int) -> None:
    found = list(halves(num_in, num_out, batch))
    assert [half.name for half, is_chosen in found if is_chosen].count("shrink") == 1
    assert [half.name for half, is_chosen in found if is_chosen].count("expand") == 1
    assert len({half for half, _ in found}) == len(found)
    assert all(half.launch.block_in * half.launch.num_splits >= num_in for half, _ in found)


def test_the_table_of_launches_shows_what_is_chosen_beside_the_best() -> None:
    figures = [
        LaunchFigure("o", 8, "distinct", half.name, half.launch._asdict(), float(idx + 1), is_chosen)
        for idx, (half, is_chosen) in enumerate(halves(4096, 4096, 8))
    ]
    lines = text_of(figures).splitlines()
    chosen = {one.half: one.us for one in figures if one.is_chosen}
    for line in lines[2:]:
        half = "shrink" if "shrink" in line else "expand"
        assert f"{chosen[half]:.1f}" in line
    assert len(lines) == 4
    assert "1.00 in 256" in lines[2]
