"""Affinity pays: the router's policy in a small simulated fleet."""

from __future__ import annotations

import affinity
import pytest

WARM_S, COUNTED_S = 8.0, 8.0


def measured(policy: str) -> dict[str, float]:
    arrivals = affinity.zipf_arrivals(100, 40.0, WARM_S + COUNTED_S, 1.0, seed=3)
    fleet = affinity.Fleet(affinity.make_workers(4, num_slots=10, num_host=30), affinity.make_policies(seed=3)[policy])
    return affinity.measure(fleet, arrivals, WARM_S)


def test_adapters_are_where_their_requests_go() -> None:
    ours, others = measured("loraplex"), [measured("round robin"), measured("least loaded")]
    assert ours["never began"] == 0
    for other in others:
        assert ours["requests"] == other["requests"], "the same requests"
        assert ours["on device"] > 1.4 * other["on device"]
        assert ours["ttft p99 ms"] < other["ttft p99 ms"]


def test_the_same_seed_gives_the_same_figures() -> None:
    one, two = measured("loraplex"), measured("loraplex")
    del one["us a choice"], two["us a choice"]
    assert one == two


def test_popularity_follows_zipfs_law() -> None:
    arrivals = affinity.zipf_arrivals(50, 200.0, 50.0, 1.0, seed=1)
    counts = sorted((sum(r.adapter_id == f"a{n}" for _, r in arrivals) for n in range(50)), reverse=True)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.3)
    assert len(arrivals) == pytest.approx(10_000, rel=0.05)
