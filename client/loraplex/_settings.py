"""How to reach a server: address, credentials, deadlines, channel options. Shared by both clients; opens nothing."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Final

import grpc

import loraplex_proto
from loraplex_proto.errors import InvalidArgument

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
        if self.token is not None and not _TOKEN.match(self.token):
            raise InvalidArgument("the token must be printable ASCII without spaces", field="token")

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
    if not timeout_s > 0:  # NaN too
        raise InvalidArgument(
            f"timeout_s must be above 0, or None for no deadline; it is {timeout_s}", field="timeout_s"
        )
    return float(timeout_s)


def _checked_target(target: str) -> str:
    if not target or _WEB_ADDRESS.match(target) or any(c.isspace() for c in target):
        raise InvalidArgument(
            f"{target[:80]!a} is not a server's address: write it as host:port, for example localhost:{DEFAULT_PORT}",
            field="target",
        )
    return f"{target}:{DEFAULT_PORT}" if _BARE_HOST.match(target) else target
