"""The CPU's back end: native kernels where this machine runs them, torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.reports import Progress, no_progress
from loraplex_server.backends.backend import AttentionRequirements, Backend, Implementation
from loraplex_server.backends.cpu.attention import NativePagedAttention, reason_against
from loraplex_server.backends.cpu.cores import default_num_threads
from loraplex_server.backends.cpu.decoder.find import FoundStack, find_stack
from loraplex_server.backends.cpu.experts import NativeTerms, native_experts, native_fused_experts
from loraplex_server.backends.cpu.fused import NativeFused
from loraplex_server.backends.cpu.linear import native_linears, native_merge, packed_linear
from loraplex_server.backends.cpu.lora import NativeDense, NativeOps
from loraplex_server.backends.cpu.medusa import NativeGuesser, native_guesser
from loraplex_server.backends.cpu.native.kernels import DTYPES, NativeKernels
from loraplex_server.backends.cpu.native.library import load
from loraplex_server.backends.cpu.recurrences import NativeRecurrences
from loraplex_server.backends.cpu.torch_lora import CpuDense, CpuOps
from loraplex_server.layers.attention import AttentionSpec
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.experts import AddTerms, MakeExpertProducts, MakeFusedExperts
from loraplex_server.layers.linear import BaseLinearFactory, Merge
from loraplex_server.layers.lora import SegmentedDense, SegmentedLora
from loraplex_server.layers.quantization import WeightFormat
from loraplex_server.sampling.draw import Draw, row_argmax
from loraplex_server.sampling.sampler import Argmax, MaskedArgmax

# Tokens of a step up to which torch's operations are short: its other threads would spin on cores that the kernels
# need. Decode steps of 32 took 114 ms with one thread and 138 with two, prompts of 2,048 tokens 2.0 and 1.9 s (250M
# hybrid); those of eight 25 and 34 ms (245M as GPT-NeoX).
FEW_TOKENS = 64


class CpuBackend(Backend):
    """Computes on the CPU: the C++ code of `kernels` what it supports, torch the rest. Without `kernels` torch computes
    all."""

    name: ClassVar[str] = "cpu"

    def __init__(self, kernels: NativeKernels | None = None) -> None:
        super().__init__("cpu")
        self.kernels = kernels

    @classmethod
    def serves(cls, device_type: str) -> bool:
        return device_type == "cpu"

    @classmethod
    def create(cls, device: torch.device, *, cpu_kernels: str, num_threads: int | None, progress: Progress) -> Self:
        if cpu_kernels == "torch":
            return cls()
        library, status = load()
        if library is not None:
            progress(f"native CPU kernels for {status.isa}")
            return cls(NativeKernels(library, num_threads or default_num_threads()))
        if cpu_kernels == "native":
            raise InvalidArgument(
                f"--cpu-kernels native: {status.reason}; with --cpu-kernels auto torch does the work",
                field="--cpu-kernels",
            )
        progress(f"no native CPU kernels, torch does their work: {status.reason}")
        return cls()

    @classmethod
    def lora_operations(cls) -> list[Implementation]:
        native = load().status
        return [
            Implementation("native", native.usable, native.reason or f"for the CPU, {native.isa}"),
            Implementation("cpu", True, "for the CPU"),
        ]

    @classmethod
    def attention_kernels(cls, wanted: AttentionRequirements) -> list[Implementation]:
        if problem := _reason_against(wanted):
            return [Implementation("native", False, problem)]
        kernels = _kernels_of(wanted)
        isa = load().status.isa if kernels is None else kernels.isa
        make = (lambda _: NativePagedAttention(kernels)) if kernels is not None else None
        return [Implementation("native", True, f"own kernels, for the CPU, {isa}", make)]

    def lora(self, max_rank: int = 256, name: str = "auto") -> SegmentedLora:
        if name != "auto":
            flag = "--lora-kernels"
            raise InvalidArgument(f"{flag} {name} is for GPUs; on a CPU --cpu-kernels says what computes", field=flag)
        return CpuOps() if self.kernels is None else NativeOps(self.kernels)

    def dense(self) -> SegmentedDense:
        return CpuDense() if self.kernels is None else NativeDense(self.kernels)

    def linears(self, form: WeightFormat | None = None) -> BaseLinearFactory:
        return packed_linear if self.kernels is None else native_linears(self.kernels, form=form)

    def merge(self) -> Merge | None:
        return None if self.kernels is None else native_merge(self.kernels)

    def expert_products(self, form: WeightFormat | None = None) -> MakeExpertProducts | None:
        return None if self.kernels is None else native_experts(self.kernels, form)

    def fused_experts(self, form: WeightFormat | None = None) -> MakeFusedExperts | None:
        return None if self.kernels is None else native_fused_experts(self.kernels, form)

    def expert_terms(self) -> AddTerms:
        return super().expert_terms() if self.kernels is None else NativeTerms(self.kernels)

    def fused_ops(self) -> NativeFused | None:
        return None if self.kernels is None else NativeFused(self.kernels)

    def argmax(self) -> Argmax:
        kernels = self.kernels
        if kernels is None:
            return row_argmax

        def argmax(values: Tensor) -> tuple[Tensor, Tensor]:
            return kernels.argmax(values) if values.dtype in DTYPES else row_argmax(values)

        return argmax

    def masked_argmax(self) -> MaskedArgmax | None:
        return None if self.kernels is None else self.kernels.argmax

    def draw(self) -> Draw | None:
        return None if self.kernels is None else self.kernels.draw

    def torch_threads(self, num_tokens: int, dtype: torch.dtype) -> AbstractContextManager[None]:
        if self.kernels is None or dtype not in DTYPES:
            return nullcontext()
        return _torch_threads(1 if num_tokens <= FEW_TOKENS else self.kernels.num_threads)

    def recurrences(self) -> NativeRecurrences | None:
        return None if self.kernels is None else NativeRecurrences(self.kernels)

    def find_decoder(
        self,
        model: PreTrainedModel,
        attention: list[tuple[nn.Module, AttentionSpec]],
        context: StepContext,
        *,
        first_states: Mapping[nn.Module, int] | None = None,
        far: Sequence[int] = (),
        form: WeightFormat | None = None,
        progress: Progress = no_progress,
    ) -> FoundStack | None:
        if self.kernels is None:
            return None
        return find_stack(
            model,
            attention,
            self.kernels,
            context,
            first_states=first_states,
            far=far,
            form=form,
            progress=progress,
        )

    def medusa_guesser(self, head: nn.Module, dtype: torch.dtype) -> NativeGuesser | None:
        return native_guesser(self.kernels, head, dtype)

    def describe_layers(self) -> str:
        layers = super().describe_layers()
        return layers if self.kernels is None else f"{layers}, with native linears and LoRA"

    def rounding(self, form: WeightFormat) -> Callable[[Tensor], None]:
        return super().rounding(form) if self.kernels is None else partial(self.kernels.round_, form=form)

    @property
    def multiplies_few_bits(self) -> bool:
        return self.kernels is not None


@contextmanager
def _torch_threads(num_threads: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _kernels_of(wanted: AttentionRequirements) -> NativeKernels | None:
    return wanted.backend.kernels if isinstance(wanted.backend, CpuBackend) else None


def _reason_against(wanted: AttentionRequirements) -> str:
    """The reason that native kernels cannot attend; empty where they can."""
    if wanted.device is not None and wanted.device.type != "cpu":
        return f"it is for the CPU, not for {wanted.device.type}"
    if _kernels_of(wanted) is None:
        if missing := load().status.reason:
            return f"the native CPU kernels are missing: {missing}"
        if wanted.device is not None:
            return "the native CPU kernels are not in use"
    return next((problem for spec in wanted.specs if (problem := reason_against(spec, wanted.dtype))), "")
