"""Command `loraplex top`: a router's workers, adapters and last minute, live in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraplex import (
    Activity,
    AdapterPlaces,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    LoraplexError,
    RouterStatus,
    Unimplemented,
    WorkerStatus,
)
from loraplex.cli import terminal
from loraplex.cli.options import DEFAULT_SERVER, Connection, JsonOption, RouterArgument
from loraplex_runtime.flags import with_flags

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

MIN_INTERVAL_S: Final = 0.2
LOOK_S: Final = 5.0  # a live look that takes longer is given up, and said so: the router may be frozen
# Lines of the screen that are not rows of adapters or errors: figures, heads, one for each worker.
OTHER_LINES: Final = 11
MAX_ERRORS: Final = 5
SPARKS: Final = " ▁▂▃▄▅▆▇█"
# Letter and style of each tier, as the wire numbers them.
TIERS: Final = {4: ("D", "bold white on green"), 3: ("H", "white on blue"), 2: ("S", "white on grey50")}
SERVES: Final = ("serving", "starting")
STATE_STYLES: Final = {"serving": "green", "starting": "green", "draining": "yellow", "leaving": "yellow"}


@with_flags
def top(
    server: RouterArgument = DEFAULT_SERVER,
    *,
    interval: Annotated[float, typer.Option("--interval", "-i", help="Seconds between two looks.")] = 2.0,
    prefix: Annotated[str, typer.Option(help="Only adapters whose names begin so.")] = "",
    once: Annotated[bool, typer.Option("--once", help="Look once. So does whatever is no terminal.")] = False,
    as_json: JsonOption = False,
    connection: Connection,
) -> None:
    """Watch a router: its workers, where adapters are, tokens/s, latencies, acceptance, the last errors.

    Needs a credential with the role admin where the router asks for one. Ctrl-C ends it.
    """
    if not interval >= MIN_INTERVAL_S:
        raise InvalidArgument(f"--interval must be at least {MIN_INTERVAL_S:g}", field="--interval")
    watches = terminal.is_terminal() and not (as_json or once)
    with (replace(connection, retries=0) if watches else connection).client(server) as client:  # it looks again anyway
        try:
            if as_json:
                terminal.write_json(asdict(client.status(adapter_prefix=prefix)))
            elif watches:
                _watch(client, prefix, interval)
            else:
                _print_once(client, prefix)
        except Unimplemented as error:
            raise Unimplemented(f"{server} has no status to show: it is a worker, or an old router") from error


def _print_once(client: Client, prefix: str) -> None:
    from rich.console import Console

    shown = screen(client.status(adapter_prefix=prefix), num_lines=1000)
    if terminal.is_terminal():
        Console().print(shown)
        return
    # Every row on one line, however long, and no longer than its text.
    console = Console(width=500, color_system=None)
    with console.capture() as captured:
        console.print(shown)
    terminal.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _watch(client: Client, prefix: str, interval_s: float) -> None:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console()
    shown = screen(client.status(adapter_prefix=prefix), console.height)
    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.refresh()
            time.sleep(interval_s)
            try:
                status = client.status(adapter_prefix=prefix, timeout_s=LOOK_S)
                shown = screen(status, console.height)
                live.update(shown)
            except LoraplexError as error:
                if error.exit_code == 2:
                    raise
                is_silent = isinstance(error, DeadlineExceeded)
                words = f"the router has not answered for {LOOK_S:g} s" if is_silent else error.message
                # The server may come back; what was seen last stays.
                live.update(Group(Text(terminal.without_control(words), style="red"), shown))


def screen(status: RouterStatus, num_lines: int) -> Group:
    """The whole screen, for a terminal of so many lines."""
    from rich.console import Group

    num_adapters = max(3, num_lines - OTHER_LINES - len(status.workers) - min(MAX_ERRORS, len(status.errors)))
    parts: list[RenderableType] = [_figures(status), _workers(status.workers)]
    parts += _adapters(status, num_adapters)
    if status.errors:
        parts.append(_errors(status))
    return Group(*parts)


def _figures(status: RouterStatus) -> RenderableType:
    from rich.text import Text

    activity = status.activity
    serving = sum(worker.state in SERVES for worker in status.workers)
    draining = ", draining" if status.draining else ""
    head = (
        f"{status.model_id or 'no model yet'} · router {status.router_id}, up for {status.uptime_s:.0f} s{draining} · "
        f"{serving} of {len(status.workers)} workers serve"
    )
    figures = (
        f"{_rate(activity):.0f} tokens/s · first message {_milliseconds(activity.time_to_first_p50_s)}, "
        f"p99 {_milliseconds(activity.time_to_first_p99_s)} · accepted {_share(activity) or '-'} · "
        f"{status.requests_in_flight} under way · {activity.failed_requests} of {activity.requests} failed"
    )
    text = Text(terminal.without_control(head) + "\n" + figures + "\n", no_wrap=True, overflow="ellipsis")
    return text.append(sparkline(status.tokens_by_second), style="cyan")


def sparkline(counts: Sequence[int]) -> str:
    """A character for each count, its height by the largest."""
    most = max(counts, default=0) or 1
    return "".join(SPARKS[-(-count * (len(SPARKS) - 1) // most)] for count in counts)


def _workers(workers: Sequence[WorkerStatus]) -> RenderableType:
    from rich.text import Text

    table = _table(
        (
            *("", "WORKER", "STATE", "RUNNING", "QUEUED", "HERE", "PENDING", "KV", "ADAPTERS"),
            *("TOKENS/S", "P50", "P99", "ACCEPTED"),
        )
    )
    _add_sentences(table, "REASON")
    for number, worker in enumerate(workers, start=1):
        used = worker.total_kv_blocks - worker.free_kv_blocks
        activity = worker.activity
        table.add_row(
            str(number),
            Text(terminal.without_control(worker.worker_id)),
            Text(worker.state, style=STATE_STYLES.get(worker.state, "red")),
            f"{worker.running_requests}/{worker.max_running_requests}",
            str(worker.queued_requests),
            str(worker.requests_in_flight),
            str(worker.pending_tokens),
            f"{100 * used / worker.total_kv_blocks:.0f} %" if worker.total_kv_blocks else "",
            f"{worker.device_adapters}/{worker.adapters}",
            f"{_rate(activity):.0f}",
            _milliseconds(activity.time_to_first_p50_s),
            _milliseconds(activity.time_to_first_p99_s),
            _share(activity),
            Text(terminal.without_control(worker.error)),
        )
    return table


def _adapters(status: RouterStatus, most: int) -> list[RenderableType]:
    from rich.text import Text

    table = _table(("ADAPTER", "WORK", "TIER BY WORKER"))
    for adapter in status.adapters[:most]:
        name = terminal.without_control(adapter.adapter_id) + (" …" if adapter.waiting else "")
        table.add_row(Text(name), str(adapter.work_tokens or ""), _places(adapter))
    shown = min(most, len(status.adapters))
    legend = f"{shown} of {status.total_adapters} adapters · D device, H host, S store on disk"
    return [table, Text(legend, style="dim")]


def _places(adapter: AdapterPlaces) -> RenderableType:
    from rich.text import Text

    text = Text()
    for tier in adapter.tiers:
        text.append(*TIERS.get(tier, ("·", "dim")))
        text.append(" ")
    return text


def _errors(status: RouterStatus) -> RenderableType:
    from rich.text import Text

    table = _table(("AGO", "ERROR", "METHOD", "WORKER", "REQUEST"))
    _add_sentences(table, "MESSAGE")
    for error in status.errors[:MAX_ERRORS]:
        words = (error.reason or error.code, error.method, error.worker_id, error.request_id, error.message)
        cells = (Text(terminal.without_control(word)) for word in words)
        table.add_row(f"{error.age_s:.0f} s", *cells)
    return table


def _table(columns: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    return table


def _add_sentences(table: Table, column: str) -> None:
    """A last column that takes what the others leave, and gets no other one cut."""
    table.expand = True
    table.add_column(column, no_wrap=True, overflow="ellipsis", ratio=1)


def _rate(activity: Activity) -> float:
    return activity.tokens / max(activity.window_s, 1.0)


def _share(activity: Activity) -> str:
    if not activity.drafted_tokens:
        return ""
    return f"{100 * activity.accepted_tokens / activity.drafted_tokens:.0f} %"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms" if seconds else "-"
