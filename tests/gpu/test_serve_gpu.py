"""Command `serve` on CUDA."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NEEDED = ("peft", "grpc_status", "grpc_health", "fastapi", "uvicorn", "httptools", "re2")


def test_texts_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NEEDED:
        pytest.importorskip(name, reason=f"{name}, which servers need, is not installed")
    from support.device_server import check_server

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    check_server("cuda", tmp_path)
