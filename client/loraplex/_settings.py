"""Connection settings of both clients: address, credentials, deadlines, channel options.

Shared by both clients; opens nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

import loraplex_proto
from loraplex_contracts.errors import InvalidArgument

DEFAULT_PORT: Final = 50051
DEFAULT_TIMEOUT_S: Final = 120.0

_BARE_HOST = re.compile(r"[A-Za-z0-9._-]+\Z")
_WEB_ADDRESS = re.compile(r"(https?|grpcs?|wss?)://", re.IGNORECASE)
_TOKEN = re.compile(r"[\x21-\x7e]+\Z")

CHANNEL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    ("grpc.primary_user_agent", f"loraplex/{loraplex_proto.__version__}"),
    # A dead peer is noticed within 40 s of silence. Servers must allow pings that often: Loraplex's do, a stock gRPC
    # server closes the connection of a client that pings more than every five minutes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Only while a call is open: balancers in between may count pings on idle connections as abuse.
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.http2.max_pings_without_data", 0),  # a request that waits in the queue sends no data
    ("grpc.max_receive_message_length", 64 << 20),  # logprobs of a long prompt with alternatives
)


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates in PEM. Nothing set: the server's certificate is checked against gRPC's own list of authorities."""

    root_certificates: bytes | None = None
    client_key: bytes | None = field(default=None, repr=False)
    client_certificate: bytes | None = None
    server_name: str | None = None  # the name in the server's certificate, where it is not the address

    def __post_init__(self) -> None:
        for name in ("root_certificates", "client_key", "client_certificate"):
            pem = getattr(self, name)
            if pem is not None and b"-----BEGIN" not in pem:
                raise InvalidArgument(f"{name} is not PEM: it has no line -----BEGIN ...-----", field=name)


@dataclass(frozen=True, slots=True)
class Settings:
    """Checked once. Raises InvalidArgument, which says what is wrong."""

    target: str
    token: str | None = field(default=None, repr=False)
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    tls: Tls | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", _checked_target(self.target))
        checked_timeout(self.timeout_s)
        given: Any = self  # a caller without a type checker gives anything
        if given.token is not None and not (isinstance(given.token, str) and _TOKEN.match(given.token)):
            raise InvalidArgument("the token must be printable ASCII without spaces", field="token")
        if given.tls is not None and not isinstance(given.tls, Tls):
            raise InvalidArgument(f"tls takes True, False or a loraplex.Tls, not {given.tls!a}", field="tls")

    def metadata(self, adapter_id: str) -> tuple[tuple[str, str], ...]:
        """What goes with a call besides the message. The adapter's name lets a proxy route without parsing."""
        pairs: list[tuple[str, str]] = []
        if adapter_id:
            pairs.append(("x-adapter-id", adapter_id))
        if self.token is not None:
            pairs.append(("authorization", f"Bearer {self.token}"))
        return tuple(pairs)

    def channel_options(self) -> list[tuple[str, int | str]]:
        options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def credentials(self) -> grpc.ChannelCredentials | None:
        """None: plain text."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(
            self.tls.root_certificates, self.tls.client_key, self.tls.client_certificate
        )


def checked_timeout(timeout_s: float | None) -> float | None:
    """Seconds, or None for no deadline. Raises InvalidArgument."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    given: Any = timeout_s
    if not (isinstance(given, (int, float)) and given > 0):  # NaN too
        raise InvalidArgument(
            f"timeout_s must be above 0, or None for no deadline; it is {timeout_s!a}", field="timeout_s"
        )
    return float(timeout_s)


def _checked_target(target: str) -> str:
    given: Any = target
    if not isinstance(given, str) or not given or _WEB_ADDRESS.match(given) or any(c.isspace() for c in given):
        shown = ascii(given if not isinstance(given, str) else given[:80])
        raise InvalidArgument(
            f"{shown} is not a server's address: write it as host:port, for example localhost:{DEFAULT_PORT}",
            field="target",
        )
    return f"{target}:{DEFAULT_PORT}" if _BARE_HOST.match(target) else target
