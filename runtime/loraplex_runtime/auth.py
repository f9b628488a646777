"""Authentication by static credentials from a file, for routers and workers.

A credential is a token of which the file holds the SHA-256 only. It belongs to a tenant, has roles, and names the
adapters that the tenant may use. The file may limit what a tenant has at a time (quotas.py). With a credentials file
every method is denied unless `METHOD_ROLES` opens it to one of the caller's roles; without one every caller is
`EVERYBODY`, and a tenant that a client names is not read.
Handlers ask `current_identity()`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import json
import re
import secrets
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, cast

import grpc
import grpc.aio

from loraplex_contracts.adapters import HUB_SOURCE, S3_SOURCE, check_id, name_in
from loraplex_contracts.errors import (
    InvalidArgument,
    LoraplexError,
    PermissionDenied,
    Unauthenticated,
    adapter_not_found,
    no_such_folder,
)
from loraplex_proto.services import ADAPTERS, INFERENCE, POOLING, STATUS, WORKER, path_of
from loraplex_runtime.reload import Reloader

AUTHORIZATION_KEY: Final = "authorization"
TENANT_KEY: Final = "x-loraplex-tenant"
# The tenant's max_resident_adapter_bytes; believed of a router only, as the tenant is.
ADAPTER_BYTES_KEY: Final = "x-loraplex-tenant-adapter-bytes"
DEFAULT_TENANT: Final = "default"

USER: Final = "user"
ADMIN: Final = "admin"
ROUTER: Final = "router"
ROLES: Final = frozenset({USER, ADMIN, ROUTER})

# Any one of the roles opens the method. What is not here is denied.
METHOD_ROLES: Final[Mapping[str, frozenset[str]]] = {
    path_of(INFERENCE, "Generate"): frozenset({USER, ROUTER}),
    path_of(INFERENCE, "GenerateStream"): frozenset({USER, ROUTER}),
    path_of(INFERENCE, "Tokenize"): frozenset({USER, ROUTER}),
    path_of(INFERENCE, "Detokenize"): frozenset({USER, ROUTER}),
    path_of(INFERENCE, "GetTokenizerInfo"): frozenset({USER, ROUTER}),
    path_of(INFERENCE, "GetInfo"): ROLES,
    path_of(POOLING, "Embed"): frozenset({USER, ROUTER}),
    path_of(POOLING, "Classify"): frozenset({USER, ROUTER}),
    path_of(POOLING, "Score"): frozenset({USER, ROUTER}),
    path_of(ADAPTERS, "LoadAdapter"): frozenset({ADMIN, ROUTER}),
    path_of(ADAPTERS, "UnloadAdapter"): frozenset({ADMIN, ROUTER}),
    path_of(ADAPTERS, "GetAdapter"): ROLES,
    path_of(ADAPTERS, "ListAdapters"): ROLES,
    path_of(WORKER, "GetLoad"): frozenset({ADMIN, ROUTER}),
    path_of(WORKER, "WatchLoad"): frozenset({ADMIN, ROUTER}),
    path_of(STATUS, "GetStatus"): frozenset({ADMIN}),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ROLES,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": ROLES,
}
# Balancers and orchestrators have no credential; health shows no more than a closed port does.
OPEN_METHODS: Final = frozenset(f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Limits of one tenant; None: without."""

    max_concurrent_requests: int | None = None
    tokens_per_minute: int | None = None
    max_resident_adapter_bytes: int | None = None  # of each worker


