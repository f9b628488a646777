"""Finds out how a loaded model is built by running it once on a handful of tokens.

Under the probing attention every layer shows its heads, scaling, window and cap, and every linear and embedding the
rows it is given. Two further runs show that nothing but attention carries information between tokens: what a step
needs, since its one row holds the tokens of many requests. No per-model code: what has another shape is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraplex_proto.errors import UnsupportedModel
from loraplex_server.model.attention import interface
from loraplex_server.model.spec import AttentionSpec

NUM_TOKENS = 7
KEPT = (2, 5)  # tokens whose logits are asked for
# Arguments that change attention in a way that AttentionSpec does not describe.
UNKNOWN_TERMS = ("s_aux", "sinks", "position_bias", "attn_bias", "attention_bias", "alibi", "head_mask")


@dataclass(slots=True)
class Probe:
    """What was seen."""

    attention: list[tuple[nn.Module, AttentionSpec]] = field(default_factory=list[tuple[nn.Module, AttentionSpec]])
    # Rows that each linear and embedding was given, by path; several entries where it was called several times.
    rows: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    # Linears that were called one after the other with the very same tensor, which nobody changed meanwhile, by path.
    runs: list[list[str]] = field(default_factory=list[list[str]])
    num_logits: int = 0
    # Of the first run: logits [1, len(KEPT), num_logits], and queries and keys of each layer.
    seen: list[Tensor] = field(default_factory=list[Tensor])


class Refusal(Exception):
    """Raised inside a forward; becomes UnsupportedModel with the model's name."""


class _Recorder:
    """Stands for attention during the probe: records its call and passes each token's own value on."""

    def __init__(self, module: nn.Module, owner: _Recording) -> None:
        self.module = module
        self.owner = owner

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        self.owner.saw(self.module, query, key, value, attention_mask, options)
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2)


class _Recording:
    """One run. `has_plain_positions` is False where positions jump: Transformers takes that for packed sequences and
    makes masks of another kind."""

    def __init__(self, text_config: Any, has_plain_positions: bool = True) -> None:
        self.layer_types: list[str | None] = list(getattr(text_config, "layer_types", None) or ())
        self.config_window: int | None = getattr(text_config, "sliding_window", None)
        self.has_plain_positions = has_plain_positions
        self.attention: list[tuple[nn.Module, AttentionSpec]] = []
        self.states: list[Tensor] = []  # queries and keys of token KEPT[0]

    def saw(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        if any(known is module for known, _ in self.attention):
            raise Refusal("an attention layer runs several times per token")
        if query.shape[0] != 1 or query.shape[2] != NUM_TOKENS or key.shape[2] != NUM_TOKENS:
            raise Refusal("its attention does not see the step's tokens as one row")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1] or query.shape[3] != key.shape[3]:
            raise Refusal("its attention heads have a shape that paged attention does not know")
        for name in UNKNOWN_TERMS:
            if options.get(name) is not None:
                raise Refusal(f"its attention has a term ({name}) that paged attention does not compute yet")
        if options.get("is_causal") is False:
            raise Refusal("it attends to later tokens")
        scaling = options.get("scaling")
        if isinstance(scaling, Tensor):
            raise Refusal("the scaling of its attention is computed for each call")
        softcap = options.get("softcap")
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            k_dim=key.shape[3],
            v_dim=value.shape[3],
            scaling=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
            window=self._window(len(self.attention), mask, options.get("sliding_window")),
            softcap=float(softcap) if softcap else None,
        )
        self.attention.append((module, spec))
        self.states += [query[0, :, KEPT[0]].clone(), key[0, :, KEPT[0]].clone()]

    def _window(self, layer_idx: int, mask: Tensor | None, keyword: Any) -> int | None:
        """The mask that Transformers makes for the layer decides; without one the keyword, then the configuration."""
        if mask is not None and self.has_plain_positions:
            if not hasattr(mask, interface.WINDOW):
                raise Refusal("it builds attention masks of its own")
            found = getattr(mask, interface.WINDOW)
            if isinstance(found, str):
                raise Refusal(f"its attention uses {found}")
            return found
        if keyword is not None:
            return int(keyword)
        layer_type = self.layer_types[layer_idx] if layer_idx < len(self.layer_types) else None
        return self.config_window if layer_type == "sliding_attention" else None


