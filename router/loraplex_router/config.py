"""Configuration of the router: dataclasses, checked where they are made, with the command's flags."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Final, Literal

from loraplex_contracts.errors import InvalidArgument
from loraplex_router.grpc_library import import_with
from loraplex_router.membership import is_address, open_membership, parse_members
from loraplex_runtime.flags import HTTP, LOGS, NETWORK, check, option
from loraplex_runtime.listen_config import ListenConfig

_ORIGIN: Final = re.compile(r"([a-z][a-z0-9+.-]*)://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([1-9][0-9]{0,4}))?")

# Panels of the help. Options without one are those that matter first.
_spread = partial(option, panel="Spreading requests")
_network = partial(option, panel=NETWORK)
_http = partial(option, panel=HTTP)
_logs = partial(option, panel=LOGS)


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Spread of requests over workers (policy.py)."""

    num_homes: int = _spread(2, "Workers that share an adapter while it is not in great demand.", "--homes")
    # A worker with more than this times the mean work is passed over.
    load_factor: float = 1.25
    # Work below this never makes a worker count as busy: an idle cluster keeps every adapter at its first home.
    free_work_tokens: int = 1024
    # Seconds for which a worker that joins others gets less than its share.
    slow_start_s: float = 20.0

    def __post_init__(self) -> None:
        check(self.num_homes >= 1, "--homes", "must be at least 1")
        check(self.load_factor >= 1.0, "load_factor", "must be at least 1: no worker is below less than the mean")
        check(self.free_work_tokens >= 0, "free_work_tokens", "must not be negative")
        check(self.slow_start_s >= 0, "slow_start_s", "must not be negative")


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """Watches on the workers (watch.py)."""

    # What WatchLoad is asked for.
    min_interval_s: float = 0.2
    # A worker reports every ten intervals at least; one that is silent for longer than this is taken for dead.
    stale_after_s: float = 6.0
    # A stream of reports that ends after this long is opened again before the worker is given up.
    min_stream_s: float = 1.0
    min_backoff_s: float = 0.1
    max_backoff_s: float = 3.0

    def __post_init__(self) -> None:
        check(0 < self.min_interval_s <= 60, "min_interval_s", "must be above 0 and at most 60")
        check(self.stale_after_s > 0, "stale_after_s", "must be above 0")
        check(
            0 < self.min_backoff_s <= self.max_backoff_s, "min_backoff_s", "must be above 0 and at most max_backoff_s"
        )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """gRPC settings of the router's own port, and of its connections to workers."""

    # Bound on workers' answers. They may be larger than requests: logprobs of a long prompt.
    max_answer_bytes: int = 64 << 20
    # Off: a second router on a taken port must fail, not steal half the clients.
    reuse_port: bool = _network(
        False, "Let several routers share the port (SO_REUSEPORT); one that drains closes it.", "--reuse-port"
    )


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Rights of clients of the HTTP port, and names that it takes."""

    base_aliases: bool = _http(
        True,
        "Take the models '', 'tgi' and 'dummy' for the base model where no adapter has that name, and every URL.",
        "--base-aliases",
    )
    strict: bool = _http(False, "Refuse HTTP requests with unknown fields.", "--strict-requests")
    allowed_hosts: tuple[str, ...] = _http(
        (),
        "Host name that HTTP requests may be sent to; repeat it for more, '*' for any. Default: localhost and "
        "addresses where the port is open to this machine only, else any.",
        "--allowed-host",
    )
    cors_origins: tuple[str, ...] = _http(
        (),
        "Origin whose pages in browsers may use the HTTP port, such as https://app.example; repeat it for more, '*' "
        "for any. Default: none.",
        "--http-cors-origin",
    )
    admin: bool = _http(False, "Load and unload adapters over HTTP without --auth-file, too.", "--http-admin")
    shows_metrics: bool = _http(
        True,
        "Serve /metrics on the HTTP port. It asks for no credential and shows the names and the use of adapters, and "
        "without --auth-file of tenants.",
        "--http-metrics",
    )
    metrics_names: Literal["loraplex", "vllm"] = _http(
        "loraplex", "vllm: give the gauges that endpoint pickers read under vLLM's names, too.", "--metrics-names"
    )
    reasoning_content: bool = _http(
        False, "Call the reasoning in chats' answers reasoning_content, too.", "--reasoning-content"
    )
    # The workers' adapter root, whose folders requests to load an adapter may name.
    adapter_root: Path | None = _http(
        None, "The workers' --adapters: lora_path may be an absolute path in it alone.", "--adapter-root"
    )

    def __post_init__(self) -> None:
        check(
            self.metrics_names in ("loraplex", "vllm"),
            "--metrics-names",
            f"takes loraplex or vllm, not {self.metrics_names!a}",
        )
        for origin in self.cors_origins:
            check(
                origin == "*" or _is_origin(origin),
                "--http-cors-origin",
                "takes '*', or an origin as browsers write it, such as https://app.example or http://localhost:3000 "
                f"(lower case, no path, no default port), not {ascii(origin)[:60]}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags(ListenConfig):
    """Flags of `loraplex router` and of `loraplex http`."""

    served_model_names: tuple[str, ...] = _http(
        (),
        "Name of the base model over HTTP; repeat it for more, the first one is listed. Default: the model's id.",
        "--served-model-name",
    )
    max_in_flight: int = _spread(
        8192,
        "Requests that are relayed at the same time; more are refused with a hint when to retry.",
        "--max-in-flight",
    )
    log_level: str = _logs("info", "debug, info, warning or error.", "--log-level")
    log_format: Literal["plain", "json"] = _logs("plain", "plain or json, an object a line.", "--log-format")
    http: HttpOptions = field(default_factory=HttpOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ServerFlags):
    """Everything about one router."""

    workers: tuple[str, ...] = option(
        (),
        "A worker's [NAME=]HOST:PORT. Repeat the flag for each of them. Adapters stay with a name when its address "
        "changes.",
        "--worker",
    )
    workers_from: str = option(
        "",
        "Follow a changing list of workers instead: file:PATH with a [NAME=]HOST:PORT in each line, or "
        "dns:HOST:PORT with all addresses of the host.",
        "--workers-from",
    )
    http_port: int | None = option(
        None, "Serve OpenAI's HTTP routes on this port; 0 takes a free one. Default: off.", "--http-port"
    )
    http_host: str | None = _http(None, "Address to serve HTTP on. Default: that of --host.", "--http-host")
    worker_token_file: Path | None = _network(
        None, "The token (role router) that this router shows its workers.", "--worker-token-file"
    )
    # What the flags about workers begin with, for errors: `loraplex http` has others.
    worker_flags: str = "--worker"
    # The same token, from a caller that has it in memory.
    worker_token: str = field(default="", repr=False)
    worker_ca: Path | None = _network(None, "Connect to workers with TLS; their certificates' CA (PEM).", "--worker-ca")
    worker_client_cert: Path | None = _network(
        None, "Certificate to show workers that ask for one (--tls-client-ca); PEM.", "--worker-client-cert"
    )
    worker_client_key: Path | None = _network(None, "Key of --worker-client-cert (PEM).", "--worker-client-key")
    # A request that went down with this many workers is given up: it may be what kills them.
    max_lost_workers: int = 2
    resume: bool = _spread(
        False,
        "When a worker is lost, have another one repeat its streams and go on where they ended, as far as the same "
        "adapter gives the same tokens.",
        "--resume",
    )
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)
    server: ServerOptions = field(default_factory=ServerOptions)

    def __post_init__(self) -> None:
        check(not (self.workers and self.workers_from), "--workers-from", "and --worker exclude each other")
        try:
            parse_members(self.workers)
        except InvalidArgument as error:
            raise InvalidArgument(f"--worker takes [NAME=]HOST:PORT: {error}", field="--worker") from None
        if self.workers_from:
            open_membership(self.workers_from)
        ListenConfig.__post_init__(self)
        check_http(self.http_port, self.served_model_names)
        check(self.max_in_flight >= 1, "--max-in-flight", "must be at least 1")
        check(self.max_lost_workers >= 1, "max_lost_workers", "must be at least 1")
        check(self.log_format in ("plain", "json"), "--log-format", f"takes plain or json, not {self.log_format!a}")
        check(
            self.auth_file is None or self.worker_token_file is not None or bool(self.worker_token),
            "--auth-file",
            "needs --worker-token-file: workers tell tenants apart only where the router shows its own credential",
        )
        _check_client_pair(self.worker_flags, self.worker_client_cert, self.worker_client_key, self.worker_ca)
        # The last check: `loraplex config show` tells of every other fault without a worker, too.
        check(
            bool(self.workers or self.workers_from),
            "--worker",
            "must be given at least once, as [NAME=]HOST:PORT; or --workers-from",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpServerConfig(ServerFlags):
    """The HTTP port as a process of its own, in front of a server that runs."""

    server: str = option("", "The server's host:port (`loraplex serve`, a router or a worker).", "--server")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", "--port")
    # No flags: clients do not call this process by gRPC, and its metrics are on the HTTP port.
    max_message_bytes: int = 4 << 20
    metrics_port: int | None = None
    metrics_host: str | None = None
    server_token_file: Path | None = _network(
        None, "The token (role router) that is shown to the server.", "--server-token-file"
    )
    server_ca: Path | None = _network(
        None, "Connect with TLS; the CA of the server's certificate (PEM).", "--server-ca"
    )
    server_client_cert: Path | None = _network(
        None, "Certificate to show a server that asks for one (--tls-client-ca); PEM.", "--server-client-cert"
    )
    server_client_key: Path | None = _network(None, "Key of --server-client-cert (PEM).", "--server-client-key")

    def __post_init__(self) -> None:
        ListenConfig.__post_init__(self)
        check(
            self.auth_file is None or self.server_token_file is not None,
            "--auth-file",
            "needs --server-token-file: a server tells tenants apart only where it is shown a credential",
        )
        _check_client_pair("--server", self.server_client_cert, self.server_client_key, self.server_ca)
        check(is_address(self.server), "--server", f"must be given as host:port, not {self.server!a}")

    def router(self) -> RouterConfig:
        """Configuration of a router whose one worker is the server, and whose gRPC port only this machine can reach."""
        shared = {one.name for one in fields(ServerFlags)} - {"host", "port"}
        return RouterConfig(
            workers=(self.server,),
            port=0,
            http_host=self.host,
            http_port=self.port,
            worker_token_file=self.server_token_file,
            worker_flags="--server",
            worker_ca=self.server_ca,
            worker_client_cert=self.server_client_cert,
            worker_client_key=self.server_client_key,
            **{name: getattr(self, name) for name in shared},
        )


def check_http(port: int | None, served_model_names: tuple[str, ...]) -> None:
    """Raises InvalidArgument for settings of the HTTP port that cannot be."""
    check(port is None or 0 <= port <= 65535, "--http-port", "must be 0 to 65535")
    check(all(served_model_names), "--served-model-name", "must not be empty")


def _check_client_pair(side: str, cert: Path | None, key: Path | None, ca: Path | None) -> None:
    """Raises InvalidArgument for half a pair, and for one without TLS. `side` begins the flags' names."""
    flag = f"{side}-client-cert"
    check((cert is None) == (key is None), flag, f"and {side}-client-key come together")
    check(cert is None or ca is not None, flag, f"needs {side}-ca: a certificate is shown over TLS only")


def import_grpc(log_format: str = "plain") -> None:
    """Imports gRPC as a router wants it; before anything else does."""
    import_with(os.environ, is_silent=log_format == "json")


def _is_origin(text: str) -> bool:
    """True for a scheme and a host, with a port where it is not the scheme's own: what browsers send as Origin."""
    if (found := _ORIGIN.fullmatch(text)) is None:
        return False
    scheme, port = found.groups()
    return port is None or (int(port) <= 65535 and (scheme, port) not in (("http", "80"), ("https", "443")))
