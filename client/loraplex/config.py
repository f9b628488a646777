"""Environment variables of the SDK and of the command.

Server, token and retries are read when a client is made.
"""

from __future__ import annotations

import os
from typing import Final

from loraplex_contracts.errors import InvalidArgument
from loraplex_proto.services import DEFAULT_PORT

LEAST_COLUMNS: Final = 20  # of a terminal
PROGRAM: Final = "loraplex"
DEFAULT_SERVER: Final = f"localhost:{DEFAULT_PORT}"
DEFAULT_RETRIES: Final = 3

SERVER_VARIABLE: Final = "LORAPLEX_SERVER"
TOKEN_VARIABLE: Final = "LORAPLEX_TOKEN"
RETRIES_VARIABLE: Final = "LORAPLEX_RETRIES"


def forget_no_columns() -> None:
    """Takes COLUMNS out of the environment where nothing could be read with so few: terminals that do not know their
    size set 0, with which Rich prints nothing."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < LEAST_COLUMNS:
        del os.environ["COLUMNS"]


def quiet_grpc() -> None:
    """Keeps gRPC's library off stderr, unless GRPC_VERBOSITY asks for its lines. Call it before any channel is made."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def words_to_complete() -> list[str]:
    """The command line that a shell wants completed, without the program; empty where none does. typer names the
    variables."""
    if f"_{PROGRAM.upper()}_COMPLETE" not in os.environ:
        return []
    return (os.environ.get("_TYPER_COMPLETE_ARGS") or os.environ.get("COMP_WORDS", "")).split()[1:]


def server_in_force(given: str | None) -> str:
    """The address given, else that of LORAPLEX_SERVER, else this machine's."""
    return given if given is not None else os.environ.get(SERVER_VARIABLE) or DEFAULT_SERVER


def token_in_force(given: str | None) -> str | None:
    """The token given, else that of LORAPLEX_TOKEN; with an empty one none goes with the calls."""
    return (given if given is not None else os.environ.get(TOKEN_VARIABLE)) or None


def retries_in_force(given: float | None) -> int:
    """The number given, else that of LORAPLEX_RETRIES, else 3. Raises InvalidArgument."""
    wanted = given if given is not None else os.environ.get(RETRIES_VARIABLE) or DEFAULT_RETRIES
    try:
        number = -1 if isinstance(wanted, float) else int(wanted)
    except (TypeError, ValueError):
        number = -1
    if number < 0:
        where = "retries" if given is not None else RETRIES_VARIABLE
        raise InvalidArgument(
            f"{where} takes how often a call is sent again, 0 for never, not {wanted!a}", field="retries"
        )
    return number