def probe_model(model: PreTrainedModel, model_id: str, max_context_tokens: int) -> Probe:
    """Runs the probe. Raises UnsupportedModel. Leaves the model as it was, apart from its attention implementation."""
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
    ids, positions = _inputs(model)
    vocab_size = _vocab_size(model)

    first = _Recording(text)
    probe = Probe()
    with _rows_recorded(model, probe.rows), _runs_recorded(model, probe.runs):
        logits = _forward(model, first, ids, positions)
    if not bool(logits.isfinite().all()):
        raise Refusal("a trial run gave NaN or Inf: its weights are damaged, or its dtype is too narrow (see --dtype)")
    probe.attention, probe.num_logits, probe.seen = first.attention, logits.shape[-1], [logits, *first.states]
    num_layers = getattr(text, "num_hidden_layers", None)
    if len(first.attention) != num_layers:
        raise Refusal(
            f"{len(first.attention)} of its {num_layers} layers go through Transformers' attention interface; "
            "layers of another kind cannot be served"
        )

    others = vocab_size - 1 - ids  # every token but the one that is looked at
    others[0, KEPT[0]] = ids[0, KEPT[0]]
    far = positions.clone()
    far[0, -1] = max(NUM_TOKENS, max_context_tokens - 1)
    for what, other_ids, other_positions in (
        ("layers other than attention mix neighbouring tokens", others, positions),
        ("positions of one request change the rotation of others", ids, far),
    ):
        second = _Recording(text, has_plain_positions=other_positions is positions)
        other = _forward(model, second, other_ids, other_positions)
        if not _same(logits[0, 0], other[0, 0]) or not all(map(_same, first.states, second.states)):
            raise Refusal(f"{what}, so requests in one step would change each other's text")
    return probe


def run_again(model: PreTrainedModel) -> list[Tensor]:
    """The probe's first run once more, for whoever has changed the model: what it computes is to be `Probe.seen`.
    Raises what the model raises. To be called before attention is in its place."""
    model.set_attn_implementation(interface.PROBING)
    recording = _Recording(model.config.get_text_config())
    return [_forward(model, recording, *_inputs(model)), *recording.states]


def _inputs(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Token ids and positions, both [1, NUM_TOKENS]."""
    positions = torch.arange(NUM_TOKENS, device=next(model.parameters()).device).unsqueeze(0)
    return positions.remainder(max(1, _vocab_size(model) - 1)), positions


def _vocab_size(model: PreTrainedModel) -> int:
    return cast(Tensor, model.get_input_embeddings().weight).shape[0]


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal up to the rounding of a differently blocked product."""
    tolerance = 1e-4 if one.dtype.itemsize >= 4 else 3e-2
    return bool((one - other).abs().max() <= tolerance * one.abs().max().clamp_min(1e-6))


def _forward(model: PreTrainedModel, recording: _Recording, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits [1, len(KEPT), num_logits] with `recording` in the place of attention."""
    modules = list(model.modules())
    for module in modules:
        setattr(module, interface.HANDLE, _Recorder(module, recording))
    try:
        with torch.inference_mode():
            kept = torch.tensor(KEPT, device=ids.device)
            logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=kept).logits
    except (Refusal, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise Refusal(f"a trial run raised {type(error).__name__}: {error}") from error
    finally:
        for module in modules:
            delattr(module, interface.HANDLE)
    if logits.shape[:2] != (1, len(KEPT)):
        raise Refusal("it computes logits for other rows than it is asked for")
    return logits


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
