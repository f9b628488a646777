"""Registry of back ends: one for every device, choice of attention."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from support.attention_cases import spec_of
from support.native_kernels import native_kernels

from loraplex_adapters.weights import ALIGN_BYTES
from loraplex_contracts.errors import InvalidArgument
from loraplex_server import config
from loraplex_server.backends import registry
from loraplex_server.backends.cpu import backend as cpu_backend
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cpu.native.library import Loaded, NativeStatus
from loraplex_server.backends.cuda import backend as cuda_backend
from loraplex_server.backends.cuda.backend import CudaBackend
from loraplex_server.backends.cuda.lora import plan
from loraplex_server.backends.registry import attention_kernels, make_attention

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


def test_adapters_lie_as_every_back_end_wants_them() -> None:
    """One layout on disk and in memory serves all."""
    assert ALIGN_BYTES % plan.ALIGN_BYTES == 0


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


CPU, CUDA = CpuBackend(), CudaBackend()
FITTING = [spec_of(k_dim=128, v_dim=128)]
BF16 = torch.bfloat16


def pretend(monkeypatch: pytest.MonkeyPatch, *, cuda: bool = True, missing: tuple[str, ...] = ()) -> None:
    """A machine with or without a GPU, with all packages but the missing ones. A package that is there is empty."""

    def find_spec(name: str) -> ModuleSpec | None:
        if name in missing:
            return None
        return importlib.util.find_spec(name) or ModuleSpec(name, None)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(cuda_backend, "find_spec", find_spec)
    monkeypatch.setattr(cuda_backend, "import_module", ModuleType)


def reasons(*args: object) -> dict[str, str]:
    """The reasons of the attention kernels that cannot be used, by name."""
    return {one.name: one.reason for one in attention_kernels(*args) if not one.usable}  # type: ignore[arg-type]


def test_flashinfer_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")
    pretend(monkeypatch)
    assert make_attention("auto", CUDA, FITTING, BF16).name == "flashinfer"
    assert make_attention("triton", CUDA, FITTING, BF16).name == "triton"
    assert make_attention("torch", CUDA, FITTING, BF16).name == "torch"


def test_own_kernels_are_taken_where_flashinfer_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")
    pretend(monkeypatch)
    assert make_attention("auto", CUDA, [spec_of(k_dim=80, v_dim=80)], BF16).name == "triton"
    assert "float32" in reasons(CUDA, FITTING, torch.float32)["flashinfer"]
    pretend(monkeypatch, missing=("flashinfer",))
    assert make_attention("auto", CUDA, FITTING, BF16).name == "triton"
    assert "flashinfer-python is not installed" in reasons(CUDA)["flashinfer"]


def test_without_triton_there_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, missing=("triton",))
    assert make_attention("auto", CUDA, FITTING, BF16).name == "torch"
    assert {"flashinfer", "triton"} <= reasons(CUDA).keys()


def test_what_is_for_a_gpu_is_not_taken_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert make_attention("auto", CPU, FITTING, BF16).name not in ("flashinfer", "triton")
    assert "not for cpu" in reasons(CPU)["triton"]
    with pytest.raises(InvalidArgument, match="--attention triton cannot be used here: it is for CUDA devices"):
        make_attention("triton", CPU)
    pretend(monkeypatch, cuda=False)
    assert "no CUDA device" in reasons()["triton"]


def test_a_broken_installation_is_named_and_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")
    pretend(monkeypatch)

    def broken(name: str) -> ModuleType:
        raise OSError("libcudart.so.12: cannot open shared object file\nand more")

    monkeypatch.setattr(cuda_backend, "import_module", broken)
    assert make_attention("auto", CUDA, FITTING, BF16).name == "triton"
    assert reasons(CUDA)["flashinfer"].endswith("does not load: libcudart.so.12: cannot open shared object file")


def test_the_option_takes_the_names_of_all() -> None:
    assert sorted(config.ATTENTION) == sorted(["auto", *(one.name for one in attention_kernels())])


def test_one_that_does_not_fit_cannot_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    with pytest.raises(InvalidArgument, match="head dimensions 64, 128 and 256, and the model has 80"):
        make_attention("flashinfer", CUDA, [spec_of(k_dim=80, v_dim=80)], BF16)
    with pytest.raises(InvalidArgument, match=r"--attention must be auto, .*torch, not 'flash'"):
        make_attention("flash", CUDA)


def test_native_kernels_attend_where_they_are_in_use() -> None:
    native = CpuBackend(native_kernels())
    assert make_attention("auto", native, FITTING, BF16).name == "native"
    assert make_attention("native", native, FITTING, BF16).name == "native"
    assert make_attention("torch", native, FITTING, BF16).name == "torch"
    assert make_attention("auto", native, FITTING, torch.float64).name == "torch"
    assert make_attention("auto", native, [*FITTING, spec_of(k_dim=24, v_dim=24)], BF16).name == "torch"
    with pytest.raises(InvalidArgument, match="--attention native cannot be used here: heads of 24 and 24"):
        make_attention("native", native, [*FITTING, spec_of(k_dim=24, v_dim=24)], BF16)
    with pytest.raises(InvalidArgument, match="native cannot be used here: it is for the CPU, not for cuda"):
        make_attention("native", CUDA, FITTING, BF16)


def test_native_attention_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    status = NativeStatus(False, "not built; with a C++ compiler, this builds it", "")
    monkeypatch.setattr(cpu_backend, "load", lambda: Loaded(None, status))
    assert make_attention("auto", CPU, FITTING, BF16).name == "torch"
    with pytest.raises(InvalidArgument, match="the native CPU kernels are missing: not built; with a C"):
        make_attention("native", CPU, FITTING, BF16)
    assert "not built" in reasons()["native"]
    monkeypatch.setattr(cpu_backend, "load", lambda: Loaded(None, NativeStatus(True, "", "avx512")))
    with pytest.raises(InvalidArgument, match="the native CPU kernels are not in use"):
        make_attention("native", CPU, FITTING, BF16)
    described = {one.name: one for one in attention_kernels()}["native"]
    assert described.usable
    assert described.reason == "own kernels, for the CPU, avx512"
