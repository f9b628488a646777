"""Paths of the fields of messages."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """The dotted path of every scalar and map that a message of this type can have."""
    for field in descriptor.fields:
        path, below = prefix + field.name, field.message_type
        if below is None or below.GetOptions().map_entry:
            yield path
        else:
            yield from leaves(below, path + ".")


def set_leaves(message: Message, prefix: str = "") -> Iterator[str]:
    """The dotted path of every scalar and map that is set."""
    for field, value in message.ListFields():
        path, below = prefix + field.name, field.message_type
        if below is None or below.GetOptions().map_entry:
            yield path
            continue
        for one in [value] if field.has_presence else value:
            yield from set_leaves(one, path + ".")
