"""Calls of one client against a live server.

Each call is a function, its result one line of JSON on standard output. Runs in the client's own
environment, so that it needs nothing but Python's library.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

CALLS: dict[str, Callable[[], Any]] = {}
# The server's URLs and names, and the texts that gRPC gives: see `facts_of` in run.py.
facts: Any = json.loads(os.environ["CONFORMANCE_FACTS"], object_hook=lambda fields: SimpleNamespace(**fields))
SKIPPED: list[str] = os.environ.get("CONFORMANCE_SKIPPED", "").splitlines()


def call(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Names a call. Functions and coroutine functions do."""

    def register(function: Callable[[], Any]) -> Callable[[], Any]:
        assert name not in CALLS, name
        CALLS[name] = function
        return function

    return register


def raises(kinds: type[BaseException] | tuple[type[BaseException], ...], function: Callable[..., Any], *args: Any,
           **fields: Any) -> Any:  # fmt: skip
    """The exception that the call raises; AssertionError for another one, and for none."""
    try:
        function(*args, **fields)
    except kinds as error:
        return error
    raise AssertionError(f"nothing was raised; expected {kinds}")


async def raises_async(kinds: type[BaseException], awaitable: Any) -> Any:
    try:
        await awaitable
    except kinds as error:
        return error
    raise AssertionError(f"nothing was raised; expected {kinds}")


def equal(found: Any, expected: Any) -> None:
    assert found == expected, f"{found!r} is not {expected!r}"


def run() -> None:
    for name, function in CALLS.items():
        if name in SKIPPED:
            continue
        fault = ""
        try:
            result = function()
            if inspect.isawaitable(result):
                asyncio.run(result)
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            fault = f"{type(error).__name__}: {error}" if str(error) else traceback.format_exc().strip()[-300:]
        print(json.dumps({"call": name, "fault": fault}), flush=True)
