"""The router's configuration: nested frozen dataclasses, checked once, where they are made.

Knows nothing of the command line (cli.py makes these from flags). The only place that touches the environment.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from loraplex_proto.errors import InvalidArgument

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})\Z")


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """How requests are spread over workers (policy.py)."""

    # Workers that an adapter calls home as long as it is not hot.
    num_homes: int = 2
    # A worker with more than this times the mean work is passed over.
    load_factor: float = 1.25
    # Work below this never makes a worker count as busy: an idle cluster keeps every adapter at its first home.
    free_work_tokens: int = 1024

    def __post_init__(self) -> None:
        _check(self.num_homes >= 1, "num_homes", "must be at least 1")
        _check(self.load_factor >= 1.0, "load_factor", "must be at least 1: no worker is below less than the mean")
        _check(self.free_work_tokens >= 0, "free_work_tokens", "must not be negative")


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """How the router keeps up with its workers (watch.py)."""

    # What WatchLoad is asked for.
    min_interval_s: float = 0.2
    # A worker reports every ten intervals at least; one that is silent for longer than this is taken for dead.
    stale_after_s: float = 6.0
    # A stream of reports that ends after this long is opened again before the worker is given up.
    min_stream_s: float = 1.0
    min_backoff_s: float = 0.1
    max_backoff_s: float = 3.0

    def __post_init__(self) -> None:
        _check(0 < self.min_interval_s <= 60, "min_interval_s", "must be above 0 and at most 60")
        _check(self.stale_after_s > 0, "stale_after_s", "must be above 0")
        _check(
            0 < self.min_backoff_s <= self.max_backoff_s, "min_backoff_s", "must be above 0 and at most max_backoff_s"
        )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """gRPC settings of the router's own port, and of its connections to workers."""

    # Largest request that is accepted. Answers of workers may be larger: logprobs of a long prompt.
    max_message_bytes: int = 4 << 20
    max_answer_bytes: int = 64 << 20
    keepalive_s: float = 30.0
    keepalive_timeout_s: float = 10.0
    # Clients may ping this often; gRPC's own default closes connections that ping more often than every five minutes.
    min_client_ping_s: float = 10.0
    # Balancers that work on connections spread clients only when connections end now and then. 0: never.
    max_connection_age_s: float = 600.0
    # What a stream on an aged connection still gets.
    max_connection_age_grace_s: float = 3600.0
    # Several router processes on one port. Off: a second router on a taken port must fail, not steal half the clients.
    reuse_port: bool = False


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything about one router."""

    workers: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int | None = None
    auth_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    # The credential (role "router") that workers know this router by, and the CA that signed their certificates.
    worker_token_file: Path | None = None
    worker_ca: Path | None = None
    # Requests that are relayed at the same time; more are refused with a retry hint.
    max_in_flight: int = 8192
    # A request that went down with this many workers is given up: perhaps it is what kills them.
    max_lost_workers: int = 2
    # On shutdown: how long health says NOT_SERVING before new requests are refused, and what those under way still get.
    announce_s: float = 2.0
    drain_s: float = 30.0
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    server: ServerOptions = field(default_factory=ServerOptions)

    def __post_init__(self) -> None:
        _check(bool(self.workers), "--worker", "must be given at least once, as host:port")
        for address in self.workers:
            found = _ADDRESS.match(address)
            is_address = found is not None and 1 <= int(found[2]) <= 65535
            _check(is_address, "--worker", f"takes host:port, not {address!a}")
        _check(len(set(self.workers)) == len(self.workers), "--worker", "names the same worker twice")
        _check(0 <= self.port <= 65535, "--port", "must be 0 (any free port) to 65535")
        _check(self.metrics_port is None or 0 <= self.metrics_port <= 65535, "--metrics-port", "must be 0 to 65535")
        _check((self.tls_cert is None) == (self.tls_key is None), "--tls-cert", "and --tls-key come together")
        _check(self.max_in_flight >= 1, "max_in_flight", "must be at least 1")
        _check(self.max_lost_workers >= 1, "max_lost_workers", "must be at least 1")
        _check(self.announce_s >= 0 and self.drain_s >= 0, "--drain", "must not be negative")
        _check(
            self.auth_file is None or self.worker_token_file is not None,
            "--auth-file",
            "needs --worker-token-file: workers tell tenants apart only where the router shows its own credential",
        )


def quieten_grpc() -> None:
    """Keeps gRPC's C core from writing its own lines beside our log. Has no effect once grpc is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def _check(is_ok: bool, name: str, rule: str) -> None:
    if not is_ok:
        raise InvalidArgument(f"{name} {rule}", field=name)
