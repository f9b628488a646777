"""Back end of CUDA: Triton kernels, FlashInfer, Punica and CUDA graphs.

Triton, FlashInfer and Punica are imported only where they are used: that takes seconds, and where one is not installed
its module does not import.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.reports import Progress
from loraplex_server.backends.backend import AttentionRequirements, Backend, Implementation
from loraplex_server.backends.cuda.graphs import (
    CudaCapture,
    GraphShape,
    StepGraphs,
    capture_steps,
    graph_bytes,
    graph_shapes,
)
from loraplex_server.backends.cuda.punica import PunicaFunctions, PunicaOps
from loraplex_server.backends.fusion import FusedOps
from loraplex_server.backends.reference import ReferenceDense, ReferenceOps
from loraplex_server.layers.attention import ModelSpec
from loraplex_server.layers.experts import MakeExpertProducts
from loraplex_server.layers.linear import JointLinear, Merge
from loraplex_server.layers.lora import SegmentedDense, SegmentedLora
from loraplex_server.layers.quantization import WeightFormat
from loraplex_server.layers.step import StepResources
from loraplex_server.sampling.draw import NoisyArgmax


class CudaBackend(Backend):
    """Computes on a CUDA device with Triton's kernels; without Triton the reference computes, on the GPU too."""

    name: ClassVar[str] = "cuda"

    def __init__(self, device: torch.device | str = "cuda") -> None:
        super().__init__(device)

    @classmethod
    def serves(cls, device_type: str) -> bool:
        return device_type == "cuda"

    @classmethod
    def lora_operations(cls) -> list[Implementation]:
        triton, punica = _triton_problem(), _punica_problem()
        return [
            Implementation("triton", not triton, triton or "for CUDA devices"),
            Implementation("punica", not punica, punica or "for CUDA devices, with --lora-kernels punica"),
        ]

    @classmethod
    def attention_kernels(cls, wanted: AttentionRequirements) -> list[Implementation]:
        return [_flashinfer(wanted), _triton(wanted)]

    def lora(self, max_rank: int = 256, name: str = "auto") -> SegmentedLora:
        flag, problem = "--lora-kernels", _triton_problem()
        if name == "punica":
            return self._punica()
        if name not in ("auto", "triton", "reference"):
            raise InvalidArgument(f"{flag} takes auto, triton, punica or reference, not {name!a}", field=flag)
        if name == "triton" and problem:
            raise InvalidArgument(f"{flag} triton: {problem}", field=flag)
        if name == "reference" or problem:
            return ReferenceOps()
        from loraplex_server.backends.cuda.lora.operation import TritonOps

        return TritonOps(max_rank)

    def _punica(self) -> SegmentedLora:
        """Punica's operators, and for what they do not compute what CUDA gets otherwise. Never chosen by itself: its
        calls cannot be part of a CUDA graph."""
        if problem := _punica_problem():
            raise InvalidArgument(f"Punica's kernels cannot be used: {problem}", field="--lora-kernels")
        return PunicaOps(cast(PunicaFunctions, import_module("punica.ops")), self.lora())

    def dense(self) -> SegmentedDense:
        if _triton_problem():
            return ReferenceDense()
        from loraplex_server.backends.cuda.lora.operation import TritonDense

        return TritonDense()

    def merge(self) -> Merge:
        return JointLinear.of

    def expert_products(self, form: WeightFormat | None = None) -> MakeExpertProducts | None:
        if _triton_problem():
            return None
        from loraplex_server.backends.cuda.experts import make_experts

        return make_experts

    def fused_ops(self) -> FusedOps | None:
        if find_spec("triton") is None:
            return None
        from loraplex_server.backends.cuda.fused import TritonFused

        return TritonFused()

    def describe_layers(self) -> str:
        return f"{super().describe_layers()}, with merged linears"

    def noisy_argmax(self) -> NoisyArgmax | None:
        if _triton_problem():
            return None
        from loraplex_server.backends.cuda.draw import draw_noisy

        return draw_noisy

    def graph_shapes(self, max_running: int, max_drafted: int, max_step_tokens: int) -> list[GraphShape]:
        return graph_shapes(max_running, max_drafted, max_step_tokens)

    def graph_bytes(self, shapes: Sequence[GraphShape], spec: ModelSpec, dtype: torch.dtype) -> int:
        return graph_bytes(shapes, spec, dtype)

    def capture_steps(
        self, steps: StepResources, shapes: Sequence[GraphShape], progress: Progress
    ) -> StepGraphs | None:
        return capture_steps(steps, shapes, CudaCapture(self.device), progress)


def _flashinfer(wanted: AttentionRequirements) -> Implementation:
    def no(reason: str) -> Implementation:
        return Implementation("flashinfer", False, reason)

    if find_spec("flashinfer") is None:
        return no("the package flashinfer-python is not installed")
    if problem := _device_problem(wanted) or _package_problem():
        return no(problem)
    from loraplex_server.backends.cuda.attention import flashinfer as ours
    from loraplex_server.backends.cuda.attention.paged import write_pages

    if problem := ours.reason_against(wanted.specs, wanted.dtype):
        return no(problem)
    try:
        package: Any = import_module("flashinfer")
    except Exception as error:  # it compiles and loads libraries: anything may go wrong
        return no(f"the package flashinfer does not load: {(str(error) or type(error).__name__).splitlines()[0]}")
    reason = "FlashInfer, for CUDA devices"
    return Implementation(
        "flashinfer", True, reason, lambda specs: ours.FlashInferAttention(specs, package, write_pages)
    )


def _triton(wanted: AttentionRequirements) -> Implementation:
    if problem := _package_problem() or _device_problem(wanted):
        return Implementation("triton", False, problem)
    from loraplex_server.backends.cuda.attention.paged import TritonPagedAttention

    return Implementation("triton", True, "own kernels, for CUDA devices", TritonPagedAttention)


def _triton_problem() -> str:
    return _package_problem() or _device_problem(AttentionRequirements())


def _package_problem() -> str:
    return "" if find_spec("triton") is not None else "the package triton is not installed"


def _device_problem(wanted: AttentionRequirements) -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if wanted.device is not None and wanted.device.type != "cuda":
        return f"it is for CUDA devices, not for {wanted.device.type}"
    return ""


def _punica_problem() -> str:
    """The reason that Punica cannot be used; empty where it can. Another package has Punica's name on PyPI: ours is
    told by its functions in its file. Nothing is run."""
    spec = find_spec("punica")
    if spec is None:
        return "the package punica is not installed"
    files = [Path(folder, "ops", "__init__.py") for folder in spec.submodule_search_locations or ()]
    text = "".join(file.read_text(errors="replace") for file in files if file.is_file())
    if not all(f"def {name}(" in text for name in PunicaFunctions.__annotations__):
        return "the package punica that is installed is another one, without LoRA operators"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if torch.cuda.get_device_capability()[0] >= 8 else "the GPU's compute capability is below 8.0"
