"""Sampling of a step's tokens with parameters by row, logprobs, and verification of drafts.

The options' processors and warpers run in the order of Transformers' `generate()` (processors.py), then a draw with
counter-based noise (draw.py). A token depends on its own row's logits, history, parameters, seed and position, and on
nothing else in the batch.

The host knows which features each row uses, so a greedy batch costs an argmax. A position behind draft tokens is
sampled like any other, with the drafts before it in its history. Only a read of the samples, which are packed in one
tensor, waits for the device, once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_contracts.plan import NewSequence, Span
from loraplex_contracts.request import PositionLogprobs
from loraplex_server.layers.masks import RowMasks
from loraplex_server.sampling.draw import (
    Draw,
    DrawTable,
    NoiseField,
    NoisyArgmax,
    draw_dense,
    draw_narrow,
    draw_open,
    row_argmax,
)
from loraplex_server.sampling.processors import GrammarMask, Part, Truncation, processors

# Features of a sample, as bits; above them one for each processor.
_DRAWS, _TRUNCATES, _LOGPROBS, _FIRST_PROCESSOR = 1, 2, 4, 8
_PROCESSES = -_FIRST_PROCESSOR  # any processor
_SPECIAL = _DRAWS | _PROCESSES  # more than an argmax over the model's logits

_NO_DRAFTS: Mapping[int, Sequence[int]] = {}

# Elements of logits that are converted at once.
_MAX_ELEMENTS = 1 << 24

Argmax = Callable[[Tensor], tuple[Tensor, Tensor]]
MaskedArgmax = Callable[[Tensor, RowMasks], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Logprobs of some positions, on the device: of the model's distribution, before processors, temperature and
    truncation, in float32, or float64 for float64 logits."""

    token_ids: Tensor  # [n] the sampled tokens
    values: Tensor  # [n] their logprobs
    top_ids: Tensor  # [n, max_top] the most likely tokens, best first
    top_values: Tensor  # [n, max_top]
    num_top: tuple[int, ...]  # [n] how many alternatives each position wants

    def pack(self) -> Tensor:
        """Packs everything in one row of float64, which holds token ids exactly."""
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
        top = highest_ids(part, max_top)
        top_ids.append(top)
        top_values.append(part.gather(1, top) - highest - normalizer)
    return Logprobs(token_ids, torch.cat(values), torch.cat(top_ids), torch.cat(top_values), tuple(num_top))


def highest_ids(logits: Tensor, num: int) -> Tensor:
    """Ids of the `num` highest logits [n, vocab_size] -> [n, num], of equal ones the lowest ids, the highest first.

    What torch's topk takes of equal values depends on `num`, which other requests may have raised.
    """
    if num == 0:  # logprobs of the tokens alone
        return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
    if logits.device.type == "cpu":
        return _highest_by_threshold(logits, num)
    if logits.dtype == torch.float64:
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :num]
    return highest_by_keys(logits, num)


def _highest_by_threshold(logits: Tensor, num: int) -> Tensor:
    """Sorts what is not below the last of topk: a few more values than `num`, where some are equal."""
    lowest = logits.topk(num, dim=-1).values[:, -1:]
    rows, ids = (~(logits < lowest)).nonzero(as_tuple=True)  # by row, then id; a NaN is among them
    order = logits[rows, ids].argsort(descending=True, stable=True)
    order = order[rows[order].argsort(stable=True)]
    counts = rows.bincount(minlength=logits.shape[0])
    starts = counts.cumsum(0) - counts
    return ids[order][starts[:, None] + torch.arange(num)]


def highest_by_keys(logits: Tensor, num: int) -> Tensor:
    """Without a wait for the device, which takes 64 bits a number: keys are ordered as the floats are, with the id
    below, so that no two are equal. On a CPU it takes ten times as long as topk."""
    bits = (logits + 0.0).view(torch.int32)  # no negative zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    del bits
    last = logits.shape[1] - 1
    keys = ordered.bitwise_left_shift_(32).add_(last - torch.arange(logits.shape[1], device=logits.device))
    return last - (keys.topk(num, dim=-1).values & 0xFFFFFFFF)


def prompt_logprobs(logits: Tensor, next_tokens: Tensor, num_top: int) -> Logprobs:
    """Logprobs of prompt tokens `next_tokens [n]`, from `logits [n, vocab_size]` at the positions before them."""
    return compute_logprobs(logits, next_tokens.to(torch.int64), (num_top,) * len(next_tokens))


