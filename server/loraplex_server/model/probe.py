"""Probe of a loaded model, by runs on a handful of tokens.

Attention is replaced by something that shows each layer's call (heads, scaling, window, cap) and passes values on, and
mixers with a state run every token as a text of its own, so that every token is computed by itself; every linear and
embedding shows the rows it is given. A second run shows that nothing but attention and known mixers carries information
between tokens: a step's one row holds the tokens of many requests. There is no code for single models; models of
another shape are refused.

Attention temperatures, scaled rotations and windows have no effect before some position, so the last runs are at the
context's end and at the numbers of tokens that the configuration names: the same few tokens in a step beside tokens of
other texts, and alone behind an empty past of that length, as `generate()` would compute them behind a long text.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from loraplex_contracts.errors import UnsupportedModel, is_out_of_memory
from loraplex_server.backends.equivalence import compare_peaks
from loraplex_server.layers.attention import HANDLE, PROBING, REACH, AttentionSpec, Reach
from loraplex_server.layers.context import StepContext
from loraplex_server.model.mixers.install import FUNCTIONS, Mixer, install_mixers, number_states
from loraplex_server.model.own_attention import KEY_BIAS, use_attention
from loraplex_server.model.rope import lengths_given
from loraplex_server.model.states import StateSpec, TextPerToken

# A model's option for its cache: Transformers 5.24 gave it a shorter name, and 5.40 is to end the longer one.
CACHE: Final = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

log = logging.getLogger(__name__)

KEPT = (2, 5)  # tokens whose logits are asked for
NUM_TOKENS = 9
TRIAL_RAISED = "a trial run raised"
# Arguments that change attention in a way that AttentionSpec does not describe.
UNKNOWN_TERMS = ("sinks", "position_bias", "attn_bias", "attention_bias", "alibi", "head_mask")
# Kinds of layers by the names in configurations: with attention, and with a mixer that keeps a state of fixed size.
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "hybrid"}
STATE_LAYERS = {"linear_attention", "conv", "hybrid"}
OTHER_LAYERS = {"mlp", "moe"}
# Parts of the names of fields that count tokens.
COUNTS_TOKENS = ("position", "window", "floor", "chunk", "context", "length")
MAX_THRESHOLDS = 6  # of a configuration that names more, the largest
# Places where a row has pairs of tokens of other texts. The tokens before the last of them are a text from its
# beginning.
PLACES = (7, 5, 3)


@dataclass(slots=True)
class Probe:
    """Facts about a model that its runs have shown."""

    attention: list[tuple[nn.Module, AttentionSpec]] = field(default_factory=list[tuple[nn.Module, AttentionSpec]])
    # Rows that each module with a weight was given, by path; several entries where it was called several times.
    rows: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    shapes: dict[str, list[tuple[int, ...]]] = field(default_factory=dict[str, list[tuple[int, ...]]])  # of the same
    # Linears that were called one after the other with the very same tensor, unchanged meanwhile, by path.
    runs: list[list[str]] = field(default_factory=list[list[str]])
    num_logits: int = 0
    mixers: list[Mixer] = field(default_factory=list[Mixer])
    states: tuple[StateSpec, ...] = ()  # of one sequence
    # Positions of a run far out, and what it saw: logits, and queries and keys of each layer.
    far: tuple[int, ...] = ()
    seen: list[Tensor] = field(default_factory=list[Tensor])


def probe_model(model: PreTrainedModel, model_id: str, max_context_tokens: int, context: StepContext) -> Probe:
    """Runs the probe. Raises UnsupportedModel. Leaves the model as it was, apart from its attention implementation,
    from mixers, which run by `context` from here on, and from a hook where it counts positions by its cache."""
    try:
        return _probe(model, max_context_tokens, context)
    except Refusal as refusal:
        raise UnsupportedModel(f"{model_id} ({model.config.model_type}) cannot be served: {refusal}") from None


def _probe(model: PreTrainedModel, max_context_tokens: int, context: StepContext) -> Probe:
    if not use_attention(model, PROBING):
        raise Refusal("its attention does not use Transformers' attention interface")
    probe = Probe(mixers=install_mixers(model, context))
    context.states = states = TextPerToken()
    try:
        return _run_probe(model, max_context_tokens, probe, states)
    finally:
        context.clear()


def _run_probe(model: PreTrainedModel, max_context_tokens: int, probe: Probe, states: TextPerToken) -> Probe:
    text = model.config.get_text_config()
    ids, positions = plain_inputs(model)
    with inputs_recorded(model, probe.rows, probe.runs, probe.shapes):
        first = trial_run(model, ids, positions, KEPT)
    if not bool(first.logits.isfinite().all()):
        raise Refusal("a trial run gave NaN or Inf: its weights are damaged, or its dtype is too narrow (see --dtype)")
    probe.attention, probe.num_logits = first.attention, first.logits.shape[-1]
    _check_layers(model, first, probe.mixers, states)
    probe.states = number_states(probe.mixers, states.specs)

    others = vocab_size(model) - 1 - ids  # other tokens everywhere, except at the compared place
    others[0, KEPT[0]] = ids[0, KEPT[0]]
    # Other neighbours and no positions at once: only where that changes the token it matters which of them did. Changes
    # that cancel each other are left to the comparison with Transformers.
    unplaced = trial_run(model, others, None, KEPT)
    if not first.is_same_as(unplaced, KEPT[0]):
        second = trial_run(model, others, positions, KEPT)
        if not first.is_same_as(second, KEPT[0]):
            raise Refusal(
                "layers other than attention mix neighbouring tokens, so requests in one step would change each "
                "other's text"
            )
        if not second.is_same_as(unplaced, KEPT[0]):
            raise Refusal("it does not count positions from 0 on, as those of requests are counted here")
    rows = far_rows(thresholds(text, max_context_tokens), max_context_tokens)
    seen = check_far(model, first, KEPT[0], rows)
    probe.far, probe.seen = rows[0].positions, [seen.logits, *seen.states]
    return probe


def _check_layers(model: PreTrainedModel, seen: Recording, mixers: Sequence[Mixer], states: TextPerToken) -> None:
    """Raises Refusal where a layer runs neither attention nor a known mixer, as its kind would."""
    text = model.config.get_text_config()
    num_layers: int = text.num_hidden_layers
    types = layer_types(text) or ["full_attention"] * num_layers
    num_stateful = sum(kind in STATE_LAYERS for kind in types)
    ran = [mixer for mixer in mixers if mixer.first in states.specs]
    if len(ran) != num_stateful:
        own = next((idx for idx, kind in enumerate(types) if kind in STATE_LAYERS), 0)
        parts = _parts_of_layer(model, own, num_layers)
        raise Refusal(
            f"{len(ran)} of its {num_stateful} layers that keep a state (in {parts}) compute it with a function that "
            f"is known ({', '.join(FUNCTIONS)})"
        )
    num_attending = sum(kind in ATTENTION_LAYERS for kind in types)
    if len(seen.attention) != num_attending:
        raise Refusal(
            f"{len(seen.attention)} of its {num_attending} layers go through Transformers' attention interface; "
            "layers of another kind cannot be served"
        )


def _parts_of_layer(model: nn.Module, idx: int, num_layers: int) -> str:
    """The classes of a decoder layer's modules."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return ", ".join(dict.fromkeys(type(child).__name__ for child in module[idx].children()))
    return "unknown modules"


