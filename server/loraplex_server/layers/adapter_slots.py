"""Adapter slots on the device, over all adapted modules."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from loraplex_adapters.weights import AdapterWeights, SavedParameter
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.experts import AdaptedModule, AdaptedRouter
from loraplex_server.layers.linear import AdaptedEmbedding, AdaptedLinear, AdaptedNorm, OwnRows, with_parameters
from loraplex_server.layers.lora import FactorTable, Segment, SegmentedLora
from loraplex_server.layers.transfer import upload


class Beyond(Enum):
    """A kind of term that a module may have beyond a low-rank one of one weight."""

    RESCALING = auto()  # a gain or a shift of its outputs
    NORM = auto()  # a norm's own parameters
    OWN_PRODUCT = auto()  # a linear's own weight, or inputs that are scaled or rotated
    OTHER = auto()  # own rows of linears, own weights of embeddings and Conv1D, and whatever experts and routers have


class AdapterSlots:
    """The factor tables of all targets, and which adapter is in which slot.

    What kernels read (pointers, ranks, scales) is one tensor [num_modules, num_slots] for all modules, of which each
    table sees its row: putting an adapter in is four copies to the device and not four per module. Rows of the members
    of a merged linear lie one below the other, so that a kernel reaches those of all.
    """

    def __init__(
        self,
        targets: dict[str, AdaptedModule],
        ops: SegmentedLora,
        num_slots: int,
        device: torch.device,
        norms: Mapping[str, NormPlace] | None = None,
    ) -> None:
        self.ops = ops
        self.num_slots = num_slots
        self.max_rank = 0  # of anything that is installed
        self._ranks_by_slot = [0] * num_slots
        self.targets = _side_by_side(targets)
        # Modules with more than low-rank terms, by the slots of adapters that have any.
        self._beyond: dict[int, tuple[tuple[str, Beyond], ...]] = {}
        self._norms: Mapping[str, NormPlace] = norms or {}
        # Adapters' own weights of norms that have nothing else, [num_norms, num_slots] and the same by path, 0: none.
        # On the host: only native code of CPUs reads them.
        simple = [path for path, norm in self._norms.items() if norm.parameters.keys() == {"weight"}]
        self._norm_ptrs = torch.zeros(len(simple), num_slots, dtype=torch.int64)
        self.norm_ptrs: Mapping[str, Tensor] = dict(zip(simple, self._norm_ptrs, strict=True))
        self._saved: list[list[dict[int, Any]]] = [[] for _ in range(num_slots)]  # where a slot's own parameters are
        self._installed: list[AdapterWeights | None] = [None] * num_slots  # keeps the tensors alive
        shape = (len(targets), num_slots)
        self._a_ptrs = torch.zeros(shape, dtype=torch.int64, device=device)
        self._b_ptrs = torch.zeros(shape, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(shape, dtype=torch.int32, device=device)
        self._scales = torch.zeros(shape, dtype=torch.float32, device=device)
        self._own = torch.zeros(len(targets), 4, num_slots, dtype=torch.int64)  # FactorTable.own
        for idx, module in enumerate(self.targets.values()):
            table = FactorTable(num_slots, module.in_features, module.out_features, device)
            table.a_ptrs, table.b_ptrs = self._a_ptrs[idx], self._b_ptrs[idx]
            table.ranks, table.scales, table.own = self._ranks[idx], self._scales[idx], self._own[idx]
            module.table = table
            module.num_installed = 0
            if isinstance(module, AdaptedLinear | AdaptedRouter):
                module.ops = ops

    def installed(self, slot: int) -> AdapterWeights | None:
        """The adapter in `slot`."""
        return self._installed[slot]

    def are_plain(
        self,
        segments: Sequence[Segment],
        within: str = "",
        but: frozenset[Beyond] = frozenset(),
        outside: Sequence[str] = (),
    ) -> bool:
        """True if the adapters of these segments have nothing but low-rank terms of linears and embeddings, and what
        `but` names, in modules whose path begins with `within`. `outside`: names of modules that are left out with
        all that is in them, wherever they are."""
        return not self._beyond or not any(
            kind not in but and path.startswith(within) and not any(f".{name}." in path for name in outside)
            for segment in segments
            for path, kind in self._beyond.get(segment.adapter_slot, ())
        )

    def install(self, slot: int, weights: AdapterWeights | None) -> None:
        """Puts an adapter into `slot` of all modules, or clears it, which takes no memory. Between steps only."""
        if weights is not None:
            strangers = [path for path in weights.factors if path not in self.targets]
            strangers += [path for path in weights.saved if path not in self.targets and path not in self._norms]
            if strangers:
                raise ValueError(f"adapter factors for modules that the model lacks: {', '.join(strangers[:3])}")
        rows = [(0, 0, 0, 0.0)] * len(self.targets)
        for idx, (path, module) in enumerate(self.targets.items()):
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
            if weights is None:
                tensor[:, slot].zero_()
                continue
            tensor[:, slot] = upload(torch.tensor([row[idx] for row in rows], dtype=tensor.dtype), tensor.device)
        self._installed[slot] = weights
        self._install_saved(slot, weights.saved if weights is not None else {})
        self._beyond.pop(slot, None)
        if weights is not None and (beyond := tuple(self._beyond_low_rank(weights))):
            self._beyond[slot] = beyond
        self._ranks_by_slot[slot] = max((rank for _, _, rank, _ in rows), default=0)
        self.max_rank = max(self._ranks_by_slot)

    def _beyond_low_rank(self, weights: AdapterWeights) -> Iterator[tuple[str, Beyond]]:
        for path, factors in weights.factors.items():
            if factors.has_experts or isinstance(self.targets[path], AdaptedRouter):
                yield path, Beyond.OTHER
            elif not factors.is_plain:
                yield path, Beyond.RESCALING
        for path, parameters in weights.saved.items():
            module = self.targets.get(path)
            if module is None:
                yield path, Beyond.NORM
            elif isinstance(module, AdaptedLinear) and not module.is_conv1d and _has_all_rows(parameters):
                yield path, Beyond.OWN_PRODUCT
            else:
                yield path, Beyond.OTHER

    def _install_saved(self, slot: int, saved: Mapping[str, Mapping[str, SavedParameter]]) -> None:
        if self._saved[slot]:
            self._norm_ptrs[:, slot] = 0
            self._own[:, :, slot] = 0
        for table in self._saved[slot]:
            del table[slot]
        self._saved[slot].clear()
        for path, parameters in saved.items():
            module = self.targets.get(path)
            values = {name: one.values for name, one in parameters.items()}
            if module is None:
                module = self._norms[path].adapted()
                module.saved[slot] = with_parameters(module.base, values)
                if path in self.norm_ptrs:
                    self.norm_ptrs[path][slot] = values["weight"].data_ptr()
            else:
                token_ids = parameters["weight"].token_ids if "weight" in parameters else None
                rows = None
                if token_ids is not None:
                    rows = upload(torch.tensor(token_ids), values["weight"].device)
                if isinstance(module, AdaptedLinear):
                    own = OwnRows(values.get("weight"), rows, values.get("input_gain"), values.get("input_rotation"))
                    module.saved[slot] = own
                    if _has_all_rows(parameters) and module.table is not None:
                        module.table.own[:, slot] = torch.tensor(own.addresses())
                elif isinstance(module, AdaptedEmbedding):
                    module.saved[slot] = with_parameters(module.base, values), rows
                else:
                    raise ValueError(f"a saved parameter for {path}, which takes low-rank terms alone")
            self._saved[slot].append(module.saved)


@dataclass(frozen=True, slots=True)
class NormPlace:
    """A norm of the model, by the module that has it."""

    parent: nn.Module
    name: str
    context: StepContext
    token_dim: int  # of what it is given

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the norm's parameters by name."""
        norm = getattr(self.parent, self.name)
        norm = norm.base if isinstance(norm, AdaptedNorm) else norm
        return {name: tuple(one.shape) for name, one in norm.named_parameters(recurse=False)}

    def adapted(self) -> AdaptedNorm:
        """The norm, made ready for adapters' parameters with the first call."""
        norm = getattr(self.parent, self.name)
        if not isinstance(norm, AdaptedNorm):
            norm = AdaptedNorm(norm, self.context, self.token_dim)
            setattr(self.parent, self.name, norm)
        return norm


def _has_all_rows(parameters: Mapping[str, SavedParameter]) -> bool:
    return all(one.token_ids is None for one in parameters.values())


def _side_by_side(targets: dict[str, AdaptedModule]) -> dict[str, AdaptedModule]:
    """The targets with the members of a merged linear one after the other, as they are called."""
    paths = {id(module): path for path, module in targets.items()}
    ordered: dict[str, AdaptedModule] = {}
    for path, module in targets.items():
        joint = module.merged if isinstance(module, AdaptedLinear) else None
        for member in joint.members if joint is not None else ():
            ordered.setdefault(paths[id(member)], member)
        ordered.setdefault(path, module)
    return ordered


@contextmanager
def as_if_installed(targets: Mapping[str, AdaptedModule]) -> Generator[None]:
    """Lets all these modules launch their adapter kernels meanwhile, also those without an installed adapter."""
    for module in targets.values():
        module.num_installed += 1
    try:
        yield
    finally:
        for module in targets.values():
            module.num_installed -= 1
