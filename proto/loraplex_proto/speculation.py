"""Kinds of speculation as texts, and their places in requests."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from google.protobuf.message import Message

from loraplex_contracts.errors import InvalidArgument
from loraplex_proto.v1 import inference_pb2

_FIELDS: Final = inference_pb2.Speculation.DESCRIPTOR.oneofs_by_name["kind"].fields
KINDS: Final = tuple(one.name for one in _FIELDS)
# The parameter that NAME is in KIND:NAME: the kind's first one, where that is a text.
_NAMED: Final = {
    one.name: first.name
    for one in _FIELDS
    for first in (one.message_type.fields[:1] if one.message_type else ())
    if first.type == first.TYPE_STRING
}
TEXTS: Final = ", ".join(f"{kind}, {kind}:{_NAMED[kind].upper()}" if kind in _NAMED else kind for kind in KINDS)


def put_kind(message: inference_pb2.Speculation, wanted: object) -> Message | None:
    """Puts a text, KIND or KIND:NAME, into the message. Returns the kind's parameters there, None where it has none.
    Raises InvalidArgument for anything else."""
    kind, has_name, name = wanted.partition(":") if isinstance(wanted, str) else ("", "", "")
    if kind in KINDS and (not has_name or (name and kind in _NAMED)):
        with suppress(ValueError):  # of protobuf, for a name that is not text in UTF-8
            parameters = getattr(message, kind)
            if not isinstance(parameters, Message):
                setattr(message, kind, True)
                return None
            parameters.SetInParent()
            if name:
                setattr(parameters, _NAMED[kind], name)
            return parameters
    raise InvalidArgument(f"`speculation` takes {TEXTS}, not {ascii(wanted)[:60]}", field="speculation")
