"""Replacement of a model's modules by ones that take adapters.

Linears are merged, and norms and gates fused, where the back end does it. Each replacement is compared with what the
probe saw; what computes something else stays as it was.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex_contracts.errors import is_out_of_memory
from loraplex_runtime.reports import Progress
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.cpu.decoder.find import FoundStack
from loraplex_server.backends.equivalence import Comparison, Kind, compare, compare_all
from loraplex_server.backends.fusion import FusedOps, fuse, separate
from loraplex_server.layers.adapter_slots import NormPlace
from loraplex_server.layers.attention import HANDLE, SERVING, AttentionLayer
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.experts import (
    DOWN,
    UP,
    AdaptedExperts,
    AdaptedModule,
    AdaptedRouter,
    ExpertProducts,
    FusedExperts,
    ScaledExperts,
)
from loraplex_server.layers.linear import (
    AdaptedEmbedding,
    AdaptedHead,
    AdaptedLinear,
    BaseLinearFactory,
    JointLinear,
    Merge,
    PlainLinear,
    merge_linears,
)
from loraplex_server.layers.quantization import WeightFormat
from loraplex_server.model.own_attention import use_attention
from loraplex_server.model.probe import KEPT, NUM_TOKENS, Probe, run_again

log = logging.getLogger(__name__)

EXPERT = re.compile(r"\.experts?\.\d+\.")


@dataclass(frozen=True, slots=True)
class Adapted:
    """The modules that have taken the place of a model's own."""

    targets: dict[str, AdaptedModule]  # that may carry an adapter, by path
    norms: dict[str, NormPlace]  # whose weights an adapter may replace, by path
    attention: tuple[AttentionLayer, ...]
    stack: FoundStack | None  # all decoder layers in one


def adapt_model(
    model: PreTrainedModel,
    probe: Probe,
    context: StepContext,
    dtype: torch.dtype,
    backend: Backend,
    *,
    replaces_decoder: bool,
    form: WeightFormat | None,
    keeps_head: bool,
    progress: Progress,
) -> Adapted:
    """Adapts the model in place. Arguments are those of `loader.adopt_model` and `adapt_modules`."""
    make_base, stack = backend.linears(form), None
    if replaces_decoder:
        first_states = {model.get_submodule(mixer.path): mixer.first for mixer in probe.mixers}
        stack = backend.find_decoder(
            model, probe.attention, context, first_states=first_states, far=probe.far, form=form, progress=progress
        )
    if stack is None:
        progress("packing weights")
    norms = _norm_places(model, probe, context, dtype)
    targets = adapt_modules(model, probe, context, dtype, make_base, keeps_head=keeps_head)
    if stack is not None:
        stack.connect()  # experts are tried in the model's own layers
    if (merge := backend.merge()) is not None:
        merge_modules(model, probe, targets, context, merge)
    # A stack has norms of its own; mixers of the model's own have others, and steps may go through its own layers.
    if (stack is None or stack.stack.shape.names.keeps_states) and (fused := backend.fused_ops()) is not None:
        _fuse(model, probe, fused, context)
    targets |= adapt_experts(model, probe, context, dtype, backend, form)
    layers: list[AttentionLayer] = []
    for module, spec in probe.attention:
        layer = AttentionLayer(spec, context)
        setattr(module, HANDLE, layer)
        layers.append(layer)
    if stack is not None:
        stack.install(model)
    return Adapted(targets, norms, tuple(layers), stack)


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

    The probe tells which modules may carry an adapter: those that are given exactly the step's tokens (or, the head,
    the sampled rows), in order. A linear that sees another selection of rows (an expert) gets a base product of its
    kind, but is not a target. `keeps_head`: the head keeps its plain weight, which adapters' copies are compared with.
    """
    head = model.get_output_embeddings()
    uses = Counter(id(parameter) for _name, parameter in model.named_parameters(remove_duplicate=False))
    targets: dict[str, AdaptedModule] = {}
    for path, module in list(model.named_modules()):
        if path not in probe.rows and not EXPERT.search(f".{path}."):
            continue  # another module reads the weight itself, a mixer or a router
        adapted: AdaptedModule
        num_rows = NUM_TOKENS
        if (type(module) is nn.Linear and module.weight.dtype == dtype) or isinstance(module, Conv1D):
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


def adapt_experts(
    model: PreTrainedModel,
    probe: Probe,
    context: StepContext,
    dtype: torch.dtype,
    backend: Backend,
    form: WeightFormat | None,
) -> dict[str, AdaptedModule]:
    """Puts experts and routers that may carry an adapter in the place of the model's. Returns these by path, experts by
    the path of their parameters. What does not compute the same, of all the step's rows in order, stays as it was.
    Experts are computed by the back end where that gives the same. `form`: as of `adapt_model`."""
    tried: dict[str, AdaptedExperts | AdaptedRouter] = {}
    for path, module in list(model.named_modules()):
        rows = set(probe.rows.get(path, ()))
        if len(rows) != 1:
            continue
        (num_rows,) = rows
        kind = next(
            (one for one in (AdaptedExperts, ScaledExperts) if one.fits(module, dtype, num_rows, NUM_TOKENS)), None
        )
        if kind is not None:
            tried[path] = kind(module, context)
        elif num_rows == NUM_TOKENS and AdaptedRouter.fits(module):
            tried[path] = AdaptedRouter(module, context, dtype)
    if not tried:
        return {}
    for path, adapted in tried.items():
        adapted.train(model.training)
        adapted.is_on_trial = True
        model.set_submodule(path, adapted)
    if problem := _difference(model, probe, context):
        log.info("experts and routers take no adapters: %s", problem)
    targets: dict[str, AdaptedModule] = {}
    for path, adapted in tried.items():
        adapted.is_on_trial = False
        if problem or adapted.rows_seen != [NUM_TOKENS]:
            model.set_submodule(path, adapted.base)
        elif isinstance(adapted, AdaptedRouter):
            targets[path] = adapted
            _take_router_product(adapted, backend)
        else:
            targets |= {f"{path}.{name}": linear for name, linear in adapted.linears.items()}
            adapted.add_terms = backend.expert_terms()
            if not isinstance(adapted, ScaledExperts):
                _take_products(adapted, backend, form)
    return targets


def _take_router_product(router: AdaptedRouter, backend: Backend) -> None:
    """Has a back end multiply with a router's weight. Then the experts of a row do not depend on the rows beside it,
    where the back end's products do not."""
    product = backend.linears()(cast(Tensor, router.base.weight), router.own_bias)
    router.product = product if product.is_copy else None


