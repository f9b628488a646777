"""What gRPC itself says when a call fails outside of the handlers: as typed errors, with sentences of our own.

Such statuses carry no details, so their words are all there is to tell them apart by; words that are not known here
leave the status as it is. Pure. Knows neither the call nor who made it.
"""

from __future__ import annotations

import re
from typing import Final

from loraplex_contracts.errors import (
    Cancelled,
    Code,
    ConnectionLost,
    LoraplexError,
    MessageTooLarge,
    ServerUnreachable,
    Unimplemented,
)

RETRY_S: Final = 1.0

_OVER_LIMIT: Final = re.compile(r"(SERVER|CLIENT): (Received|Sent) message larger than max \((\d+) vs\. (\d+)\)")
_UNPACKED_OVER_LIMIT: Final = "Decompressed message larger than max"
_METADATA_OVER_LIMIT: Final = re.compile(r"received metadata size exceeds (hard|soft) limit")
# No connection came about: the request was certainly never sent.
_NEVER_SENT: Final = re.compile("failed to connect to all addresses|connections to all backends failing|DNS resolution")
_WHY: Final = re.compile(r"last error: [A-Z_]+: (?:\w+:\S+: )?(?:Failed to connect to remote host: )?(.+)")
_NO_METHOD: Final = "Method not found!"
_RESET: Final = "RST_STREAM"
# A call that its own side has cancelled, or whose channel it has closed.
_OWN_DOING: Final = re.compile(r"[Ll]ocally cancelled|[Cc]hannel (is )?closed")


def from_transport(code: Code, words: str) -> LoraplexError | None:
    """None where the status is nothing that gRPC itself says."""
    match code:
        case Code.RESOURCE_EXHAUSTED:
            return _too_large(words)
        case Code.UNIMPLEMENTED if words == _NO_METHOD:
            return Unimplemented("the server does not know this method; client and server are of different versions")
        case Code.UNAVAILABLE if _NEVER_SENT.match(words):
            why = found[1] if (found := _WHY.search(words)) else words
            return ServerUnreachable(f"the server cannot be reached: {why}", retry_after_s=RETRY_S)
        case Code.CANCELLED if _OWN_DOING.search(words):
            return Cancelled("the call was cancelled on this side")
        # A server that is stopped hard resets or cancels what it has; nobody else cancels without being asked to.
        case Code.UNAVAILABLE | Code.CANCELLED:
            return connection_lost()
        case Code.INTERNAL | Code.UNKNOWN if _RESET in words:
            return connection_lost()
        case _:
            return None


def connection_lost() -> ConnectionLost:
    return ConnectionLost(
        "the connection to the server was lost, or cut by something in between, before the answer was complete; send "
        "the request again",
        retry_after_s=RETRY_S,
    )


def _too_large(words: str) -> MessageTooLarge | None:
    """No waiting helps, so none of them says when to retry."""
    if sizes := _OVER_LIMIT.search(words):
        side, verb, num_bytes, limit = sizes.groups()
        metadata = {"bytes": num_bytes, "limit_bytes": limit}
        if (side, verb) == ("SERVER", "Received"):
            return MessageTooLarge(
                f"the request has {num_bytes} bytes, and the server takes {limit}; send less, or start the server "
                "with a larger --max-message",
                field="request",
                metadata=metadata,
            )
        return MessageTooLarge(
            f"the answer has {num_bytes} bytes, and {limit} are taken; ask for less at a time",
            field="answer",
            metadata=metadata,
        )
    if _UNPACKED_OVER_LIMIT in words:
        return MessageTooLarge(
            "a compressed message is larger than the limit once it is unpacked; send less, or start the server with a "
            "larger --max-message",
            field="request",
        )
    if _METADATA_OVER_LIMIT.search(words):
        return MessageTooLarge(
            "the call's metadata is larger than gRPC takes (8 KiB are safe); send less of it", field="metadata"
        )
    return None