UNLIMITED: Final = TenantLimits()
MAX_LIMIT: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Identity:
    """The tenant that a request is for. `adapters` are glob patterns over whole adapter ids ('*' takes '/' too)."""

    tenant: str
    roles: frozenset[str] = frozenset({USER})
    adapters: tuple[str, ...] = ()
    limits: TenantLimits = UNLIMITED
    # Made at the first use: a file may have thousands of identities, and most are idle.
    _patterns: tuple[re.Pattern[str], ...] | None = field(default=None, init=False, repr=False, compare=False)

    def may_use(self, adapter_id: str) -> bool:
        if (patterns := self._patterns) is None:
            patterns = tuple(re.compile(fnmatch.translate(glob)) for glob in self.adapters)
            object.__setattr__(self, "_patterns", patterns)
        name = name_in(adapter_id)  # of all its versions alike
        return any(pattern.match(name) for pattern in patterns)

    def check_adapters(self, adapter_ids: Iterable[str]) -> None:
        """Raises AdapterNotFound for the first one that this tenant may not use: the same as for an unknown one."""
        for adapter_id in adapter_ids:
            if not self.may_use(adapter_id):
                raise adapter_not_found(adapter_id)

    def check_source(self, source: str, adapter_id: str) -> None:
        """Checks the source of a load: a folder below the adapter root is there for those who may use the adapter of
        its path. An absolute path, which only the worker can compare with its root, is for those who may use all.
        Raises AdapterNotFound, the same as for a folder that is not there."""
        is_folder = source and not source.startswith((HUB_SOURCE, S3_SOURCE))
        if is_folder and not ("*" in self.adapters or self.may_use(source.rstrip("/"))):
            raise no_such_folder(source, adapter_id)


EVERYBODY: Final = Identity(tenant=DEFAULT_TENANT, roles=ROLES, adapters=("*",))

# Raises where the call's credential no longer opens its method.
_recheck: ContextVar[Callable[[], object]] = ContextVar("loraplex_recheck", default=lambda: None)
_identity: ContextVar[Identity] = ContextVar("loraplex_identity", default=EVERYBODY)


def current_identity() -> Identity:
    """The identity of the call whose handler this runs in. A task that the handler starts inherits it."""
    return _identity.get()


def recheck_identity() -> None:
    """Checks the credential of a stream that lasts: raises Unauthenticated or PermissionDenied once the credential that
    this call was opened with has been revoked."""
    _recheck.get()()


# --- credentials ----------------------------------------------------------------------------------------------------


def token_digest(token: str) -> str:
    """A token as the file holds it: `printf %s TOKEN | sha256sum` gives the same."""
    return hashlib.sha256(token.encode()).hexdigest()


