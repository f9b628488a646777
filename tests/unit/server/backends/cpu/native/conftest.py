"""Instruction sets, kernels and fixed numbers for native tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.native_kernels import isas, native_kernels, using

from loraplex_server.backends.cpu.native.kernels import NativeKernels


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with using(request.param):
        yield request.param


@pytest.fixture
def kernels(isa: str) -> NativeKernels:
    return native_kernels()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))
