"""Configuration of a router: refusals that name the flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loraplex_contracts.errors import InvalidArgument
from loraplex_router.config import HttpOptions, HttpServerConfig, PolicyConfig, RouterConfig, WatchConfig
from loraplex_runtime.flags import flags_of

ONE = ("127.0.0.1:50051",)


@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"workers": ()}, "--worker"),
        ({"workers": ("localhost",)}, "--worker"),
        ({"workers": ("localhost:0",)}, "--worker"),
        ({"workers": ("localhost:70000",)}, "--worker"),
        ({"workers": ("http://localhost:1",)}, "--worker"),
        ({"workers": ("a:1\n",)}, "--worker"),
        ({"workers": ("a:1", "a:1")}, "--worker"),
        ({"port": -1}, "--port"),
        ({"port": 65536}, "--port"),
        ({"metrics_port": 65536}, "--metrics-port"),
        ({"tls_cert": Path("cert.pem")}, "--tls-cert"),
        ({"tls_key": Path("key.pem")}, "--tls-cert"),
        ({"tls_client_ca": Path("ca.pem")}, "--tls-client-ca"),
        ({"worker_ca": Path("ca.pem"), "worker_client_cert": Path("cert.pem")}, "--worker-client-cert"),
        ({"worker_ca": Path("ca.pem"), "worker_client_key": Path("key.pem")}, "--worker-client-cert"),
        ({"worker_client_cert": Path("cert.pem"), "worker_client_key": Path("key.pem")}, "--worker-client-cert"),
        ({"auth_file": Path("auth.json")}, "--auth-file"),
        ({"max_in_flight": 0}, "--max-in-flight"),
        ({"max_lost_workers": 0}, "max_lost_workers"),
        ({"drain_s": -1.0}, "--drain"),
        ({"announce_s": -1.0}, "--announce"),
        ({"max_message_bytes": 1023}, "--max-message"),
        ({"quota_share": 0.0}, "--quota-share"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], flag: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        RouterConfig(**{"workers": ONE, **fields})
    assert caught.value.field == flag
    assert flag in caught.value.message


def test_an_http_port_by_itself_has_a_router_that_only_this_machine_reaches() -> None:
    router = HttpServerConfig(server=ONE[0], host="0.0.0.0", port=1, announce_s=3.0, max_in_flight=5).router()
    assert (router.host, router.port) == ("127.0.0.1", 0)
    assert (router.workers, router.http_host, router.http_port) == (ONE, "0.0.0.0", 1)
    assert (router.announce_s, router.max_in_flight) == (3.0, 5)
    with pytest.raises(InvalidArgument, match="--port"):
        HttpServerConfig(server=ONE[0], port=-1)


def test_an_http_port_by_itself_asks_for_certificates_and_shows_its_own() -> None:
    ca, cert, key = (Path(name) for name in ("ca.pem", "cert.pem", "key.pem"))
    own = {"tls_cert": cert, "tls_key": key, "tls_client_ca": ca}
    shown = {"server_ca": ca, "server_client_cert": cert, "server_client_key": key}
    router = HttpServerConfig(server=ONE[0], **own, **shown).router()
    assert (router.tls_client_ca, router.worker_flags) == (ca, "--server")
    assert (router.worker_ca, router.worker_client_cert, router.worker_client_key) == (ca, cert, key)
    for left_out in shown:
        with pytest.raises(InvalidArgument) as caught:
            HttpServerConfig(server=ONE[0], **(shown | {left_out: None}))
        assert caught.value.field == "--server-client-cert"
        assert left_out.replace("_", "-") in caught.value.message


def test_an_http_port_by_itself_has_no_flags_for_a_grpc_port() -> None:
    flags = {cls: {flag.flag for flag in flags_of(cls)} for cls in (HttpServerConfig, RouterConfig)}
    assert flags[RouterConfig] - flags[HttpServerConfig] >= {"--max-message", "--metrics-port", "--metrics-host"}
    assert flags[HttpServerConfig] - flags[RouterConfig] == {
        "--server", "--server-token-file", "--server-ca", "--server-client-cert", "--server-client-key"
    }  # fmt: skip


@pytest.mark.parametrize("address", ["worker-1:50051", "10.0.0.1:1", "[::1]:50051", "a.b_c:65535"])
def test_addresses(address: str) -> None:
    assert RouterConfig(workers=(address,)).workers == (address,)


@pytest.mark.parametrize(
    "origin",
    ["*", "https://app.example", "http://localhost:3000", "http://[::1]:8080", "tauri://localhost", "http://a:443"],
)
def test_origins(origin: str) -> None:
    assert HttpOptions(cors_origins=(origin,)).cors_origins == (origin,)


@pytest.mark.parametrize(
    "origin",
    ["", "null", "app.example", "https://app.example/", "https://App.example", "https://a:443", "http://a:80",
     "http://a:70000", "https://*.example", "https://a\n", "https://"],
)  # fmt: skip
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(InvalidArgument, match=r"--http-cors-origin takes .*, or an origin") as caught:
        HttpOptions(cors_origins=("*", origin))
    assert caught.value.field == "--http-cors-origin"


def test_nested_settings_are_checked_too() -> None:
    with pytest.raises(InvalidArgument, match="load_factor"):
        PolicyConfig(load_factor=0.9)
    with pytest.raises(InvalidArgument, match="--homes"):
        PolicyConfig(num_homes=0)
    with pytest.raises(InvalidArgument, match="stale_after_s"):
        WatchConfig(stale_after_s=0)
    with pytest.raises(InvalidArgument, match="min_backoff_s"):
        WatchConfig(min_backoff_s=2, max_backoff_s=1)
