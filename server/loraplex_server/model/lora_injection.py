"""Puts adapted modules into a loaded model, and adapters into their slots.

The probe tells which modules may carry an adapter: those that are given exactly the step's tokens (or, the head, the
sampled rows), in order. A linear that sees some other selection of rows (an expert) still gets the base product of its
kind, but is no target.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex_adapters.targets import TargetModule
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import (
    AdaptedEmbedding,
    AdaptedHead,
    AdaptedLinear,
    AdaptedModule,
    BaseLinearFactory,
    PlainLinear,
)
from loraplex_server.model.probe import KEPT, Probe
from loraplex_server.model.recording import NUM_TOKENS

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
