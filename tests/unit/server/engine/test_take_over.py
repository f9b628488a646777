"""Locks that an engine takes with --take-over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from loraplex_adapters.store import LOCK_NAME, AdapterStore
from loraplex_contracts.errors import FailedPrecondition
from loraplex_server.engine.take_over import hold_device, take_over

CPU = torch.device("cpu")


def test_a_store_that_is_left_is_free_for_the_engine(tmp_path: Path) -> None:
    said: list[str] = []
    take_over(CPU, tmp_path / "store", 5.0, said.append)
    AdapterStore(tmp_path / "store", budget_bytes=1 << 20).close()
    assert said == []
    assert (tmp_path / "store" / LOCK_NAME).exists()


def test_a_store_in_use_is_waited_for(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path, budget_bytes=1 << 20)
    said: list[str] = []
    with pytest.raises(FailedPrecondition, match=r"the adapter store .* is still used"):
        take_over(CPU, tmp_path, 0.2, said.append)
    assert "until the process before this one leaves the adapter store" in said[0]
    store.close()
    take_over(CPU, tmp_path, 0.2, said.append)


def test_a_gpu_has_one_worker(tmp_path: Path) -> None:
    first = hold_device("GPU-1", tmp_path, 0.0, lambda text: None)
    other = hold_device("GPU-2", tmp_path, 0.0, lambda text: None)
    with pytest.raises(FailedPrecondition, match="the GPU GPU-1 is still used"):
        hold_device("GPU-1", tmp_path, 0.0, lambda text: None)
    os.close(first)
    os.close(other)
    os.close(hold_device("GPU-1", tmp_path, 0.0, lambda text: None))