@dataclass(frozen=True, slots=True)
class HostSampled:
    """A step's samples on the host, in the order of the call to `sample`."""

    token_ids: tuple[int, ...]
    is_bad: tuple[bool, ...]  # no token: the logits held NaN or +inf, or nothing above -inf
    logprobs: tuple[PositionLogprobs | None, ...]  # None where not requested, or bad
    others: tuple[tuple[PositionLogprobs, ...], ...] = ()  # of `Sampled.others`
    without_token: frozenset[int] = frozenset()  # bad samples whose options and min_tokens left no token


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's samples on the device. Token ids of `bad_rows` are 0 and invalid."""

    token_ids: Tensor  # [num_samples] int64
    bad_rows: Tensor  # [num_samples] bool
    logprobs: Logprobs | None = None
    logprob_samples: tuple[int, ...] = ()  # samples of these logprobs
    empty_rows: Tensor | None = None  # [num_samples] bool, nothing above -inf; set if a processor may ban all tokens
    banned_samples: tuple[int, ...] = ()  # samples for which a processor may

    others: tuple[Logprobs, ...] = ()  # of prompt tokens; they go to the host with the samples

    @property
    def _parts(self) -> tuple[Logprobs, ...]:
        return (*((self.logprobs,) if self.logprobs else ()), *self.others)

    def pack(self) -> Tensor:
        """Samples and logprobs in one tensor."""
        # Negative numbers mark bad rows; float64 holds token ids exactly.
        ids = torch.where(self.bad_rows, -1, self.token_ids)
        if self.empty_rows is not None:
            ids = torch.where(self.empty_rows, -2, ids)
        parts = [part.pack() for part in self._parts]
        return torch.cat([ids.to(torch.float64), *parts]) if parts else ids

    def to_host(self) -> HostSampled:
        """The samples on the host, by a single transfer."""
        return self.unpack(self.pack())

    def unpack(self, values: Tensor) -> HostSampled:
        """The samples, from a copy of `pack()` on the host."""
        packed: list[float] = values.tolist()
        num_samples = start = len(self.token_ids)
        unpacked: list[tuple[PositionLogprobs, ...]] = []
        for part in self._parts:
            unpacked.append(part.unpack(packed[start : start + part.packed_len()]))
            start += part.packed_len()
        is_bad = tuple(value < 0 for value in packed[:num_samples])
        logprobs: list[PositionLogprobs | None] = [None] * num_samples
        if self.logprob_samples:
            for sample, found in zip(self.logprob_samples, unpacked.pop(0), strict=True):
                logprobs[sample] = None if is_bad[sample] else found
        token_ids = tuple(max(0, int(value)) for value in packed[:num_samples])
        without_token = frozenset(sample for sample in self.banned_samples if packed[sample] == -2)
        return HostSampled(token_ids, is_bad, tuple(logprobs), tuple(unpacked), without_token)


