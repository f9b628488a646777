"""Linears that read one input, as one product and one adapter update: q, k and v, or gate and up.

A decode step waits for launches as much as for weights, and one wide product keeps more of a GPU busy than three narrow
ones. Which linears those are is not told by their names: the probe saw them called one after the other with the very
same tensor. The first of them to be called computes for all; the others take their columns, if they are given that same
tensor again, and compute alone otherwise. So what a model does with them may be anything.

Owns the joint weights, of which the members' own are rows: nothing is in memory twice. Knows no kernels and no steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraplex_server.layers.context import JointOutput, StepContext
from loraplex_server.layers.linear import AdaptedHead, AdaptedLinear, PlainLinear
from loraplex_server.layers.lora import SiblingLora


class Siblings:
    """Implements linear.JointProduct for linears of one parent, in the order in which they are called."""

    def __init__(self, members: Sequence[AdaptedLinear], context: StepContext) -> None:
        self.members = tuple(members)
        self._context = context
        self._ends = tuple(accumulate(member.out_features for member in members))
        with torch.no_grad():
            self.weight = torch.cat(tuple(member.weight for member in members))  # [sum of outputs, in]
            biases = tuple(member.bias for member in members if member.bias is not None)
            self.bias = torch.cat(biases) if biases else None
        for member, start, end in zip(members, (0, *self._ends), self._ends, strict=False):
            member.weight.data = self.weight[start:end]
            if member.bias is not None and self.bias is not None:
                member.bias.data = self.bias[start:end]
            member.joint = self

    def separate(self) -> None:
        """Every member computes alone from here on. Their weights stay where they are."""
        for member in self.members:
            member.joint = None

    def output(self, member: AdaptedLinear, x: Tensor) -> Tensor | None:
        """x [..., in] -> the member's columns [..., out] of what all compute of x, adapters included. None where the
        member comes out of turn or with another x than the first."""
        if member is self.members[0]:
            found = JointOutput(self, 0, x, self._compute(x))
        else:
            left = self._context.joint
            if left is None or left.x is not x or left.siblings is not self:
                return None
            found = left
            if self.members[found.next_idx] is not member:
                return None
        idx = found.next_idx
        self._context.joint = found._replace(next_idx=idx + 1) if idx + 1 < len(self.members) else None
        return found.y[..., self._ends[idx] - member.out_features : self._ends[idx]]

    def base(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def _compute(self, x: Tensor) -> Tensor:
        y = self.base(x)
        segments, first = self._context.token_segments, self.members[0]
        if segments is None or first.ops is None or not any(member.num_installed for member in self.members):
            return y
        rows, inputs = y.view(-1, self._ends[-1]), x.reshape(-1, first.in_features)
        tables = [member.table for member in self.members if member.table is not None]
        if isinstance(first.ops, SiblingLora):
            first.ops.apply_siblings(rows, inputs, tables, segments)
            return y
        for table, end in zip(tables, self._ends, strict=True):
            first.ops.apply(rows[:, end - table.out_features : end], inputs, table, segments)
        return y


def join_siblings(
    model: nn.Module, runs: Sequence[Sequence[str]], targets: Mapping[str, nn.Module], context: StepContext
) -> list[Siblings]:
    """Joins what of `runs` (paths of linears that were called in turn with one input) can be joined."""
    found: list[Siblings] = []
    for run in runs:
        for paths in _of_one_parent(run):
            modules = [targets.get(path) for path in paths]
            members = [m for m in modules if isinstance(m, AdaptedLinear) and not isinstance(m, AdaptedHead)]
            if len(members) == len(paths) > 1 and _fit_together(members):
                found.append(Siblings(members, context))
    device = next(model.parameters()).device
    if found and device.type == "cuda":
        torch.cuda.empty_cache()  # what the members' own weights have left is no room for the KV cache otherwise
    return found


def _of_one_parent(run: Sequence[str]) -> list[list[str]]:
    """Cut where the parent changes."""
    groups: list[list[str]] = []
    for path in run:
        if groups and groups[-1][0].rpartition(".")[0] == path.rpartition(".")[0]:
            groups[-1].append(path)
        else:
            groups.append([path])
    return groups


def _fit_together(members: Sequence[AdaptedLinear]) -> bool:
    first = members[0]
    return all(
        type(member.base) is PlainLinear
        and not member.is_conv1d
        and (member.bias is None) == (first.bias is None)
        and member.weight.dtype == first.weight.dtype
        for member in members
    )
