"""`loraplex bench`: open-loop load against a running server."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, cast

import typer

from loraplex import AsyncClient, GenerateOptions, InvalidArgument
from loraplex.bench.arrivals import LoadSpec, parse_lengths
from loraplex.bench.outcomes import Distribution, Summary
from loraplex.bench.popularity import parse_popularity
from loraplex.bench.session import Selection, Session
from loraplex.cli import terminal
from loraplex.cli.connection import (
    DEFAULT_SERVER,
    DEFAULT_TIMEOUT_S,
    CaCertOption,
    JsonOption,
    TimeoutOption,
    TlsOption,
    TokenOption,
    connect_async,
)
from loraplex.cli.speculation import parse_speculation

_ARRIVALS = "Arrivals"
_ADAPTERS = "Adapters"
_REQUESTS = "Requests"
_DEFAULT_DURATION_S = 30.0
_LATE_S = 0.005  # what sending may lag behind before it is worth a word


def bench(
    server: Annotated[
        str, typer.Argument(metavar="ADDR", envvar="LORAPLEX_SERVER", help="Address of a router or worker.")
    ] = DEFAULT_SERVER,
    rate: Annotated[
        float, typer.Option(help="Requests per second; inf sends all at once.", rich_help_panel=_ARRIVALS)
    ] = 1.0,
    cv: Annotated[
        float,
        typer.Option(
            help="How irregular arrivals are (coefficient of variation of the gaps, Gamma-distributed): 0 evenly "
            "spaced, 1 Poisson, more comes in bursts.",
            rich_help_panel=_ARRIVALS,
        ),
    ] = 1.0,
    duration: Annotated[
        float | None,
        typer.Option(help="Seconds of arrivals. Default: 30, without --num-requests.", rich_help_panel=_ARRIVALS),
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(help="End after this many arrivals.", rich_help_panel=_ARRIVALS)
    ] = None,
    max_inflight: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests under way at most; more wait on this side. Their wait counts as latency.",
            rich_help_panel=_ARRIVALS,
        ),
    ] = 1024,
    adapter: Annotated[
        list[str] | None,
        typer.Option(
            "--adapter",
            "-a",
            help="Adapter to ask for, the most popular first; may be given several times. Default: all that the server "
            "lists.",
            rich_help_panel=_ADAPTERS,
        ),
    ] = None,
    adapters_prefix: Annotated[
        str, typer.Option(help="Of what the server lists, only names that begin so.", rich_help_panel=_ADAPTERS)
    ] = "",
    num_adapters: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many of them.", rich_help_panel=_ADAPTERS)
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="Ask for no adapter at all.", rich_help_panel=_ADAPTERS)] = False,
    popularity: Annotated[
        str,
        typer.Option(
            metavar="KIND",
            help="identical (all ask for the first), distinct (in turns), uniform (drawn, equally likely), skewed "
            "(each 1.5 times as likely as the next), or zipf:S (the k-th in proportion to k to the power of -S).",
            rich_help_panel=_ADAPTERS,
        ),
    ] = "uniform",
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N[-M]", help="Random tokens of a prompt.", rich_help_panel=_REQUESTS)
    ] = "64",
    output_tokens: Annotated[
        str, typer.Option(metavar="N[-M]", help="New tokens of a request, at most.", rich_help_panel=_REQUESTS)
    ] = "64",
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Text file with a prompt per line, to draw from instead of random tokens.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--stop-at-eos",
            help="Go on to --output-tokens in any case, or not.",
            rich_help_panel=_REQUESTS,
        ),
    ] = True,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token, the default.", rich_help_panel=_REQUESTS)
    ] = None,
    speculation: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:NAME]",
            help="As `loraplex generate` takes it. Default: as the server and the adapter have it.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed sends the same load again.")] = 0,
    as_json: JsonOption = False,
    token: TokenOption = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    tls: TlsOption = False,
    ca_cert: CaCertOption = None,
) -> None:
    """Put a server under load, and print how soon it answers and how much it gets done.

    Requests are sent when they are due, whether or not earlier ones are done (open loop), and latencies count from when
    they were due. Ctrl-C ends the load early and prints what was measured so far.

    Example: loraplex bench localhost:50051 --rate 4 --popularity zipf:1
    """
    if num_requests is None and duration is None:
        duration = _DEFAULT_DURATION_S
    spec = LoadSpec(
        rate,
        cv,
        duration,
        num_requests,
        parse_popularity(popularity),
        prompt_tokens=parse_lengths(prompt_tokens, field="--prompt-tokens"),
        output_tokens=parse_lengths(output_tokens, field="--output-tokens"),
        texts=() if prompts is None else _read_prompts(prompts),
        seed=seed,
    )
    options: GenerateOptions = {
        "ignore_eos": ignore_eos or None,
        "temperature": temperature,
        "speculation": None if speculation is None else parse_speculation(speculation),
    }
    selection = Selection(tuple(adapter or ()), adapters_prefix, num_adapters, base)
    session = Session(spec, selection, options, max_in_flight=max_inflight)
    client = connect_async(server, token, timeout_s, tls, ca_cert)
    was_interrupted = False
    try:
        with terminal.progress(f"{rate:g} requests per second to {server}"):
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
    if not summary.completed:
        raise typer.Exit(1)


async def _run(session: Session, client: AsyncClient) -> None:
    async with client:
        await session.run(client)


def _read_prompts(path: Path) -> tuple[str, ...]:
    """Raises InvalidArgument."""
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