def layer_types(text_config: Any) -> list[str]:
    """The type of each layer, by the configuration; empty where it does not say."""
    return [str(kind) for kind in getattr(text_config, "layer_types", None) or ()]


def run_again(model: PreTrainedModel, probe: Probe, context: StepContext) -> list[Tensor]:
    """The probe's run far out once more, after the model was changed: it must compute `Probe.seen`.
    Raises what the model raises. To be called before attention is in its place. Leaves `context` for the caller to
    clear."""
    use_attention(model, PROBING)
    context.states = TextPerToken()
    seen = packed_run(model, probe.far)
    return [seen.logits, *seen.states]


@contextmanager
def inputs_recorded(
    model: nn.Module,
    rows: dict[str, list[int]],
    runs: list[list[str]],
    shapes: dict[str, list[tuple[int, ...]]] | None = None,
) -> Generator[None]:
    """Records what modules are given, see `Probe`: the number of rows of every one with a weight, and which linears
    are called one after the other with one input. `shapes`: also those."""
    last: tuple[Tensor, Tensor] | None = None  # the input, and what it was

    def see(path: str, module: nn.Module, x: Tensor | None) -> None:
        nonlocal last
        is_ids = x is not None and not x.is_floating_point()
        rows.setdefault(path, []).append(-1 if x is None else x.numel() if is_ids else x.numel() // max(1, x.shape[-1]))
        if shapes is not None and x is not None:
            shapes.setdefault(path, []).append(tuple(x.shape))
        if not isinstance(module, nn.Linear):
            return
        if x is not None and last is not None and last[0] is x and torch.equal(last[1], x):
            runs[-1].append(path)
            return
        last = (x, x.clone()) if x is not None else None
        runs.append([path])

    def watch(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            see(path, module, args[0] if args and isinstance(args[0], Tensor) else None)

        return hook

    handles = [
        module.register_forward_pre_hook(watch(path))
        for path, module in model.named_modules()
        if any(True for _ in module.parameters(recurse=False))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# --- trial runs -------------------------------------------------------------------------------------------------------


class Refusal(Exception):
    """Raised inside a forward; becomes UnsupportedModel with the model's name."""


class Recording:
    """The record of one run. `has_plain_positions` is False where positions jump: Transformers takes that for packed
    sequences and makes masks of another kind."""

    def __init__(self, text_config: Any, has_plain_positions: bool) -> None:
        self.layer_types = [kind for kind in layer_types(text_config) if kind in ATTENTION_LAYERS]
        # The configuration's reach, by the name of a kind of layers.
        self.config_reach = {
            "sliding_attention": Reach(window=getattr(text_config, "sliding_window", None)),
            "chunked_attention": Reach(chunk=getattr(text_config, "attention_chunk_size", None)),
        }
        self.has_plain_positions = has_plain_positions
        self.attention: list[tuple[nn.Module, AttentionSpec]] = []
        self.given: list[tuple[Tensor, Tensor]] = []  # keys and values of each layer, as they came
        self.states: list[Tensor] = []  # queries and keys of each layer [heads, NUM_TOKENS, dim]
        self.logits = torch.empty(0)  # [len(kept), num_logits]
        self.kept: tuple[int, ...] = ()  # tokens whose logits these are

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        """Stands for attention: records the call, and passes each token's own value on."""
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
        reach = self._reach(len(self.attention), mask, options.get("sliding_window"))
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            k_dim=key.shape[3],
            v_dim=value.shape[3],
            scaling=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
            window=reach.window,
            softcap=float(softcap) if softcap else None,
            chunk=reach.chunk,
            sinks=_sinks(module, options.get("s_aux"), query.shape[1]),
            key_bias=options.get(KEY_BIAS),
            source=next((idx for idx, (k, v) in enumerate(self.given) if k is key and v is value), None),
        )
        self.attention.append((module, spec))
        self.given.append((key, value))
        self.states += [query[0].clone(), key[0].clone()]
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous()

    @property
    def specs(self) -> list[AttentionSpec]:
        return [spec for _, spec in self.attention]

    def is_same_as(self, other: Recording, place: int) -> bool:
        """True if the token at `place`, one of those whose logits were asked for, was computed as in the other run."""
        states = zip(self.states, other.states, strict=True)
        logits = [run.logits[run.kept.index(place)] for run in (self, other)]
        pairs = [tuple(logits), *((a[:, place], b[:, place]) for a, b in states)]
        return all(compare_peaks("token", *pair).is_equal for pair in pairs)

    def _reach(self, layer_idx: int, mask: Tensor | None, keyword: Any) -> Reach:
        """The mask that Transformers makes for the layer decides; without one the keyword, then the configuration."""
        if mask is not None and self.has_plain_positions:
            if not hasattr(mask, REACH):
                raise Refusal("it builds attention masks of its own")
            found: Reach | str = getattr(mask, REACH)
            if isinstance(found, str):
                raise Refusal(f"its attention uses {found}")
            return found
        if keyword is not None:
            return Reach(window=int(keyword))
        layer_type = self.layer_types[layer_idx] if layer_idx < len(self.layer_types) else ""
        return self.config_reach.get(layer_type, Reach())


def _sinks(module: nn.Module, given: Any, num_heads: int) -> Tensor | None:
    """The sinks of an attention layer: a parameter of it, one for each head. Raises Refusal for anything else that is
    given."""
    if given is None:
        return None
    if not isinstance(given, nn.Parameter) or given.shape != (num_heads,):
        raise Refusal("the sinks of its attention are no parameter with one number for each head")
    if all(given is not parameter for parameter in module.parameters(recurse=False)):
        raise Refusal("the sinks of its attention belong to another module")
    return given.detach().to(torch.promote_types(given.dtype, torch.float32)).contiguous()


def trial_run(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor | None,
    kept: Sequence[int],
    *,
    past: Cache | None = None,
    has_plain_positions: bool = True,
) -> Recording:
    """The recording of one run. `kept`: tokens whose logits are asked for. Raises Refusal, for whatever the model
    raises."""
    recording = Recording(model.config.get_text_config(), has_plain_positions)
    modules = list(model.modules())
    for module in modules:
        setattr(module, HANDLE, partial(recording.attend, module))
    options: dict[str, Any] = {"use_cache": False} if past is None else {"use_cache": True, CACHE: past}
    try:
        with torch.inference_mode():
            rows = torch.tensor(kept, device=ids.device)
            logits: Tensor = model(input_ids=ids, position_ids=positions, logits_to_keep=rows, **options).logits
    except Refusal:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise Refusal(f"{TRIAL_RAISED} {type(error).__name__}: {error}") from error
    finally:
        for module in modules:
            delattr(module, HANDLE)
    if logits.shape[:2] != (1, len(kept)):
        raise Refusal("it computes logits for other rows than it is asked for")
    recording.logits, recording.kept = logits[0], tuple(kept)
    return recording


def vocab_size(model: PreTrainedModel) -> int:
    return cast(Tensor, model.get_input_embeddings().weight).shape[0]


def plain_inputs(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Token ids and positions, both [1, NUM_TOKENS]."""
    positions = torch.arange(NUM_TOKENS, device=next(model.parameters()).device).unsqueeze(0)
    return positions.remainder(max(1, vocab_size(model) - 1)), positions


# --- positions far out ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FarRow:
    """Tokens of several texts side by side, as in a step."""

    positions: tuple[int, ...]  # [NUM_TOKENS]
    places: tuple[int, ...]  # of the first token of each pair


def thresholds(config: PreTrainedConfig, limit: int) -> tuple[int, ...]:
    """Numbers of tokens within `limit` that the configuration names, in order. A run of the first tokens shows those
    below NUM_TOKENS, and a run of the last tokens those at the end."""
    found = {count for count in _counts(config.to_dict()) if NUM_TOKENS <= count <= limit - NUM_TOKENS}
    return tuple(sorted(found)[-MAX_THRESHOLDS:])


def _counts(fields: Mapping[str, Any]) -> Iterator[int]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _counts(value)  # rope parameters, perhaps of each kind of layer
        elif any(part in str(name) for part in COUNTS_TOKENS) and isinstance(value, int | float):
            yield int(value) if math.isfinite(value) else 0


def far_rows(counts: Sequence[int], limit: int) -> list[FarRow]:
    """Rows with pairs around each of these numbers of tokens, and at the end of a context of `limit`."""
    ends = [max(limit, NUM_TOKENS), *(count + 1 for count in counts)]
    rows: list[FarRow] = []
    for begin in range(0, len(ends), len(PLACES)):
        pairs = dict(zip(PLACES, ends[begin : begin + len(PLACES)], strict=False))
        positions = list(range(NUM_TOKENS))
        for place, end in pairs.items():
            positions[place : place + 2] = (end - 2, end - 1)
        rows.append(FarRow(tuple(positions), tuple(pairs)))
    return rows


def check_far(model: PreTrainedModel, plain: Recording, place: int, rows: Sequence[FarRow]) -> Recording:
    """Records a step of the first row. `plain`: a run of plain positions, and a place in it. Raises Refusal.

    A model that counts positions by its cache gets a cache that reports them in every step.
    """
    try:
        return _check(model, plain, place, rows)
    except Refusal as refusal:
        hook = count_by_cache(model)
        try:
            found = _check(model, plain, place, rows)
        except Refusal:
            hook.remove()
            if not _takes_positions(model, rows[0]):
                raise Refusal(
                    "it counts positions by itself, whatever those of a step's tokens are, so that tokens of several "
                    "requests cannot share a step"
                ) from None
            raise refusal from None
        log.info("the model counts positions by its cache, so every step has one")
        return found


def _check(model: PreTrainedModel, plain: Recording, place: int, rows: Sequence[FarRow]) -> Recording:
    steps = [packed_run(model, row.positions) for row in rows]
    for row, step in zip(rows, steps, strict=True):
        if not step.is_same_as(plain, place):
            raise Refusal(
                "positions of one request change the rotation of others, so requests in one step would change each "
                "other's text"
            )
        for first in row.places:
            alone = _run_alone(model, row.positions[first] - first)
            if not all(step.is_same_as(alone, idx) for idx in (first, first + 1)):
                raise Refusal(
                    f"around position {row.positions[first]} it computes a token of a step otherwise than `generate()` "
                    "does, so texts would be wrong"
                )
            if alone.specs != plain.specs:
                raise Refusal(f"its attention is another one from position {row.positions[first]} on")
    return steps[0]


def _takes_positions(model: PreTrainedModel, row: FarRow) -> bool:
    """True if a token computes something else at another position."""
    far, near = packed_run(model, row.positions), packed_run(model, range(NUM_TOKENS))
    return not all(far.is_same_as(near, place) for place in row.places)


def packed_run(model: PreTrainedModel, positions: Sequence[int]) -> Recording:
    """A trial run of tokens at these positions, as a step has them."""
    ids, plain = plain_inputs(model)
    far = torch.tensor([positions], device=plain.device)
    ends = np.array(positions) - np.arange(NUM_TOKENS) + NUM_TOKENS  # of the texts that they are a part of
    with lengths_given(model, ends):
        return trial_run(model, ids, far, range(NUM_TOKENS), has_plain_positions=False)


def _run_alone(model: PreTrainedModel, start: int) -> Recording:
    """A trial run of the same tokens as one text, `start` tokens after its beginning."""
    ids, positions = plain_inputs(model)
    try:
        return trial_run(model, ids, positions + start, range(NUM_TOKENS), past=EmptyPast(start))
    except Refusal as refusal:
        log.debug("without a cache: %s", refusal)
    return trial_run(model, ids, positions + start, range(NUM_TOKENS), has_plain_positions=False)


class EmptyPast(Cache):
    """A cache without content: a query attends to the new tokens only, at any position."""

    def __init__(self, num_past: int | Tensor) -> None:
        """`num_past`: tokens before the first one; or for each token [num_tokens] its position less its place."""
        super().__init__(layers=[])
        self._num_past = num_past

    def get_seq_length(self, layer_idx: int = 0, *_: Any, **__: Any) -> int:
        return cast(int, self._num_past)  # arithmetic is the same with one number and with one for each token

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0, *_: Any, **__: Any) -> tuple[int, int]:
        """Number of keys, and the position of the first."""
        return query_length, self.get_seq_length()

    # Mixers with a state find none, and leave none.

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        return None

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        return None

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return False

    def is_recording_past(self, *_: Any, **__: Any) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def count_by_cache(model: nn.Module) -> RemovableHandle:
    """Passes a cache that reports `position_ids` to a model that is called without a cache."""

    def add(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positions: Tensor | None = options.get("position_ids")  # [1, num_tokens]
        if positions is None or options.get(CACHE) is not None:
            return args, options
        places = torch.arange(positions.shape[1], device=positions.device)
        return args, {**options, CACHE: EmptyPast(positions[0] - places)}

    return model.register_forward_pre_hook(add, with_kwargs=True)
