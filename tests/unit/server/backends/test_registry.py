"""Registry of back ends: a working one for every device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from loraplex_adapters.weights import ALIGN_BYTES
from loraplex_contracts.errors import InvalidArgument
from loraplex_server.backends import registry
from loraplex_server.backends.backend import Backend

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # any import of it fails
from loraplex_server.backends import registry
statuses = {s.name: s for s in registry.lora_operations()}
assert statuses["triton"][:3] == ("triton", False, "the package triton is not installed"), statuses
assert statuses["cpu"].usable and statuses["reference"].usable
assert registry.choose_backend("cpu", cpu_kernels="torch").lora().name == "cpu"
assert registry.choose_backend("cuda").lora().name == "reference"
"""


@pytest.mark.parametrize("backend", registry.BACKENDS)
def test_adapters_lie_as_every_back_end_wants_them(backend: type[Backend]) -> None:
    """One layout on disk and in memory serves all."""
    assert ALIGN_BYTES % backend.align_bytes == 0


def test_the_cpu_gets_its_own() -> None:
    assert registry.choose_backend(torch.device("cpu"), cpu_kernels="torch").lora().name == "cpu"


def test_a_device_without_its_own_gets_the_reference() -> None:
    assert registry.choose_backend("meta").lora().name == "reference"


def test_cuda_without_a_device_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    triton = next(s for s in registry.lora_operations() if s.name == "triton")
    assert not triton.usable
    assert triton.reason in ("no CUDA device", "the package triton is not installed")
    assert registry.choose_backend("cuda").lora().name == "reference"


def test_cuda_gets_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert registry.lora_operations()[0][:3] == ("triton", True, "for CUDA devices")
    assert registry.choose_backend("cuda:0").lora().name == "triton"


def test_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert registry.choose_backend("cuda").lora(16, "auto").name == "triton"
    ops = registry.choose_backend("cuda").lora(16, "triton")
    assert (ops.name, ops.max_rank) == ("triton", 16)  # type: ignore[attr-defined]
    assert registry.choose_backend("cuda").lora(16, "reference").name == "reference"


@pytest.mark.parametrize(
    ("device", "name", "why"),
    [
        ("cpu", "reference", "is for GPUs; on a CPU --cpu-kernels says"),
        ("cuda", "triton", "--lora-kernels triton: no CUDA device|not installed"),
        ("cuda", "punica", "Punica's kernels cannot be used: the package punica is not installed"),
        ("cuda", "native", "takes auto, triton, punica or reference, not 'native'"),
    ],
)
def test_one_that_cannot_be_used_is_refused_by_its_flag(
    device: str, name: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgument, match=why) as raised:
        registry.choose_backend(device).lora(16, name)
    assert raised.value.field == "--lora-kernels"


def test_everything_imports_where_triton_is_missing() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_TRITON], check=True, timeout=100)
