"""A router's status: rows of workers and adapters, and who may see which."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from loraplex_contracts.errors import InvalidArgument
from loraplex_proto import validate
from loraplex_proto.v1 import inference_pb2, status_pb2, worker_pb2
from loraplex_router.activity import FailedCall
from loraplex_router.calls import Calls, RouterMetrics
from loraplex_router.replicas import Replicas
from loraplex_router.status import MAX_ERRORS, SHARED_S, StatusService
from loraplex_runtime.auth import EVERYBODY, Identity

Request = status_pb2.GetStatusRequest


class Router:
    """A router's state without a router."""

    def __init__(self, *loads: dict[str, Any]) -> None:
        self.now = 1000.0
        self.replicas = Replicas([f"w{number}" for number in range(len(loads))])
        for number, fields in enumerate(loads):
            tiers = fields.pop("tiers", {})
            load = worker_pb2.Load(**fields)
            for name, tier in tiers.items():
                load.adapters.add(adapter_id=name, tier=tier)
            self.replicas.on_info(f"w{number}", inference_pb2.GetInfoResponse(model_id="m"))
            self.replicas.on_report(f"w{number}", load, self.now)
        self.calls = Calls(10, RouterMetrics())
        self.calls.activity.started_s = self.now - 100
        self.service = StatusService(self.replicas, self.calls, clock=lambda: self.now)

    def status(self, caller: Identity = EVERYBODY, **request: Any) -> status_pb2.GetStatusResponse:
        self.now += SHARED_S + 0.001
        return self.service.status(Request(**request), caller)


def test_workers_and_their_states() -> None:
    router = Router({"running_requests": 2, "max_running_requests": 8}, {"draining": True}, {"stalled": True}, {}, {})
    router.replicas.on_lost("w3", "UNAVAILABLE: refused")
    router.replicas.leave("w4")
    found = router.status()
    states = [status_pb2.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_") for worker in found.workers]
    assert states == ["SERVING", "DRAINING", "STALLED", "UNREACHABLE", "LEAVING"]
    assert (found.workers[0].running_requests, found.workers[0].max_running_requests) == (2, 8)
    assert found.workers[3].error == "UNAVAILABLE: refused"
    assert found.model_id == "m"
    assert found.uptime_s == pytest.approx(100, abs=2)


def test_the_model_has_the_name_that_the_operator_gave() -> None:
    router = Router({})
    named = StatusService(router.replicas, router.calls, served_names=("ours", "other"))
    assert named.status(Request(), EVERYBODY).model_id == "ours"


def test_adapters_with_work_come_first_then_the_waiting_then_the_nearest() -> None:
    router = Router(
        {"tiers": {"disk": 2, "busy": 2, "device": 4}, "waiting_adapter_ids": ["wanted"], "max_device_adapters": 3},
        {"tiers": {"disk": 3}},
    )
    router.replicas.begin("w0", "busy\nother", 70, router.now)
    found = router.status()
    assert [(one.adapter_id, one.tiers, one.work_tokens, one.waiting) for one in found.adapters] == [
        ("busy", "20", 70, False),
        ("other", "00", 70, False),
        ("wanted", "00", 0, True),
        ("device", "40", 0, False),
        ("disk", "23", 0, False),
    ]
    assert (found.workers[0].adapters, found.workers[0].device_adapters, found.workers[0].max_device_adapters) == (
        *(3, 1),
        3,
    )


def test_so_many_adapters_as_are_asked_for_and_the_number_of_all() -> None:
    router = Router({"tiers": {f"a{number:03}": 2 for number in range(300)} | {"b": 4}})
    assert len(router.status().adapters) == validate.DEFAULT_STATUS_ADAPTERS
    found = router.status(max_adapters=2)
    assert ([one.adapter_id for one in found.adapters], found.total_adapters) == (["b", "a000"], 301)
    found = router.status(adapter_prefix="a29")
    assert (found.adapters[0].adapter_id, found.total_adapters) == ("a290", 10)
    with pytest.raises(InvalidArgument):
        validate.check_status(Request(max_adapters=validate.MAX_STATUS_ADAPTERS + 1))


def test_callers_see_their_adapters_and_their_tenants_errors() -> None:
    router = Router({"tiers": {"acme/a": 4, "other/b": 4}})
    for tenant in ("acme", "other"):
        router.calls.activity.failed(FailedCall(router.now, "Generate", "INTERNAL", "", f"of {tenant}", tenant=tenant))
    acme = Identity(tenant="acme", adapters=("acme/*",))
    found = router.status(acme)
    assert [one.adapter_id for one in found.adapters] == ["acme/a"]
    assert [one.message for one in found.errors] == ["of acme"]
    assert len(router.status().errors) == len(router.status().adapters) == 2


def test_errors_are_few_and_the_newest_first() -> None:
    router = Router({})
    for number in range(100):
        router.calls.activity.failed(FailedCall(float(number), "Generate", f"CODE_{number}", "", "m"))
    found = router.status().errors
    assert len(found) == MAX_ERRORS
    assert found[0].code == "CODE_99"
    assert found[0].age_s == pytest.approx(router.now - 99)


def test_those_who_look_at_once_share_an_answer() -> None:
    router = Router({})
    first = router.service.status(Request(), EVERYBODY)
    assert router.service.status(Request(), EVERYBODY) is first
    assert router.service.status(Request(), Identity(tenant="t")) is not first
    router.now += SHARED_S
    assert router.service.status(Request(), EVERYBODY) is not first


def test_places_are_kept_of_the_adapters_that_are_shown_alone() -> None:
    router = Router(*({"tiers": {f"a{worker:02}-{number:03}": 2 for number in range(500)}} for worker in range(32)))
    tracemalloc.start()
    try:
        found = router.status(max_adapters=2)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [(one.adapter_id, one.tiers) for one in found.adapters] == [
        (f"a00-{number:03}", "2" + 31 * "0") for number in range(2)
    ]
    assert found.total_adapters == 16_000
    assert peak_bytes < 200 * 16_000  # less than a place for each adapter at each worker
