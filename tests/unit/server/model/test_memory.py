"""Free memory of a device."""

from __future__ import annotations

import torch

from loraplex_server.model.memory import free_memory_bytes

MIB = 1 << 20


def test_something_is_free_here() -> None:
    assert free_memory_bytes(torch.device("cpu")) > MIB
