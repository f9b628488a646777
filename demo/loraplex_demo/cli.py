"""Command `loraplex demo`: a mixed batch on the committed demo models.

The batch mixes adapters and kinds of speculation. The same requests are sent without speculation for comparison.
Exit status 0 only if every answer is right and equal both ways.
"""

from __future__ import annotations

import asyncio
import json as jsonlib
import shlex
import sys
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loraplex_contracts.errors import LoraplexError
from loraplex_demo.world import MAX_NEW_TOKENS, Case, World, committed_world, open_world
from loraplex_proto.services import DEFAULT_PORT
from loraplex_runtime.flags import flags_of
from loraplex_runtime.shutdown import Ending, ends_before
from loraplex_server.cli.report import Report
from loraplex_server.cli.serve import NO_HTTP, Http, Serving, child_spec, serving
from loraplex_server.cli.worker import worker_config
from loraplex_server.config import WorkerConfig

if TYPE_CHECKING:  # the SDK brings gRPC along, which only what is run needs
    from loraplex import AnySpeculation


HTTP_NAME = "demo"  # of the base model


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of one request of the batch."""

    adapter: str  # "": the base model
    case: Case
    text: str
    is_right: bool
    num_tokens: int
    seconds: float
    drafted_by: str = ""  # "": no proposer
    tokens_per_step: float | None = None  # of the model


@dataclass(frozen=True, slots=True)
class Alone:
    """Requests for one adapter, one at a time, each with speculation and without."""

    adapter: str
    drafted_by: str
    tokens_per_step: float
    seconds: float
    plain_seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """The batch, with speculation and without."""

    answers: list[Answer]
    seconds: float
    plain: list[Answer]
    plain_seconds: float
    alone: list[Alone]

    @property
    def is_right(self) -> bool:
        """True when every answer is right and equal to the one without speculation."""
        return all(one.is_right and one.text == other.text for one, other in zip(self.answers, self.plain, strict=True))


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Adapter id and speculation of the requests for one adapter."""

    adapter_id: str
    speculation: AnySpeculation
    drafted_by: str


def request_options(world: World) -> dict[str, RequestOptions]:
    """Options for the base model and each adapter: its own heads if it has some, else prompt lookup and the draft
    models in turn."""
    from loraplex import DraftModel, Medusa

    others: list[tuple[str, AnySpeculation]] = [("prompt lookup", "prompt_lookup")]
    others += [(f"draft model {draft.name}", DraftModel(draft.name)) for draft in world.drafts]
    heads = {heads.adapter: heads for heads in world.heads}
    found: dict[str, RequestOptions] = {}
    for name in ["", *(adapter.name for adapter in world.adapters)]:
        own = heads.get(name)
        if own is None:
            drafted_by, speculation = others[len(found) % len(others)]
            found[name] = RequestOptions(name, speculation, drafted_by)
        elif own.is_combined:
            found[name] = RequestOptions(own.name, "medusa", f"Medusa, in {own.name}")
        else:
            found[name] = RequestOptions(name, Medusa(own.name), f"Medusa {own.name}")
    return found


def demo(
    records: Annotated[int, typer.Option(min=1, max=32, help="Held-out records; each goes to every adapter.")] = 4,
    retrain: Annotated[
        Path | None, typer.Option(help="Train the world again into this folder first (several minutes).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the models until Ctrl-C instead, to try examples and commands with.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of --serve; 0 takes a free one.")] = DEFAULT_PORT,
    http: Annotated[
        bool, typer.Option("--http", help="As --serve, with the HTTP port, whose / is a page for the browser.")
    ] = False,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="Of --http; 0 takes a free one.")] = 8000,
) -> None:
    """See it work: a small model and its adapters, trained for this, in one mixed batch.

    The model reads a short record; each adapter writes it in a format of its own (JSON, YAML, SQL, ...). The prompts do
    not name the format: only the adapter knows it. Every answer is compared with the one right text.
    """
    report = Report("demo", as_json=False)
    try:
        world = _world(retrain)
        with report:
            with_http = Http(http_port, served_model_names=(HTTP_NAME,)) if http else NO_HTTP
            to_run = _serve(world, port, report, with_http) if serve or http else run_batch(world, records, report)
            run = asyncio.run(to_run)
    except LoraplexError as error:
        sys.exit(report.failed(error))
    if isinstance(run, int):
        sys.exit(run)
    if json:
        _print_json(world, run)
    else:
        print_tables(world, run, Console(width=None if sys.stdout.isatty() else 200, highlight=False))
    sys.exit(0 if run.is_right else 1)


