"""Flags of a command that ends with its supervisor."""

from __future__ import annotations

from typing import Annotated

import typer

from loraplex_runtime.flags import STARTING

Supervised = Annotated[
    bool,
    typer.Option(
        "--supervised",
        help="End when standard input closes, as it does when a supervisor dies.",
        rich_help_panel=STARTING,
    ),
]
OnOrphan = Annotated[
    str,
    typer.Option(
        "--on-orphan",
        metavar="end|drain=SECONDS",
        help="With --supervised, what running requests get when standard input closes: nothing, or SECONDS to end.",
        rich_help_panel=STARTING,
    ),
]
