"""The router's view of its workers: reports, and what they cannot know of yet."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from loraplex_proto.v1 import inference_pb2, worker_pb2
from loraplex_router.replicas import ASSUMED_CONTEXT_TOKENS, REPORT_LAG_S, Replicas, WorkersCollector

A, B = "a:1", "b:1"


def report(pending_tokens: int = 0, *, draining: bool = False, **tiers: int) -> worker_pb2.Load:
    load = worker_pb2.Load(pending_tokens=pending_tokens, draining=draining)
    for adapter_id, tier in tiers.items():
        load.adapters.add(adapter_id=adapter_id, tier=tier)
    return load


def test_a_worker_is_routable_between_its_first_report_and_its_loss() -> None:
    changes: list[int] = []
    replicas = Replicas([A, B], on_change=lambda: changes.append(replicas.num_routable))
    assert replicas.views() == []
    replicas.on_report(A, report(), 1.0)
    replicas.on_report(A, report(), 1.2)
    assert [view.worker_id for view in replicas.views()] == [A]
    replicas.on_lost(A, "gone")
    replicas.on_lost(A, "still gone")
    assert replicas.views() == []
    assert replicas[A].last_error == "still gone"
    assert changes == [1, 0]


def test_a_draining_worker_is_asked_but_not_sent_to() -> None:
    replicas = Replicas([A])
    replicas.on_report(A, report(draining=True), 1.0)
    assert replicas.views() == []
    assert [replica.worker_id for replica in replicas.connected()] == [A]


def test_why_no_worker_takes_requests() -> None:
    one = Replicas([A])
    assert one.no_worker().message == "the router's one worker cannot take requests (not reachable); try again"
    one.on_report(A, report(draining=True), 1.0)
    assert one.no_worker().message == "the router's one worker cannot take requests (shutting down); try again"
    two = Replicas([A, B])
    two.on_report(A, report(draining=True), 1.0)
    assert "none of the router's 2 workers can take requests (1 shutting down, 1 not reachable);" in str(
        two.no_worker()
    )


def test_excluded_workers_are_no_candidates() -> None:
    replicas = Replicas([A, B])
    for worker_id in (A, B):
        replicas.on_report(worker_id, report(), 1.0)
    assert [view.worker_id for view in replicas.views(excluded={A})] == [B]


def sourced(*names: str, **fields: bool) -> worker_pb2.Load:
    load = worker_pb2.Load(**fields)
    for name in names:
        load.adapters.add(adapter_id=name, tier=4, has_source=True)
    return load


def test_an_adapter_from_a_source_of_its_own_stays_with_the_workers_that_have_it() -> None:
    replicas = Replicas([A, B, "c:1"])
    replicas.on_report(A, sourced("sql"), 1.0)
    replicas.on_report(B, report(sql=4, json=2), 1.0)  # one that has answered from the folder of that name
    replicas.on_report("c:1", sourced("sql", "both"), 1.0)

    def views(*adapter_ids: str) -> list[str]:
        return [view.worker_id for view in replicas.views(adapter_ids=adapter_ids)]

    assert views("sql") == views(f"sql@{'0' * 8}") == views("json", "sql") == [A, "c:1"]
    assert views("sql", "both") == ["c:1"]
    assert views() == views("json") == [A, B, "c:1"]
    # A worker that cannot be reached keeps it: it may come back, and the others have something else.
    replicas.on_report(A, sourced("sql", stalled=True), 1.0)
    replicas.on_lost("c:1", "gone")
    assert views("sql") == []
    assert "that has 'sql'" in replicas.no_worker(["sql"]).message
    replicas.leave("c:1")
    replicas.on_report("c:1", report(), 1.0)
    # One that drains, has drained or starts without it does not.
    replicas.on_report(A, sourced("sql", draining=True), 1.0)
    assert views("sql") == [B]
    replicas.on_lost(A, "gone")
    assert views("sql") == [B]


def test_a_request_for_a_draft_model_goes_where_that_is() -> None:
    replicas = Replicas([A, B])
    for worker_id, names in ((A, ["tiny"]), (B, [])):
        replicas.on_info(worker_id, inference_pb2.GetInfoResponse(draft_models=names))
        replicas.on_report(worker_id, report(), 1.0)

    def views(draft_model: str | None, excluded: str = "") -> list[str]:
        return [view.worker_id for view in replicas.views({excluded}, draft_model)]

    assert views(None) == [A, B]
    assert views("tiny") == views("") == [A]
    assert views("tiny", excluded=A) == []  # another worker would only hide what this one said
    assert views("other") == [A, B]


def test_a_request_of_a_task_goes_where_that_is_known() -> None:
    replicas = Replicas([A, B])
    for worker_id, tasks in ((A, ["generate", "embed"]), (B, [])):  # B is of before workers said it
        replicas.on_info(worker_id, inference_pb2.GetInfoResponse(tasks=tasks))
        replicas.on_report(worker_id, report(), 1.0)
    assert [view.worker_id for view in replicas.views(task="embed")] == [A]
    assert [view.worker_id for view in replicas.views({A}, task="embed")] == []
    assert [view.worker_id for view in replicas.views(task="score")] == [A, B]


def test_workers_of_one_version_lack_the_same() -> None:
    replicas = Replicas([A, B, "c:1", "d:1"])
    for worker_id, version in ((A, "1"), (B, "1"), ("c:1", "")):
        replicas.on_info(worker_id, inference_pb2.GetInfoResponse(version=version))
    assert replicas.of_same_version(A) == [A, B]
    assert replicas.of_same_version("c:1") == ["c:1"]  # of before workers said it
    assert replicas.of_same_version("d:1") == ["d:1"]  # has said nothing yet
    assert replicas.of_same_version("gone:1") == ["gone:1"]


def test_what_was_sent_counts_until_a_report_knows_of_it() -> None:
    replicas = Replicas([A])
    replicas.on_report(A, report(100), 1.0)
    flight = replicas.begin(A, "sql", 50, 2.0)
    assert replicas.views()[0].work_tokens == 150
    # Made before the request can have arrived.
    replicas.on_report(A, report(100), 2.0 + REPORT_LAG_S / 2)
    assert replicas.views()[0].work_tokens == 150
    replicas.on_report(A, report(150), 2.0 + 2 * REPORT_LAG_S)
    assert replicas.views()[0].work_tokens == 150
    replicas.end(flight)
    assert replicas.views()[0].work_tokens == 150  # nobody knows what it had left


def test_what_ends_before_a_report_leaves_nothing() -> None:
    replicas = Replicas([A])
    replicas.on_report(A, report(100), 1.0)
    replicas.end(replicas.begin(A, "sql", 50, 2.0))
    assert replicas.views()[0].work_tokens == 100
    assert replicas[A].num_in_flight == 0


def test_what_ends_early_gives_back_what_the_last_report_still_counts() -> None:
    replicas = Replicas([A])
    replicas.on_report(A, report(), 1.0)
    flight = replicas.begin(A, "", 1000, 2.0)
    replicas.on_report(A, report(900), 3.0)
    flight.remaining_tokens = 850
    replicas.end(flight)
    assert replicas.views()[0].work_tokens == 50
    replicas.on_report(A, report(0), 3.2)
    assert replicas.views()[0].work_tokens == 0


def test_work_is_never_negative() -> None:
    replicas = Replicas([A])
    flight = replicas.begin(A, "", 1000, 2.0)
    replicas.on_report(A, report(10), 3.0)
    flight.remaining_tokens = 1000
    replicas.end(flight)
    assert replicas.views()[0].work_tokens == 0


def test_work_by_key_is_forgotten_at_its_end() -> None:
    replicas = Replicas([A, B])
    first, second = replicas.begin(A, "sql", 10, 1.0), replicas.begin(B, "sql", 20, 1.0)
    assert replicas.work_in_flight_tokens("sql") == 30
    replicas.end(first)
    assert replicas.work_in_flight_tokens("sql") == 20
    replicas.end(second)
    assert replicas.work_in_flight_tokens("sql") == 0
    assert replicas._work_by_key == {}


def test_requests_without_work_leave_no_trace_either() -> None:
    replicas = Replicas([A])
    first, second = replicas.begin(A, "", 0, 1.0), replicas.begin(A, "", 0, 1.0)
    replicas.end(first)
    replicas.end(second)
    assert replicas._work_by_key == {}


def test_residency_is_that_of_the_last_report_and_gone_with_the_worker() -> None:
    replicas = Replicas([A])
    replicas.on_report(A, report(sql=4, json=2), 1.0)
    assert replicas.views()[0].tiers == {"sql": 4, "json": 2}
    replicas.on_report(A, report(json=3), 1.2)
    assert replicas.views()[0].tiers == {"json": 3}
    replicas.on_lost(A, "gone")
    assert replicas[A].tiers == {}


def test_a_lost_worker_may_come_back_with_what_it_had_unless_it_drained() -> None:
    version = f"sql@{'a' * 64}"
    replicas = Replicas([A, B])
    for worker_id, names in ((A, ["sql"]), (B, [version])):
        report = worker_pb2.Load(adapters=[worker_pb2.ResidentAdapter(adapter_id=name) for name in names])
        replicas.on_report(worker_id, report, 0.0)
    assert replicas.absent_holders("sql", with_versions=True) == []
    for worker_id in (A, B):
        replicas.on_lost(worker_id, "gone")
    assert replicas.absent_holders("sql") == [A]
    assert replicas.absent_holders("sql", with_versions=True) == [A, B]
    assert replicas.absent_holders("sql@aaaaaaaa", with_versions=True) == [B]
    assert replicas.absent_holders("sq", with_versions=True) == []
    replicas.on_report(A, worker_pb2.Load(draining=True, adapters=[worker_pb2.ResidentAdapter(adapter_id="sql")]), 0.0)
    replicas.on_lost(A, "gone")
    assert replicas.absent_holders("sql") == []
    # With `--adapter-store` it comes back with what a load had bound to a source of its own.
    replicas.on_report(A, sourced("sql", draining=True), 0.0)
    for _ in range(2):
        replicas.on_lost(A, "gone")
        assert replicas.absent_holders("sql") == [A]
        assert replicas.keepers(["sql"]) is None
    replicas.on_report(A, worker_pb2.Load(), 0.0)
    assert replicas.absent_holders("sql") == []


def test_the_context_is_assumed_until_a_worker_has_said_its_own() -> None:
    replicas = Replicas([A, B])
    assert replicas.max_context_tokens == ASSUMED_CONTEXT_TOKENS
    replicas.on_info(A, inference_pb2.GetInfoResponse(max_context_tokens=100))
    replicas.on_info(B, inference_pb2.GetInfoResponse(max_context_tokens=200))
    assert replicas.max_context_tokens == 200


# --- members ----------------------------------------------------------------------------------------------------------


def test_one_that_leaves_ends_its_requests() -> None:
    changes: list[int] = []
    replicas = Replicas(on_change=lambda: changes.append(replicas.num_routable))
    replicas.join("w=a:1", "w")
    replicas.on_report("w=a:1", report(), 1.0)
    flight = replicas.begin("w=a:1", "sql", 50, 2.0)
    replicas.leave("w=a:1")
    assert replicas.views() == []
    assert changes[-2:] == [1, 0]
    replicas.on_report("w=a:1", report(), 3.0)
    assert replicas.views() == []
    with pytest.raises(AssertionError):
        replicas.forget("w=a:1")
    replicas.end(flight)
    replicas.forget("w=a:1")
    assert replicas.all() == []
    assert "no workers yet" in str(replicas.no_worker())


def test_one_that_leaves_stands_in_until_its_replacement_is_there() -> None:
    replicas = Replicas()
    replicas.join("w=a:1", "w")
    replicas.on_report("w=a:1", report(), 1.0)
    replicas.join("w=b:1", "w")
    replicas.leave("w=a:1")
    assert [view.worker_id for view in replicas.views()] == ["w=a:1"]
    assert not replicas.has_left("w=a:1")
    replicas.on_info("w=b:1", inference_pb2.GetInfoResponse())
    replicas.on_report("w=b:1", report(), 2.0)
    assert [view.worker_id for view in replicas.views()] == ["w=b:1"]
    assert replicas.has_left("w=a:1")
    replicas.on_lost("w=b:1", "gone")
    assert replicas.views() == []


def test_those_that_leave_are_not_counted_among_those_that_could_serve() -> None:
    replicas = Replicas([A, B, "c:1", "d:1"])
    for worker_id in (A, B):
        replicas.leave(worker_id)
    assert "none of the router's 2 workers can take requests (2 not reachable)" in str(replicas.no_worker())
    replicas.leave("c:1")
    assert "the router's one worker cannot take requests (not reachable)" in str(replicas.no_worker())
    replicas.leave("d:1")
    assert "no workers yet" in str(replicas.no_worker())


def test_one_that_comes_back_in_time_stays() -> None:
    replicas = Replicas([A])
    replicas.on_report(A, report(), 1.0)
    replicas.leave(A)
    replicas.join(A, A)
    assert [view.worker_id for view in replicas.views()] == [A]


def test_newcomers_are_those_that_join_others() -> None:
    replicas = Replicas(slow_start_s=10.0)
    for worker_id in (A, B):  # both are there at the start
        replicas.join(worker_id, worker_id)
    for worker_id in (A, B):
        replicas.on_report(worker_id, report(), 1.0)
    replicas.join("c:1", "c")
    replicas.on_report("c:1", report(), 5.0)
    assert [view.share for view in replicas.views(now_s=5.0)] == [1.0, 1.0, 0.0]
    assert [view.share for view in replicas.views(now_s=12.5)] == [1.0, 1.0, 0.75]
    assert [view.share for view in replicas.views(now_s=99.0)] == [1.0, 1.0, 1.0]
    assert [view.hash_name for view in replicas.views()] == [A, B, "c"]


def test_a_worker_that_was_never_heard_may_have_any_adapter_unless_nothing_is_there() -> None:
    replicas = Replicas([A, B])
    replicas.on_report(B, report(), 1.0)
    assert replicas.absent_holders("sql") == [A]
    replicas.on_lost(A, "UNAVAILABLE: failed to connect to all addresses; connect: Connection refused (111)")
    assert replicas.absent_holders("sql", with_versions=True) == []
    replicas.on_lost(A, "silent for 10 s")
    assert replicas.absent_holders("sql", with_versions=True) == [A]
    replicas.on_report(A, report(), 2.0)
    replicas.on_lost(A, "gone")
    assert replicas.absent_holders("sql") == []


def test_names_are_sorted_anew_only_when_they_change() -> None:
    replicas = Replicas(["a", "b"])
    replicas.on_report("a", report(x=4, y=2), 1.0)
    replicas.on_report("b", report(x=2), 1.0)
    names = replicas.adapter_names()
    assert names == ["x", "y"]
    replicas.on_report("a", report(10, x=2, y=4), 2.0)
    assert replicas.adapter_names() is names
    replicas.on_report("b", report(z=2), 2.0)
    assert replicas.adapter_names() == ["x", "y", "z"]
    replicas.on_lost("a", "gone")
    assert replicas.adapter_names() == ["z"]
    replicas.leave("b")
    replicas.on_lost("a", "gone")
    replicas.on_report("a", report(w=2), 3.0)
    replicas.forget("b")
    assert replicas.adapter_names() == ["w"]


def test_base_models_are_counted_over_the_workers_that_take_requests() -> None:
    registry, replicas = CollectorRegistry(), Replicas(["a", "b", "c", "not heard of"])
    WorkersCollector(registry, replicas)
    for worker, model in (("a", "base"), ("b", "base"), ("c", "another")):
        replicas.on_info(worker, inference_pb2.GetInfoResponse(model_id=model, dtype="bfloat16"))
        replicas.on_report(worker, report(), 0.0)

    def counted() -> dict[str, float]:
        (family,) = [one for one in registry.collect() if one.name == "loraplex:router_models"]
        return {sample.labels["model"]: sample.value for sample in family.samples}

    assert counted() == {"base": 2, "another": 1}
    replicas.on_report("c", report(draining=True), 1.0)
    assert counted() == {"base": 2}