def _world(retrain: Path | None) -> World:
    if retrain is None:
        return committed_world()
    from loraplex_demo.train import make_world  # torch and PEFT, only when asked for
    from loraplex_training.progress import training_progress

    with training_progress(Console(stderr=True)) as progress:
        make_world(retrain, scale="full", progress=progress)
    return open_world(retrain)


async def run_batch(world: World, num_records: int, report: Report) -> Run | int:
    """Serves the world and runs the batch. Returns the exit status if a signal came first."""
    ending = Ending()
    async with _serving(world, 0, report, ending) as served:
        if served is None:
            return ending.status
        report.progress("asking")
        asking = asyncio.ensure_future(_ask(served.address, world, num_records))
        return asking.result() if await ends_before(asking, ending.asked) else ending.status


async def _serve(world: World, port: int, report: Report, http: Http) -> int:
    """Serves the world until a signal comes. Returns the exit status."""
    ending = Ending()
    async with _serving(world, port, report, ending, http) as served:
        if served is None:
            return ending.status
        report.ready(served.address, str(world.base_path), http=served.http_address)
        if served.http_address is not None:
            print(_to_try(world, served.address, f"http://{served.http_address}"), file=sys.stderr, flush=True)
        await ending.asked.wait()
    return 0


def _to_try(world: World, address: str, url: str) -> str:
    """Commands for a shell, with a prompt that every adapter answers correctly."""
    (case,) = world.showcase(1)
    body = {"model": world.adapters[0].name, "prompt": case.prompt, "max_tokens": MAX_NEW_TOKENS, "temperature": 0}
    chat = {"model": world.adapters[-1].name, "messages": [{"role": "user", "content": case.prompt}], "stream": True}
    lines = [
        f"  open {url}/ in a browser, and enter: {case.prompt}",
        f"  curl {url}/v1/models",
        *(
            f"  curl {url}/v1/{route} -H 'content-type: application/json' \\\n    -d '{jsonlib.dumps(fields)}'"
            for route, fields in (("completions", body), ("chat/completions", {**chat, "temperature": 0}))
        ),
        f"  loraplex generate {shlex.quote(case.prompt)} --adapter {world.adapters[0].name} --server {address}",
    ]
    return "try:\n" + "\n".join(lines)


def _serving(
    world: World, port: int, report: Report, ending: Ending, http: Http = NO_HTTP
) -> AbstractAsyncContextManager[Serving | None]:
    params = {flag.parameter: flag.default for flag in flags_of(WorkerConfig)}
    # One thread: products of a model this small end before a second thread has woken up.
    params |= {"adapters": world.adapters_root, "port": port, "drain": 2.0, "log_level": "error", "threads": 1}
    params["draft_model"] = [f"{draft.name}={world.draft_path(draft.name)}" for draft in world.drafts]
    if http.http_port is not None:
        params["stream_wait"] = 0.0  # each step by itself, so that the page knows which tokens were drafts
    config = worker_config(str(world.base_path), params)
    ending.listen()
    return serving(config, child_spec(config.engine.model.model, params), 1, "", report.progress, ending, http)


async def _ask(address: str, world: World, num_records: int) -> Run:
    """Sends all requests at once: every record with every adapter, and with none; without speculation, then with. Then
    sends the same requests one at a time."""
    from loraplex import AsyncClient

    cases, asked = world.showcase(num_records), request_options(world)
    plain = {name: RequestOptions(name, "off", "") for name in asked}
    async with AsyncClient(address) as client:

        async def one(name: str, options: RequestOptions, case: Case, salt: str) -> Answer:
            made = await client.generate(
                case.prompt,
                adapter_id=options.adapter_id,
                speculation=options.speculation,
                max_tokens=MAX_NEW_TOKENS,
                # Lookup searches earlier answers: those of another round would be the very text.
                cache_salt=salt,
            )
            return Answer(
                name,
                case,
                made.text,
                world.is_right(made.text, case, name or None),
                made.usage.completion_tokens,
                made.timings.total_s,
                options.drafted_by,
                made.usage.tokens_per_step,
            )

        async def batch(by_name: dict[str, RequestOptions], salt: str) -> tuple[list[Answer], float]:
            start = time.perf_counter()
            answers = await asyncio.gather(
                *(one(name, options, case, salt) for case in cases for name, options in by_name.items())
            )
            return answers, time.perf_counter() - start

        async def alone(name: str) -> Alone:
            answers: list[Answer] = []
            seconds = [0.0, 0.0]
            for number, case in enumerate(cases):
                for idx, options in enumerate((asked[name], plain[name])):
                    start = time.perf_counter()
                    answer = await one(name, options, case, f"alone-{name}-{idx}-{number}")
                    seconds[idx] += time.perf_counter() - start
                    if idx == 0:
                        answers.append(answer)
            num_steps = sum(answer.num_tokens / (answer.tokens_per_step or 1) for answer in answers)
            per_step = sum(answer.num_tokens for answer in answers) / num_steps
            return Alone(name, asked[name].drafted_by, per_step, *seconds)

        # One unmeasured round loads adapters and heads, so that the measured rounds are serving alone.
        for by_name in (plain, asked):
            await batch(by_name, "unmeasured")
        batches = *(await batch(asked, "asked")), *(await batch(plain, "plain"))
        return Run(*batches, [await alone(name) for name in asked])


