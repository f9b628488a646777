"""Logprobs of the model's distribution, before processors, temperature and truncation.

Computed in float32, or float64 for float64 logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_contracts.request import PositionLogprobs

# Elements of logits that are converted at once.
_MAX_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs of some positions, on the device."""

    token_ids: Tensor  # [n] the sampled tokens
    values: Tensor  # [n] their logprobs
    top_ids: Tensor  # [n, max_top] the most likely tokens, best first
    top_values: Tensor  # [n, max_top]
    num_top: tuple[int, ...]  # [n] how many alternatives each position wants

    def pack(self) -> Tensor:
        """Everything in one row of float64, which holds token ids exactly."""
        parts = (self.token_ids, self.values, self.top_ids, self.top_values)
        return torch.cat([part.reshape(-1).to(torch.float64) for part in parts])

    def packed_len(self) -> int:
        return len(self.num_top) * (2 + 2 * self.top_ids.shape[1])

    def unpack(self, packed: Sequence[float]) -> tuple[PositionLogprobs, ...]:
        """Logprobs by position, from a copy of `pack()` on the host."""
        n, max_top = len(self.num_top), self.top_ids.shape[1]
        ids, values = packed[:n], packed[n : 2 * n]
        top_ids, top_values = packed[2 * n : (2 + max_top) * n], packed[(2 + max_top) * n :]
        found: list[PositionLogprobs] = []
        for i, num_top in enumerate(self.num_top):
            start = i * max_top
            # Devices order equal values differently; greedy decoding takes the lowest id.
            pairs = zip(top_ids[start : start + max_top], top_values[start : start + max_top], strict=True)
            top = sorted(((int(token_id), value) for token_id, value in pairs), key=lambda pair: (-pair[1], pair[0]))
            found.append(PositionLogprobs(int(ids[i]), values[i], tuple(top[:num_top])))
        return tuple(found)

    def to_host(self) -> tuple[PositionLogprobs, ...]:
        return self.unpack(self.pack().tolist())


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> Logprobs:
    """Logprobs from `logits [n, vocab_size]`, `token_ids [n]` and the number of alternatives at each position."""
    max_top = min(max(num_top, default=0), logits.shape[1])
    chunk = max(1, _MAX_ELEMENTS // logits.shape[1])
    values: list[Tensor] = []
    top_ids: list[Tensor] = []
    top_values: list[Tensor] = []
    for part, part_ids in zip(logits.split(chunk), token_ids.split(chunk), strict=True):
        part = part if part.dtype == torch.float64 else part.float()
        # Relative to the maximum, as in log_softmax, so that no logprob is above zero.
        highest = part.amax(dim=-1, keepdim=True)
        normalizer = (part - highest).exp_().sum(dim=-1, keepdim=True).log_()
        values.append((part.gather(1, part_ids.unsqueeze(1)) - highest - normalizer).squeeze(1))
        top = part.topk(max_top, dim=-1)
        top_ids.append(top.indices)
        top_values.append(top.values - highest - normalizer)
    return Logprobs(token_ids, torch.cat(values), torch.cat(top_ids), torch.cat(top_values), tuple(num_top))


def prompt_logprobs(logits: Tensor, next_tokens: Tensor, num_top: int) -> Logprobs:
    """Logprobs of prompt tokens `next_tokens [n]`, from `logits [n, vocab_size]` at the positions before them."""
    return compute_logprobs(logits, next_tokens.to(torch.int64), (num_top,) * len(next_tokens))
