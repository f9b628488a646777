"""Fused norms, gates and rotary embeddings: interface, and replacement of a model's own.

A candidate is an RMS norm by its shape, a gated MLP by its linears' names, or the function `apply_rotary_pos_emb` in
the file of an attention module. It runs beside the fused operation on random values, in float32 (rounding hides
nothing) and in the model's dtype. A candidate that differs is not replaced.

A module keeps its class and weights and gets a `forward` of its own. For an attention module that is the same code with
other globals, in which our function has the name of theirs. Transformers and other models are not changed.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from loraplex_server.backends.equivalence import Comparison, compare, compare_all

log = logging.getLogger(__name__)


class NormForm(NamedTuple):
    """The form of a family's RMS norm."""

    offset: float  # what is added to the weight
    narrows: bool  # the normed values are rounded to the model's dtype before they are multiplied with the weight


class Norm(NamedTuple):
    """An RMS norm."""

    weight: Tensor
    eps: float
    form: NormForm


class FusedOps(Protocol):
    """Fused operations. Results, intermediate roundings included, equal those of the model's own code, so that texts
    equal Transformers'. Each raises TypeError for what it does not compute."""

    @property
    def name(self) -> str: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        """RMS norm: x [..., features] over its root mean square, times weight [features] + offset, in x's dtype."""
        ...

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool) -> Tensor:
        """RMS norm beside a gate of x's shape: weight [features] * x / rms(x) * silu(gate), or, where the gate goes
        first, the norm of x * silu(gate), in x's dtype. The normed values are rounded to it. x may be in float32 beside
        others in fewer bits."""
        ...

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embedding of halves: query, key [1, heads, num_tokens, dim] with cos, sin [1, num_tokens, dim].

        x * cos + (-second half, first half) * sin, products rounded to the dtype that all have.
        """
        ...

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        """SiLU of gate [..., features], rounded to its dtype, times up of the same shape and dtype."""
        ...


ROTATE: Final = "apply_rotary_pos_emb"
FORMS: Final = (NormForm(0.0, True), NormForm(0.0, False), NormForm(1.0, False), NormForm(1.0, True))
GATED: Final = ("gate_proj", "up_proj", "down_proj")
NUM_ROWS, NUM_HEADS = 5, 3

Rotate = Callable[..., tuple[Tensor, Tensor]]


def fuse(model: nn.Module, attention: Sequence[nn.Module], ops: FusedOps) -> list[nn.Module]:
    """Gives modules fused forwards where these are proven equal. Returns the modules; `separate` undoes it."""
    changed: list[nn.Module] = []
    with torch.no_grad():
        for module in model.modules():
            if (forward := _norm_forward(module, ops)) is not None:
                module.forward = forward
                changed.append(module)
        for module in model.modules():
            if (forward := _gated_forward(module, ops)) is not None:
                module.forward = forward
                changed.append(module)
        proven: dict[int, Rotate | None] = {}
        for module in attention:
            if (forward := _attention_forward(module, ops, proven)) is not None:
                module.forward = forward
                changed.append(module)
    log.info("%d of a model's modules have fused operations (%s)", len(changed), ops.name)
    return changed


def separate(modules: Sequence[nn.Module]) -> None:
    """Gives modules their own forwards back."""
    for module in modules:
        module.__dict__.pop("forward", None)


# --- norms ------------------------------------------------------------------------------------------------------------


def _norm_forward(module: nn.Module, ops: FusedOps) -> Callable[..., Tensor] | None:
    if (parts := _weight_and_eps(module)) is None:
        return None
    weight, eps = parts
    norm, gates_first = find_norm(module, ops), _gates_first(module, ops)
    if norm is None and gates_first is None:
        return None
    own = type(module).forward.__get__(module)
    plain = None if norm is None else partial(ops.rms_norm, weight=weight, eps=eps, form=norm.form)
    gated = None if gates_first is None else partial(ops.gated_norm, weight=weight, eps=eps, gates_first=gates_first)
    return partial(_norm, own=own, weight=weight, plain=plain, gated=gated)


def norm_eps(norm: nn.Module) -> float | None:
    """The epsilon of an RMS norm, by the names that modules have for it."""
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found if isinstance(found, float) else None


def _weight_and_eps(module: nn.Module) -> tuple[Tensor, float] | None:
    """Those of a module that has the parts of an RMS norm and no others."""
    parameters = dict(module.named_parameters(recurse=False))
    weight, eps = parameters.get("weight"), norm_eps(module)
    if weight is None or weight.dim() != 1 or len(parameters) != 1 or eps is None:
        return None
    if isinstance(module, nn.LayerNorm) or next(module.children(), None) is not None:
        return None
    return weight, eps


def find_norm(module: nn.Module, ops: FusedOps) -> Norm | None:
    """The norm that a module computes, in the form that rounds as it does; None where it is no RMS norm."""
    if (parts := _weight_and_eps(module)) is None:
        return None
    weight, eps = parts
    wide = copy.deepcopy(module).float()
    right = [form for form in FORMS if _norm_error(wide, cast(Tensor, wide.weight), eps, form, ops).is_equal]
    found = [_norm_error(module, weight, eps, form, ops) for form in right]
    # The form with the smallest error rounds as the module does.
    best = min(range(len(found)), key=lambda idx: found[idx].error, default=None)
    return None if best is None or not found[best].is_equal else Norm(weight, eps, right[best])


def _norm_error(module: nn.Module, weight: Tensor, eps: float, form: NormForm, ops: FusedOps) -> Comparison:
    generator = torch.Generator().manual_seed(5)
    found: list[Comparison] = []
    for scale in (1.0, eps**0.5):  # the second shows where eps is added
        x = scale * torch.randn(1, NUM_ROWS, weight.shape[0], generator=generator)
        x = x.to(weight.device, weight.dtype)
        try:
            found.append(compare("operation", module(x.clone()), ops.rms_norm(x, weight, eps, form)))
        except Exception:  # model-specific code that takes something else
            return Comparison(math.inf, 0.0)
    return max(found, key=lambda one: one.error)


def _gates_first(module: nn.Module, ops: FusedOps) -> bool | None:
    """The place of a norm's gate: True before the norm, False behind it; None of a module that is no such norm."""
    if (parts := _weight_and_eps(module)) is None:
        return None
    weight, eps = parts
    wide = copy.deepcopy(module).float()
    of_wide = cast(Tensor, wide.weight)
    for gates_first in (False, True):
        tried = ((wide, of_wide, torch.float32), (module, weight, torch.float32), (module, weight, weight.dtype))
        if all(_gates_as(one, values, eps, dtype, ops, gates_first=gates_first) for one, values, dtype in tried):
            return gates_first
    return None


