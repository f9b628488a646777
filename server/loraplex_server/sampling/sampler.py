"""Draws a step's tokens: every row of the batch with its own parameters, all rows at once.

Order as in Transformers' `generate()`: logit bias, repetition, frequency and presence penalties, min_tokens, then
temperature, top-k, top-p, min-p, and a draw with counter-based noise (see `noise`). A token depends on its own row's
logits, history, parameters, seed and position, and on nothing else in the batch.

Owns the rows' parameters. Does not know sequences' lives, the model, or drafts: a position behind draft tokens is
sampled like any other, with the drafts before it in its history. Never waits for the device: `Sampled.to_host` does,
once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_contracts.plan import NewSequence, PositionLogprobs
from loraplex_server.sampling import rows as row_table
from loraplex_server.sampling.blocks import row_argmax
from loraplex_server.sampling.draw import draw_dense, draw_narrow, draw_open
from loraplex_server.sampling.logprobs import Logprobs, compute_logprobs
from loraplex_server.sampling.noise import NoiseField, row_keys
from loraplex_server.sampling.processors import History, add_bias, ban, flatten, penalize_counts, penalize_repetition
from loraplex_server.sampling.rows import RowTable
from loraplex_server.sampling.truncation import DrawRows

Argmax = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class HostSampled:
    """A step's samples on the host, in the order in which they were asked for."""

    token_ids: tuple[int, ...]
    is_bad: tuple[bool, ...]  # no token: the logits held NaN or +inf, or nothing above -inf
    logprobs: tuple[PositionLogprobs | None, ...]  # None where not asked for, or bad
    others: tuple[tuple[PositionLogprobs, ...], ...] = ()  # what `to_host` was given besides


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's samples on the device. Where `bad_rows`, the token id is 0 and means nothing."""

    token_ids: Tensor  # [num_samples] int64
    bad_rows: Tensor  # [num_samples] bool
    logprobs: Logprobs | None = None
    logprob_samples: tuple[int, ...] = ()  # whose logprobs these are

    def pack(self, others: Sequence[Logprobs] = ()) -> PackedSamples:
        """Everything, and the logprobs of prompt tokens if there are any, in one tensor."""
        # One number says both; float64 holds token ids exactly.
        ids = torch.where(self.bad_rows, -1, self.token_ids)
        parts = (*((self.logprobs,) if self.logprobs else ()), *others)
        values = torch.cat([ids.to(torch.float64), *(part.pack() for part in parts)]) if parts else ids
        return PackedSamples(values, len(ids), parts, self.logprob_samples)

    def to_host(self, others: Sequence[Logprobs] = ()) -> HostSampled:
        """The same, at once and in a single transfer."""
        packed = self.pack(others)
        return packed.unpack(packed.values)


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """What of a step's samples the host is to know, in one tensor, and how to read it."""

    values: Tensor  # [num_values] on the device
    num_samples: int
    parts: tuple[Logprobs, ...]  # only how long they are counts from here on
    logprob_samples: tuple[int, ...]  # whose logprobs the first part is, if there are any

    def unpack(self, values: Tensor) -> HostSampled:
        """From a copy of `values` on the host."""
        packed: list[float] = values.tolist()
        num_samples = start = self.num_samples
        unpacked: list[tuple[PositionLogprobs, ...]] = []
        for part in self.parts:
            unpacked.append(part.unpack(packed[start : start + part.packed_len()]))
            start += part.packed_len()
        is_bad = tuple(value < 0 for value in packed[:num_samples])
        logprobs: list[PositionLogprobs | None] = [None] * num_samples
        if self.logprob_samples:
            for sample, found in zip(self.logprob_samples, unpacked.pop(0), strict=True):
                logprobs[sample] = None if is_bad[sample] else found
        token_ids = tuple(max(0, int(value)) for value in packed[:num_samples])
        return HostSampled(token_ids, is_bad, tuple(logprobs), tuple(unpacked))


