"""Fixtures: a loaded model, and the size of its KV blocks."""

from __future__ import annotations

import pytest
import torch
from support.engine_config import BLOCK_SIZE
from support.zoo import random_model

from loraplex_server.layers.attention import kv_block_bytes
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import adopt_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    torch.set_num_threads(1)
    return adopt_model(random_model("llama"))


@pytest.fixture(scope="module")
def block_bytes(loaded: LoadedModel) -> int:
    return kv_block_bytes(loaded.spec, BLOCK_SIZE, loaded.dtype.itemsize)
