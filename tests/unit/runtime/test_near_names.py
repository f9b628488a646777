"""Near names of adapters in errors, by permission."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex_contracts.errors import AdapterNotFound, AdapterVersionNotFound, LoraplexError, adapter_not_found
from loraplex_proto.status import from_status, to_status
from loraplex_router.calls import Calls, RouterMetrics
from loraplex_runtime import auth
from loraplex_runtime.auth import EVERYBODY, ROUTER, Identity
from loraplex_runtime.near_names import MAX_COMPARED, near_names, with_near_names
from loraplex_server.grpc.middleware import RequestGate

ACME = Identity("acme", adapters=("acme/*",))
NAMES = ["acme/sql", "acme/sql-v2", "acme/xml", "other/sql", "other/sqll"]


def as_identity(monkeypatch: pytest.MonkeyPatch, identity: Identity) -> None:
    monkeypatch.setattr(auth, "current_identity", lambda: identity)
    monkeypatch.setattr("loraplex_router.calls.current_identity", lambda: identity)


def test_the_nearest_come_first() -> None:
    assert near_names("acme/sqlv2", EVERYBODY, [NAMES])[0] == "acme/sql-v2"
    assert near_names("acme/sqlv2", EVERYBODY, [NAMES, NAMES])[:2] == ("acme/sql-v2", "acme/sql")
    assert near_names("zebra", EVERYBODY, [NAMES]) == ()
    assert near_names("zebra", EVERYBODY, []) == ()


def test_only_those_that_the_caller_may_use() -> None:
    assert near_names("other/sqlx", EVERYBODY, [NAMES])[0].startswith("other/")
    assert all(name.startswith("acme/") for name in near_names("other/sqlx", ACME, [NAMES]))
    assert near_names("acme/sql", Identity("none"), [NAMES]) == ()


def test_the_unknown_name_itself_and_versions_are_not_suggested() -> None:
    found = near_names("acme/sql@0123abcd", EVERYBODY, [["acme/sql", "acme/sql2@0123abcd"]])
    assert found == ("acme/sql2",)


def test_another_tenants_adapter_is_answered_as_an_unknown_one() -> None:
    found: list[str] = []
    for listing in (NAMES, [name for name in NAMES if name != "other/sqll"]):
        with pytest.raises(AdapterNotFound) as caught:
            ACME.check_adapters(["other/sqll"])
        found.append(str(to_status(with_near_names(caught.value, ACME, [listing]))))
    assert found[0] == found[1]


def test_many_names_cost_a_bounded_number_of_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    may_use = Identity.may_use

    def counted(identity: Identity, name: str) -> bool:
        asked.append(name)
        return may_use(identity, name)

    monkeypatch.setattr(Identity, "may_use", counted)
    names = [f"adapter-{number:06}" for number in range(100_000)]
    assert "adapter-050000" in near_names("adapter-05000x", EVERYBODY, [names])
    assert MAX_COMPARED < len(asked) <= 2048


def test_errors_that_say_more_stay_as_they_are() -> None:
    for error in (AdapterNotFound("there is no such file", resource="a"), AdapterVersionNotFound("x", resource="a")):
        assert with_near_names(error, EVERYBODY, [["ab"]]) is error


# --- through a worker, and through a router ---------------------------------------------------------------------------


def worker_error(monkeypatch: pytest.MonkeyPatch, identity: Identity, name: str, names: Sequence[str]) -> LoraplexError:
    as_identity(monkeypatch, identity)
    gate = RequestGate()
    gate.adapter_names = lambda: [names]
    with gate.call("Generate") as call:
        return from_status(to_status(call.failed(adapter_not_found(name))))


def test_a_worker_suggests(monkeypatch: pytest.MonkeyPatch) -> None:
    error = worker_error(monkeypatch, EVERYBODY, "acme/sqk", NAMES)
    assert "did you mean 'acme/sql'" in error.message
    assert error.metadata["near_names"].startswith("acme/sql")
    assert "other" not in worker_error(monkeypatch, ACME, "acme/sqk", NAMES).message


def test_a_worker_leaves_it_to_a_router_with_a_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Identity("acme", frozenset({ROUTER}), ("*",))
    assert "mean" not in worker_error(monkeypatch, router, "acme/sqk", NAMES).message


@pytest.mark.parametrize("known", [NAMES, ["other/sql"], []])
async def test_a_router_replaces_what_a_worker_suggests(monkeypatch: pytest.MonkeyPatch, known: list[str]) -> None:
    from_worker = worker_error(monkeypatch, EVERYBODY, "other/sqlx", NAMES)
    assert "other/sqll" in from_worker.message
    as_identity(monkeypatch, ACME)
    statuses: list[LoraplexError] = []

    class Aborted(Exception):
        pass

    async def abort(_context: Any, error: LoraplexError) -> None:
        statuses.append(error)
        raise Aborted

    monkeypatch.setattr("loraplex_router.calls.abort", abort)
    calls = Calls(8, RouterMetrics(), lambda: known)

    async def body(_call: Any, _raw: bytes) -> None:
        raise from_worker if _raw else adapter_not_found("other/sqlx")

    for raw in (b"unknown", b""):
        context = SimpleNamespace(time_remaining=lambda: None)
        with pytest.raises(Aborted):
            await calls.handler("Generate", body)(raw, cast("Any", context))
    assert statuses[0].message == statuses[1].message
    assert "other/sql'" not in statuses[0].message
    assert "other/sqll" not in str(to_status(statuses[0]))
