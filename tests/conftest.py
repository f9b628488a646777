"""What every test shares."""

from __future__ import annotations

import pytest
import torch
from support.world import TinyWorld, make_world


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors gain nothing from threads, and the suite's time should not depend on the machine's cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A random Llama and 40 adapters."""
    return make_world(tmp_path_factory.mktemp("world"), num_adapters=40)
