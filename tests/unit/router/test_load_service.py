"""A router's report of all its workers together."""

from __future__ import annotations

from loraplex_proto.v1 import inference_pb2, worker_pb2
from loraplex_router.load_service import MAX_ADAPTERS, MAX_WAITING, LoadService, total_load
from loraplex_router.replicas import Replicas
from loraplex_runtime.auth import EVERYBODY, Identity


def replicas(*loads: worker_pb2.Load) -> Replicas:
    names = [f"w{index}" for index in range(len(loads))]
    found = Replicas(names)
    for name, load in zip(names, loads, strict=True):
        found.on_info(name, inference_pb2.GetInfoResponse(model_id="m"))
        found.on_report(name, load, 100.0)
    return found


def load(**fields: object) -> worker_pb2.Load:
    tiers = fields.pop("tiers", {})
    message = worker_pb2.Load(**fields)
    for name, tier in tiers.items():  # type: ignore[attr-defined]
        message.adapters.add(adapter_id=name, tier=tier)
    return message


def test_numbers_are_added() -> None:
    one = load(
        running_requests=1,
        queued_requests=2,
        pending_tokens=30,
        total_kv_blocks=100,
        free_kv_blocks=40,
        kv_block_tokens=16,
        total_state_slots=9,
        free_state_slots=5,
        state_snapshots=2,
        max_running_requests=8,
        max_device_adapters=4,
    )
    total = total_load(replicas(one, one).all(), draining=False)
    assert (total.running_requests, total.queued_requests, total.pending_tokens) == (2, 4, 60)
    assert (total.total_kv_blocks, total.free_kv_blocks, total.kv_block_tokens) == (200, 80, 16)
    assert (total.total_state_slots, total.free_state_slots, total.state_snapshots) == (18, 10, 4)
    assert (total.max_running_requests, total.max_device_adapters) == (16, 8)
    assert not total.draining
    assert not total.stalled


def test_an_adapter_has_its_nearest_tier() -> None:
    total = total_load(replicas(load(tiers={"a": 2, "b": 4}), load(tiers={"a": 3})).all(), draining=False)
    assert {one.adapter_id: one.tier for one in total.adapters} == {"a": 3, "b": 4}


def test_the_nearest_adapters_fit_into_a_message() -> None:
    many = {f"disk{index}": 2 for index in range(MAX_ADAPTERS)}
    waiting = [f"w{index:04}" for index in range(80)]
    total = total_load(
        replicas(
            load(tiers=many, waiting_adapter_ids=waiting), load(tiers={"near": 4}, waiting_adapter_ids=["a"] * 30)
        ).all(),
        draining=False,
    )
    assert len(total.adapters) == MAX_ADAPTERS
    assert total.adapters[0].adapter_id == "near"
    assert len(total.waiting_adapter_ids) == 81 <= MAX_WAITING


def test_names_with_a_source_of_their_own_are_told_behind_the_nearest() -> None:
    one, two = load(tiers={f"near{index}": 4 for index in range(MAX_ADAPTERS)}), load(tiers={"own": 2})
    two.adapters.add(adapter_id="near0", tier=2, has_source=True)
    two.adapters.add(adapter_id="gone", tier=1, has_source=True)
    total = total_load(replicas(one, two).all(), draining=False)
    assert [(row.adapter_id, row.tier) for row in total.adapters[MAX_ADAPTERS:]] == [("gone", 1)]
    assert {row.adapter_id for row in total.adapters if row.has_source} == {"near0", "gone"}


def test_workers_that_take_nothing_do_not_count() -> None:
    total = total_load(
        replicas(
            load(running_requests=1), load(running_requests=2, draining=True), load(running_requests=4, stalled=True)
        ).all(),
        draining=False,
    )
    assert total.running_requests == 1
    assert total_load(replicas(load(stalled=True)).all(), draining=True).stalled


def test_callers_see_their_own_adapters() -> None:
    mixed = load(tiers={"acme/a": 4, "other/b": 4}, waiting_adapter_ids=["acme/c", "other/d"])
    total = total_load(replicas(mixed).all(), draining=False, may_see=lambda name: name.startswith("acme/"))
    assert [one.adapter_id for one in total.adapters] == ["acme/a"]
    assert list(total.waiting_adapter_ids) == ["acme/c"]


def test_watches_share_what_they_are_told() -> None:
    now_s, workers = 100.0, replicas(load(running_requests=1, tiers={"acme/a": 4, "b": 4}))
    service = LoadService(workers, clock=lambda: now_s)
    first = service.shared_load(EVERYBODY, 0.2)
    workers.on_report("w0", load(running_requests=2), 100.0)
    assert service.shared_load(EVERYBODY, 0.2) is first
    assert b"acme/a" in first
    theirs = service.shared_load(Identity("acme", adapters=("acme/*",)), 0.2)
    assert worker_pb2.WatchLoadResponse.FromString(theirs).load.running_requests == 2
    now_s += 0.3
    found = service.shared_load(EVERYBODY, 0.2)
    assert worker_pb2.WatchLoadResponse.FromString(found).load.running_requests == 2
    service.begin_drain()
    found = service.shared_load(EVERYBODY, 0.2)
    assert worker_pb2.WatchLoadResponse.FromString(found).load.draining
