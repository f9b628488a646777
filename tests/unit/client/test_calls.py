"""Addresses, tokens, headers and deadlines of calls."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from loraplex import Client, Hub, Tls
from loraplex._calls import DEFAULT_MAX_MESSAGE_BYTES, Call, Calls, Settings, _with_remedy, checked_timeout
from loraplex_contracts.errors import ConnectionLost, InvalidArgument, LoraplexError, MessageTooLarge
from loraplex_runtime.listen_config import ListenConfig

CALLS = Calls("localhost", None, None, False)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("localhost", "localhost:50051"),
        ("10.0.0.1", "10.0.0.1:50051"),
        ("host:1234", "host:1234"),
        ("[::1]:50051", "[::1]:50051"),
        ("[fe80::1%br-1.2]:50051", "[fe80::1%br-1.2]:50051"),
        ("dns:///service.local:50051", "dns:///service.local:50051"),
        ("unix:/run/loraplex.sock", "unix:/run/loraplex.sock"),
    ],
)
def test_targets(target: str, expected: str) -> None:
    assert Settings(target).target == expected


@pytest.mark.parametrize(
    "target",
    [
        "",
        "http://host:50051",
        "HTTPS://host",
        "grpc://host:1",
        "host :1",
        "a\nb",
        ":::",
        "::1",
        "[::1",
        "h:0",
        "h:99999",
        "h:",
        "h:x",
    ],
)
def test_what_is_no_address_says_how_to_write_one(target: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port") as caught:
        Client(target)
    assert caught.value.field == "target"


_HANDSHAKE = "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:OPENSSL_internal"
_OWN_PAIR = Tls(client_key=b"-----BEGIN k", client_certificate=b"-----BEGIN c")
_NO_SETTINGS = "Failed parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 80)"


@pytest.mark.parametrize(
    ("words", "tls", "says"),
    [
        (f"{_HANDSHAKE}:CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", Tls(), "has expired"),
        (f"{_HANDSHAKE}:NO_COMMON_SIGNATURE_ALGORITHMS: OK", Tls(), "the key of the client's certificate"),
        (
            f"{_HANDSHAKE}:SSLV3_ALERT_HANDSHAKE_FAILURE: OK",
            Tls(),
            "asks for a certificate of the client (--client-key",
        ),
        (f"{_HANDSHAKE}:SSLV3_ALERT_HANDSHAKE_FAILURE: OK", Tls(), "(a certificate whose key is RSA, P-256 or P-384)"),
        (f"{_HANDSHAKE}:CERTIFICATE_VERIFY_FAILED: certificate is not yet valid: OK", Tls(), "not valid yet"),
        (f"{_HANDSHAKE}:CERTIFICATE_VERIFY_FAILED: self signed certificate: OK", Tls(), "vouches for its certificate"),
        ("Failed to create security handshaker.", Tls(), "(--ca-cert) takes certificates, no key"),
        ("Cannot check peer: missing selected ALPN property.", Tls(), "use the gRPC port"),
        (f"{_NO_SETTINGS} (Trying to connect an http1.x server (HTTP status 400))", None, "use the gRPC port"),
        (_NO_SETTINGS, None, "use the gRPC port"),
        ("Socket closed", None, "try tls=True (--tls)"),
        ("Socket closed", Tls(), "(--client-key, --client-cert)"),
        ("Socket closed", _OWN_PAIR, "do not accept the client's certificate (one of another authority"),
        ("Socket closed", _OWN_PAIR, "one for servers alone"),
        ("Socket closed", Tls(), "whose own key gRPC's clients do not take"),
        ("Handshake read failed (Socket closed)", Tls(), "(--client-key, --client-cert)"),
        ("recvmsg:Connection reset by peer (104)", None, "try tls=True (--tls)"),
        ("recvmsg:Connection reset by peer (104)", Tls(), "(--client-key, --client-cert)"),
        ("Connection refused (111)", None, "see that one runs there"),
        ("Connection refused (111)", Tls(), "where the name has several addresses"),
    ],
)
def test_grpcs_words_on_a_connection_become_ours(words: str, tls: Tls | None, says: str) -> None:
    sentence = _with_remedy(f"the server at box:1 cannot be reached: {words}", tls)
    assert sentence.startswith("the server at box:1 cannot be reached: ")
    assert says in sentence
    assert words not in sentence or "Connection refused" in words


@pytest.mark.parametrize("token", ["", "a b", "a\r\nx: y", "\u00e9"])
def test_tokens_that_are_no_header_are_refused_and_not_shown(token: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Settings("host:1", token)
    assert not token or token not in str(caught.value)


def test_secrets_are_not_in_the_repr() -> None:
    settings = Settings("host:1", "s3cret", tls=Tls(client_key=b"-----BEGIN k3y"))
    assert "s3cret" not in repr(settings)
    assert "k3y" not in repr(settings)


def test_tokens_are_not_in_the_repr_of_a_call() -> None:
    call = Calls("h:1", "s3cret", 1.0, False).generate("x", {"adapter_id": "org/sql", "hub": Hub(token="hf_secret")})
    assert "hf_secret" not in repr(call)
    assert "s3cret" not in repr(call)


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan])
def test_timeouts(timeout_s: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Settings("host:1", timeout_s=timeout_s)
    assert caught.value.field == "timeout_s"


def test_no_deadline() -> None:
    assert checked_timeout(None) is None
    assert checked_timeout(math.inf) is None
    assert checked_timeout(9e9) is None, "gRPC's clock would overflow: the call would end at once"
    assert checked_timeout(10**400) is None
    assert checked_timeout(3) == 3.0


def test_a_long_time_to_connect() -> None:
    options = dict(Settings("h:1", connect_timeout_s=1e9).channel_options())
    assert options["grpc.min_reconnect_backoff_ms"] == 2**31 - 1
    for bad in (None, math.inf, 1e10):
        with pytest.raises(InvalidArgument, match="connect_timeout_s takes a number of seconds"):
            Client("localhost:1", connect_timeout_s=bad)  # type: ignore[arg-type]


def test_metadata() -> None:
    assert Settings("h:1").metadata("") == ()
    assert Settings("h:1", "t0k").metadata("sql") == (("x-adapter-id", "sql"), ("authorization", "Bearer t0k"))


def test_keepalive_and_server_name() -> None:
    options = dict(Settings("h:1", tls=Tls(server_name="other")).channel_options())
    assert options["grpc.keepalive_time_ms"] == 30_000
    assert options["grpc.keepalive_permit_without_calls"] == 0
    assert options["grpc.ssl_target_name_override"] == "other"
    assert "grpc.ssl_target_name_override" not in dict(Settings("h:1").channel_options())


@pytest.mark.parametrize(
    ("target", "is_direct"),
    [
        ("localhost", True),
        ("127.0.0.1:1", True),
        ("127.1.2.3:1", True),
        ("[::1]:1", True),
        ("LOCALHOST:1", True),
        ("ipv4:127.0.0.1:1", True),
        ("ipv6:[::1]:1", True),
        ("dns:localhost:1", True),
        ("dns:///localhost:1", True),
        ("dns:///server:1", False),
        ("ipv4:127.0.0.1:1,10.0.0.1:1", False),
        ("localhost.example.com:1", False),
        ("127.example.com:1", False),
        ("10.0.0.1:1", False),
    ],
)
def test_a_proxy_is_for_other_machines(target: str, is_direct: bool) -> None:
    assert ("grpc.enable_http_proxy" in dict(Settings(target).channel_options())) == is_direct


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"target": 5}, "target"),
        ({"target": "host:1", "token": 5}, "token"),
        ({"target": "host:1", "timeout_s": "5"}, "timeout_s"),
        ({"target": "host:1", "tls": "yes"}, "tls"),
    ],
)
def test_values_of_another_type_are_told_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Client(**given)
    assert caught.value.field == field


@pytest.mark.parametrize("name", ["root_certificates", "client_key", "client_certificate"])
def test_certificates_that_are_none(name: str) -> None:
    for pem in (b"\x30\x82", "-----BEGIN CERTIFICATE-----"):
        with pytest.raises(InvalidArgument, match=rf"Tls\({name}=...\) takes the bytes of a PEM file"):
            replace(Tls(), **{name: pem})


@pytest.mark.parametrize(
    ("num_bytes", "code", "may_retry", "kind"),
    [
        (5 << 20, grpc.StatusCode.CANCELLED, True, MessageTooLarge),
        (5 << 20, grpc.StatusCode.CANCELLED, False, ConnectionLost),
        (5 << 20, grpc.StatusCode.INTERNAL, True, ConnectionLost),
        (1 << 20, grpc.StatusCode.CANCELLED, True, ConnectionLost),
    ],
)
def test_a_large_request_that_haproxy_cuts_off_is_too_large(
    num_bytes: int, code: grpc.StatusCode, may_retry: bool, kind: type[LoraplexError]
) -> None:
    words = "Stream removed (RST_STREAM (Received RST_STREAM with error code 8))"
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), words)
    call = Call("/a/B", b"x" * num_bytes, bytes, (), None, Settings("host:1", retries=0))
    with pytest.raises(kind) as caught:
        call.after(error, may_retry=may_retry)
    if kind is MessageTooLarge:
        assert caught.value.retry_after_s is None
        assert f"{num_bytes} bytes, and the server takes 4194304" in caught.value.message
    assert DEFAULT_MAX_MESSAGE_BYTES == ListenConfig(port=0).max_message_bytes


def test_the_sdk_needs_no_torch() -> None:
    code = "import sys, loraplex; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'typer', 'rich')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
