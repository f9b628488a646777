"""Settings of a server's port: address, credentials, TLS, quotas, logs, end."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from loraplex_proto.services import DEFAULT_PORT
from loraplex_runtime.flags import LOGS, NETWORK, STARTING, check, option

_network = partial(option, panel=NETWORK)
_logs = partial(option, panel=LOGS)
_ending = partial(option, panel=STARTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """Settings that worker, router and `loraplex http` have in common."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.", "--host")
    port: int = option(DEFAULT_PORT, "Port to listen on; 0 takes a free one.", "--port")
    auth_file: Path | None = option(
        None, "Credentials (JSON or TOML). Default: everybody may do everything.", "--auth-file"
    )
    quota_share: float = _network(
        1.0,
        "Share of each tenant's quotas in --auth-file that this server gives: 0.5 where two servers share the load.",
        "--quota-share",
    )
    tls_cert: Path | None = _network(None, "TLS certificate chain (PEM).", "--tls-cert")
    tls_key: Path | None = _network(None, "TLS key (PEM).", "--tls-key")
    tls_client_ca: Path | None = _network(
        None,
        "Demand a certificate of each client; the CA that has to have signed it (PEM).",
        "--tls-client-ca",
    )
    max_message_bytes: int = _network(4 << 20, "Largest request that is accepted.", "--max-message", is_bytes=True)
    drain_s: float = _ending(30.0, "Seconds that running requests get to end on shutdown.", "--drain")
    announce_s: float = _ending(
        2.0, "On SIGTERM or SIGHUP, seconds of NOT_SERVING before requests are refused.", "--announce"
    )
    metrics_port: int | None = _logs(
        None, "Serve Prometheus metrics on this port; 0 takes a free one. Default: off.", "--metrics-port"
    )
    metrics_host: str | None = _logs(None, "Address to serve metrics on. Default: that of --host.", "--metrics-host")
    request_log: bool = _logs(True, "Log a line for each request that ends.", "--request-log")
    otlp_traces_endpoint: str | None = _logs(
        None,
        "Send traces of requests to this OpenTelemetry collector, such as http://HOST:4318 (OTLP over HTTP). Default: "
        "off.",
        "--otlp-traces-endpoint",
    )

    def __post_init__(self) -> None:
        check(0 <= self.port <= 65535, "--port", "must be 0 (any free port) to 65535")
        check(self.metrics_port is None or 0 <= self.metrics_port <= 65535, "--metrics-port", "must be 0 to 65535")
        check((self.tls_cert is None) == (self.tls_key is None), "--tls-cert", "and --tls-key come together")
        check(
            self.tls_client_ca is None or self.tls_cert is not None,
            "--tls-client-ca",
            "needs --tls-cert and --tls-key: only over TLS do clients show certificates",
        )
        check(1024 <= self.max_message_bytes < 1 << 31, "--max-message", "must be 1024 bytes to less than 2GiB")
        check(0 < self.quota_share <= 1, "--quota-share", "must be above 0 and at most 1")
        check(self.drain_s >= 0, "--drain", "must be a number from 0 on")
        check(self.announce_s >= 0, "--announce", "must be a number from 0 on")
