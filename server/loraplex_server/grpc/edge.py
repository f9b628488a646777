"""What every handler of the worker does first and last: who calls, are we draining, which error leaves.

Owns the draining flag.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

from loraplex_proto import auth, status
from loraplex_proto.errors import Draining

Context = Any
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


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


def handles_errors(handler: _Handler) -> _Handler:
    """Errors of a unary handler leave as typed status; unknown ones as INTERNAL with an opaque id."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: Context) -> Any:
        try:
            return await handler(self, request, context)
        except Exception as error:
            return await status.abort(context, error)

    return cast(_Handler, wrapped)


def handles_stream_errors(handler: _Handler) -> _Handler:
    """The same for a handler that streams."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for message in handler(self, request, context):
                yield message
        except Exception as error:
            await status.abort(context, error)

    return cast(_Handler, wrapped)
