"""Values that a shell suggests: names of a server's adapters, kinds of speculation.

A server that is away, slow or refuses means no suggestions and no words: they would land in the user's command line.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final

import typer  # also for typer, which reads annotations

from loraplex_contracts.errors import LoraplexError
from loraplex_runtime.flags import configure, flags_of

MAX_WAIT_S: Final = 2.0  # somebody has pressed Tab
SPECULATION: Final = ("off", "auto", "prompt_lookup", "medusa", "draft_model")


def adapter_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Of the server that the command line, or the environment, names."""
    from loraplex.cli.options import Connection  # late: it imports this module

    given: Any = ctx.params
    logging.getLogger("loraplex").setLevel(logging.CRITICAL)
    try:
        connection = configure(Connection, list(flags_of(Connection)), given, {})
        quick = replace(connection, timeout_s=MAX_WAIT_S, connect_timeout_s=MAX_WAIT_S, retries=0)
        with quick.client(given["server"]) as client:
            return [one.adapter_id for one in client.adapters.list(prefix=incomplete)]
    except LoraplexError:
        return []


def speculation_kinds(ctx: typer.Context, incomplete: str) -> list[str]:
    return [kind for kind in SPECULATION if kind.startswith(incomplete)]
