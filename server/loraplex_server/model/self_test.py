"""Self-test of a loaded model against Transformers' own attention.

A few short texts are packed, paged and cut in two. The test finds differences that the probe does not look for, such as
an unknown option of attention. All texts but the first have positions far out and attend to themselves alone. Costs two
runs of a handful of tokens, and one for each text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from loraplex_contracts.errors import UnsupportedModel
from loraplex_contracts.plan import NewSequence, Span
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.backends.equivalence import DOUBTFUL, compare
from loraplex_server.backends.reference import TorchPagedAttention
from loraplex_server.layers.attention import KvCache
from loraplex_server.model.batch import BatchMirror
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.probe import EmptyPast, thresholds

log = logging.getLogger(__name__)

BLOCK_SIZE = 4
LENGTHS = (9, 6, 6, 6)  # of the texts: at the beginning, at the context's end, and around numbers of tokens
CUT = 5  # where each is cut


@dataclass(frozen=True, slots=True)
class Text:
    """What a model is compared on."""

    ids: tuple[int, ...]
    start: int  # position of the first token
    logits: Tensor  # [len(ids), num_logits] by Transformers


def reference_texts(model: PreTrainedModel, max_context_tokens: int) -> list[Text] | None:
    """What the model computes under Transformers' own attention; None if it has none."""
    model.set_attn_implementation("eager")
    if getattr(model.config, "_attn_implementation", None) != "eager":
        return None
    num_ids = cast(Tensor, model.get_input_embeddings().weight).shape[0]
    counts = thresholds(model.config.get_text_config(), max_context_tokens)
    starts = [0, max(0, max_context_tokens - LENGTHS[1]), *(count - LENGTHS[2] // 2 for count in reversed(counts))]
    texts: list[Text] = []
    for row, (length, start) in enumerate(zip(LENGTHS, starts, strict=False)):
        ids = tuple((17 * row + 7 * i + 3) % num_ids for i in range(length))
        texts.append(Text(ids, start, _reference_logits(model, ids, start)))
    return texts


def _reference_logits(model: PreTrainedModel, ids: Sequence[int], start: int) -> Tensor:
    """[len(ids), num_logits] as `generate()` computes them, `start` tokens after a text's beginning."""
    device = next(model.parameters()).device
    options: dict[str, Any] = {"use_cache": False}
    if start:
        positions = torch.arange(start, start + len(ids), device=device).unsqueeze(0)
        options = {"use_cache": True, "past_key_values": EmptyPast(start), "position_ids": positions}
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids], device=device), **options).logits[0]


def verify_loaded(loaded: LoadedModel, texts: Sequence[Text]) -> None:
    """Raises UnsupportedModel when the model computes something else than in `texts`. Doubt goes to the log."""
    got = _served_logits(loaded, texts)
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


def _served_logits(loaded: LoadedModel, texts: Sequence[Text]) -> list[Tensor]:
    """Of each text, when all are served together. Leaves no cache bound."""
    device, spec, dtype, context = loaded.device, loaded.spec, loaded.dtype, loaded.context
    blocks_each = -(-max(LENGTHS) // BLOCK_SIZE)
    cache = KvCache(spec, blocks_each * len(texts), BLOCK_SIZE, dtype, device)
    backend = TorchPagedAttention()
    loaded.bind_kv(cache, backend)
    mirror = BatchMirror(len(texts), max(LENGTHS), BLOCK_SIZE, device)
    first: list[Span] = []
    second: list[Span] = []
    for row, text in enumerate(texts):
        name, length = str(row), len(text.ids)
        mirror.enter(NewSequence(name, row, text.ids, length, SamplingParams(), OutputParams()))
        # In another order than that of the positions.
        blocks = tuple(blocks_each * (row + 1) - 1 - i for i in range(-(-length // BLOCK_SIZE)))
        first.append(Span(name, row, 0, CUT, 0, blocks))
        second.append(Span(name, row, CUT, length - CUT, 0))
    got = [torch.empty_like(text.logits) for text in texts]
    for spans in (first, second):
        staged = mirror.stage(spans)
        cache.clear_blocks(staged.fresh_blocks)
        inputs = mirror.inputs(staged)
        context.attention = backend.plan(inputs.attention, dtype, device)
        starts = np.repeat([texts[span.row].start for span in staged.spans], staged.query_lens)
        positions = inputs.position_ids + torch.from_numpy(starts).to(device)
        try:
            with torch.inference_mode():
                out = loaded.model(input_ids=inputs.input_ids, position_ids=positions, use_cache=False)
        finally:
            context.clear()
        mirror.commit(staged)
        place = 0
        for span in staged.spans:
            got[span.row][span.start : span.start + span.num_tokens] = out.logits[0, place : place + span.num_tokens]
            place += span.num_tokens
    loaded.unbind_kv()
    return got
