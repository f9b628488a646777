"""gRPC's poller and its log lines in a router's process.

It has two pollers: an event engine, the default from 1.80 on, and the one before that. The older takes less CPU time
for a relayed message; a router uses it where the library still has it (docs/adr/0021-grpcs-older-poller.md).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import mmap
from collections.abc import Iterable, MutableMapping
from pathlib import Path
from typing import Final

EXPERIMENTS: Final = "GRPC_EXPERIMENTS"
# Parts of the event engine, as gRPC calls its experiments: each can be switched off.
EVENT_ENGINE: Final = ("event_engine_client", "event_engine_listener")


def import_with(environment: MutableMapping[str, str], *, is_silent: bool) -> None:
    """Imports gRPC, which reads the process's environment then and never again: child processes get it as it was, and
    what an operator has set stays in force. `is_silent`: it writes no lines. Has no effect once gRPC is imported."""
    # Its lines would stand between those of our log; errors may, where people read it.
    environment.setdefault("GRPC_VERBOSITY", "NONE" if is_silent else "ERROR")
    is_ours = EXPERIMENTS not in environment and knows_experiments(EVENT_ENGINE)
    if is_ours:
        environment[EXPERIMENTS] = ",".join(f"-{name}" for name in EVENT_ENGINE)
    try:
        importlib.import_module("grpc")
    finally:
        if is_ours:
            del environment[EXPERIMENTS]


def knows_experiments(names: Iterable[str]) -> bool:
    """True if the installed library has these names: it writes an error for each that it does not know."""
    package = importlib.util.find_spec("grpc")
    folders = package.submodule_search_locations if package is not None else None
    for path in (path for folder in folders or () for path in Path(folder).glob("_cython/cygrpc*.so")):
        with (
            contextlib.suppress(OSError, ValueError),  # a file that cannot be read knows none
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
        ):
            return all(library.find(b"\0" + name.encode() + b"\0") >= 0 for name in names)
    return False