class Credentials:
    """The credentials of one file. Without any, every call is refused."""

    def __init__(self, identities: Mapping[str, Identity], limits: Mapping[str, TenantLimits] | None = None) -> None:
        """`identities` by the token's digest, 64 lower-case hexadecimal digits; `limits` by tenant."""
        self._limits = limits or {}
        # Keyed by a secret of this process, so that the time of a look-up shows nothing about any digest.
        self._key = secrets.token_bytes(32)
        self._identities = {
            self._keyed(bytes.fromhex(digest)): replace(
                identity, limits=self._limits.get(identity.tenant, identity.limits)
            )
            for digest, identity in identities.items()
        }

    @classmethod
    def parse(cls, path: Path, raw: bytes) -> Credentials:
        """The content of a .toml file, or JSON under any other name:

            [[credentials]]
            sha256 = "..."              # of the token
            tenant = "acme"
            adapters = ["acme/*"]       # default: none, the base model only; for a router all of them
            roles = ["user"]            # user, admin, router; default: user

            [tenants.acme]              # limits, each of them optional
            max_concurrent_requests = 8
            tokens_per_minute = 60000
            max_resident_adapter_bytes = 2000000000

        Raises InvalidArgument that says what is wrong where; never shows what the file holds.
        """
        try:
            text = raw.decode("utf-8")
            content: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
        except RecursionError:
            raise _bad_file(path, "is nested too deeply") from None
        except ValueError as error:  # of TOML, JSON and UTF-8 alike; their messages may quote the file
            kind = "TOML" if path.suffix == ".toml" else "JSON"
            line = re.search(r"\bline \d+", str(error))
            raise _bad_file(path, f"is not valid {kind}" + (f" (in {line[0]})" if line else "")) from error
        tables = _table(path, content, "the file", {"credentials": list}, {"tenants": dict})
        identities: dict[str, Identity] = {}
        for number, row in enumerate(cast("list[Any]", tables["credentials"]), start=1):
            digest, identity = _credential(path, f"credential {number}", row)
            if digest in identities:
                raise _bad_file(path, f"has the token of credential {number} twice")
            identities[digest] = identity
        tenants = cast("dict[str, Any]", tables.get("tenants", {}))
        return cls(identities, {tenant: _limits(path, tenant, row) for tenant, row in tenants.items()})

    def identify(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
        """The identity of a call of `method`. Raises Unauthenticated, PermissionDenied, InvalidArgument."""
        pairs = list(metadata)
        return self.acting_as(self.owner(pairs), method, pairs)

    def owner(self, pairs: list[tuple[str, str | bytes]]) -> Identity:
        """The identity that the call's credential belongs to. Raises Unauthenticated."""
        return self._find(_single(pairs, AUTHORIZATION_KEY, Unauthenticated))

    def acting_as(self, identity: Identity, method: str, pairs: list[tuple[str, str | bytes]]) -> Identity:
        """The identity that a call of `method` by the credential of `identity` is for. Raises PermissionDenied,
        InvalidArgument."""
        roles = METHOD_ROLES.get(method, frozenset())
        if identity.roles.isdisjoint(roles):
            raise PermissionDenied(_wanted(roles))
        tenant = _single(pairs, TENANT_KEY, InvalidArgument)
        if ROUTER not in identity.roles or not tenant:
            return identity  # a tenant is believed of a router only
        check_id(tenant, field=TENANT_KEY)
        limits = self._limits.get(tenant, UNLIMITED)
        if given := _single(pairs, ADAPTER_BYTES_KEY, InvalidArgument):
            limits = replace(limits, max_resident_adapter_bytes=_num_bytes(given))
        return Identity(tenant, identity.roles, identity.adapters, limits)

    def _find(self, authorization: str) -> Identity:
        scheme, _, token = authorization.partition(" ")
        if not authorization:
            raise Unauthenticated("this server wants a credential: send `authorization: Bearer TOKEN`")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated("`authorization` must read `Bearer TOKEN`")
        found = self._identities.get(self._keyed(hashlib.sha256(token.strip().encode()).digest()))
        if found is None:
            raise Unauthenticated("this credential is not known here")
        return found

    def _keyed(self, digest: bytes) -> bytes:
        return hmac.digest(self._key, digest, "sha256")


def follow_credentials(files: Reloader, path: Path | None) -> Callable[[], Credentials] | None:
    """The credentials in `path` at any time, for `ServerInterceptor`. Raises as `read_file` and `Credentials.parse`."""
    if path is None:
        return None
    followed = files.follow([(path, "--auth-file")], lambda raw: Credentials.parse(path, raw))
    return lambda: followed.value


def one_router(digest: str) -> Credentials:
    """Credentials of a worker that takes calls of one router only, the one whose token has this SHA-256."""
    return Credentials({digest: Identity(DEFAULT_TENANT, frozenset({ROUTER}), ("*",))})


def _wanted(roles: frozenset[str]) -> str:
    """The sentence for a credential that has none of `roles`."""
    if not roles:
        return "no credential opens this call"
    names = " or ".join(sorted(roles - {ROUTER}))
    return f"this call asks for the role {names}, which this credential lacks; send one that has it"


def _single(metadata: list[tuple[str, str | bytes]], key: str, error: type[LoraplexError]) -> str:
    """The one value of `key`, "" where there is none; two of them are refused rather than chosen from."""
    values = [value for name, value in metadata if name == key]
    if len(values) > 1:
        raise error(f"`{key}` is given {len(values)} times; send it once")
    value = values[0] if values else ""
    return value if isinstance(value, str) else value.decode("ascii", "replace")


def _num_bytes(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text) or not 1 <= int(text) <= MAX_LIMIT:
        raise InvalidArgument(f"`{ADAPTER_BYTES_KEY}` must be a number of bytes", field=ADAPTER_BYTES_KEY)
    return int(text)


def _limits(path: Path, tenant: str, row: Any) -> TenantLimits:
    where = f"tenants.{ascii(tenant)[1:41]}".rstrip("'")
    _check_tenant(path, where, tenant)
    names = {limit.name: int for limit in fields(TenantLimits)}
    found = _table(path, row, where, {}, names)
    for name, value in found.items():
        if not 1 <= value <= MAX_LIMIT:
            raise _bad_file(path, f"{where}: {name} must be at least 1 and below 2^63; leave it out for no limit")
    return TenantLimits(**found)


def _check_tenant(path: Path, where: str, tenant: str) -> None:
    try:
        check_id(tenant, field="tenant")
    except InvalidArgument as error:
        raise _bad_file(path, f"{where}: {error.message}") from error


def _credential(path: Path, where: str, row: Any) -> tuple[str, Identity]:
    found = _table(path, row, where, {"sha256": str, "tenant": str}, {"adapters": list, "roles": list})
    digest = found["sha256"].lower()
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise _bad_file(path, f"{where}: sha256 must be the 64 hexadecimal digits of the token's SHA-256")
    _check_tenant(path, where, found["tenant"])
    roles = frozenset(_strings(path, f"{where}: roles", found.get("roles", [USER])))
    if not roles or not roles <= ROLES:
        raise _bad_file(path, f"{where}: roles must be some of {', '.join(sorted(ROLES))}")
    # A router has checked its client already.
    default = ["*"] if ROUTER in roles else []
    adapters = _strings(path, f"{where}: adapters", found.get("adapters", default))
    return digest, Identity(found["tenant"], roles, adapters)


_KINDS: Final = {list: "list", str: "string", dict: "table", int: "whole number"}


def _table(path: Path, value: Any, where: str, required: dict[str, type], optional: dict[str, type]) -> dict[str, Any]:
    """`value` as a table with exactly these keys, or the sentence that says what is wrong."""
    if not isinstance(value, dict):
        raise _bad_file(path, f"{where} must be a table")
    table = cast("dict[str, Any]", value)
    known = required | optional
    for key in table:
        if key not in known:
            raise _bad_file(path, f"{where}: {ascii(key)[:40]} is not known; use {', '.join(known)}")
    for key, kind in known.items():
        if key in table and type(table[key]) is not kind:  # True is an int, too
            raise _bad_file(path, f"{where}: {key} must be a {_KINDS[kind]}")
        if key in required and key not in table:
            raise _bad_file(path, f"{where}: {key} is missing")
    return table


def _strings(path: Path, where: str, values: Any) -> tuple[str, ...]:
    items = cast("list[Any]", values)
    if not all(isinstance(item, str) and item for item in items):
        raise _bad_file(path, f"{where} must be strings that are not empty")
    return tuple(items)


def _bad_file(path: Path, what: str) -> InvalidArgument:
    return InvalidArgument(f"the credentials file {path} {what}", field="--auth-file")


# --- in the server --------------------------------------------------------------------------------------------------


def admit(current: Callable[[], Credentials], method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Sets what `current_identity` and `recheck_identity` answer in this task. Raises as `Credentials.identify`; the
    identity is set where the credential is known, although it may not call `method`."""
    pairs, credentials = list(metadata), current()
    owner = credentials.owner(pairs)
    _identity.set(owner)  # of a refusal, too
    _identity.set(credentials.acting_as(owner, method, pairs))
    _recheck.set(lambda: current().identify(method, pairs))


_Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


class ServerInterceptor(grpc.aio.ServerInterceptor):
    """Denies, or sets what `current_identity` returns in the handler. Without credentials it does nothing."""

    def __init__(self, current: Callable[[], Credentials] | None, refuse: Callable[[str, LoraplexError], Any]) -> None:
        """`current` returns the credentials that are in force at the time of a call, `refuse` the handler of a call of
        a method that is denied."""
        self._current = current
        self._refuse = refuse

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        method = str(handler_call_details.method)
        current = self._current
        if current is None or method in OPEN_METHODS:
            return await continuation(handler_call_details)
        try:
            pairs = cast("Iterable[tuple[str, str | bytes]]", handler_call_details.invocation_metadata or ())
            admit(current, method, pairs)
        except LoraplexError as error:
            return self._refuse(method, error)
        # The handler runs in the same task, and every call has a task of its own.
        return await continuation(handler_call_details)
