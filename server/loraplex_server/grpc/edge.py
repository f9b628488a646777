"""What every handler of the worker does first and last: who calls, are we draining, which error leaves.

Owns the draining flag.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from loraplex_proto import auth, status
from loraplex_proto.errors import Draining

Context = Any
_Answer = TypeVar("_Answer")
_Handler = Callable[[Any, Any, Context], Awaitable[_Answer]]
_StreamHandler = Callable[[Any, Any, Context], AsyncIterator[_Answer]]


class Edge:
    """Shared by the services of one server."""

    def __init__(self) -> None:
        self.is_draining = False

    def admit(self, *adapter_ids: str) -> auth.Identity:
        """The caller's identity. Raises Draining, and AdapterNotFound for an adapter that is not the caller's."""
        if self.is_draining:
            raise Draining("this worker is shutting down; send the request to another one", retry_after_s=1.0)
        identity = auth.current_identity()
        identity.check_adapters(adapter_ids)
        return identity


def new_request_id(given: str) -> str:
    """The client's request id, or one of ours."""
    return given or uuid.uuid4().hex


def handles_errors(handler: _Handler[_Answer]) -> _Handler[_Answer]:
    """Errors of a unary handler leave as typed status; unknown ones as INTERNAL with an opaque id."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: Context) -> _Answer:
        try:
            return await handler(self, request, context)
        except Exception as error:
            return await status.abort(context, error)

    return wrapped


def handles_stream_errors(handler: _StreamHandler[_Answer]) -> _StreamHandler[_Answer]:
    """The same for a handler that streams."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: Context) -> AsyncIterator[_Answer]:
        try:
            async for message in handler(self, request, context):
                yield message
        except Exception as error:
            await status.abort(context, error)

    return wrapped
