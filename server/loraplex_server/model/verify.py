"""A last check of a loaded model: two short texts, packed, paged and cut in two, against Transformers' own attention.

The probe knows what it looked for; this notices the rest (an option of attention that it did not look for, say). Costs
four runs of a handful of tokens.
"""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from loraplex_proto.errors import UnsupportedModel
from loraplex_server.model.attention.torch_paged import TorchPagedAttention
from loraplex_server.model.batch import BatchMirror
from loraplex_server.model.kv import KvCache
from loraplex_server.model.loaded import LoadedModel
from loraplex_server.request import OutputParams, SamplingParams
from loraplex_server.scheduler.plan import NewSequence, Span

log = logging.getLogger(__name__)

BLOCK_SIZE = 4
LENGTHS = (9, 6)  # of the two texts
CUTS = (5, 5)  # where each is cut
# Relative error of the logits, from which on a model is doubtful, and refused. Wide dtypes differ by rounding alone; in
# narrow ones two right results may differ by a router's decision, while a wrong scale or mask differs by far more.
DOUBTFUL, REFUSED = 0.1, 0.5
WIDE_REFUSED = 1e-2


def reference_logits(model: PreTrainedModel) -> Tensor | None:
    """What the model computes under Transformers' own attention [sum of LENGTHS, num_logits]; None if it has none."""
    model.set_attn_implementation("eager")
    if getattr(model.config, "_attn_implementation", None) != "eager":
        return None
    device = next(model.parameters()).device
    with torch.inference_mode():
        texts = _texts(cast(Tensor, model.get_input_embeddings().weight).shape[0])
        rows = [model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in texts]
    return torch.cat(rows)


def verify_loaded(loaded: LoadedModel, reference: Tensor) -> None:
    """Raises UnsupportedModel when the model computes something else than `reference`. Doubt goes to the log."""
    error = relative_error(loaded, reference)
    is_wide = loaded.dtype.itemsize >= 4
    if not error <= (WIDE_REFUSED if is_wide else REFUSED):  # NaN is refused as well
        raise UnsupportedModel(
            f"{loaded.model_id} ({loaded.model_type}) cannot be served: over paged attention its logits are off by "
            f"{error:.0%} from those of Transformers' own attention"
        )
    if not is_wide and error > DOUBTFUL:
        log.warning("over paged attention logits are off by %.0f %% in %s", 100 * error, loaded.dtype_name)


def relative_error(loaded: LoadedModel, reference: Tensor) -> float:
    """How far the model is from `reference` when it is served. Leaves no cache bound."""
    device, spec, dtype, context = loaded.device, loaded.spec, loaded.dtype, loaded.context
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
    cache = KvCache(spec, num_blocks, BLOCK_SIZE, dtype, device)
    backend = TorchPagedAttention()
    loaded.bind_kv(cache, backend)
    mirror = BatchMirror(len(LENGTHS), max(LENGTHS), BLOCK_SIZE, device)
    free = list(range(num_blocks))
    first: list[Span] = []
    second: list[Span] = []
    for row, (ids, cut) in enumerate(zip(_texts(spec.vocab_size), CUTS, strict=True)):
        name = str(row)
        mirror.enter(NewSequence(name, row, tuple(ids), len(ids), SamplingParams(), OutputParams()))
        blocks = tuple(free.pop() for _ in range(-(-len(ids) // BLOCK_SIZE)))
        first.append(Span(name, row, 0, cut, 0, blocks))
        second.append(Span(name, row, cut, len(ids) - cut, 0))
    starts = [sum(LENGTHS[:row]) for row in range(len(LENGTHS))]
    got = torch.empty_like(reference)
    for spans in (first, second):
        staged = mirror.stage(spans)
        cache.clear_blocks(staged.fresh_blocks)
        inputs = mirror.inputs(staged)
        context.attention = backend.plan(inputs.attention, dtype, device)
        try:
            with torch.inference_mode():
                out = loaded.model(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False)
        finally:
            context.clear()
        mirror.commit(staged)
        place = 0
        for span in staged.spans:
            begin = starts[span.row] + span.start
            got[begin : begin + span.num_tokens] = out.logits[0, place : place + span.num_tokens]
            place += span.num_tokens
    loaded.unbind_kv()
    difference = (got.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30)
    return float(difference)


def _texts(vocab_size: int) -> list[list[int]]:
    return [[(17 * row + 7 * i + 3) % vocab_size for i in range(length)] for row, length in enumerate(LENGTHS)]
