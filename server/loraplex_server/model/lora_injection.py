"""Puts adapted modules into a loaded model, and adapters into their slots.

The probe tells which modules may carry an adapter: those that are given exactly the step's tokens (or, the head, the
sampled rows), in order. A linear that sees some other selection of rows (an expert) still gets the base product of its
kind, but is no target.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex_adapters.targets import TargetModule
from loraplex_adapters.weights import AdapterWeights
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import (
    AdaptedEmbedding,
    AdaptedHead,
    AdaptedLinear,
    BaseLinearFactory,
    PlainLinear,
)
from loraplex_server.layers.lora import FactorTable, SegmentedLora
from loraplex_server.layers.transfer import upload
from loraplex_server.model.probe import KEPT, Probe
from loraplex_server.model.recording import NUM_TOKENS

AdaptedModule = AdaptedLinear | AdaptedEmbedding
EXPERT = re.compile(r"\.experts?\.\d+\.")


def adapt_modules(
    model: PreTrainedModel,
    probe: Probe,
    context: StepContext,
    dtype: torch.dtype,
    make_base: BaseLinearFactory = PlainLinear,
    *,
    keeps_head: bool = True,
) -> dict[str, AdaptedModule]:
    """Replaces every linear, and the embeddings that may carry an adapter. Returns the possible targets by path.

    `keeps_head`: the head keeps its plain weight, which adapters' copies are compared with.
    """
    head = model.get_output_embeddings()
    uses = Counter(id(parameter) for _name, parameter in model.named_parameters(remove_duplicate=False))
    targets: dict[str, AdaptedModule] = {}
    for path, module in list(model.named_modules()):
        adapted: AdaptedModule
        num_rows = NUM_TOKENS
        if type(module) is nn.Linear or isinstance(module, Conv1D):
            kind = AdaptedHead if module is head else AdaptedLinear
            num_rows = len(KEPT) if module is head else NUM_TOKENS
            is_conv1d = isinstance(module, Conv1D)
            adapted = kind(
                cast(nn.Parameter, module.weight), module.bias, context, is_conv1d=is_conv1d, make_base=make_base
            )
            if uses[id(module.weight)] == 1 and not (keeps_head and module is head):
                adapted.drop_weight()
        elif isinstance(module, nn.Embedding) and (
            type(module) is nn.Embedding or module is model.get_input_embeddings()
        ):
            adapted = AdaptedEmbedding(module, context)
        else:
            continue
        adapted.train(module.training)
        model.set_submodule(path, adapted)
        rows = probe.rows.get(path, [])
        is_whole = bool(rows) and all(seen == num_rows for seen in rows)
        if is_whole and not EXPERT.search(f".{path}.") and module.weight.dtype == dtype:
            targets[path] = adapted
    return targets


def target_modules(targets: dict[str, AdaptedModule]) -> dict[str, TargetModule]:
    """The same as plain data, for the formats."""
    return {
        path: TargetModule(
            path,
            "linear" if isinstance(module, AdaptedLinear) else "embedding",
            module.in_features,
            module.out_features,
            is_conv1d=isinstance(module, AdaptedLinear) and module.is_conv1d,
        )
        for path, module in targets.items()
    }


class AdapterSlots:
    """The factor tables of all targets, and which adapter is in which slot.

    What kernels read (pointers, ranks, scales) is one tensor [num_modules, num_slots] for all modules, of which each
    table sees its row: putting an adapter in is four copies to the device and not four per module. Rows of siblings lie
    one below the other, so that a kernel reaches those of all.
    """

    def __init__(
        self, targets: dict[str, AdaptedModule], ops: SegmentedLora, num_slots: int, device: torch.device
    ) -> None:
        self.ops = ops
        self.num_slots = num_slots
        self.max_rank = 0  # of anything that is installed
        self._ranks_by_slot = [0] * num_slots
        self._targets = _side_by_side(targets)
        self._installed: list[AdapterWeights | None] = [None] * num_slots  # keeps the tensors alive
        shape = (len(targets), num_slots)
        self._a_ptrs = torch.zeros(shape, dtype=torch.int64, device=device)
        self._b_ptrs = torch.zeros(shape, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device)
        for idx, module in enumerate(self._targets.values()):
            table = FactorTable(num_slots, module.in_features, module.out_features, device)
            table.a_ptrs, table.b_ptrs = self._a_ptrs[idx], self._b_ptrs[idx]
            table.ranks, table.scales = self._ranks[idx], self._scales[idx]
            module.table = table
            module.num_installed = 0
            if isinstance(module, AdaptedLinear):
                module.ops = ops

    def install(self, slot: int, weights: AdapterWeights | None) -> None:
        """Puts an adapter into `slot` of all modules, or clears it. Between steps only. Implements InstallFn."""
        if weights is not None:
            strangers = [path for path in weights.factors if path not in self._targets]
            if strangers:
                raise ValueError(f"adapter factors for modules that the model lacks: {', '.join(strangers[:3])}")
        rows = [(0, 0, 0, 0.0)] * len(self._targets)
        for idx, (path, module) in enumerate(self._targets.items()):
            factors = weights.factors.get(path) if weights is not None else None
            table = module.table
            assert table is not None
            had_any = table.factors[slot] is not None
            if had_any is not (factors is not None):
                # The module's own way to set it looks for parameters first, and takes longer than all the rest here.
                object.__setattr__(module, "num_installed", module.num_installed + (-1 if had_any else 1))
            table.put(slot, factors)
            if factors is not None:
                rows[idx] = factors.a.data_ptr(), factors.b.data_ptr(), factors.rank, factors.scale
        read = self._a_ptrs, self._b_ptrs, self._ranks, self._scales
        for idx, tensor in enumerate(read):
            tensor[:, slot] = upload(torch.tensor([row[idx] for row in rows], dtype=tensor.dtype), tensor.device)
        self._installed[slot] = weights
        self._ranks_by_slot[slot] = max((rank for _, _, rank, _ in rows), default=0)
        self.max_rank = max(self._ranks_by_slot)


def _side_by_side(targets: dict[str, AdaptedModule]) -> dict[str, AdaptedModule]:
    """The same, with siblings one after the other as they are called."""
    paths = {id(module): path for path, module in targets.items()}
    ordered: dict[str, AdaptedModule] = {}
    for path, module in targets.items():
        joint = module.joint if isinstance(module, AdaptedLinear) else None
        for member in joint.members if joint is not None else ():
            ordered.setdefault(paths[id(member)], member)
        ordered.setdefault(path, module)
    return ordered


@contextmanager
def as_if_installed(targets: Mapping[str, AdaptedModule]) -> Generator[None]:
    """Every one of these modules launches its adapter kernels, also those that no adapter changes yet."""
    for module in targets.values():
        module.num_installed += 1
    try:
        yield
    finally:
        for module in targets.values():
            module.num_installed -= 1
