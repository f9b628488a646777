"""Command `loraplex bench`: open-loop load against a running server."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, cast

import typer

from loraplex import AsyncClient, InvalidArgument
from loraplex.bench import Distribution, LoadSpec, Selection, Session, Summary
from loraplex.cli import terminal
from loraplex.cli.options import DEFAULT_SERVER, Connection, Drafting, JsonOption, ServerArgument, options_of
from loraplex_runtime.flags import option, with_flags

_LATE_S = 0.005  # p99 of the delay in sending from which it is reported


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """Options of every request, under their names in the SDK."""

    ignore_eos: bool = option(
        True, "Go on to --output-tokens in any case, or not.", "--ignore-eos", off="--stop-at-eos", panel="Requests"
    )
    temperature: float | None = option(
        None, "0 takes the likeliest token, the default.", "--temperature", panel="Requests"
    )


@with_flags
def bench(
    server: ServerArgument = DEFAULT_SERVER,
    *,
    load: LoadSpec,
    selection: Selection,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text file with a prompt per line, to draw from instead of random tokens.",
            rich_help_panel="Requests",
        ),
    ] = None,
    wanted: RequestFlags,
    drafting: Drafting,
    as_json: JsonOption = False,
    connection: Connection,
) -> None:
    """Put a server under load, and print how soon it answers and how much it gets done.

    Requests are sent when they are due, whether or not earlier ones are done (open loop), and latencies count from when
    they were due. Ctrl-C ends the load early and prints what was measured so far.

    Example: loraplex bench localhost:50051 --rate 4 --popularity zipf:1
    """
    if prompts is not None:
        load = replace(load, texts=_read_prompts(prompts))
    session = Session(load, selection, options_of(wanted, drafting))
    client = replace(connection, retries=0).async_client(server)  # a refusal is what is measured
    was_interrupted = False
    try:
        with terminal.progress(f"{load.rate:g} requests/s to {server}"):
            asyncio.run(_run(session, client))
    except KeyboardInterrupt:
        if not session.recording.outcomes:
            raise  # nothing was sent yet
        was_interrupted = True
    summary = session.recording.summary()
    if as_json:
        terminal.write_json({**session.described(), "interrupted": was_interrupted, **asdict(summary)})
    else:
        _print(summary)
    if was_interrupted:
        raise KeyboardInterrupt
    if summary.failed or not summary.completed:
        raise typer.Exit(1)


async def _run(session: Session, client: AsyncClient) -> None:
    async with client:
        await session.run(client)


def _read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts in a file, one per line. Raises InvalidArgument."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not text in UTF-8", field="--prompts") from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="--prompts") from error
    found = tuple(line for line in lines if line.strip())
    if not found:
        raise InvalidArgument(f"{path} has no prompt in it; write one per line", field="--prompts")
    return found


_LATENCIES = (
    ("first token", "ttft_s"),
    ("first token, cold adapter", "cold_ttft_s"),
    ("first token, warm adapter", "warm_ttft_s"),
    ("per further token", "tpot_s"),
    ("whole request", "total_s"),
)


def _print(summary: Summary) -> None:
    rows = [
        _latency(name, found)
        for name, field in _LATENCIES
        if (found := cast("Distribution | None", getattr(summary, field))) is not None
    ]
    terminal.write_table(("LATENCY (ms)", "COUNT", "MEAN", "P50", "P90", "P99", "MAX"), rows)
    rest = f", {summary.failed} failed" if summary.failed else ""
    rest += f", {summary.unfinished} unfinished" if summary.unfinished else ""
    facts = [
        ("requests", f"{summary.completed} of {summary.scheduled} completed{rest}"),
        ("duration", f"{summary.elapsed_s:.1f} s"),
        ("throughput", f"{summary.output_tokens_per_s:.1f} tokens/s, {summary.requests_per_s:.2f} requests/s"),
    ]
    if summary.drafted_tokens:
        facts.append(("drafted tokens", f"{summary.accepted_tokens} of {summary.drafted_tokens} accepted"))
    if summary.held:
        facts.append(("held back", f"{summary.held} requests waited here because of --max-inflight"))
    if summary.late_s is not None and summary.late_s.p99 > _LATE_S:
        facts.append(("late", f"{summary.late_s.p99 * 1e3:.0f} ms (p99): this side could not keep up"))
    facts += [(f"{one.code} {one.reason}", f"{one.count} times: {one.example}") for one in summary.errors]
    terminal.write_table(("WHAT", "FIGURE"), facts)


def _latency(name: str, found: Distribution) -> tuple[str, ...]:
    times = (found.mean, found.p50, found.p90, found.p99, found.max)
    return (name, str(found.count), *(f"{time * 1e3:.1f}" for time in times))
