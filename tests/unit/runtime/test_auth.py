"""Credentials: file, permissions, and trusted tenants."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from loraplex_contracts.errors import AdapterNotFound, InvalidArgument, PermissionDenied, Unauthenticated
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import adapter_pb2, inference_pb2, pooling_pb2, status_pb2, worker_pb2
from loraplex_runtime import auth as auth_module
from loraplex_runtime.auth import (
    ADMIN,
    DEFAULT_TENANT,
    EVERYBODY,
    METHOD_ROLES,
    OPEN_METHODS,
    ROLES,
    ROUTER,
    USER,
    Credentials,
    Identity,
    ServerInterceptor,
    TenantLimits,
    current_identity,
    follow_credentials,
    one_router,
    token_digest,
)
from loraplex_runtime.refusals import Refusals
from loraplex_runtime.reload import Reloader

GENERATE = "/loraplex.v1.InferenceService/Generate"
LOAD = "/loraplex.v1.AdapterService/LoadAdapter"
WATCH = "/loraplex.v1.WorkerService/WatchLoad"

ACME = Identity("acme", frozenset({USER}), ("acme/*", "shared-?"))
OPS = Identity("ops", frozenset({ADMIN}), ("*",))
GATE = Identity("gate", frozenset({ROUTER}), ("*",))
CREDENTIALS = Credentials({token_digest("a"): ACME, token_digest("o"): OPS, token_digest("g"): GATE})


def bearer(token: str, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}"), *more]


# --- who --------------------------------------------------------------------------------------------------------------


def test_a_known_token_is_its_identity() -> None:
    assert CREDENTIALS.identify(GENERATE, bearer("a")) == ACME
    assert CREDENTIALS.identify(GENERATE, [("authorization", "bearer a")]) == ACME


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "")],
        [("authorization", "a")],
        [("authorization", "Basic a")],
        [("authorization", "Bearer ")],
        bearer("b"),
        bearer("A"),
        bearer("a") * 2,
        [("Authorization-bin", b"Bearer a")],
        bearer("a") + bearer("o"),
    ],
)
def test_anything_else_is_nobody(metadata: list[tuple[str, Any]]) -> None:
    with pytest.raises(Unauthenticated):
        CREDENTIALS.identify(GENERATE, metadata)


def test_no_credentials_let_nobody_in() -> None:
    with pytest.raises(Unauthenticated):
        Credentials({}).identify(GENERATE, bearer("a"))


@pytest.mark.parametrize(
    ("token", "method", "is_open"),
    [
        ("a", GENERATE, True),
        ("a", LOAD, False),
        ("a", WATCH, False),
        ("o", GENERATE, False),
        ("o", LOAD, True),
        ("o", WATCH, True),
        ("g", GENERATE, True),
        ("g", LOAD, True),
        ("g", WATCH, True),
        ("g", "/loraplex.v1.InferenceService/NewMethod", False),
        ("g", "/other.Service/Method", False),
    ],
)
def test_methods_are_denied_unless_a_role_opens_them(token: str, method: str, is_open: bool) -> None:
    if is_open:
        CREDENTIALS.identify(method, bearer(token))
    else:
        with pytest.raises(PermissionDenied):
            CREDENTIALS.identify(method, bearer(token))


@pytest.mark.parametrize(
    ("token", "method", "says"),
    [
        ("a", LOAD, "asks for the role admin,"),
        ("o", GENERATE, "asks for the role user,"),
        ("g", "/other.Service/Method", "no credential opens this call"),
    ],
)
def test_refusals_name_the_role_that_is_missing(token: str, method: str, says: str) -> None:
    with pytest.raises(PermissionDenied, match=says):
        CREDENTIALS.identify(method, bearer(token))


def test_every_method_of_the_contract_has_been_thought_of() -> None:
    services = [
        *inference_pb2.DESCRIPTOR.services_by_name.values(),
        *pooling_pb2.DESCRIPTOR.services_by_name.values(),
        *adapter_pb2.DESCRIPTOR.services_by_name.values(),
        *worker_pb2.DESCRIPTOR.services_by_name.values(),
        *status_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    ours = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert ours == {method for method in METHOD_ROLES if method.startswith("/loraplex.")}
    assert all(roles and roles <= ROLES for roles in METHOD_ROLES.values())
    assert all(method.startswith("/grpc.health.v1.Health/") for method in OPEN_METHODS)


# --- for whom ---------------------------------------------------------------------------------------------------------


def test_a_router_is_believed() -> None:
    identity = CREDENTIALS.identify(GENERATE, bearer("g", ("x-loraplex-tenant", "acme")))
    assert (identity.tenant, identity.roles, identity.adapters) == ("acme", GATE.roles, GATE.adapters)
    assert CREDENTIALS.identify(GENERATE, bearer("g")).tenant == "gate"


@pytest.mark.parametrize("token", ["a", "o"])
def test_nobody_else_is(token: str) -> None:
    method = GENERATE if token == "a" else LOAD
    tenant = CREDENTIALS.identify(method, bearer(token, ("x-loraplex-tenant", "victim"))).tenant
    assert tenant == {"a": "acme", "o": "ops"}[token]


@pytest.mark.parametrize("tenants", [["a b"], ["../x"], ["x" * 200], ["acme", "victim"]])
def test_even_a_router_names_one_tenant_and_well(tenants: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        CREDENTIALS.identify(GENERATE, bearer("g", *(("x-loraplex-tenant", tenant) for tenant in tenants)))


# --- which adapters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("adapter_id", "may"),
    [
        ("acme/a", True),
        ("acme/a.b", True),
        ("acme", False),
        ("acmex/a", False),
        ("shared-1", True),
        ("shared-12", False),
    ],
)
def test_globs_are_over_whole_names(adapter_id: str, may: bool) -> None:
    assert ACME.may_use(adapter_id) is may


def test_an_adapter_that_is_not_the_tenants_is_not_found() -> None:
    ACME.check_adapters(["acme/a", "shared-1"])
    with pytest.raises(AdapterNotFound) as caught:
        ACME.check_adapters(["acme/a", "other/b"])
    assert caught.value.resource == "other/b"


def test_everybody_may_everything() -> None:
    assert EVERYBODY.tenant == DEFAULT_TENANT
    assert EVERYBODY.may_use("org/anything")
    EVERYBODY.check_source("/adapters/other/b", "mine")


def test_a_load_takes_no_other_tenants_folder() -> None:
    for source in ("", "acme/a", "shared-1/", "hub:other/b", "s3:bucket/other"):
        ACME.check_source(source, "acme/mine")
    for source in ("other/b", "/adapters/acme/a", "acme"):
        with pytest.raises(AdapterNotFound, match="there is no folder") as caught:
            ACME.check_source(source, "acme/mine")
        assert caught.value.field == "source"
    assert current_identity() is EVERYBODY


# --- the file ---------------------------------------------------------------------------------------------------------

ROW = {"sha256": token_digest("a"), "tenant": "acme"}


def write(folder: Path, content: Any, name: str = "auth.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def loaded(path: Path) -> Credentials:
    return Credentials.parse(path, path.read_bytes())


def test_json(tmp_path: Path) -> None:
    row = {**ROW, "adapters": ["acme/*"], "roles": ["user", "admin"]}
    identity = loaded(write(tmp_path, {"credentials": [row]})).identify(GENERATE, bearer("a"))
    assert identity == Identity("acme", frozenset({USER, ADMIN}), ("acme/*",))


def test_toml(tmp_path: Path) -> None:
    text = f'[[credentials]]\nsha256 = "{token_digest("a").upper()}"\ntenant = "acme"\n'
    identity = loaded(write(tmp_path, text, "auth.toml")).identify(GENERATE, bearer("a"))
    # Nothing is given that the file does not say.
    assert identity == Identity("acme", frozenset({USER}), ())
    assert not identity.may_use("a")


def test_a_router_may_use_all_adapters_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    for given, may in (({}, True), ({"adapters": ["b"]}, False)):
        path = write(tmp_path, {"credentials": [{**ROW, "roles": ["router"], **given}]})
        assert loaded(path).identify(GENERATE, bearer("a")).may_use("a") is may


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ('{"credentials": [\n{"tenant": "secret"\n"x"', "not valid JSON (in line 3)"),
        ("[]", "must be a table"),
        pytest.param('{"credentials": ' + "[" * 50_000 + "]" * 50_000 + "}", "is nested too deeply", id="nested"),
        ({}, "credentials is missing"),
        ({"credentials": {}}, "must be a list"),
        ({"credentials": [], "more": 1}, "'more' is not known"),
        ({"credentials": ["x"]}, "credential 1 must be a table"),
        ({"credentials": [ROW, {"tenant": "b"}]}, "credential 2: sha256 is missing"),
        ({"credentials": [{"sha256": ROW["sha256"]}]}, "tenant is missing"),
        ({"credentials": [{**ROW, "sha256": "secret"}]}, "64 hexadecimal digits"),
        ({"credentials": [{**ROW, "sha256": 5}]}, "sha256 must be a string"),
        ({"credentials": [{**ROW, "tenant": "a b"}]}, "tenant"),
        ({"credentials": [{**ROW, "token": "secret"}]}, "'token' is not known"),
        ({"credentials": [{**ROW, "roles": ["root"]}]}, "roles must be some of"),
        ({"credentials": [{**ROW, "roles": []}]}, "roles must be some of"),
        ({"credentials": [{**ROW, "adapters": "*"}]}, "adapters must be a list"),
        ({"credentials": [{**ROW, "adapters": [1]}]}, "must be strings"),
        ({"credentials": [{**ROW, "adapters": [""]}]}, "must be strings"),
        ({"credentials": [ROW, ROW]}, "twice"),
        ({"credentials": [], "tenants": []}, "tenants must be a table"),
        ({"credentials": [], "tenants": {"acme": 5}}, "tenants.acme must be a table"),
        ({"credentials": [], "tenants": {"a b": {}}}, "tenants.a b: tenant 'a b' is not valid"),
        ({"credentials": [], "tenants": {"acme": {"rate": 5}}}, "'rate' is not known; use max_concurrent_requests"),
        ({"credentials": [], "tenants": {"acme": {"tokens_per_minute": "5"}}}, "tokens_per_minute must be a whole"),
        ({"credentials": [], "tenants": {"acme": {"tokens_per_minute": 1.5}}}, "must be a whole number"),
        ({"credentials": [], "tenants": {"acme": {"tokens_per_minute": True}}}, "must be a whole number"),
        ({"credentials": [], "tenants": {"acme": {"tokens_per_minute": 0}}}, "must be at least 1"),
        ({"credentials": [], "tenants": {"acme": {"tokens_per_minute": 1 << 63}}}, "and below 2^63"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        loaded(write(tmp_path, content))
    assert says in caught.value.message
    assert caught.value.field == "--auth-file"
    assert "secret" not in caught.value.message


def test_limits_of_tenants(tmp_path: Path) -> None:
    text = (
        f'[[credentials]]\nsha256 = "{token_digest("a")}"\ntenant = "acme"\n'
        f'[[credentials]]\nsha256 = "{token_digest("b")}"\ntenant = "b"\n'
        "[tenants.acme]\nmax_concurrent_requests = 8\ntokens_per_minute = 60_000\n[tenants.gone]\n"
    )
    credentials = loaded(write(tmp_path, text, "auth.toml"))
    assert credentials.identify(GENERATE, bearer("a")).limits == TenantLimits(8, 60_000, None)
    assert credentials.identify(GENERATE, bearer("b")).limits == TenantLimits()


LIMITED = Credentials({token_digest("g"): GATE, token_digest("a"): ACME}, {"acme": TenantLimits(1, 2, 3)})
SAYS_BYTES = ("x-loraplex-tenant-adapter-bytes", "7")


def test_a_router_says_how_many_bytes_of_adapters_its_tenant_may_have() -> None:
    of_acme = ("x-loraplex-tenant", "acme")
    assert LIMITED.identify(GENERATE, bearer("g", of_acme)).limits.max_resident_adapter_bytes == 3
    assert LIMITED.identify(GENERATE, bearer("g", of_acme, SAYS_BYTES)).limits.max_resident_adapter_bytes == 7
    of_other = ("x-loraplex-tenant", "other")
    assert LIMITED.identify(GENERATE, bearer("g", of_other, SAYS_BYTES)).limits == TenantLimits(None, None, 7)
    assert LIMITED.identify(GENERATE, bearer("a", SAYS_BYTES)).limits == TenantLimits(1, 2, 3)


@pytest.mark.parametrize("text", ["-1", "0", "x", "1e3", "9" * 19, "9" * 5000, "\u0663"])
def test_bytes_that_are_none(text: str) -> None:
    metadata = bearer("g", ("x-loraplex-tenant", "acme"), (SAYS_BYTES[0], text))
    with pytest.raises(InvalidArgument, match="must be a number of bytes"):
        LIMITED.identify(GENERATE, metadata)


def test_toml_that_is_none_says_where(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"not valid TOML \(in line 2\)$"):
        loaded(write(tmp_path, "[[credentials]]\nsha256 = secret\n", "auth.toml"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read"):
        follow_credentials(Reloader(), tmp_path / "none.json")
    assert follow_credentials(Reloader(), None) is None


def test_a_worker_that_believes_one_router() -> None:
    credentials = one_router(token_digest("router"))
    identity = credentials.identify(GENERATE, bearer("router", ("x-loraplex-tenant", "acme")))
    assert identity.tenant == "acme"
    assert identity.may_use("anything")
    with pytest.raises(Unauthenticated):
        credentials.identify(GENERATE, bearer(token_digest("router")))


# --- in a server ------------------------------------------------------------------------------------------------------


async def echo(request: bytes, context: Any) -> bytes:
    identity = current_identity()
    return f"{identity.tenant} {request.decode()}".encode()


async def echo_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield await echo(request, context)


async def health(request: bytes, context: Any) -> bytes:
    return current_identity().tenant.encode()


@pytest.fixture(params=[True, False])
async def channel(request: pytest.FixtureRequest) -> AsyncIterator[tuple[grpc.aio.Channel, bool]]:
    """Channels to a server with credentials, and to one without."""
    interceptor = ServerInterceptor((lambda: CREDENTIALS) if request.param else None, Refusals().handler)
    server = grpc.aio.server(interceptors=[interceptor])
    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    for service, handlers in (
        ("loraplex.v1.InferenceService", {"Generate": unary(echo), "GenerateStream": stream(echo_stream)}),
        ("loraplex.v1.AdapterService", {"LoadAdapter": unary(echo)}),
        ("grpc.health.v1.Health", {"Check": unary(health)}),
        ("other.Service", {"Method": unary(echo)}),
    ):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel, request.param
    await server.stop(None)


async def test_the_identity_is_there_in_every_kind_of_handler(channel: tuple[grpc.aio.Channel, bool]) -> None:
    client, has_auth = channel
    metadata = bearer("g", ("x-loraplex-tenant", "acme"))
    expected = b"acme hi" if has_auth else b"default hi"
    assert await client.unary_unary(GENERATE)(b"hi", metadata=metadata) == expected
    answers = [m async for m in client.unary_stream(f"{GENERATE}Stream")(b"hi", metadata=metadata)]
    assert answers == [expected]
    # A call's identity ends with it.
    if has_auth:
        assert await client.unary_unary(GENERATE)(b"hi", metadata=bearer("a")) == b"acme hi"
    else:
        assert await client.unary_unary(GENERATE)(b"hi") == b"default hi"
    assert await client.unary_unary("/grpc.health.v1.Health/Check")(b"") == b"default"


@pytest.mark.parametrize(
    ("method", "metadata", "error"),
    [
        (GENERATE, [], Unauthenticated),
        (GENERATE + "Stream", [], Unauthenticated),
        (GENERATE, bearer("x"), Unauthenticated),
        (LOAD, bearer("a"), PermissionDenied),
        ("/other.Service/Method", bearer("g"), PermissionDenied),
        ("/no.Service/Method", bearer("g"), PermissionDenied),
    ],
)
async def test_refusals_are_typed(
    channel: tuple[grpc.aio.Channel, bool], method: str, metadata: Any, error: type[Exception]
) -> None:
    client, has_auth = channel
    call = client.unary_unary(method)(b"hi", metadata=metadata)
    if not has_auth:
        if method.startswith("/no."):
            with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                await call
        else:
            assert await call == b"default hi"
        return
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert type(from_rpc_error(caught.value)) is error


def test_versions_are_allowed_as_their_names_are() -> None:
    identity = Identity("acme", adapters=("acme/sql", "*@0123abcd"))
    assert identity.may_use("acme/sql@0123abcd")
    assert not identity.may_use("other/sql@0123abcd")


# --- many -------------------------------------------------------------------------------------------------------------


def test_a_call_costs_no_look_at_every_credential() -> None:
    rows = [{"sha256": token_digest(str(number)), "tenant": f"t{number}"} for number in range(1000)]
    many = Credentials.parse(Path("auth.json"), json.dumps({"credentials": rows}).encode())
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event.endswith("call")

    sys.setprofile(count)
    try:
        found = many.identify(GENERATE, bearer("999"))
    finally:
        sys.setprofile(None)
    assert found.tenant == "t999"
    assert num_calls < 100
    with pytest.raises(Unauthenticated):
        many.identify(GENERATE, bearer("1000"))


def test_patterns_are_compiled_when_they_are_first_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(auth_module.fnmatch, "translate", lambda glob: compiled.append(glob) or glob)
    identities = [Identity(f"t{number}", adapters=(f"t{number}",)) for number in range(3)]
    assert not compiled
    assert [one.may_use("t1") for one in identities for _ in range(2)] == [False, False, True, True, False, False]
    assert compiled == ["t0", "t1", "t2"]
