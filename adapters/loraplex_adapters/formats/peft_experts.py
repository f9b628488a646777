"""PEFT LoRA on fused experts: `target_parameters`, or linears of single experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from loraplex_adapters.formats.files import CONFIG_NAME, WEIGHTS_NAME
from loraplex_adapters.formats.peft_config import PeftLoraConfig
from loraplex_adapters.formats.peft_patterns import Budget
from loraplex_adapters.formats.peft_places import LAYER, Places, renamed
from loraplex_adapters.formats.peft_plan import Found, PlannedModule, check_rank, check_shape, not_named, not_together
from loraplex_adapters.io.safetensors import TensorInfo, check_float
from loraplex_adapters.weights import BaseTargets, FactorShape
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported

# Linears of single experts, before Transformers fused them, by the fused parameter: in the order of its rows.
_FUSED: Mapping[str, tuple[frozenset[str], ...]] = {
    "gate_up_proj": (frozenset({"gate_proj", "w1"}), frozenset({"up_proj", "w3"})),
    "down_proj": (frozenset({"down_proj", "w2"}),),
}


def plan_experts(
    found: Mapping[str, Found], places: Places, config: PeftLoraConfig, targets: BaseTargets, budget: Budget
) -> tuple[list[PlannedModule], set[str]]:
    """The modules of experts' tensors, and the paths that these have in `found`."""
    layers: dict[str, dict[int, str]] = {}  # paths by module and PEFT's layer around it, the outermost first
    single: dict[str, dict[tuple[str, int], str]] = {}  # paths by module, and a linear's name and expert
    for path in found if targets.experts else ():
        inner = path
        while inner.endswith(LAYER):
            inner = inner.removesuffix(LAYER)
        if (place := places.of(inner)) in targets.experts:
            layers.setdefault(place, {})[(len(path) - len(inner)) // len(LAYER)] = path
            continue
        rest, _, name = path.rpartition(".")
        module, _, number = rest.rpartition(".")
        module = renamed(places.of(module))
        if module in targets.experts and number.isdecimal() and number.isascii() and len(number) < 6:
            single.setdefault(module, {})[name, int(number)] = path
    modules = [
        one
        for module, paths in layers.items()
        for one in _plan_fused(
            module,
            min(paths.values(), key=len).removesuffix(LAYER),
            {at: found[path] for at, path in paths.items()},
            config,
            targets,
            budget,
        )
    ]
    for module, paths in single.items():
        modules += _plan_single(module, paths, found, config, targets, budget)
    seen: set[str] = set()
    for one in modules:
        if one.shape.path in seen:
            raise AdapterInvalid(f"{WEIGHTS_NAME} has terms of the experts {one.shape.path!a} twice")
        seen.add(one.shape.path)
    taken = [path for paths in (*layers.values(), *single.values()) for path in paths.values()]
    return modules, set(taken)


def check_beside_experts(config: PeftLoraConfig, modules: Sequence[PlannedModule]) -> None:
    """Raises AdapterUnsupported for what does not go together with terms of experts and routers, as in PEFT."""
    one = next((module.shape.path for module in modules if module.target.kind in ("router", "experts")), "")
    name = "alora_invocation_tokens" if config.invocation else "init_lora_weights" if config.init else ""
    if one and name:
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: {name} together with LoRA on {one!a} is not served; PEFT refuses it too"
        )


