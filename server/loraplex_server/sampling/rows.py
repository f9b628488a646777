"""The sampling parameters of every row of the batch, on the host, and which features a step's samples use.

The host decides from these what a step has to compute at all: a greedy batch costs an argmax. Owns the table; the
device sees only the rows that a step needs, in one small transfer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_contracts.plan import NewSequence
from loraplex_server.sampling.noise import seed_to_int64

# Features of a sample, as bits.
DRAWS = 1  # temperature above 0
TRUNCATES = 2  # top-k, top-p or min-p
BIAS = 4
REPETITION = 8
COUNTS = 16  # frequency or presence penalty
BANS = 32  # min_tokens is not reached
LOGPROBS = 64
# Features that make a sample more than an argmax over the model's logits.
SPECIAL = DRAWS | BIAS | REPETITION | COUNTS | BANS
# Those that change scores.
PROCESSES = BIAS | REPETITION | COUNTS | BANS

# Columns of `RowTable.values`.
TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, REPETITION_PENALTY, FREQUENCY_PENALTY, PRESENCE_PENALTY = range(7)
_NUM_VALUES = 7

# Colder than this, one token has all the probability; and its inverse is finite in float32.
_MIN_TEMPERATURE = 1e-30


class RowTable:
    """Parameters by row. A cleared row is greedy and wants nothing."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.values = torch.zeros(max_rows, _NUM_VALUES, dtype=torch.float64)
        self.seeds = torch.zeros(max_rows, dtype=torch.int64)
        self.num_prompt = [0] * max_rows
        self.num_top = [0] * max_rows
        self._features = [0] * max_rows
        self._min_tokens = [0] * max_rows
        self._bias: dict[int, tuple[Tensor, Tensor]] = {}  # token ids, values
        self._banned: dict[int, Tensor] = {}  # token ids

    def set(self, row: int, sequence: NewSequence) -> None:
        self.clear(row)
        sampling, output = sequence.sampling, sequence.output
        top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
        values = (
            max(sampling.temperature, _MIN_TEMPERATURE),
            float(top_k),
            sampling.top_p,
            math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
        )
        self.values[row] = torch.tensor(values, dtype=torch.float64)
        self.seeds[row] = seed_to_int64(sampling.seed)
        self.num_prompt[row] = sequence.num_prompt_tokens
        self.num_top[row] = output.top_logprobs
        features = 0
        if not sampling.is_greedy:
            features |= DRAWS
            if top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
                features |= TRUNCATES
        if sampling.repetition_penalty != 1.0:
            features |= REPETITION
        if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
            features |= COUNTS
        # Ids beyond the vocabulary can never come: nothing to do about them.
        bias = [(token_id, value) for token_id, value in sampling.logit_bias if 0 <= token_id < self._vocab_size]
        if bias:
            features |= BIAS
            ids, biases = zip(*bias, strict=True)
            self._bias[row] = (torch.tensor(ids, dtype=torch.int64), torch.tensor(biases, dtype=torch.float64))
        banned = sorted(token_id for token_id in sequence.banned_until_min if 0 <= token_id < self._vocab_size)
        if banned and sequence.min_tokens > 0:
            features |= BANS
            self._min_tokens[row] = sequence.min_tokens
            self._banned[row] = torch.tensor(banned, dtype=torch.int64)
        if output.logprobs or output.top_logprobs > 0:
            features |= LOGPROBS
        self._features[row] = features

    def clear(self, row: int) -> None:
        """Harmless to repeat."""
        self._features[row] = 0
        self._bias.pop(row, None)
        self._banned.pop(row, None)

    def features(self, rows: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Of each sample; with BANS only while its row's min_tokens is not reached."""
        found = [self._features[row] for row in rows]
        for idx, features in enumerate(found):
            if features & BANS:
                row = rows[idx]
                if positions[idx] - self.num_prompt[row] >= self._min_tokens[row]:
                    found[idx] = features & ~BANS
        return found

    def bias_of(self, row: int) -> tuple[Tensor, Tensor]:
        """Token ids and what is added to their logits. Only of rows with BIAS."""
        return self._bias[row]

    def banned_of(self, row: int) -> Tensor:
        """Token ids that may not come yet. Only of rows with BANS."""
        return self._banned[row]