class Sampler:
    """Draws tokens with the parameters of `max_rows` rows. `device` is that of the logits; `argmax` returns the largest
    value of each row and its index, the lowest one on ties, and NaN for a row with a NaN. `masked_argmax` does so among
    the values that the row's mask allows, and returns NaN where another one is infinite; of float32 and bfloat16.
    `noisy_argmax` draws from all tokens at once, on other devices than a CPU. `draw`: of float32 scores."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device | str,
        *,
        argmax: Argmax = row_argmax,
        masked_argmax: MaskedArgmax | None = None,
        noisy_argmax: NoisyArgmax | None = None,
        draw: Draw | None = None,
    ) -> None:
        self._noisy_argmax = noisy_argmax
        self._direct_draw = draw
        self._device = torch.device(device)
        self._argmax = argmax
        self._masked_argmax = masked_argmax
        self._noise = NoiseField(vocab_size, self._device)
        self._draws = DrawTable(max_rows, vocab_size)
        made = processors(vocab_size, self._draws)
        self._processors = tuple((_FIRST_PROCESSOR << idx, one) for idx, one in enumerate(made))
        self._bans = sum(bit for bit, processor in self._processors if processor.bans)
        ((self._grammars, self._grammar_mask),) = (
            (bit, one) for bit, one in self._processors if isinstance(one, GrammarMask)
        )
        self._features = [0] * max_rows
        self._num_top = [0] * max_rows

    def warm_up(self) -> None:
        """Compiles what draws, where that is compiled."""
        if self._noisy_argmax is not None:
            logits = torch.zeros(1, self._noise.vocab_size, device=self._device)
            rows = self._draws.rows([0], [0], logits.dtype, self._upload)
            for truncates in (False, True):
                draw_dense(logits, rows, self._noise, truncates=truncates, noisy_argmax=self._noisy_argmax)

    def set_row(self, row: int, sequence: NewSequence) -> None:
        """Sets the parameters of a sequence that enters `row`. Its `sampling.seed` is the completion's own."""
        self.clear_row(row)
        self._num_top[row] = sequence.output.top_logprobs
        features = _TRUNCATES if self._draws.set(row, sequence.sampling) else 0
        features = 0 if sequence.sampling.is_greedy else _DRAWS | features
        if sequence.output.logprobs or sequence.output.top_logprobs > 0:
            features |= _LOGPROBS
        for bit, processor in self._processors:
            if processor.set(row, sequence):
                features |= bit
                if isinstance(processor, Truncation):
                    features &= ~_TRUNCATES
        self._features[row] = features

    def clear_row(self, row: int) -> None:
        """Clears a row whose sequence has left; the row is greedy again. May be repeated."""
        if self._features[row] & _PROCESSES:
            for _, processor in self._processors:
                processor.clear(row)
        self._features[row] = 0

    def begin(self, spans: Sequence[Span]) -> None:
        """Starts what needs no logits: masks of grammars. On a GPU the host has the time for it later, while the device
        computes."""
        if self._device.type == "cpu":
            self._grammar_mask.begin(spans)

    def end(self) -> None:
        """Called when the step is over, in whatever way."""
        self._grammar_mask.end()

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[int] | Tensor,
        positions: Sequence[int] | Tensor,
        tokens: Tensor,
        drafts: Mapping[int, Sequence[int]] = _NO_DRAFTS,
    ) -> Sampled:
        """Samples the token at `positions[i]` of row `rows[i]` from `logits[i]`, which is left unchanged.

        `rows` and `positions` are on the host (as lists or tensors). `tokens [max_rows, max_len]` holds every
        row's tokens: the history of a sample is `tokens[row, :position]`. `drafts`: the draft tokens among them, by
        row; a row's samples follow each other then.
        """
        host_rows, host_positions = _as_list(rows), _as_list(positions)
        features = self._features_at(host_rows, host_positions)
        can_mask = self._masked_argmax is not None and logits.dtype in (torch.float32, torch.bfloat16)
        masked = _only(features, self._grammars, host_rows) if can_mask else []
        special, banned = _with(features, _SPECIAL), tuple(_with(features, self._bans))
        if masked:
            special = [idx for idx in special if idx not in masked]
        empty: Tensor | None = None
        num_samples = len(host_rows)
        if len(special) < num_samples:
            best, token_ids = self._largest(logits, masked, host_rows, drafts)
            bad = (best - best).ne(0)  # NaN for infinity and NaN; a third of the time of `isfinite`
            empty = best == -torch.inf if masked else None
        else:
            token_ids = torch.zeros(num_samples, dtype=torch.int64, device=self._device)
            bad = torch.zeros(num_samples, dtype=torch.bool, device=self._device)
        if special:
            step = _Step(special, features, host_rows, host_positions, tokens, drafts)
            special_ids, best = self._sample_special(logits, step)
            idx = self._upload(special)
            token_ids.index_copy_(0, idx, special_ids)
            bad.index_copy_(0, idx, ~best.isfinite())
            if banned:
                empty = torch.zeros_like(bad) if empty is None else empty
                empty.index_copy_(0, idx, best == -torch.inf)
        token_ids.masked_fill_(bad, 0)
        wanted = _with(features, _LOGPROBS)
        if not wanted:
            return Sampled(token_ids, bad, empty_rows=empty, banned_samples=banned)
        num_top = [self._num_top[host_rows[sample]] for sample in wanted]
        logprobs = compute_logprobs(self._take(logits, wanted), self._take(token_ids, wanted), num_top)
        return Sampled(token_ids, bad, logprobs, tuple(wanted), empty, banned)

    def _largest(
        self, logits: Tensor, masked: list[int], rows: list[int], drafts: Mapping[int, Sequence[int]]
    ) -> tuple[Tensor, Tensor]:
        """The results of `argmax`; for the samples `masked`, among the tokens that their grammars allow."""
        if not masked or self._masked_argmax is None:
            return self._argmax(logits)
        bits = self._grammar_mask.masks([rows[idx] for idx in masked], drafts)
        numbers = [-1] * len(rows)
        for number, idx in enumerate(masked):
            numbers[idx] = number
        return self._masked_argmax(logits, RowMasks(numbers, bits))

    def _features_at(self, rows: list[int], positions: list[int]) -> list[int]:
        """Features of each sample, without the processors that are not due at its position."""
        found = [self._features[row] for row in rows]
        for idx in _with(found, _PROCESSES):
            for bit, processor in self._processors:
                if found[idx] & bit and not processor.is_due(rows[idx], positions[idx]):
                    found[idx] &= ~bit
        return found

    def _sample_special(self, logits: Tensor, step: _Step) -> tuple[Tensor, Tensor]:
        """Token ids of the step's special samples, and their highest scores."""
        scores = self._take(logits, step.samples)
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        if _with(step.features, _PROCESSES):
            scores = scores.to(
                dtype, copy=scores.data_ptr() == logits.data_ptr(), memory_format=torch.contiguous_format
            )
            for bit, processor in self._processors:
                if members := _with(step.features, bit):
                    rows, positions = step.select(members)
                    processor.run(Part(scores, members, rows, positions, step.tokens, self._upload, step.drafts))
        else:
            scores = scores.to(dtype)
        token_ids = torch.empty(scores.shape[0], dtype=torch.int64, device=self._device)
        tops = torch.empty(scores.shape[0], dtype=dtype, device=self._device)
        draws, truncates = _DRAWS, _DRAWS | _TRUNCATES
        for kind in (0, draws, truncates):
            members = [i for i, features in enumerate(step.features) if features & truncates == kind]
            if members:
                ids, best = self._draw(self._take(scores, members), members, step, kind)
                idx = self._upload(members)
                token_ids.index_copy_(0, idx, ids)
                tops.index_copy_(0, idx, best)
        return token_ids, tops

    def _draw(self, scores: Tensor, members: list[int], step: _Step, kind: int) -> tuple[Tensor, Tensor]:
        """Token ids and highest scores of samples of one kind: greedy, drawing, or drawing with truncation."""
        if kind == 0:
            best, token_ids = self._argmax(scores)
            return token_ids, best
        draw_rows = self._draws.rows(*step.select(members), scores.dtype, self._upload)
        truncates = bool(kind & _TRUNCATES)
        if self._direct_draw is not None and scores.dtype == torch.float32:
            return self._direct_draw(scores, draw_rows, self._noise, truncates=truncates)
        if self._device.type != "cpu":
            return draw_dense(scores, draw_rows, self._noise, truncates=truncates, noisy_argmax=self._noisy_argmax)
        return (draw_narrow if truncates else draw_open)(scores, draw_rows, self._noise)

    def _take(self, values: Tensor, members: list[int]) -> Tensor:
        """The rows `members`; the tensor itself where these are all rows."""
        return values if len(members) == values.shape[0] else values.index_select(0, self._upload(members))

    def _upload(self, values: Tensor | list[int]) -> Tensor:
        """Copies to the device without waiting for it."""
        tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)