def _gates_as(
    module: nn.Module, weight: Tensor, eps: float, dtype: torch.dtype, ops: FusedOps, *, gates_first: bool
) -> bool:
    """True if the module computes such a norm of x in this dtype."""
    generator = torch.Generator().manual_seed(6)
    for scale in (1.0, eps**0.5):
        x, gate = (
            torch.randn(NUM_ROWS, weight.shape[0], generator=generator).to(weight.device, one)
            for one in (dtype, weight.dtype)
        )
        x *= scale
        try:
            want = module(x.clone(), gate.clone())
            found = compare("operation", want, ops.gated_norm(x, gate, weight, eps, gates_first=gates_first))
        except Exception:  # model-specific code that takes something else
            return False
        if not found.is_equal:
            return False
    return True


def _norm(
    x: Tensor,
    *others: Any,
    own: Callable[..., Tensor],
    weight: Tensor,
    plain: Callable[[Tensor], Tensor] | None,
    gated: Callable[[Tensor, Tensor], Tensor] | None,
    **named: Any,
) -> Tensor:
    """The norm of x. `others` and `named`: what a norm may be given beside x, as some recurrent layers give it a gate.
    Other calls are left to the norm's own code, and so are values on another device: gated MLPs are tried out on
    meta."""
    if x.device == weight.device:
        if plain is not None and not others and not named and x.dtype == weight.dtype:
            return plain(x)
        beside = [*others, *named.values()]
        if gated is not None and len(beside) == 1 and (not named or "gate" in named):
            gate: Any = beside[0]
            fits = isinstance(gate, Tensor) and gate.shape == x.shape and gate.dtype == weight.dtype
            if fits and x.dtype in (weight.dtype, torch.float32):
                return gated(x, gate)
    return own(x, *others, **named)


# --- gated MLPs -------------------------------------------------------------------------------------------------------


def _gated_forward(module: nn.Module, ops: FusedOps) -> Callable[..., Tensor] | None:
    if any(getattr(module, name, None) is None for name in GATED) or "forward" in vars(module):
        return None
    own = type(module).forward.__get__(module)
    return partial(_gated, own=own, module=module, ops=ops) if _is_gated(module, ops) else None


