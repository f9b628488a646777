"""CPU engines assembled as on CUDA, with torch stand-ins for graphs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from loraplex_server.backends.backend import Backend
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.config import EngineConfig
from loraplex_server.engine import assembly as build
from loraplex_server.model.graphs import Shape, graph_shapes
from loraplex_server.model.runner import ModelRunner
from support.replay import ReplayableReference, ReplayableTorch, calls_again


def _captured_shapes(config: EngineConfig, device: torch.device) -> list[Shape]:
    return graph_shapes(config.batch.max_running, config.speculation.max_draft_tokens)


def build_as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (Backend, CpuBackend):
        monkeypatch.setattr(backend, "lora", lambda *_: ReplayableReference())
    monkeypatch.setattr(build, "make_attention", lambda *_: ReplayableTorch())
    monkeypatch.setattr(build, "captured_shapes", _captured_shapes)
    monkeypatch.setattr(Backend, "capture", lambda _: calls_again)
    monkeypatch.setattr(build, "ModelRunner", partial(ModelRunner, overlaps=True))