class _Step:
    """Samples of a step that need more than an argmax, and their inputs: host lists, `tokens` on the device."""

    def __init__(
        self,
        samples: list[int],
        features: list[int],
        rows: list[int],
        positions: list[int],
        tokens: Tensor,
        drafts: Mapping[int, Sequence[int]],
    ) -> None:
        self.samples = samples
        self.features = [features[i] for i in samples]
        self._rows = [rows[i] for i in samples]
        self._positions = [positions[i] for i in samples]
        self.tokens = tokens
        self.drafts = drafts

    def select(self, members: list[int]) -> tuple[list[int], list[int]]:
        """Rows and positions of the samples `members`."""
        return [self._rows[i] for i in members], [self._positions[i] for i in members]


def _only(features: list[int], bit: int, rows: list[int]) -> list[int]:
    """Samples that need nothing but this feature beside an argmax, of rows of which all samples do: a row's masks are
    counted from its first sample on, so they are not taken apart."""
    others = {row for row, value in zip(rows, features, strict=True) if value & bit and value & _SPECIAL != bit}
    return [idx for idx, value in enumerate(features) if value & _SPECIAL == bit and rows[idx] not in others]


def _with(features: list[int], mask: int) -> list[int]:
    return [idx for idx, value in enumerate(features) if value & mask]


def _as_list(values: Sequence[int] | Tensor) -> list[int]:
    return values.tolist() if isinstance(values, Tensor) else list(values)


def verify_chain(draft: Sequence[int], sampled: Sequence[int]) -> tuple[int, ...]:
    """The accepted draft tokens and the token drawn behind them. Lossless for greedy and sampling rows.

    `sampled[i]` is what the target draws given `draft[:i]`; it has one more token than `draft`. While the draft tokens
    equal the drawn ones, each draw has the same history as without a draft. Draws are functions of (seed, position,
    history), so the same seed gives the same tokens with and without drafts, from the target's own distribution.
    """
    if len(sampled) != len(draft) + 1:
        raise ValueError(f"a draft of {len(draft)} tokens needs {len(draft) + 1} sampled ones, not {len(sampled)}")
    num_accepted = 0
    for proposed, drawn in zip(draft, sampled, strict=False):
        if proposed != drawn:
            break
        num_accepted += 1
    return tuple(sampled[: num_accepted + 1])
