"""Self-test of a loaded model against Transformers' own attention.

A few short texts are packed, paged and cut in three. The test finds differences that the probe does not look for, such
as an unknown option of attention. All texts but the first have positions far out and attend to themselves alone. Costs
three runs of a handful of tokens, one for each text, and one for a direct forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from loraplex_contracts.errors import UnsupportedModel
from loraplex_contracts.plan import AdapterUse, NewSequence, Span, StateUse
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.backends.equivalence import DOUBTFUL, compare
from loraplex_server.backends.reference import TorchPagedAttention
from loraplex_server.kv.states import NO_STATE
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.attention import KvCache
from loraplex_server.model.batch import BatchMirror
from loraplex_server.model.direct import DirectForward
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.own_attention import EAGER, use_attention
from loraplex_server.model.probe import CACHE, EmptyPast, thresholds

log = logging.getLogger(__name__)

BLOCK_SIZE = 4
LENGTHS = (9, 6, 6, 6)  # of the texts: at the beginning, at the context's end, and around numbers of tokens
CUTS = (3, -1)  # where each is cut: the last token comes alone


@dataclass(frozen=True, slots=True)
class Text:
    """A text on which models are compared."""

    ids: tuple[int, ...]
    start: int  # position of the first token
    logits: Tensor  # [len(ids), num_logits] by Transformers
    adapted_from: int | None = None  # the first token that the adapter in slot 0 changes; None: it changes none


def reference_texts(model: PreTrainedModel, max_context_tokens: int, chunk: int) -> list[Text] | None:
    """Logits of the model under Transformers' own attention; None if it has none. `chunk`: of its attention; texts
    begin at multiples of it, for pages know nothing of where they begin."""
    if not use_attention(model, EAGER):
        return None
    num_ids = cast(Tensor, model.get_input_embeddings().weight).shape[0]
    counts = thresholds(model.config.get_text_config(), max_context_tokens)
    starts = [0, max(0, max_context_tokens - LENGTHS[1]), *(count - LENGTHS[2] // 2 for count in reversed(counts))]
    texts: list[Text] = []
    for row, (length, start) in enumerate(zip(LENGTHS, starts, strict=False)):
        ids = tuple((17 * row + 7 * i + 3) % num_ids for i in range(length))
        start -= start % chunk
        texts.append(Text(ids, start, _reference_logits(model, ids, start)))
    return texts


def _reference_logits(model: PreTrainedModel, ids: Sequence[int], start: int) -> Tensor:
    """Logits [len(ids), num_logits] as `generate()` computes them, `start` tokens after a text's beginning."""
    device = next(model.parameters()).device
    options: dict[str, Any] = {"use_cache": False}
    if start:
        positions = torch.arange(start, start + len(ids), device=device).unsqueeze(0)
        options = {"use_cache": True, CACHE: EmptyPast(start), "position_ids": positions}
    inputs = torch.tensor([ids], device=device)
    with torch.inference_mode():
        try:
            return model(input_ids=inputs, **options).logits[0]
        except Exception as error:  # a model with a cache of its own kind takes no other
            if not start:
                raise
            log.debug("without a cache: %s", error)
        return model(input_ids=inputs, use_cache=False, position_ids=options["position_ids"]).logits[0]


