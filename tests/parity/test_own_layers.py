"""Adapters beyond a native stack, computed by the model's own layers."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.dense import dense_logits, make_dense
from support.driver import Job, make_rig, random_prompts
from support.native_models import native_model
from support.peft_files import RICH_SPECS, load_lora, save_adapter
from support.zoo import VOCAB_SIZE
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraplex_contracts.plan import AdapterUse
from loraplex_runtime.reports import Progress, no_progress
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.cpu.decoder import find
from loraplex_server.backends.cpu.decoder.find import FoundStack, find_stack
from loraplex_server.backends.cpu.native import library
from loraplex_server.backends.cpu.native.build import LIBRARY
from loraplex_server.backends.cpu.native.kernels import NativeKernels, PackedWeight
from loraplex_server.backends.cpu.torch_lora import CpuOps
from loraplex_server.layers.attention import AttentionSpec
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.quantization import WeightFormat
from loraplex_server.model.loader import adopt_model


class TorchProducts(NativeKernels):
    """Packs as the native kernels do, which needs no instruction set, and multiplies by torch."""

    def linear(self, x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
        y = x @ packed.matrix().T
        return y if bias is None else y + bias

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0, narrows: bool = True) -> Tensor:
        assert not offset
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


class PackingBackend(Backend):
    """Takes the layers' weights as the CPU's back end does."""

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__("cpu")
        self.kernels = kernels

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
        assert self.kernels is not None
        return find_stack(model, attention, self.kernels, context)


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_the_models_own_layers_compute_what_the_stack_cannot(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not LIBRARY.exists():
        pytest.skip("the native library is not built: make native")
    functions = ctypes.CDLL(str(LIBRARY))
    library._declare(functions, {**library.IDENTITY, **library.KERNELS})
    monkeypatch.setattr(find.LayerProof, "check", lambda _, _layer, weights: weights)  # it runs the kernels
    base = make_dense(native_model(family))
    # Some rows of a linear are what the stack cannot compute; DoRA, biases and saved norms alone are its own.
    rows = {"modules_to_save": ["norms"], "trainable_token_indices": {"up_proj": [3, 5]}}
    specs = [
        replace(spec, targets="attention", fields={**spec.fields, **rows})
        for spec in RICH_SPECS
        if spec.name in ("dora", "saved-norms", "dora-biases")
    ]
    peft = [save_adapter(base, spec, tmp_path / spec.name, seed) for seed, spec in enumerate(specs)]
    loaded = adopt_model(
        copy.deepcopy(base),
        model_id=family,
        backend=PackingBackend(TorchProducts(library.Library(functions, LIBRARY), 1)),
        verify=False,
    )
    assert loaded.decoder is not None
    targets = loaded.base_targets(max_rank=16)
    rig = make_rig(loaded, ops=CpuOps(), seed=4, max_rows=len(specs), attention="torch")
    for slot, spec in enumerate(specs):
        rig.slots.install(slot, load_lora(tmp_path, spec.name, targets))
    prompts = random_prompts(len(specs), VOCAB_SIZE, seed=8)
    jobs = [Job(prompt, 4, (AdapterUse(slot),)) for slot, prompt in enumerate(prompts)]
    rig.run(jobs)
    for reference, job in zip(peft, jobs, strict=True):
        assert job.error is None
        want = dense_logits(reference, job.prompt, job.tokens)
        torch.testing.assert_close(rig.logits(job), want, rtol=1e-4, atol=1e-4)