class Sampler:
    """The parameters of `max_rows` rows, and the draws. `device` is where the logits are; `argmax` gives the largest
    value of each row and its index, the lowest one on ties, and NaN where there is one."""

    def __init__(
        self, max_rows: int, vocab_size: int, device: torch.device | str, *, argmax: Argmax = row_argmax
    ) -> None:
        self._device = torch.device(device)
        self._argmax = argmax
        self._rows = RowTable(max_rows, vocab_size)
        self._noise = NoiseField(vocab_size, self._device)

    def set_row(self, row: int, sequence: NewSequence) -> None:
        """A sequence enters `row`. Its `sampling.seed` is the completion's own."""
        self._rows.set(row, sequence)

    def clear_row(self, row: int) -> None:
        """The sequence has left. Harmless to repeat."""
        self._rows.clear(row)

    def sample(
        self, logits: Tensor, rows: Sequence[int] | Tensor, positions: Sequence[int] | Tensor, tokens: Tensor
    ) -> Sampled:
        """Samples the token at `positions[i]` of row `rows[i]` from `logits[i]`, which is left unchanged.

        `rows` and `positions` are on the host (tensors there are taken, too). `tokens [max_rows, max_len]` holds every
        row's tokens: the history of a sample is `tokens[row, :position]`.
        """
        host_rows, host_positions = _as_list(rows), _as_list(positions)
        features = self._rows.features(host_rows, host_positions)
        special = _with(features, row_table.SPECIAL)
        num_samples = len(host_rows)
        token_ids = torch.zeros(num_samples, dtype=torch.int64, device=self._device)
        bad = torch.zeros(num_samples, dtype=torch.bool, device=self._device)
        if len(special) < num_samples:
            best, token_ids = self._argmax(logits)
            bad = ~best.isfinite()
        if special:
            step = _Step(special, features, host_rows, host_positions, tokens)
            special_ids, special_bad = self._sample_special(logits, step)
            idx = self._upload(special)
            token_ids.index_copy_(0, idx, special_ids)
            bad.index_copy_(0, idx, special_bad)
        token_ids.masked_fill_(bad, 0)
        wanted = _with(features, row_table.LOGPROBS)
        if not wanted:
            return Sampled(token_ids, bad)
        num_top = [self._rows.num_top[host_rows[sample]] for sample in wanted]
        logprobs = compute_logprobs(self._take(logits, wanted), self._take(token_ids, wanted), num_top)
        return Sampled(token_ids, bad, logprobs, tuple(wanted))

    def _sample_special(self, logits: Tensor, step: _Step) -> tuple[Tensor, Tensor]:
        """Token ids of the step's special samples, and which of them are bad."""
        scores = self._take(logits, step.samples)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if any(features & row_table.PROCESSES for features in step.features):
            scores = scores.to(
                dtype, copy=scores.data_ptr() == logits.data_ptr(), memory_format=torch.contiguous_format
            )
            self._process(scores, step)
        else:
            scores = scores.to(dtype)
        token_ids = torch.empty(scores.shape[0], dtype=torch.int64, device=self._device)
        bad = torch.empty(scores.shape[0], dtype=torch.bool, device=self._device)
        draws, truncates = row_table.DRAWS, row_table.DRAWS | row_table.TRUNCATES
        for kind in (0, draws, truncates):
            members = [i for i, features in enumerate(step.features) if features & truncates == kind]
            if members:
                ids, best = self._draw(self._take(scores, members), members, step, kind)
                idx = self._upload(members)
                token_ids.index_copy_(0, idx, ids)
                bad.index_copy_(0, idx, ~best.isfinite())
        return token_ids, bad

    def _draw(self, scores: Tensor, members: list[int], step: _Step, kind: int) -> tuple[Tensor, Tensor]:
        """Of samples which all draw in the same way."""
        if kind == 0:
            best, token_ids = self._argmax(scores)
            return token_ids, best
        rows = [step.rows[i] for i in members]
        draw_rows = self._draw_rows(rows, [step.positions[i] for i in members], scores.dtype)
        truncates = bool(kind & row_table.TRUNCATES)
        if self._device.type != "cpu":
            return draw_dense(scores, draw_rows, self._noise, truncates=truncates)
        return (draw_narrow if truncates else draw_open)(scores, draw_rows, self._noise)

    def _draw_rows(self, rows: list[int], positions: list[int], dtype: torch.dtype) -> DrawRows:
        idx = torch.tensor(rows)
        values = self._rows.values[idx]
        keys = row_keys(self._rows.seeds[idx], torch.tensor(positions))
        top_k, top_p = values[:, row_table.TOP_K], values[:, row_table.TOP_P]
        max_top_k, has_open_top_p = int(top_k.max()), bool(((top_k == 0) & (top_p < 1.0)).any())
        values = self._upload(values)
        return DrawRows(
            keys=self._upload(keys),
            temperature=_column(values, row_table.TEMPERATURE).to(dtype),
            top_k=_column(values, row_table.TOP_K).to(torch.int64),
            top_p=_column(values, row_table.TOP_P),
            log_min_p=_column(values, row_table.LOG_MIN_P).to(dtype),
            max_top_k=max_top_k,
            has_open_top_p=has_open_top_p,
        )

    def _process(self, scores: Tensor, step: _Step) -> None:
        """Bias, penalties and bans, in place. The order is part of the contract."""
        biased = _with(step.features, row_table.BIAS)
        if biased:
            entries = [self._rows.bias_of(step.rows[i]) for i in biased]
            row_idx, ids = flatten([(i, ids) for i, (ids, _) in zip(biased, entries, strict=True)])
            add_bias(scores, self._upload(row_idx), self._upload(ids), self._upload(torch.cat([v for _, v in entries])))
        repeats = _with(step.features, row_table.REPETITION)
        if repeats:
            values = self._values(step, repeats, scores.dtype)
            penalty = _column(values, row_table.REPETITION_PENALTY)
            penalize_repetition(scores, self._upload(repeats), self._history(step, repeats), penalty)
        counted = _with(step.features, row_table.COUNTS)
        if counted:
            values = self._values(step, counted, scores.dtype)
            frequency, presence = (
                _column(values, column) for column in (row_table.FREQUENCY_PENALTY, row_table.PRESENCE_PENALTY)
            )
            penalize_counts(scores, self._upload(counted), self._history(step, counted), frequency, presence)
        banned = _with(step.features, row_table.BANS)
        if banned:
            row_idx, ids = flatten([(i, self._rows.banned_of(step.rows[i])) for i in banned])
            ban(scores, self._upload(row_idx), self._upload(ids))

    def _values(self, step: _Step, members: list[int], dtype: torch.dtype) -> Tensor:
        return self._upload(self._rows.values[torch.tensor([step.rows[i] for i in members])].to(dtype))

    def _history(self, step: _Step, members: list[int]) -> History:
        rows = [step.rows[i] for i in members]
        positions = [step.positions[i] for i in members]
        num_prompt = [self._rows.num_prompt[row] for row in rows]
        packed = self._upload(torch.tensor([rows, num_prompt, positions]))
        return History(
            tokens=step.tokens,
            rows=packed[0],
            num_prompt=packed[1].unsqueeze(1),
            positions=packed[2].unsqueeze(1),
            max_position=max(positions),
            max_output=max(p - n for p, n in zip(positions, num_prompt, strict=True)),
        )

    def _take(self, values: Tensor, members: list[int]) -> Tensor:
        """Some rows; the tensor itself where these are all of them."""
        return values if len(members) == values.shape[0] else values.index_select(0, self._upload(members))

    def _upload(self, values: Tensor | list[int]) -> Tensor:
        """To the device without waiting for it."""
        tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)


class _Step:
    """The samples of a step that are more than an argmax, and what they need. Host lists but for `tokens`."""

    def __init__(
        self, samples: list[int], features: list[int], rows: list[int], positions: list[int], tokens: Tensor
    ) -> None:
        self.samples = samples
        self.features = [features[i] for i in samples]
        self.rows = [rows[i] for i in samples]
        self.positions = [positions[i] for i in samples]
        self.tokens = tokens


def _with(features: list[int], mask: int) -> list[int]:
    return [idx for idx, value in enumerate(features) if value & mask]


def _column(values: Tensor, column: int) -> Tensor:
    return values[:, column : column + 1]


def _as_list(values: Sequence[int] | Tensor) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else list(values)