def _take_products(experts: AdaptedExperts, backend: Backend, form: WeightFormat | None) -> None:
    """Has a back end compute all that experts do, or their products, where it gives the same, and frees their
    weights."""
    like, top_k = experts.weight(UP), min(2, experts.linears[UP].num_experts)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_TOKENS, like.shape[2], generator=generator).to(like)
    chosen = torch.rand(NUM_TOKENS, like.shape[0], generator=generator).topk(top_k).indices.to(like.device)
    weights = torch.rand(NUM_TOKENS, top_k, generator=generator).to(like)
    with torch.inference_mode():
        want = experts(x, chosen, weights)
        for fused, products in _computations(experts, backend, form):
            experts.fused, experts.products = fused, products
            found = compare("decoder", want, experts(x, chosen, weights))
            if found.is_equal:
                experts.drop_weights()
                return
            log.info("a back end's way to compute experts is left: its results are %.1e off", found.error)
    experts.fused, experts.products = None, {}


def _computations(
    experts: AdaptedExperts, backend: Backend, form: WeightFormat | None
) -> Iterator[tuple[FusedExperts | None, dict[str, ExpertProducts]]]:
    """Ways of a back end to compute these experts, the fastest first."""
    weights = {name: experts.weight(name) for name in (UP, DOWN)}
    fuse, make = backend.fused_experts(form), backend.expert_products(form)
    if fuse is not None and experts.has_plain_gate():
        fused = fuse([*experts.linears.values()], [*weights.values()], experts.base.act_fn)
        if fused is not None:
            yield fused, {}
    if make is not None:
        products = {name: found for name, weight in weights.items() if (found := make(weight)) is not None}
        if len(products) == len(weights):
            yield None, products


def _norm_places(
    model: PreTrainedModel, probe: Probe, context: StepContext, dtype: torch.dtype
) -> dict[str, NormPlace]:
    """Norms by path, of whole hidden states or of single heads: modules that have vectors alone (or one for each head),
    and are given the step's tokens in order."""
    found: dict[str, NormPlace] = {}
    for path, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        max_dims = 2 if "norm" in type(module).__name__.lower() else 1
        is_norm = parameters and all(one.dim() <= max_dims and one.dtype == dtype for one in parameters)
        if not is_norm or next(module.children(), None) is not None:
            continue
        dims = {
            tuple(dim for dim, size in enumerate(shape[:-1]) if size == NUM_TOKENS)
            for shape in probe.shapes.get(path, [])
        }
        if len(dims) == 1 and len(of_tokens := dims.pop()) == 1:
            parent, _, name = path.rpartition(".")
            found[path] = NormPlace(model.get_submodule(parent), name, context, of_tokens[0])
    return found


def merge_modules(
    model: PreTrainedModel,
    probe: Probe,
    targets: dict[str, AdaptedModule],
    context: StepContext,
    merge: Merge = JointLinear.of,
) -> None:
    """Merges linears that read one input. None, where the model computes something else with them."""
    called_once = [[path for path in run if len(probe.rows.get(path, ())) == 1] for run in probe.runs]
    linears = {path: module for path, module in targets.items() if isinstance(module, AdaptedLinear)}
    merged = merge_linears(model, called_once, linears, context, merge)
    with _products_compared([member for group in merged for member in group.members]) as products:
        problem = _difference(model, probe, context, "merged model")
    if problem := problem or next((f"a product is {one.error:.1%} off" for one in products if not one.is_equal), ""):
        log.info("linears are computed one by one: %s", problem)
        for group in merged:
            group.separate()


@contextmanager
def _products_compared(members: Sequence[AdaptedLinear]) -> Generator[list[Comparison]]:
    """Compares what linears give meanwhile with their own products of the same inputs."""
    found: list[Comparison] = []

    def look(member: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> None:
        assert isinstance(member, AdaptedLinear)
        found.append(compare("product", member.base(args[0]), y))

    hooks = [member.register_forward_hook(look) for member in members]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _fuse(model: PreTrainedModel, probe: Probe, fused: FusedOps, context: StepContext) -> None:
    changed = fuse(model, [module for module, _ in probe.attention], fused)
    if problem := _difference(model, probe, context, "merged model"):
        log.info("norms, gates and rotary embeddings are the model's own: %s", problem)
        separate(changed)


def _difference(model: PreTrainedModel, probe: Probe, context: StepContext, kind: Kind = "model") -> str:
    """The difference of the model from its probe; empty for none."""
    try:
        got = run_again(model, probe, context)
    except Exception as failure:  # model-specific code
        if is_out_of_memory(failure):
            raise
        return f"{type(failure).__name__}: {failure}"
    finally:
        context.clear()
        use_attention(model, SERVING)
    found = compare_all(kind, probe.seen, got)
    return "" if found.is_equal else f"what it computes is {found.error:.1%} off"
