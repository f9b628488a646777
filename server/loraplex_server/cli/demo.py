"""`loraplex demo`: the small world that comes along, served like any other model, one mixed batch, every answer judged.

Exit status 0 only if every answer is right.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loraplex_proto.errors import LoraplexError
from loraplex_proto.flags import flags_of
from loraplex_server.cli.report import Report
from loraplex_server.cli.serving import child_spec, serving
from loraplex_server.cli.worker import worker_config
from loraplex_server.config import WorkerConfig
from loraplex_server.demo.world import MAX_NEW_TOKENS, Case, World, committed_world, open_world


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request of the batch gave."""

    adapter: str  # "": the base model
    case: Case
    text: str
    is_right: bool
    num_tokens: int
    seconds: float


def demo(
    records: Annotated[int, typer.Option(min=1, max=32, help="Held-out records; each goes to every adapter.")] = 4,
    retrain: Annotated[
        Path | None, typer.Option(help="Train the world again into this folder first (several minutes).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """See it work: a small model and its adapters, trained for this, in one mixed batch.

    The model reads a short record; each adapter writes it in a format of its own (JSON, YAML, SQL, ...). The prompts do
    not name the format: only the adapter knows it. Every answer is compared with the one right text.
    """
    report = Report("demo", as_json=False)
    try:
        world = _world(retrain)
        with report:
            answers, seconds = asyncio.run(_run(world, records, report))
    except LoraplexError as error:
        sys.exit(report.failed(error))
    is_plain = json or not sys.stdout.isatty()
    (_print_json if json else _print_table)(world, answers, seconds, is_plain)
    sys.exit(0 if all(answer.is_right for answer in answers) else 1)


def _world(retrain: Path | None) -> World:
    if retrain is None:
        return committed_world()
    from loraplex_server.demo.train import make_world  # torch and PEFT, only when asked for
    from loraplex_server.training.bars import training_progress

    with training_progress(Console(stderr=True)) as progress:
        make_world(retrain, scale="full", progress=progress)
    return open_world(retrain)


async def _run(world: World, num_records: int, report: Report) -> tuple[list[Answer], float]:
    given = {flag.parameter: flag.default for flag in flags_of(WorkerConfig)}
    given |= {"adapters": world.adapters_root, "port": 0, "drain": 2.0, "log_level": "error"}
    config = worker_config(str(world.base_path), given)
    with tempfile.TemporaryDirectory(prefix="loraplex-demo-") as folder:
        spec = child_spec(config.engine.model.model, {**given, "adapter_store": Path(folder)})
        async with serving(config, spec, 1, None, report.progress) as served:
            assert served is not None, "nothing stops a demo but its end"
            report.progress("asking")
            return await _ask(served.address, world, num_records)


async def _ask(address: str, world: World, num_records: int) -> tuple[list[Answer], float]:
    """All requests at once: every record with every adapter, and with none."""
    from loraplex import AsyncClient

    adapters = ["", *(adapter.name for adapter in world.adapters)]
    async with AsyncClient(address) as client:

        async def one(adapter: str, case: Case) -> Answer:
            made = await client.generate(case.prompt, adapter_id=adapter, max_tokens=MAX_NEW_TOKENS)
            return Answer(
                adapter,
                case,
                made.text,
                world.is_right(made.text, case, adapter or None),
                made.usage.completion_tokens,
                made.timings.total_s,
            )

        # One request per adapter first: the adapters load, and what is measured afterwards is serving.
        cases = world.showcase(num_records)
        await asyncio.gather(*(one(adapter, cases[0]) for adapter in adapters))
        start = time.perf_counter()
        answers = await asyncio.gather(*(one(adapter, case) for case in cases for adapter in adapters))
        return answers, time.perf_counter() - start


def _print_table(world: World, answers: list[Answer], seconds: float, is_plain: bool) -> None:
    """A table for each record with every text that came, and what a wrong one should have been."""
    console = Console(width=200 if is_plain else None, highlight=False)
    console.print(f"{len(answers)} requests, one batch, one base model")
    ranks = {adapter.name: str(adapter.rank) for adapter in world.adapters}
    for prompt in dict.fromkeys(answer.case.prompt for answer in answers):
        table = Table(title=Text(prompt), title_justify="left", title_style="bold")
        for column in ("adapter", "rank", "answer", "right?"):
            table.add_column(column, overflow="fold")
        for answer in answers:
            if answer.case.prompt != prompt:
                continue
            mark = Text("right", style="green") if answer.is_right else Text("WRONG", style="bold red")
            table.add_row(answer.adapter or "(base)", ranks.get(answer.adapter, ""), Text(answer.text), mark)
            if not answer.is_right:
                table.add_row("", "", Text(_expected(world, answer), style="dim"), Text("expected", style="dim"))
        console.print(table)
    num_right = sum(answer.is_right for answer in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    console.print(
        f"{num_right} of {len(answers)} answers are right; {num_tokens} tokens in {seconds:.2f} s, "
        f"{num_tokens / seconds:.0f} tokens/s through router and worker"
    )


def _expected(world: World, answer: Answer) -> str:
    return answer.case.expected(world.format_of(answer.adapter or None))


def _print_json(world: World, answers: list[Answer], seconds: float, is_plain: bool) -> None:
    rows = [
        {
            "adapter": answer.adapter,
            "prompt": answer.case.prompt,
            "text": answer.text,
            "expected": _expected(world, answer),
            "is_right": answer.is_right,
            "num_tokens": answer.num_tokens,
            "seconds": round(answer.seconds, 4),
        }
        for answer in answers
    ]
    print(jsonlib.dumps({"seconds": round(seconds, 3), "answers": rows}))
