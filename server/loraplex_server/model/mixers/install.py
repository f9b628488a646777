"""Installation of packed recurrences into a model's mixers.

A mixer is a module whose code calls one of the module-level functions in `FUNCTIONS`, which Transformers' families
share. Its methods that do are bound again, to the module alone, with the packed versions under those names; the rest of
its code stays Transformers' own. Outside of a step they call the model's own functions. Lightning attention, which
calls none, and Gated DeltaNet have their forward replaced (`lightning.py`, `layers/gated_delta.py`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from loraplex_server.layers import gated_delta
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.mixers import mamba2
from loraplex_server.layers.recurrences import (
    Convolution,
    LinearAttention,
    Recurrence,
    RunRecurrence,
    SelectiveScan,
)
from loraplex_server.model.mixers import lightning
from loraplex_server.model.states import StateSpec, StateStep, TextPerToken

Forward = Callable[[RunRecurrence, Tensor], Any]  # of a mixer: of `Mixer.run` and hidden states
MAX_STATES = 8  # of one mixer
# Arguments that make more of a call than the packed functions do.
NOT_PACKED = ("seq_idx", "cu_seqlens", "initial_state", "initial_states")


class Mixer:
    """A mixer's handle: counts the states that one run of it uses."""

    def __init__(self, path: str, module: nn.Module, context: StepContext, number: int) -> None:
        self.path = path
        self.class_name = type(module).__name__
        self.first = number * MAX_STATES  # index of its first state; dense once `number_states` has run
        self._context = context
        self._next = 0

    def __deepcopy__(self, _: dict[int, Any]) -> Mixer:
        """Copies of a mixer's module run by the same handle, and their forward is their own."""
        return self

    @property
    def step(self) -> StateStep | TextPerToken | None:
        return self._context.states

    def begin(self) -> None:
        self._next = 0

    def run(self, run: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Runs the next recurrence over the step's row: inputs [num_tokens, ...] each -> outputs [num_tokens, ...]."""
        step, idx = self.step, self._next
        assert step is not None
        if idx >= MAX_STATES:
            raise ValueError(f"a {self.class_name} has more than {MAX_STATES} states")
        self._next += 1
        return step.run(self.first + idx, run, inputs)


def install_mixers(model: nn.Module, context: StepContext) -> list[Mixer]:
    """Gives every mixer its handle."""
    mixers: list[Mixer] = []
    for path, module in model.named_modules():
        methods = _methods_with(module, FUNCTIONS)
        is_lightning = lightning.is_lightning(module)
        if not methods and not is_lightning:
            continue
        mixer = Mixer(path, module, context, len(mixers))
        mixers.append(mixer)
        projection = gated_delta.projection_of(module)
        origin = sys.modules[type(module).__module__]
        packed = {name: partial(_call, mixer, origin, name) for name in FUNCTIONS}
        for name, function in methods.items():
            bound = FunctionType(
                function.__code__,
                {**function.__globals__, **packed},
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            bound.__kwdefaults__ = function.__kwdefaults__
            setattr(module, name, MethodType(bound, module))
        if is_lightning:
            module.forward = partial(_run_ours, mixer, module.forward, partial(lightning.attend, module))
        elif projection is not None:
            module.forward = partial(_run_ours, mixer, module.forward, gated_delta.GatedDelta(module, projection))
        module.forward = partial(_run_counted, mixer, module.forward)
    return mixers


def number_states(mixers: Sequence[Mixer], specs: dict[int, StateSpec]) -> tuple[StateSpec, ...]:
    """Numbers the states of all mixers one after the other. `specs`: by the numbers that they have now."""
    found: list[StateSpec] = []
    for mixer in mixers:
        own = [specs[idx] for idx in range(mixer.first, mixer.first + MAX_STATES) if idx in specs]
        mixer.first = len(found)
        found += own
    return tuple(found)


def _methods_with(module: nn.Module, names: dict[str, Any]) -> dict[str, FunctionType]:
    """Methods of the module's class that call a function with one of these names."""
    found: dict[str, FunctionType] = {}
    for name in dir(type(module)):
        function = inspect.unwrap(inspect.getattr_static(type(module), name, None))  # type: ignore[arg-type]
        if isinstance(function, FunctionType) and not names.keys().isdisjoint(function.__code__.co_names):
            found[name] = function
    return found


def _run_counted(mixer: Mixer, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    mixer.begin()
    return forward(*args, **options)


def _call(mixer: Mixer, origin: Any, name: str, *args: Any, **options: Any) -> Any:
    if mixer.step is None:
        return getattr(origin, name)(*args, **options)
    for one in NOT_PACKED:
        if options.get(one) is not None:
            raise ValueError(f"{name} is called with {one}")
    return FUNCTIONS[name](mixer, *args, **{key: value for key, value in options.items() if key not in NOT_PACKED})


def _run_ours(
    mixer: Mixer, own: Callable[..., Any], ours: Forward, hidden_states: Tensor, *args: Any, **options: Any
) -> Any:
    """A mixer's forward within a step; the module's own outside of one."""
    if mixer.step is None:
        return own(hidden_states, *args, **options)
    return ours(mixer.run, hidden_states)


# --- packed functions: arguments and results are those of Transformers' own -------------------------------------------


def causal_conv1d_fn(
    mixer: Mixer,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Packed causal convolution: hidden_states [1, channels, num_tokens]."""
    is_silu = activation in ("silu", "swish")
    out = mixer.run(Convolution(weight, bias, is_silu), (hidden_states[0].t(),)).t().unsqueeze(0)
    return (out if activation is None or is_silu else ACT2FN[activation](out)).to(hidden_states.dtype)


def chunk_delta_rule(
    mixer: Mixer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Packed delta rule: query, key [1, num_tokens, key heads, K], value [1, num_tokens, heads, V], beta [1,
    num_tokens, heads], g like beta, or with a decay for each channel of a key."""
    recurrence = LinearAttention(query.shape[-1] ** -0.5, use_qk_l2norm_in_kernel, is_delta=True)
    out = mixer.run(recurrence, (query[0], key[0], value[0], g[0], beta[0])).to(query.dtype).unsqueeze(0)
    return out, _placeholder(out, output_final_state)


def mamba2_chunk_scan(
    mixer: Mixer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    chunk_size: int,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Packed scan of Mamba 2: hidden_states [1, num_tokens, heads, P], dt [1, num_tokens, heads], A, D [heads], B, C
    [1, num_tokens, groups, N]. The result is in float32 at least, as Transformers' own is."""
    if z is not None:
        raise ValueError("mamba2_chunk_scan is called with z")
    if not dt_softplus:
        raise ValueError("mamba2_chunk_scan is called without softplus")
    out = mixer.run(mamba2(A, D, dt_bias, dt_limit, dt.dtype), (C[0], B[0], hidden_states[0], dt[0]))
    out = out.unsqueeze(0).contiguous()  # as some callers view it in another shape
    return (out, _placeholder(out, True)) if return_final_states else out


def mamba_selective_scan(
    mixer: Mixer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Tensor | tuple[Tensor, Tensor | None]:
    """Packed selective scan of Mamba: hidden_states, dt, z [1, channels, num_tokens], A [channels, N], D [channels], B,
    C [1, N, num_tokens]."""
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    bias = None if delta_bias is None else delta_bias.unsqueeze(-1)
    step = _time_step(dt, bias, delta_softplus)
    inputs = [one[0].t().to(dtype) for one in (hidden_states, step, B, C)]
    out = mixer.run(SelectiveScan(A.to(dtype)), inputs).t().unsqueeze(0)
    if D is not None:
        out = out + hidden_states * D.unsqueeze(-1)
    if z is not None:
        out = out * nn.functional.silu(z)
    return (out, _placeholder(out, True)) if return_last_state else out


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return nn.functional.softplus(dt) if softplus else dt


def _placeholder(out: Tensor, is_wanted: bool) -> Tensor | None:
    """A placeholder for the state that the caller wants to cache: the step holds the state itself."""
    return out.new_zeros(()) if is_wanted else None


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": chunk_delta_rule,
    "chunk_kimi_delta_attention": chunk_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba_selective_scan": mamba_selective_scan,
}
