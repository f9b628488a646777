"""Generator of docs/images/demo.svg: what `loraplex demo` prints, from a run.

python scripts/demo_picture.py    # after a change to what the demo prints; on a machine that does nothing else
"""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

from rich.console import Console

from loraplex_demo.cli import print_tables, run_batch
from loraplex_demo.world import committed_world
from loraplex_server.cli.report import Report

PICTURE = Path(__file__).resolve().parents[1] / "docs/images/demo.svg"
WIDTH = 108  # characters
NUM_RECORDS = 4
NUM_SHOWN = 1


def main() -> None:
    world = committed_world()
    with (report := Report("demo", as_json=False)):
        run = asyncio.run(run_batch(world, NUM_RECORDS, report))
    if isinstance(run, int):
        sys.exit(run)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_terminal=True)
    console.print("[bold]$ loraplex demo[/]")
    print_tables(world, run, console, num_shown=NUM_SHOWN)
    PICTURE.write_text(console.export_svg(title="loraplex demo"), encoding="utf-8")


if __name__ == "__main__":
    main()