def _is_gated(module: nn.Module, ops: FusedOps) -> bool:
    """True if the module's code, with small linears in the place of its own, computes what `_gated` does. In float32
    inputs are also so large that what cuts values off shows."""
    generator = torch.Generator().manual_seed(11)
    like = next(module.parameters(), None)
    if like is None or not like.is_floating_point():
        return False
    device = "cpu" if like.is_meta else like.device  # packed weights leave nothing where they were
    sizes = {GATED[0]: (16, 24), GATED[1]: (16, 24), GATED[2]: (24, 16)}
    for dtype, scale in ((torch.float32, 4.0), (torch.float32, 400.0), (like.dtype, 4.0)):
        linears: dict[str, nn.Module] = {}
        for name, (num_in, num_out) in sizes.items():
            linears[name] = linear = nn.Linear(num_in, num_out, bias=False, device="cpu")
            linear.weight.copy_(torch.randn(num_out, num_in, generator=generator) / 4)
            linear.to(device, dtype)
        small = copy.copy(module)
        small.__dict__["_modules"] = {name: linears.get(name, child) for name, child in module.named_children()}
        x = (scale * torch.randn(1, NUM_ROWS, 16, generator=generator)).to(device, dtype)
        try:
            found = compare("gate", small(x), _gated(x, own=small.forward, module=small, ops=ops))
        except Exception:  # model-specific code that takes or needs something else
            return False
        if not found.is_equal:
            return False
    return True


def _gated(*args: Tensor, own: Callable[..., Tensor], module: Any, ops: FusedOps, **named: Any) -> Tensor:
    """A gated MLP of one x. The module's own code takes other arguments, and products that differ in dtype."""
    if len(args) != 1 or named:
        return own(*args, **named)
    gate, up, down = (getattr(module, name) for name in GATED)
    # Members of a merged linear in their order, so that the first computes for both.
    merged = getattr(gate, "merged", None)
    if merged is not None and merged.members[0] is up:
        right, left = up(*args), gate(*args)
    else:
        left, right = gate(*args), up(*args)
    return down(ops.silu_product(left, right)) if left.dtype == right.dtype else own(*args)


# --- rotary embeddings ------------------------------------------------------------------------------------------------


def _attention_forward(module: nn.Module, ops: FusedOps, proven: dict[int, Rotate | None]) -> Any:
    """The module's own code over other globals."""
    # Transformers wraps a forward whose argument it has renamed.
    forward: Any = inspect.unwrap(cast(Any, type(module)).forward)
    is_replaced = "forward" in vars(module)
    if is_replaced or not isinstance(forward, FunctionType) or ROTATE not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(ROTATE)
    if own is None:
        return None
    if id(own) not in proven:
        tensor = next(module.parameters(), None)
        is_right = tensor is not None and _rotates_halves(own, ops, tensor)
        proven[id(own)] = partial(_rotate, own=own, ops=ops) if is_right else None
    rotate = proven[id(own)]
    if rotate is None:
        return None
    names = {**forward.__globals__, ROTATE: rotate}
    rebound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    rebound.__kwdefaults__ = forward.__kwdefaults__
    return MethodType(rebound, module)


def _rotates_halves(own: Rotate, ops: FusedOps, like: Tensor) -> bool:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator).to(like.device)

    dim = 16
    wide = random(NUM_HEADS, NUM_ROWS, dim), random(1, NUM_ROWS, dim), random(NUM_ROWS, dim), random(NUM_ROWS, dim)
    for dtype in (torch.float32, like.dtype):
        tensors = tuple(tensor.to(dtype) for tensor in wide)
        try:
            is_equal = compare_all("operation", own(*tensors), ops.rotate(*tensors)).is_equal
        except Exception:  # one of them takes something else
            return False
        if not is_equal:
            return False
    return True


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, own: Rotate, ops: FusedOps, **options: Any):
    """The fused operation for the usual shapes, the function's own code for others."""
    shape = (1, q.shape[-2], q.shape[-1])
    is_known = q.dim() == k.dim() == 4 and q.shape[0] == 1 and cos.shape == sin.shape == shape
    is_known &= q.dtype == k.dtype == cos.dtype == sin.dtype and k.shape[-2:] == q.shape[-2:]
    if rest or options or not is_known:
        return own(q, k, cos, sin, *rest, **options)
    return ops.rotate(q, k, cos, sin)
