"""Finds out how a loaded model is built by running it once on a handful of tokens.

Under the probing attention every layer shows its heads, scaling, window and cap, and every linear and embedding the
rows it is given. A second run shows that nothing but attention carries information between tokens: what a step needs,
since its one row holds the tokens of many requests. Positions far out come last (positions.py). No per-model code: what
has another shape is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.layers import attention_interface as interface
from loraplex_server.layers.spec import AttentionSpec
from loraplex_server.model.positions import check_far, far_rows, packed_run, thresholds
from loraplex_server.model.recording import Recording, Refusal, plain_inputs, trial_run, vocab_size

KEPT = (2, 5)  # tokens whose logits are asked for


@dataclass(slots=True)
class Probe:
    """What was seen."""

    attention: list[tuple[nn.Module, AttentionSpec]] = field(default_factory=list[tuple[nn.Module, AttentionSpec]])
    # Rows that each linear and embedding was given, by path; several entries where it was called several times.
    rows: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    # Linears that were called one after the other with the very same tensor, which nobody changed meanwhile, by path.
    runs: list[list[str]] = field(default_factory=list[list[str]])
    num_logits: int = 0
    # Positions of a run far out, and what it saw: logits, and queries and keys of each layer.
    far: tuple[int, ...] = ()
    seen: list[Tensor] = field(default_factory=list[Tensor])


def probe_model(model: PreTrainedModel, model_id: str, max_context_tokens: int) -> Probe:
    """Runs the probe. Raises UnsupportedModel. Leaves the model as it was, apart from its attention implementation, and
    from a hook where it counts positions by its cache."""
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{model_id} cannot be served: its forward does not take logits_to_keep")
    try:
        return _probe(model, max_context_tokens)
    except Refusal as refusal:
        raise UnsupportedModel(f"{model_id} ({model.config.model_type}) cannot be served: {refusal}") from None


def _probe(model: PreTrainedModel, max_context_tokens: int) -> Probe:
    text = model.config.get_text_config()
    model.set_attn_implementation(interface.PROBING)
    if getattr(model.config, "_attn_implementation", None) != interface.PROBING:
        raise Refusal("its attention does not use Transformers' attention interface")
    ids, positions = plain_inputs(model)

    probe = Probe()
    with _rows_recorded(model, probe.rows), _runs_recorded(model, probe.runs):
        first = trial_run(model, Recording(text), ids, positions, KEPT)
    if not bool(first.logits.isfinite().all()):
        raise Refusal("a trial run gave NaN or Inf: its weights are damaged, or its dtype is too narrow (see --dtype)")
    probe.attention, probe.num_logits = first.attention, first.logits.shape[-1]
    num_layers = getattr(text, "num_hidden_layers", None)
    if len(first.attention) != num_layers:
        raise Refusal(
            f"{len(first.attention)} of its {num_layers} layers go through Transformers' attention interface; "
            "layers of another kind cannot be served"
        )

    others = vocab_size(model) - 1 - ids  # every token but the one that is looked at
    others[0, KEPT[0]] = ids[0, KEPT[0]]
    if not first.is_same_as(trial_run(model, Recording(text), others, positions, KEPT), KEPT[0]):
        raise Refusal(
            "layers other than attention mix neighbouring tokens, so requests in one step would change each other's "
            "text"
        )
    rows = far_rows(thresholds(text, max_context_tokens), max_context_tokens)
    seen = check_far(model, first, KEPT[0], rows)
    probe.far, probe.seen = rows[0].positions, [seen.logits, *seen.states]
    return probe


def run_again(model: PreTrainedModel, probe: Probe) -> list[Tensor]:
    """The probe's run far out once more, for whoever has changed the model: what it computes is to be `Probe.seen`.
    Raises what the model raises. To be called before attention is in its place."""
    model.set_attn_implementation(interface.PROBING)
    seen = packed_run(model, probe.far)
    return [seen.logits, *seen.states]


@contextmanager
def _rows_recorded(model: nn.Module, rows: dict[str, list[int]]) -> Generator[None]:
    """Records the number of rows that every leaf with a weight is given."""
    handles: list[Any] = []

    def watch(path: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            x = args[0] if args and isinstance(args[0], Tensor) else None
            is_ids = x is not None and not x.is_floating_point()
            num_rows = -1 if x is None else x.numel() if is_ids else x.numel() // max(1, x.shape[-1])
            rows.setdefault(path, []).append(num_rows)

        return hook

    try:
        for path, module in model.named_modules():
            if not any(True for _ in module.children()) and any(True for _ in module.parameters(recurse=False)):
                handles.append(module.register_forward_pre_hook(watch(path)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _runs_recorded(model: nn.Module, runs: list[list[str]]) -> Generator[None]:
    """Records which linears are called one after the other with one input."""
    last: tuple[Tensor, Tensor] | None = None  # the input, and what it was

    def watch(path: str) -> Any:
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal last
            x = args[0] if args and isinstance(args[0], Tensor) else None
            if x is not None and last is not None and last[0] is x and torch.equal(last[1], x):
                runs[-1].append(path)
                return
            last = (x, x.clone()) if x is not None else None
            runs.append([path])

        return hook

    handles = [m.register_forward_pre_hook(watch(p)) for p, m in model.named_modules() if isinstance(m, nn.Linear)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
