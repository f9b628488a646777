"""Back end interface, with the plain form in torch for any device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_runtime.reports import Progress, no_progress
from loraplex_server.backends.cuda.graphs import GraphShape, StepGraphs
from loraplex_server.backends.fusion import FusedOps
from loraplex_server.backends.reference import ReferenceDense, ReferenceOps, TorchPagedAttention
from loraplex_server.layers.attention import AttentionSpec, ModelSpec, PagedAttention
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.experts import AddTerms, MakeExpertProducts, MakeFusedExperts, add_terms
from loraplex_server.layers.linear import BaseLinearFactory, Merge, PlainLinear
from loraplex_server.layers.lora import SegmentedDense, SegmentedLora
from loraplex_server.layers.quantization import WeightFormat
from loraplex_server.layers.recurrences import StateOps
from loraplex_server.layers.step import StepResources
from loraplex_server.sampling.draw import Draw, NoisyArgmax, row_argmax
from loraplex_server.sampling.sampler import Argmax, MaskedArgmax

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from loraplex_server.backends.cpu.decoder.find import FoundStack
    from loraplex_server.backends.cpu.medusa import NativeGuesser

MakeAttention = Callable[[Sequence[AttentionSpec]], PagedAttention]


class Implementation(NamedTuple):
    """One implementation of an operation, as `loraplex doctor` lists it."""

    name: str
    usable: bool
    reason: str  # what it is for, or why it cannot be used
    make: MakeAttention | None = None  # of attention, for the layers of one model


@dataclass(frozen=True, slots=True)
class AttentionRequirements:
    """Requirements of attention. None and () require nothing."""

    backend: Backend | None = None  # whose layers attend
    specs: tuple[AttentionSpec, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def device(self) -> torch.device | None:
        return self.backend.device if self.backend is not None else None


class Backend:
    """Operations of one device. This class is the plain reference; others override what they do faster."""

    name: ClassVar[str] = "reference"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    # --- what there is on this machine --------------------------------------------------------------------------------

    @classmethod
    def serves(cls, device_type: str) -> bool:
        """True if this back end is for devices of this type."""
        return True

    @classmethod
    def create(cls, device: torch.device, *, cpu_kernels: str, num_threads: int | None, progress: Progress) -> Self:
        """The back end for `device`, with the operator's choices. Raises InvalidArgument where one cannot be met."""
        return cls(device)

    @classmethod
    def lora_operations(cls) -> list[Implementation]:
        """Implementations of segmented LoRA, the fastest first."""
        return [Implementation("reference", True, "for every device, slow; what the others are tested against")]

    @classmethod
    def attention_kernels(cls, wanted: AttentionRequirements) -> list[Implementation]:
        """Implementations of attention, the best first."""
        return [Implementation("torch", True, "plain torch, any device", lambda _: TorchPagedAttention())]

    # --- operations ---------------------------------------------------------------------------------------------------

    def lora(self, max_rank: int = 256, name: str = "auto") -> SegmentedLora:
        """Segmented LoRA: the fastest, or the one called `name` (--lora-kernels). `max_rank`: of any adapter that will
        come; what is captured in graphs has room for it. Raises InvalidArgument."""
        if name not in ("auto", "reference"):
            raise InvalidArgument(f"--lora-kernels {name} is for CUDA devices", field="--lora-kernels")
        return ReferenceOps()

    def dense(self) -> SegmentedDense:
        """Segmented dense products, which Medusa heads are made of."""
        return ReferenceDense()

    def linears(self, form: WeightFormat | None = None) -> BaseLinearFactory:
        """Products with base weights. `form`: of few bits, to which the weights are rounded already; a back end without
        such products multiplies with the rounded weights as they are."""
        return PlainLinear

    def merge(self) -> Merge | None:
        """Computation of linears that read one input by the first of them; None: each computes alone."""
        return None

    def expert_products(self, form: WeightFormat | None = None) -> MakeExpertProducts | None:
        """Products with the weights of experts; None: the model's own code stays. `form`: as of `linears`."""
        return None

    def fused_experts(self, form: WeightFormat | None = None) -> MakeFusedExperts | None:
        """Experts whose whole computation is one call; None: there are none. `form`: as of `linears`."""
        return None

    def expert_terms(self) -> AddTerms:
        """Addition of adapters' terms to the products of experts."""
        return add_terms

    def fused_ops(self) -> FusedOps | None:
        """Fused norms and rotary embeddings; None: the model's own code stays."""
        return None

    def argmax(self) -> Argmax:
        """The most likely token of each row."""
        return row_argmax

    def masked_argmax(self) -> MaskedArgmax | None:
        """The most likely token of each row among those that a mask allows; None: the scores are changed first."""
        return None

    def noisy_argmax(self) -> NoisyArgmax | None:
        """A function that draws from all tokens at once, on another device than a CPU; None: tensor operations do."""
        return None

    def draw(self) -> Draw | None:
        """A function that draws the tokens of float32 scores, truncation included; None: tensor operations do it."""
        return None

    def torch_threads(self, num_tokens: int, dtype: torch.dtype) -> AbstractContextManager[None]:
        """Gives torch, within the block, as many threads as are good for a step of so many tokens, of a model that back
        end and torch compute in turns."""
        return nullcontext()

    def recurrences(self) -> StateOps | None:
        """Recurrences of mixers straight over the states of a step; None: tensor operations do it."""
        return None

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
        """All decoder layers in one call, where that is proven to compute the same; None: they stay. See
        `cpu.decoder.find.find_stack`."""
        return None

    def medusa_guesser(self, head: nn.Module, dtype: torch.dtype) -> NativeGuesser | None:
        """Guesses of Medusa heads before the model's own `head` in one call; None: tensor operations do it."""
        return None

    def graph_shapes(self, max_running: int, max_drafted: int, max_step_tokens: int) -> list[GraphShape]:
        """Shapes of the steps to capture as graphs, for so many sequences, drafts of so many tokens, and steps with
        prompts of up to `max_step_tokens` tokens."""
        return []

    def graph_bytes(self, shapes: Sequence[GraphShape], spec: ModelSpec, dtype: torch.dtype) -> int:
        """Estimate of the device memory that graphs of these shapes take at most."""
        return 0

    def capture_steps(
        self, steps: StepResources, shapes: Sequence[GraphShape], progress: Progress
    ) -> StepGraphs | None:
        """Captures steps of these shapes; None: every step is launched. `progress` is told what became of it."""
        return None

    def describe_layers(self) -> str:
        """The code that computes the layers, in words, where `find_decoder` finds none."""
        return "Transformers' layers"

    def rounding(self, form: WeightFormat) -> Callable[[Tensor], None]:
        """Rounds a weight in place to what so few bits hold."""
        return form.round_

    @property
    def multiplies_few_bits(self) -> bool:
        """True if products are made with weights of few bits as they are kept."""
        return False

    def check_quantize(self, form: WeightFormat) -> None:
        """Raises Unimplemented where weights cannot be served in so few bits."""
        if self.device.type != "cpu":
            raise Unimplemented(
                f"--quantize {form.name} is there for the CPU only, not for {self.device.type}: leave it out, or use "
                "it with --device cpu",
                field="--quantize",
            )