def _plan_fused(
    module: str,
    own: str,
    layers: Mapping[int, Found],
    config: PeftLoraConfig,
    targets: BaseTargets,
    budget: Budget,
) -> Iterator[PlannedModule]:
    """Plans the parameters of one module that `target_parameters` names. PEFT wraps the module for the first of them
    first. A key says how many layers are outside, and not which parameter it is. `own`: the module's path in the
    adapter."""
    names = [name for name in targets.experts[module] if config.names_parameter(f"{own}.{name}")]
    first = next(iter(next(iter(layers.values())).values()))
    if not names:
        raise not_named(first, "target_parameters")
    if sorted(layers) != list(range(len(names))):
        raise not_together(
            f"{first.where}: {CONFIG_NAME} names the parameters {', '.join(names)} of {module!a}, and {WEIGHTS_NAME} "
            f"has tensors for {len(layers)}"
        )
    for name, at in zip(names, sorted(layers, reverse=True), strict=True):
        a, b = _a_and_b(layers[at])
        target = targets.modules.get(f"{module}.{name}")
        if target is None:
            raise AdapterUnsupported(f"{a.where} adapts {name} of {module!a}, which is not served")
        rank, scale = config.rank_and_scale(f"{own}.{name}", budget)
        check_rank(rank, a, targets)
        num_experts, num_inputs, num_outputs = target.num_experts, target.in_features, target.out_features
        if target.swaps_features:  # the weight is [experts, in, out], and the term that PEFT adds to it B @ A
            num_inputs, num_outputs = num_outputs, num_inputs
        check_shape(a, (num_experts * rank, num_inputs))
        check_shape(b, (num_outputs, rank * num_experts))
        shape = FactorShape(target.path, rank, target.in_features, target.out_features, scale, num_experts=num_experts)

        def make(
            read: Callable[[TensorInfo], Tensor],
            of: tuple[TensorInfo, TensorInfo] = (a, b),
            sizes: tuple[int, int, int] = (num_outputs, rank, num_experts),
            *,
            is_swapped: bool = target.swaps_features,
        ) -> tuple[Tensor, Tensor]:
            a, b = map(read, of)
            b = b.view(sizes).permute(2, 0, 1)  # [experts, out, rank]
            return (b.mT.flatten(0, 1), a.view(sizes[2], sizes[1], -1).mT) if is_swapped else (a, b)

        yield PlannedModule(shape, target, None, None, made=make)


def _plan_single(
    module: str,
    paths: Mapping[tuple[str, int], str],
    found: Mapping[str, Found],
    config: PeftLoraConfig,
    targets: BaseTargets,
    budget: Budget,
) -> Iterator[PlannedModule]:
    """Plans linears of single experts (Transformers 4) as terms of the fused parameters: A's one below the other, B's
    on a diagonal, as PEFT converts them."""
    left = dict(paths)
    for parameter, parts in _FUSED.items():
        target = targets.modules.get(f"{module}.{parameter}")
        names = [next((name for name, _ in left if name in part), "") for part in parts]
        if target is None or not any(names):
            continue
        num_experts, num_outputs = target.num_experts, target.out_features // len(parts)
        wanted = [(name, expert) for expert in range(num_experts) for name in names]
        missing = next((one for one in wanted if one not in left), None)
        if missing is not None:
            raise AdapterInvalid(
                f"{WEIGHTS_NAME} has terms of some linears of {module!a}, but none of {missing[0] or 'its neighbour'} "
                f"of expert {missing[1]}: those that are fused are adapted together"
            )
        tensors: list[tuple[TensorInfo, TensorInfo]] = []
        ranks: set[tuple[int, float]] = set()
        for one in wanted:
            path = left.pop(one)
            a, b = _a_and_b(found[path])
            if field := config.targets.field_against(path):
                raise not_named(a, field)
            rank, scale = config.rank_and_scale(path, budget)
            ranks.add((rank, scale))
            check_shape(a, (rank, target.in_features))
            check_shape(b, (num_outputs, rank))
            tensors.append((a, b))
        if len(ranks) > 1:
            raise AdapterUnsupported(
                f"{tensors[0][0].where}: the experts of {module!a} have several ranks or scales, which is not served"
            )
        ((rank, scale),) = ranks
        check_rank(rank * len(parts), tensors[0][0], targets)
        shape = FactorShape(
            target.path, rank * len(parts), target.in_features, target.out_features, scale, num_experts=num_experts
        )

        def make(
            read: Callable[[TensorInfo], Tensor],
            of: Sequence[tuple[TensorInfo, TensorInfo]] = tensors,
            num_parts: int = len(parts),
        ) -> tuple[Tensor, Tensor]:
            b = [torch.block_diag(*(read(b) for _, b in of[i : i + num_parts])) for i in range(0, len(of), num_parts)]
            return torch.cat([read(a) for a, _ in of]), torch.stack(b)

        yield PlannedModule(shape, target, None, None, made=make)
    if left:
        path = next(iter(left.values()))
        tensor = next(iter(found[path].values()))
        raise AdapterUnsupported(f"{tensor.where} adapts a part of experts that is not served")


def _a_and_b(entry: Found) -> tuple[TensorInfo, TensorInfo]:
    """Factors A and B of experts. Raises AdapterUnsupported for anything else, AdapterInvalid where one is missing."""
    first = next(iter(entry.values()))
    for which, tensor in entry.items():
        check_float(tensor)
        if which not in ("a", "b"):
            raise AdapterUnsupported(f"{tensor.where} belongs to experts, of which A and B are served")
    if len(entry) < 2:
        raise AdapterInvalid(f"{first.where} has no lora_{'B' if 'a' in entry else 'A'} beside it")
    return entry["a"], entry["b"]
