"""A worker's metrics out of what its engine last said."""

from __future__ import annotations

import pickle

from loraplex_contracts.load import Load
from loraplex_runtime.telemetry import WorkerCollector, new_registry
from loraplex_server.engine.client import EngineState
from loraplex_server.grpc.metrics import snapshot


def test_drafts_are_counted_by_proposer() -> None:
    load = Load(drafted={"medusa": 9, "prompt_lookup": 4}, accepted={"medusa": 6, "prompt_lookup": 0})
    state = EngineState(pickle.loads(pickle.dumps(load)))  # as it comes through the pipe
    registry = new_registry()
    WorkerCollector(registry, lambda: snapshot(state))

    def value(name: str, proposer: str) -> float | None:
        return registry.get_sample_value(f"loraplex:{name}_total", {"proposer": proposer})

    assert (value("draft_tokens", "medusa"), value("accepted_tokens", "medusa")) == (9, 6)
    assert (value("draft_tokens", "prompt_lookup"), value("accepted_tokens", "prompt_lookup")) == (4, 0)
    state.load = Load(drafted={"medusa": 12}, accepted={"medusa": 7})
    assert value("draft_tokens", "medusa") == 12
    assert value("draft_tokens", "universal") is None


def test_before_the_first_draft() -> None:
    registry = new_registry()
    WorkerCollector(registry, lambda: snapshot(EngineState(Load())))
    assert registry.get_sample_value("loraplex:num_requests_running") == 0
    assert not [s for family in registry.collect() for s in family.samples if "draft" in s.name]
