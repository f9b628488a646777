"""CPU engines assembled as on CUDA, with torch stand-ins for graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest

from loraplex_server.backends.backend import Backend
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cuda.graphs import GraphShape, StepGraphs, capture_steps, graph_shapes
from loraplex_server.engine import assembly as build
from loraplex_server.layers.linear import JointLinear, PlainLinear
from loraplex_server.layers.step import StepResources
from loraplex_server.model.runner import ModelRunner
from support.replay import ReplayableReference, ReplayableTorch, calls_again


def _capture_steps(
    backend: Backend, steps: StepResources, shapes: Sequence[GraphShape], progress: Callable[[str], None]
) -> StepGraphs | None:
    return capture_steps(steps, shapes, calls_again, progress)


def build_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (Backend, CpuBackend):
        monkeypatch.setattr(backend, "lora", lambda *_: ReplayableReference())
        monkeypatch.setattr(backend, "linears", lambda *_: PlainLinear)
        monkeypatch.setattr(backend, "merge", lambda _: JointLinear.of)
        monkeypatch.setattr(backend, "find_decoder", lambda *_, **__: None)
    monkeypatch.setattr(build, "make_attention", lambda *_: ReplayableTorch())
    monkeypatch.setattr(Backend, "graph_shapes", lambda _, *sizes, **named: graph_shapes(*sizes, **named))
    monkeypatch.setattr(Backend, "capture_steps", _capture_steps)
    monkeypatch.setattr(build, "ModelRunner", partial(ModelRunner, overlaps=True))
