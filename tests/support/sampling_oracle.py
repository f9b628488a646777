"""Transformers' own logits processors, row by row."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from loraplex_contracts.plan import NewSequence
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_server.sampling.draw import NoiseField, row_keys, seed_to_int64


@cache
def noise_field(vocab_size: int) -> NoiseField:
    return NoiseField(vocab_size, "cpu")


def sequence(
    prompt: list[int],
    sampling: SamplingParams | None = None,
    *,
    row: int = 0,
    output: OutputParams | None = None,
    min_tokens: int = 0,
    banned: frozenset[int] = frozenset(),
) -> NewSequence:
    return NewSequence(
        sequence_id=f"s{row}",
        row=row,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=sampling or SamplingParams(),
        output=output or OutputParams(),
        min_tokens=min_tokens,
        banned_until_min=banned,
    )


def processed(logits: Tensor, new: NewSequence, history: list[int]) -> Tensor:
    """Scores `[vocab_size]` after all that `generate()` would do to `logits [vocab_size]`; -inf where removed."""
    sampling, processors = new.sampling, LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in sampling.logit_bias]))
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    ids = torch.tensor([history])
    scores = processors(ids, logits.unsqueeze(0).clone())
    for token_id in set(history[new.num_prompt_tokens :]):
        count = history[new.num_prompt_tokens :].count(token_id)
        scores[0, token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    warpers = LogitsProcessorList()
    if new.min_tokens and new.banned_until_min:
        eos = sorted(new.banned_until_min)
        warpers.append(MinNewTokensLengthLogitsProcessor(new.num_prompt_tokens, new.min_tokens, eos))
    if sampling.bad_words:
        warpers.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    if sampling.allowed_token_ids:
        warpers.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: list(sampling.allowed_token_ids), 1))
    if not sampling.is_greedy:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0.0:
            warpers.append(MinPLogitsWarper(sampling.min_p))
        if sampling.typical_p < 1.0:
            warpers.append(TypicalLogitsWarper(sampling.typical_p))
    return warpers(ids, scores)[0]


def drawn(logits: Tensor, new: NewSequence, history: list[int]) -> int:
    """The token that those scores and the row's noise give."""
    scores = processed(logits, new, history)
    if not new.sampling.is_greedy:
        keys = row_keys(torch.tensor([seed_to_int64(new.sampling.seed)]), torch.tensor([len(history)]))
        scores = scores + noise_field(len(logits)).dense(keys)[0]
    return int(scores.argmax())