def verify_loaded(loaded: LoadedModel, texts: Sequence[Text], direct: DirectForward | None) -> None:
    """Raises UnsupportedModel when the model computes something else than in `texts`. A doubtful difference is logged.
    From here on the model takes the pass `direct` if that gives the very bits of its own."""
    got = served_logits(loaded, texts)
    found = compare("served logits", torch.cat([text.logits for text in texts]), torch.cat(got))
    if not found.is_equal:
        pairs = zip(texts, got, strict=True)
        wrong = [text.start for text, own in pairs if not compare("served logits", text.logits, own).is_equal]
        raise UnsupportedModel(
            f"{loaded.model_id} ({loaded.model_type}) cannot be served: over paged attention its logits are off by "
            f"{found.error:.0%} from those of Transformers' own attention, from position {min(wrong, default=0)} on"
        )
    if loaded.dtype.itemsize < 4 and found.error > DOUBTFUL:
        log.warning("over paged attention logits are off by %.0f %% in %s", 100 * found.error, loaded.dtype_name)
    if direct is not None:
        # In one step: each reads all weights. Rows have the same bits in any, but for torch's attention in mixers.
        if loaded.decoder is not None and loaded.decoder.shape.names.own_mixers:
            got = served_logits(loaded, texts, cuts=())
        loaded.direct = direct
        if not all(map(torch.equal, got, served_logits(loaded, texts, cuts=()))):
            loaded.direct = None
            log.info("the model's own forward pass computes more than its layers, norm and head; it is used")


def served_logits(
    loaded: LoadedModel, texts: Sequence[Text], slots: AdapterSlots | None = None, cuts: Sequence[int] = CUTS
) -> list[Tensor]:
    """Logits [len(ids), num_logits] of each text, when all are served together. Leaves no cache bound. `slots`: with
    the adapter of texts that have one. `cuts`: where each is cut."""
    device, spec, dtype, context = loaded.device, loaded.spec, loaded.dtype, loaded.context
    longest = max(len(text.ids) for text in texts)
    blocks_each = -(-longest // BLOCK_SIZE)
    cache = KvCache(spec, blocks_each * len(texts), BLOCK_SIZE, dtype, device)
    backend = TorchPagedAttention()
    loaded.bind_kv(cache, backend)
    mirror = BatchMirror(len(texts), longest, BLOCK_SIZE, device)
    states = loaded.state_memory(len(texts), len(texts))
    steps: list[list[Span]] = [[] for _ in range(len(cuts) + 1)]
    for row, text in enumerate(texts):
        name, length = str(row), len(text.ids)
        uses = () if text.adapted_from is None else (AdapterUse(0),)
        first_adapted = text.adapted_from or 0
        mirror.enter(NewSequence(name, row, text.ids, length, SamplingParams(), OutputParams(), uses, first_adapted))
        # In another order than that of the positions.
        blocks = tuple(blocks_each * (row + 1) - 1 - i for i in range(-(-length // BLOCK_SIZE)))
        ends = (0, *(cut % length for cut in cuts), length)
        for spans, (start, end) in zip(steps, pairwise(ends), strict=True):
            use = StateUse(row + 1 if start else NO_STATE, row + 1)
            spans.append(Span(name, row, start, end - start, 0, () if start else blocks, state=use))
    got = [torch.empty_like(text.logits) for text in texts]
    for spans in steps:
        staged = mirror.stage(spans)
        cache.clear_blocks(staged.fresh_blocks)
        inputs = mirror.inputs(staged)
        context.attention = backend.plan(inputs.attention, dtype, device)
        context.states = step_states = None if states is None else states.begin(staged.spans)
        if slots is not None and staged.token_segments:
            prepared = slots.ops.prepare(staged.token_segments, staged.num_tokens, slots.num_slots, device)
            context.token_segments = context.head_segments = prepared
        starts = np.repeat([texts[span.row].start for span in staged.spans], staged.query_lens)
        positions = inputs.position_ids + torch.from_numpy(starts).to(device)
        if spec.rope is not None:
            ends = [texts[span.row].start + len(texts[span.row].ids) for span in staged.spans]
            context.rope_lengths = np.repeat(ends, staged.query_lens)
        try:
            with torch.inference_mode():
                logits = loaded.logits(inputs.input_ids, positions)
        finally:
            context.clear()
        mirror.commit(staged)
        if step_states is not None:
            step_states.commit()
        place = 0
        for span in staged.spans:
            got[span.row][span.start : span.start + span.num_tokens] = logits[place : place + span.num_tokens]
            place += span.num_tokens
    loaded.unbind_kv()
    return got
