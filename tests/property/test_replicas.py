"""Remembered views of workers against a fresh look."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from loraplex_proto.v1 import inference_pb2, worker_pb2
from loraplex_router.policy import WorkerView
from loraplex_router.replicas import ASSUMED_CONTEXT_TOKENS, Replica, Replicas

SLOW_START_S = 20.0
WORKERS = ("a", "b", "c", "d")

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["join", "leave", "forget", "begin", "end", "report", "drain", "stall", "lost", "info", "wait"]
        ),
        st.sampled_from(WORKERS),
        st.integers(0, 5000),
    ),
    max_size=60,
)


def fresh_view(replica: Replica, now_s: float) -> WorkerView:
    age_s = math.inf if replica.joined_s is None else now_s - replica.joined_s
    share = max(0.0, age_s) / SLOW_START_S if age_s < SLOW_START_S else 1.0
    return WorkerView(replica.worker_id, replica.work_tokens, replica.tiers, replica.name, share)


@given(steps=STEPS)
def test_views_routable_workers_and_context_are_never_stale(steps: list[tuple[str, str, int]]) -> None:
    replicas = Replicas(["a"], slow_start_s=SLOW_START_S)
    known, flights, now_s = {"a"}, list[Any](), 100.0
    for step, worker_id, number in steps:
        if step == "join":
            replicas.join(worker_id, f"name of {worker_id}")
            known.add(worker_id)
        elif step == "wait":
            now_s += number / 100
        elif step == "end" and flights:
            replicas.end(flights.pop(number % len(flights)))
        elif worker_id in known:
            match step:
                case "leave":
                    replicas.leave(worker_id)
                case "forget" if replicas.has_left(worker_id):
                    replicas.forget(worker_id)
                    known.discard(worker_id)
                case "begin":
                    flights.append(replicas.begin(worker_id, "key", number, now_s))
                case "report" | "drain" | "stall":
                    load = worker_pb2.Load(pending_tokens=number, draining=step == "drain", stalled=step == "stall")
                    load.adapters.add(adapter_id=f"adapter {number}", tier=4)
                    replicas.on_report(worker_id, load, now_s)
                case "lost":
                    replicas.on_lost(worker_id, "gone")
                case "info":
                    replicas.on_info(worker_id, inference_pb2.GetInfoResponse(max_context_tokens=number))
                case _:
                    pass
        routable = [replica for replica in replicas.all() if replica.is_routable]
        if routable:
            assert replicas.routable() == routable
            assert replicas.views(now_s=now_s) == [fresh_view(replica, now_s) for replica in routable]
        else:
            assert not any(replica.is_routable for replica in replicas.routable())
        contexts = [replica.info.max_context_tokens for replica in replicas.all() if replica.info is not None]
        assert replicas.max_context_tokens == (max(contexts, default=0) or ASSUMED_CONTEXT_TOKENS)
