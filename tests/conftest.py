"""What every test shares."""

from __future__ import annotations

import pytest
import torch
from support.world import TinyWorld, make_world


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny tensors gain nothing from threads, and threads of several test processes wait for each other.

    Before every test, since an engine built in one sets what serving wants.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A random Llama and 40 adapters."""
    return make_world(tmp_path_factory.mktemp("world"), num_adapters=40)