def print_tables(world: World, run: Run, console: Console, num_shown: int | None = None) -> None:
    """Prints a table for each record: every answer, and the expected text beside a wrong one. Then one of requests that
    were alone. `num_shown`: of the first records only."""
    console.print(f"{len(run.answers)} requests, one batch, one base model")
    ranks = {adapter.name: str(adapter.rank) for adapter in world.adapters}
    for prompt in list(dict.fromkeys(answer.case.prompt for answer in run.answers))[:num_shown]:
        table = Table(title=Text(prompt), title_justify="left", title_style="bold")
        for column in ("adapter", "rank", "drafted by", "tokens/step", "answer", "right?"):
            table.add_column(column, overflow="fold")
        for answer, plain in zip(run.answers, run.plain, strict=True):
            if answer.case.prompt != prompt:
                continue
            mark = Text("right", style="green") if answer.is_right else Text("WRONG", style="bold red")
            per_step = "" if answer.tokens_per_step is None else f"{answer.tokens_per_step:.2f}"
            name = answer.adapter or "(base)"
            table.add_row(name, ranks.get(answer.adapter, ""), answer.drafted_by, per_step, Text(answer.text), mark)
            if not answer.is_right:
                wanted = Text(_expected(world, answer), style="dim")
                table.add_row("", "", "", "", wanted, Text("expected", style="dim"))
            if plain.text != answer.text:
                other = Text("DIFFERS", style="bold red")
                table.add_row("", "", "without speculation", "", Text(plain.text, style="dim"), other)
        console.print(table)
    console.print(_summary(run))
    console.print(_table_alone(run))


def _table_alone(run: Run) -> Table:
    """The gain of speculation with one request at a time. A full batch leaves it little to gain."""
    title = "one request at a time, with speculation and without"
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("adapter", "drafted by", "tokens/step", "time", "without", "as fast"):
        table.add_column(column, justify="left" if column in ("adapter", "drafted by") else "right")
    num_records = len(run.answers) // len(run.alone)
    for one in run.alone:
        seconds = (f"{1000 * each / num_records:.0f} ms" for each in (one.seconds, one.plain_seconds))
        ratio = f"{one.plain_seconds / one.seconds:.1f}x"
        table.add_row(one.adapter or "(base)", one.drafted_by, f"{one.tokens_per_step:.2f}", *seconds, ratio)
    return table


def _summary(run: Run) -> str:
    num_right = sum(answer.is_right for answer in run.answers)
    num_tokens = sum(answer.num_tokens for answer in run.answers)
    speed, plain_speed = num_tokens / run.seconds, num_tokens / run.plain_seconds
    return (
        f"{num_right} of {len(run.answers)} answers are right; {num_tokens} tokens in {run.seconds:.2f} s, "
        f"{speed:.0f} tokens/s through router and worker, {plain_speed:.0f} without speculation"
    )


def _expected(world: World, answer: Answer) -> str:
    return answer.case.expected(world.format_of(answer.adapter or None))


def _print_json(world: World, run: Run) -> None:
    rows = [
        {
            "adapter": answer.adapter,
            "prompt": answer.case.prompt,
            "text": answer.text,
            "expected": _expected(world, answer),
            "is_right": answer.is_right,
            "num_tokens": answer.num_tokens,
            "seconds": round(answer.seconds, 4),
            "drafted_by": answer.drafted_by,
            "tokens_per_step": answer.tokens_per_step,
            "is_same_without_speculation": answer.text == plain.text,
        }
        for answer, plain in zip(run.answers, run.plain, strict=True)
    ]
    alone = [
        {
            "adapter": one.adapter,
            "drafted_by": one.drafted_by,
            "tokens_per_step": round(one.tokens_per_step, 4),
            "seconds": round(one.seconds, 4),
            "seconds_without_speculation": round(one.plain_seconds, 4),
        }
        for one in run.alone
    ]
    seconds = {"seconds": round(run.seconds, 3), "seconds_without_speculation": round(run.plain_seconds, 3)}
    print(jsonlib.dumps({**seconds, "answers": rows, "one_at_a_time": alone}))
