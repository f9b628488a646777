"""Output of `loraplex demo`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from loraplex_demo import cli as demo_module
from loraplex_demo import train
from loraplex_demo.cli import Alone, Answer, Run
from loraplex_demo.world import World, committed_world


@pytest.fixture
def world() -> World:
    return committed_world()


@pytest.fixture
def answers(world: World) -> list[Answer]:
    """All right but one."""
    cases = world.showcase(2)
    names = ["", *(adapter.name for adapter in world.adapters)]
    made = [
        Answer(name, case, case.expected(world.format_of(name or None)), True, 5, 0.1)
        for case in cases
        for name in names
    ]
    made[-1] = replace(made[-1], text="nonsense", is_right=False)
    return made


def alone(answers: list[Answer]) -> list[Alone]:
    """One `Alone` for each adapter of the answers."""
    return [Alone(name, "heads", 2.5, 0.04, 0.1) for name in dict.fromkeys(answer.adapter for answer in answers)]


def test_the_table_says_of_each_output_whether_it_is_right(
    world: World, answers: list[Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    demo_module.print_tables(world, Run(answers, 2.0, answers, 3.0, alone(answers)), Console(width=200))
    text, _, after = capsys.readouterr().out.partition("one request at a time")
    lines = text.splitlines()
    assert sum(line.rstrip(" │").endswith("right") for line in lines) == len(answers) - 1
    (wrong,) = [number for number, line in enumerate(lines) if line.rstrip(" │").endswith("WRONG")]
    assert "nonsense" in lines[wrong]
    last = answers[-1]
    expected = last.case.expected(world.format_of(last.adapter)).splitlines()
    assert expected[0] in lines[wrong + 1]
    assert "expected" in lines[wrong + 1]
    assert all(text.count(answer.case.prompt) >= 1 for answer in answers)
    assert f"{len(answers) - 1} of {len(answers)} answers are right" in lines[-1]
    (row,) = [line for line in after.splitlines() if "json" in line]
    assert [cell.strip() for cell in row.strip("│ ").split("│")] == ["json", "heads", "2.50", "20 ms", "50 ms", "2.5x"]


def test_json_says_the_same(world: World, answers: list[Answer], capsys: pytest.CaptureFixture[str]) -> None:
    demo_module._print_json(world, Run(answers, 2.0, answers, 3.0, alone(answers)))
    printed = json.loads(capsys.readouterr().out)
    rows = printed["answers"]
    assert [row["adapter"] for row in printed["one_at_a_time"]] == list(dict.fromkeys(row["adapter"] for row in rows))
    assert [row["is_right"] for row in rows] == [answer.is_right for answer in answers]
    assert all((row["text"] == row["expected"]) == row["is_right"] for row in rows)


def test_training_again_shows_how_far_it_is(
    world: World, answers: list[Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[bool] = []

    def make_world(out_dir: Path, *, scale: str, progress: object) -> World:
        shown.append(scale == "full" and not getattr(progress, "disable", True))
        return world

    async def run(*_: object) -> Run:
        return Run(answers, 1.0, answers, 1.0, alone(answers))

    monkeypatch.setattr(train, "make_world", make_world)
    monkeypatch.setattr(demo_module, "open_world", lambda path: world)
    monkeypatch.setattr(demo_module, "run_batch", run)
    app = typer.Typer()
    app.command()(demo_module.demo)
    result = CliRunner().invoke(app, ["--retrain", str(tmp_path), "--json"])
    assert shown == [True]
    assert result.exit_code == 1, "one answer is wrong"


def test_every_adapter_is_asked_in_a_way_of_its_own(world: World) -> None:
    found = demo_module.request_options(world)
    assert list(found) == ["", *(adapter.name for adapter in world.adapters)]
    drafted_by = [way.drafted_by for way in found.values()]
    assert {heads.name for heads in world.heads} == {name.split()[-1] for name in drafted_by if "Medusa" in name}
    assert all(any(draft.name == name.split()[-1] for name in drafted_by) for draft in world.drafts)
    assert "prompt lookup" in drafted_by


def test_a_text_that_depends_on_who_drafted_is_an_error(
    world: World, answers: list[Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    right = [replace(answer, text="same", is_right=True) for answer in answers]
    assert Run(right, 1.0, right, 1.0, []).is_right
    other = [*right[:-1], replace(right[-1], text="another")]
    run = Run(right, 1.0, other, 1.0, alone(right))
    assert not run.is_right
    demo_module.print_tables(world, run, Console(width=200))
    shown = capsys.readouterr().out
    assert shown.count("DIFFERS") == 1
    assert "another" in shown
