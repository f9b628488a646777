"""Initialisations of LoRA that PEFT repeats at load, on the base model.

PiSSA (arXiv 2404.02948) takes out the r largest singular components of W, OLoRA (arXiv 2406.01775) the first r columns
of Q times the first r rows of R of W = QR. The adapter's trained factors then stand beside what is left of W:

    y = (W - s B0 A0) x + s B A x = W x + s [B, -B0] [A; A0] x

which is a LoRA of twice the rank on the base model as it is. B0 A0 is the same whatever signs a library gives singular
vectors or Q's columns. Values are computed in float32, as in PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from loraplex_adapters.formats.files import CONFIG_NAME
from loraplex_adapters.formats.peft_plan import Read
from loraplex_adapters.io.safetensors import TensorInfo
from loraplex_adapters.weights import BaseTargets, TargetModule
from loraplex_contracts.errors import AdapterUnsupported

Init = Literal["pissa", "olora", "loftq"]
# Limit for all decompositions of an adapter, in out * in * min(out, in): some ten minutes. Measured on two cores in
# float32: the one of 2048 x 2048 takes 4.7 s, which is 0.55 ns for each of these.
MAX_WORK: Final = 1 << 40
HOW_TO_CONVERT: Final = "convert the adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"


def check_init(init: Init, modules: Sequence[TargetModule], targets: BaseTargets, num_decompositions: int) -> None:
    """Raises AdapterUnsupported for modules on which PEFT's own initialisation fails or changes more than them, and
    where it takes too long. `num_decompositions`: of each weight."""
    for module in modules:
        why = ""
        if module.kind != "linear":
            why = f"of kind {module.kind}"
        elif module.is_conv1d and init != "pissa":
            why = "a Conv1D"
        elif targets.tied_head and module.path == targets.tied_head:
            why = "the head, whose weight is the embedding's: both would change"
        elif module.is_shared:
            why = "whose weight other modules share: PEFT takes a part out of it for each of them"
        if why:
            raise AdapterUnsupported(
                f"{CONFIG_NAME}: init_lora_weights {init!a} of {module.path!a} ({why}) is not served"
            )
    sizes = [(module.out_features, module.in_features) for module in modules]
    if num_decompositions * sum(rows * columns * min(rows, columns) for rows, columns in sizes) > MAX_WORK:
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: init_lora_weights {init!a} decomposes {len(modules)} weights of the base model, which "
            f"takes too long at load; {HOW_TO_CONVERT}"
        )


def restored(
    init: Init, module: TargetModule, a: TensorInfo, b: TensorInfo, scale: float
) -> Callable[[Read], tuple[Tensor, Tensor]]:
    """Makes A [2 rank, in] and B [out, 2 rank] of the saved A and B."""

    def make(read: Read) -> tuple[Tensor, Tensor]:
        assert module.weights is not None, "targets of a loaded model have their weights"
        own_a, own_b = read(a), read(b)
        taken_a, taken_b = _taken_out(init, module.weights()[0].float(), own_a.shape[0], scale)
        taken_a, taken_b = taken_a.to(own_a), taken_b.to(own_b)
        return torch.cat([own_a, taken_a]), torch.cat([own_b, -taken_b], dim=1)

    return make


def _taken_out(init: Init, weight: Tensor, rank: int, scale: float) -> tuple[Tensor, Tensor]:
    """A0 [rank, in] and B0 [out, rank] of a weight [out, in]."""
    if init == "olora":
        q, r = torch.linalg.qr(weight)
        return r[:rank], q[:, :rank]
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    roots = (s[:rank] / scale).sqrt()
    return roots[:, None] * v[:rank], u[:, :rank] * roots
