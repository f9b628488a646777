"""From bytes to messages, the same in the router and in the worker: what is no message is the sender's error.

Owns nothing. Knows nothing of what the messages say (`validate.py` does).
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from loraplex_contracts.errors import InvalidArgument

M = TypeVar("M", bound=Message)


def parse(cls: type[M], raw: bytes) -> M:
    """Raises InvalidArgument for bytes that are no such message."""
    try:
        return cls.FromString(raw)
    except DecodeError as error:
        name = cls.DESCRIPTOR.full_name
        raise InvalidArgument(f"the request's bytes are not a {name}; use the published .proto files") from error
