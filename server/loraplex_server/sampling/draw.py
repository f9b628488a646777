"""Token drawing: temperature, truncation, and argmax with counter-based Gumbel noise.

`draw_dense` is the definition. On a CPU native kernels find the same token in one call, and without them two functions
do. For rows that truncate, `draw_narrow` looks up their few candidates first. For the others, `draw_open` computes
bounds for all tokens and exact values only where they can matter. Ties go to the lowest token id.

Noise is a pure function of (seed, position, token id): no generator is advanced, so a request's tokens do not depend on
the batch around it, on chunking, on drafts before it or on which candidates are computed. A draft model that adds the
same noise to its own scores mostly draws the same tokens.

Truncation is a threshold on a row's scores. It keeps every token that ties with the last one kept, so the result does
not depend on how a device orders equal scores. Top-p counts the tokens that top-k kept; min-p compares with the most
likely token. Sums are float64, so that the order of addition does not matter.

Every draw returns token ids and the rows' highest scores; where such a score is not finite, the id is invalid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_contracts.sampling import SamplingParams

# Values in a block. On a CPU the maximum of a block costs a third of a maximum with its index, and a hundredth of a
# sort; later steps read only the few blocks that can matter.
BLOCK = 64
_HOST_ROWS = 8  # rows at once: they stay in the CPU's cache
# Elements worked on at once: temporaries stay in a CPU core's cache.
_CHUNK_COLS = 512 * BLOCK
_CHUNK_ROWS = 4
# Elements in the larger temporaries of a dense draw or of a candidate search.
_MAX_ELEMENTS = 1 << 23
# Candidates looked up for a top-p without top-k, until they hold enough of the probability.
_TOP_P_SEARCHES = (64, 1024)
# Weights that are added up at once where a sum's place is looked for.
_SUM_BLOCK = 256
# Candidates looked up beyond the k-th, so that a few ties need no second search.
_SPARE = 16
# Below this, one token has all the probability. Its inverse is finite in float32.
_MIN_TEMPERATURE = 1e-30

# --- noise ----------------------------------------------------------------------------------------------------------
#
# Only wrapping integer arithmetic, table look-ups, and single float32 multiplications and additions, which every device
# rounds in the same way. The last bit of a vectorised `log` depends on the device and even on the tensor's shape. The
# tables are made once on the host, in float64.

# Bits of the mantissa that choose a cell of the tables; the rest interpolates. Error of the noise below 1e-5.
_CELL_BITS = 7
_LOW_BITS = 23 - _CELL_BITS
_LOW_MASK = (1 << _LOW_BITS) - 1
_NUM_CELLS = 1 << (9 + _CELL_BITS)  # sign, exponent, cell

# -log(-log(1/2)), where the two halves of the hash's range meet.
_MIDDLE = -math.log(math.log(2.0))
# Constant that callers add to `NoiseField.bounds`. Its margin exceeds the errors of interpolation and float32.
BOUND_SHIFT = (159 - 256) * math.log(2.0) + 1e-3


def seed_to_int64(seed: int) -> int:
    """The uint64 seed with the same bits as a signed number, as tensors hold it."""
    return _signed(seed & 0xFFFFFFFFFFFFFFFF)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The keys of a row's noise: `[num_rows, 3]` int32, from int64 seeds and the positions of the sampled tokens."""
    # Two rounds of SplitMix64's finaliser, one behind each coordinate: neighbouring seeds or positions share nothing.
    state = _mix64(seeds + _signed(0x9E3779B97F4A7C15))
    first = _mix64(state + positions * _signed(0xD1342543DE82EF95))
    second = _mix64(first + _signed(0x9E3779B97F4A7C15))
    # An exclusive-or and two odd factors: 94 bits.
    keys = torch.stack((first >> 32, first | 1, second | 1), dim=-1)
    return _low32(keys)


class NoiseField:
    """Tables and hashed token ids on one device. Constant."""

    low_bits = _LOW_BITS  # of a float's mantissa: they interpolate within a cell
    # Of `bounds`: what a float's bits are multiplied with, and the least that becomes of them.
    bound_slope = -math.log(2.0) / (1 << 23)
    bound_least = _MIDDLE - BOUND_SHIFT

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        device = torch.device(device)
        values, slopes = _tables()
        self.values = values.to(device)  # [_NUM_CELLS]
        self.slopes = slopes.to(device)  # [_NUM_CELLS]
        self.mixed_ids = _mix32(torch.arange(vocab_size, dtype=torch.int32, device=device))  # [vocab_size]

    def dense(self, keys: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Noise of the token ids `start` to `stop` (default: all) in every row: `[num_rows, stop - start]` float32."""
        return self._gumbel(_hash(keys, self.mixed_ids[start:stop]))

    def at(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Noise of chosen token ids: `[num_rows, num_ids]` float32, from ids of that shape."""
        return self._gumbel(_hash(keys, self.mixed_ids[token_ids]))

    def bounds(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Upper bounds of `dense(...)` less `BOUND_SHIFT`, tight where the noise is large, at a third of its cost."""
        bits = _hash(keys, self.mixed_ids[start:stop]).to(torch.float32).view(torch.int32)
        # A float's bits, read as an integer, approximate its logarithm with an error of at most 0.086 (Mitchell), which
        # only raises the bound here. The noise is large for negative hashes; for others it stays below the middle.
        return bits.to(torch.float32).mul_(self.bound_slope).clamp_(min=self.bound_least)

    def _gumbel(self, hashes: Tensor) -> Tensor:
        bits = hashes.to(torch.float32).view(torch.int32).view(-1)
        cells = (bits >> _LOW_BITS).add_(_NUM_CELLS >> 1)  # the sign makes the shifted bits negative
        noise = self.slopes.index_select(0, cells)
        noise.mul_(bits.bitwise_and(_LOW_MASK).to(torch.float32))
        noise.add_(self.values.index_select(0, cells))
        return noise.view(hashes.shape)


def _hash(keys: Tensor, mixed_ids: Tensor) -> Tensor:
    """Hashes [num_rows, num_ids] int32, uniform over all 32 bits."""
    hashes = torch.bitwise_xor(mixed_ids, keys[:, 0:1])
    hashes.mul_(keys[:, 1:2])
    hashes.bitwise_xor_(hashes >> 15)
    return hashes.mul_(keys[:, 2:3])


@cache
def _tables() -> tuple[Tensor, Tensor]:
    """Noise at the start of each cell, and its slope within the cell per unit of the float's low bits.

    A hash h, converted to float32, is read as sign and magnitude x = |h| / 2**32 <= 1/2. The uniform variable is x for
    negative h and 1 - x for others, so both tails are resolved as finely as floats near zero are.
    """
    values = [0.0] * _NUM_CELLS
    slopes = [0.0] * _NUM_CELLS
    half = _NUM_CELLS >> 1
    for is_positive in (False, True):
        offset = half if is_positive else 0
        values[offset] = _noise_at(0.0, is_positive)  # h == 0; -0 does not occur
        for exponent in range(31 + 1):  # |h| is in [2**exponent, 2**(exponent + 1))
            for cell in range(1 << _CELL_BITS):
                start = math.ldexp(1.0 + cell / (1 << _CELL_BITS), exponent)
                end = math.ldexp(1.0 + (cell + 1) / (1 << _CELL_BITS), exponent)
                idx = offset + ((127 + exponent) << _CELL_BITS) + cell
                at_start, at_end = _noise_at(start, is_positive), _noise_at(end, is_positive)
                values[idx] = at_start
                slopes[idx] = (at_end - at_start) / (1 << _LOW_BITS)
    return torch.tensor(values, dtype=torch.float32), torch.tensor(slopes, dtype=torch.float32)


def _noise_at(magnitude: float, is_positive: bool) -> float:
    x = min(max(magnitude, 0.5) / 2.0**32, 0.5)
    return -math.log(-math.log(x)) if is_positive else -math.log(-math.log1p(-x))


def _mix32(x: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit reaches every output bit, also with these arithmetic shifts."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * _signed(0x846CA68B, 32)
    return x ^ (x >> 16)


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _low32(z: Tensor) -> Tensor:
    """The low 32 bits as int32. Wraps by hand, as conversions of numbers out of range are undefined."""
    z = z & 0xFFFFFFFF
    return (z - ((z >> 31) << 32)).to(torch.int32)


def _signed(value: int, bits: int = 64) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


# --- parameters -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrawRows:
    """Parameters of the rows that draw; on the device of the scores."""

    keys: Tensor  # [num_rows, 3] int32, of the noise
    temperature: Tensor  # [num_rows, 1] as the scores, > 0
    top_k: Tensor  # [num_rows, 1] int64, 0: off
    top_p: Tensor  # [num_rows, 1] float64, 1: off
    log_min_p: Tensor  # [num_rows, 1] as the scores, -inf: off
    max_top_k: int  # of all rows; known on the host
    has_open_top_p: bool  # a row has top-p without top-k

    def select(self, idx: Tensor) -> DrawRows:
        """The parameters of some of the rows. The two host values stay valid as upper bounds."""
        columns = (self.keys, self.temperature, self.top_k, self.top_p, self.log_min_p)
        keys, temperature, top_k, top_p, log_min_p = (column.index_select(0, idx) for column in columns)
        return DrawRows(keys, temperature, top_k, top_p, log_min_p, self.max_top_k, self.has_open_top_p)


class DrawTable:
    """Temperature, truncation and seed of every row of the batch, on the host."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._values = torch.zeros(max_rows, 4, dtype=torch.float64)  # temperature, top-k, top-p, log of min-p
        self._seeds = torch.zeros(max_rows, dtype=torch.int64)

    def set(self, row: int, sampling: SamplingParams) -> bool:
        """Sets a row. True if it truncates."""
        top_k = sampling.top_k if sampling.top_k < self._vocab_size else 0
        log_min_p = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
        values = (max(sampling.temperature, _MIN_TEMPERATURE), float(top_k), sampling.top_p, log_min_p)
        self._values[row] = torch.tensor(values, dtype=torch.float64)
        self._seeds[row] = seed_to_int64(sampling.seed)
        return top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0

    def rows(
        self, rows: list[int], positions: list[int], dtype: torch.dtype, upload: Callable[[Tensor], Tensor]
    ) -> DrawRows:
        """Parameters for tokens at `positions[i]` of `rows[i]`, brought to the device by `upload` without waiting."""
        idx = torch.tensor(rows)
        values = self._values[idx]
        keys = row_keys(self._seeds[idx], torch.tensor(positions))
        top_k, top_p = values[:, 1], values[:, 2]
        max_top_k, has_open_top_p = int(top_k.max()), bool(((top_k == 0) & (top_p < 1.0)).any())
        temperature, top_k, top_p, log_min_p = upload(values).unsqueeze(-1).unbind(1)
        return DrawRows(
            keys=upload(keys),
            temperature=temperature.to(dtype),
            top_k=top_k.to(torch.int64),
            top_p=top_p,
            log_min_p=log_min_p.to(dtype),
            max_top_k=max_top_k,
            has_open_top_p=has_open_top_p,
        )


# --- the definition -------------------------------------------------------------------------------------------------


class Draw(Protocol):
    """Draws the tokens of `draw_dense` at once, in float32."""

    def __call__(self, scores: Tensor, rows: DrawRows, noise: NoiseField, *, truncates: bool) -> tuple[Tensor, Tensor]:
        """Token ids [num_rows] and highest scores [num_rows] of scores [num_rows, vocab_size]. Of rows that have been
        truncated already, `truncates` is False: a second top-p would take some of the tokens that the first kept."""
        ...


class NoisyArgmax(Protocol):
    """Finds the best token of `draw_dense` at once, in float32."""

    def __call__(
        self, scores: Tensor, tops: Tensor, rows: DrawRows, noise: NoiseField, threshold: Tensor | None
    ) -> Tensor:
        """Token ids [num_rows] from scores [num_rows, vocab_size], which may be on a device; the lowest on ties. Of
        rows that truncate the threshold [num_rows, 1]. A row whose top [num_rows, 1] is not finite may get any id
        below the vocabulary's size."""
        ...


def draw_dense(
    scores: Tensor, rows: DrawRows, noise: NoiseField, *, truncates: bool, noisy_argmax: NoisyArgmax | None = None
) -> tuple[Tensor, Tensor]:
    """Draws from all tokens: the definition, or with `noisy_argmax` the same token. Does not wait for the device."""
    token_ids: list[Tensor] = []
    tops: list[Tensor] = []
    for part, part_rows in _chunks(scores, rows):
        top = part.amax(-1, keepdim=True)
        threshold = kept_threshold(part, top, part_rows) if truncates else None
        if noisy_argmax is not None and part.dtype == torch.float32:
            token_ids.append(noisy_argmax(part, top, part_rows, noise, threshold))
        else:
            noisy = ((part - top) / part_rows.temperature).add_(noise.dense(part_rows.keys))
            if threshold is not None:
                noisy.masked_fill_(~_kept_mask(part, top, part_rows, threshold), -torch.inf)
            token_ids.append(noisy.max(dim=-1).indices)
        tops.append(top.squeeze(1))
    return torch.cat(token_ids), torch.cat(tops)


def truncate(scores: Tensor, rows: DrawRows) -> Tensor:
    """The scores of tokens that top-k, top-p and min-p keep, -inf for the others; a row whose highest score is not
    finite stays as it is. Does not wait for the device."""
    tops = scores.amax(-1, keepdim=True)
    keeps: list[Tensor] = []
    for part, some in _chunks(scores, rows):
        top = part.amax(-1, keepdim=True)
        keeps.append(_kept_mask(part, top, some, kept_threshold(part, top, some)))
    return scores.masked_fill(~torch.cat(keeps) & tops.isfinite(), -torch.inf)


def _chunks(scores: Tensor, rows: DrawRows) -> Iterator[tuple[Tensor, DrawRows]]:
    """Rows in chunks, which bound the size of the temporaries."""
    size, idx = max(1, _MAX_ELEMENTS // scores.shape[1]), torch.arange(len(scores), device=scores.device)
    for part, some in zip(scores.split(size), idx.split(size), strict=True):
        yield part, rows.select(some)


def top_p_threshold(values: Tensor, weights: Tensor, mass: Tensor, top_p: Tensor) -> Tensor:
    """`[num_rows, 1]`: the score of the last token that top-p keeps, -inf where it is off.

    `values` are sorted, best first; `weights` their unnormalised float64 probabilities, 0 for removed ones;
    `mass` the sum over all tokens that are not removed.
    """
    # A token stays while the tokens before it have not reached p; the first always does.
    num_kept = _count_before(weights, top_p * mass).clamp_(min=1)
    threshold = values.gather(1, num_kept - 1)
    return threshold.masked_fill(top_p >= 1.0, -torch.inf)


def _count_before(weights: Tensor, limit: Tensor) -> Tensor:
    """`[num_rows, 1]`: places before which the weights `[num_rows, num_values]` add up to less than the row's limit.
    None of them is negative. Of many values the block is found first where that ends: a sum over all, place by place,
    takes a GPU as long as sorting them."""
    num_rows, num_values = weights.shape
    if num_values <= 2 * _SUM_BLOCK:
        return (weights.cumsum(-1) - weights < limit).sum(-1, keepdim=True)
    num_blocks = -(-num_values // _SUM_BLOCK)
    if missing := num_blocks * _SUM_BLOCK - num_values:
        weights = F.pad(weights, (0, missing))
    blocks = weights.view(num_rows, num_blocks, _SUM_BLOCK)
    sums = blocks.sum(-1)
    before = sums.cumsum(-1) - sums  # [num_rows, num_blocks]
    last = ((before < limit).sum(-1, keepdim=True) - 1).clamp_(min=0)  # block in which the limit is reached
    inside = blocks.gather(1, last.unsqueeze(-1).expand(-1, 1, _SUM_BLOCK)).squeeze(1)
    count = (before.gather(1, last) + (inside.cumsum(-1) - inside) < limit).sum(-1, keepdim=True)
    return (last * _SUM_BLOCK + count).clamp_(max=num_values)


def probability_weights(values: Tensor, tops: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities relative to the best token's, in float64."""
    return ((values - tops) / temperature).to(torch.float64).exp_()


def kept_threshold(scores: Tensor, tops: Tensor, rows: DrawRows) -> Tensor:
    """The least score that top-k and top-p keep: `[num_rows, 1]`. May sort; never waits for the device."""
    vocab_size = scores.shape[1]
    count = vocab_size if rows.has_open_top_p else max(1, min(rows.max_top_k, vocab_size))
    values = scores.topk(count, dim=-1).values if count < vocab_size else scores.sort(dim=-1, descending=True).values
    kth = values.gather(1, rows.top_k.clamp(1, count) - 1)
    threshold = kth.masked_fill(rows.top_k == 0, -torch.inf)
    # Ties of the k-th beyond `count` belong to the mass, so it is summed over everything.
    mass = probability_weights(scores, tops, rows.temperature).masked_fill_(scores < threshold, 0.0).sum(-1, True)
    weights = probability_weights(values, tops, rows.temperature).masked_fill_(values < threshold, 0.0)
    return torch.maximum(threshold, top_p_threshold(values, weights, mass, rows.top_p))


def _kept_mask(scores: Tensor, tops: Tensor, rows: DrawRows, threshold: Tensor) -> Tensor:
    """Mask of the tokens that may be drawn: `[num_rows, vocab_size]`."""
    return (scores >= threshold) & ((scores - tops) / rows.temperature >= rows.log_min_p)


# --- rows that do not truncate, on a CPU ----------------------------------------------------------------------------


def draw_open(scores: Tensor, rows: DrawRows, noise: NoiseField) -> tuple[Tensor, Tensor]:
    """Does what `draw_dense` does without truncation. Computes exact noise only in blocks whose bound reaches the
    best."""
    num_rows, vocab_size = scores.shape
    tops = scores.amax(-1, keepdim=True)
    bounds = _bounds(scores, tops, rows, noise)  # [num_rows, num_blocks]
    row_idx = torch.arange(num_rows)
    first = bounds.argmax(-1)
    best, token_ids = _best_of_blocks(scores, tops, rows, noise, row_idx, first)
    bounds[row_idx, first] = -torch.inf
    others = (bounds >= best.unsqueeze(1)).nonzero()
    if len(others):
        values, ids = _best_of_blocks(scores, tops, rows, noise, others[:, 0], others[:, 1])
        row_idx = torch.cat((row_idx, others[:, 0]))
        values, ids = torch.cat((best, values)), torch.cat((token_ids, ids))
        best = best.scatter_reduce(0, row_idx, values, "amax")
        ids = torch.where(values == best[row_idx], ids, vocab_size - 1)
        token_ids = torch.full_like(token_ids, vocab_size - 1).scatter_reduce(0, row_idx, ids, "amin")
    return token_ids, tops.squeeze(1)


def _bounds(scores: Tensor, tops: Tensor, rows: DrawRows, noise: NoiseField) -> Tensor:
    """Upper bounds of score / temperature + noise in each block."""
    num_rows, vocab_size = scores.shape
    bounds = scores.new_empty(num_rows, -(-vocab_size // BLOCK))
    for start in range(0, num_rows, _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        # Faster than dividing; the bounds' margin covers the difference.
        scale = 1.0 / rows.temperature[part]
        for begin in range(0, vocab_size, _CHUNK_COLS):
            end = min(begin + _CHUNK_COLS, vocab_size)
            chunk = scores[part, begin:end] - tops[part]
            chunk = noise.bounds(rows.keys[part], begin, end).to(chunk.dtype).addcmul_(chunk, scale)
            bounds[part, begin // BLOCK : -(-end // BLOCK)] = block_max(chunk)
    return bounds.add_(BOUND_SHIFT)


def _best_of_blocks(
    scores: Tensor, tops: Tensor, rows: DrawRows, noise: NoiseField, row_idx: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor]:
    """The best value and its token in block `blocks[i]` of row `row_idx[i]`."""
    ids, exists = block_ids(blocks.unsqueeze(1), scores.shape[1])
    scaled = (scores[row_idx.unsqueeze(1), ids] - tops[row_idx]) / rows.temperature[row_idx]
    noisy = scaled.add_(noise.at(rows.keys[row_idx], ids)).masked_fill_(~exists, -torch.inf)
    best = noisy.max(dim=-1)  # ids ascend, so the first is the lowest
    return best.values, ids.gather(1, best.indices.unsqueeze(1)).squeeze(1)


# --- rows that truncate, on a CPU -----------------------------------------------------------------------------------


def draw_narrow(scores: Tensor, rows: DrawRows, noise: NoiseField) -> tuple[Tensor, Tensor]:
    """Does what `draw_dense` does with truncation. Looks up as many candidates as each row needs, similar rows
    together."""
    vocab_size = scores.shape[1]
    maxima = block_max(scores)
    tops = maxima.amax(-1, keepdim=True)
    token_ids = torch.zeros(scores.shape[0], dtype=torch.int64)
    is_open = (rows.top_k == 0) & (rows.top_p < 1.0)
    # Least number of candidates of a row; 0 where min-p alone decides.
    need = torch.where(is_open, _TOP_P_SEARCHES[0], rows.top_k).squeeze(1)
    pending = tops.isfinite().squeeze(1)
    for size in (*_TOP_P_SEARCHES, vocab_size):
        members = (pending & (need <= size)).nonzero().squeeze(1)
        if not len(members):
            continue
        for idx in members.split(max(1, _MAX_ELEMENTS // (min(size * BLOCK, vocab_size) + vocab_size))):
            everything = len(idx) == scores.shape[0]
            part = scores if everything else scores.index_select(0, idx)
            part_maxima = maxima if everything else maxima.index_select(0, idx)
            part_rows = rows if everything else rows.select(idx)
            ids, is_done = _draw_among(part, part_maxima, part_rows, noise, size)
            done = idx[is_done]
            token_ids[done] = ids[is_done]
            pending[done] = False
    return token_ids, tops.squeeze(1)


def _draw_among(scores: Tensor, maxima: Tensor, rows: DrawRows, noise: NoiseField, size: int) -> tuple[Tensor, Tensor]:
    """Token ids, and a mask of the rows for which the `size` best tokens were enough."""
    tops = maxima.amax(-1, keepdim=True)
    is_open = (rows.top_k == 0) & (rows.top_p < 1.0)
    k = torch.where(is_open, size, rows.top_k)
    # A little below the threshold of min-p: the exact comparison follows. The mass of top-p behind top-k is that of the
    # k best tokens, whatever min-p leaves of them.
    floor = tops + rows.temperature * (rows.log_min_p - 1e-3)
    floor = floor.masked_fill((rows.top_k > 0) & (rows.top_p < 1.0), -torch.inf)
    found = find_candidates(scores, maxima, k, floor)
    weights = probability_weights(found.values, tops, rows.temperature).masked_fill_(~found.is_kept, 0.0)
    mass = weights.sum(-1, keepdim=True)
    is_done = torch.ones_like(is_open)
    if bool(is_open.any()):
        idx = is_open.squeeze(1).nonzero().squeeze(1)
        mass[idx] = total_mass(scores.index_select(0, idx), tops[idx], rows.temperature[idx])
        has_mass = weights.sum(-1, keepdim=True) >= rows.top_p * mass
        # Fewer than k: the candidates end at min-p's threshold, so lower tokens do not matter.
        is_short = found.is_kept.sum(-1, keepdim=True) < k
        is_done = ~is_open | has_mass | is_short | (k >= scores.shape[1])
    threshold = top_p_threshold(found.values, weights, mass, rows.top_p)
    scaled = (found.values - tops) / rows.temperature
    keeps = found.is_kept & (found.values >= threshold) & (scaled >= rows.log_min_p)
    noisy = scaled.add_(noise.at(rows.keys, found.token_ids)).masked_fill_(~keeps, -torch.inf)
    ids = torch.where(noisy == noisy.amax(-1, keepdim=True), found.token_ids, scores.shape[1] - 1).amin(-1)
    return ids, is_done.squeeze(1)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Best tokens of each row, best first; `is_kept` is False behind a row's own ones."""

    values: Tensor  # [num_rows, num_candidates] scores
    token_ids: Tensor  # [num_rows, num_candidates]
    is_kept: Tensor  # [num_rows, num_candidates]


def find_candidates(scores: Tensor, maxima: Tensor, k: Tensor, floor: Tensor) -> Candidates:
    """Every token whose score is at least the row's k-th best (k > 0) and at least `floor`. For the CPU, as
    it branches.

    `maxima` are `block_max(scores)`. The k largest of them are scores of k different tokens, so the k-th best token
    scores at least the k-th largest maximum, and all candidates lie in blocks that reach it.
    """
    vocab_size = scores.shape[1]
    _, blocks, _ = _largest(maxima, k, floor)
    if 2 * blocks.shape[1] * BLOCK >= vocab_size:
        values, ids = scores, torch.arange(vocab_size).expand(scores.shape)
    else:
        ids, exists = block_ids(blocks, vocab_size)
        values = scores.gather(1, ids).masked_fill_(~exists, -torch.inf)
    kept, idx, threshold = _largest(values, k, floor)
    return Candidates(kept, ids.gather(1, idx), kept >= threshold)


def _largest(values: Tensor, k: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values that are at least the row's k-th largest (k > 0) and at least `floor`, best first, with their indices, and
    the threshold `[num_rows, 1]`. Rows with fewer such values are filled with lower ones."""
    max_k, num_values = int(k.max()), values.shape[1]
    count = min(max_k + _SPARE, num_values)
    best = values.topk(count)
    kth = best.values.gather(1, k.clamp(1, count) - 1)
    threshold = torch.maximum(kth.masked_fill((k == 0) | (k > num_values), -torch.inf), floor)
    num_found = max(1, int(((values >= threshold) & (values > -torch.inf)).sum(-1).max()))
    if num_found > count:
        best = values.topk(num_found)
    return best.values[:, :num_found], best.indices[:, :num_found], threshold


def total_mass(scores: Tensor, tops: Tensor, temperature: Tensor) -> Tensor:
    """Normalising sum over all tokens, `[num_rows, 1]` float64; for the CPU.

    Blocks are summed in the scores' precision, their sums in float64.
    """
    num_whole = scores.shape[1] // BLOCK * BLOCK
    masses: list[Tensor] = []
    for part, top, t in zip(*(values.split(_CHUNK_ROWS) for values in (scores, tops, temperature)), strict=True):
        values = ((part - top) / t).exp_()
        mass = values[:, :num_whole].unflatten(1, (-1, BLOCK)).sum(-1).to(torch.float64).sum(-1, keepdim=True)
        masses.append(mass + values[:, num_whole:].to(torch.float64).sum(-1, keepdim=True))
    return torch.cat(masses)


# --- maxima of blocks -----------------------------------------------------------------------------------------------


def block_max(values: Tensor) -> Tensor:
    """Maxima of blocks, `[num_rows, ceil(num_values / BLOCK)]`. A block with a NaN gives NaN."""
    num_values = values.shape[1]
    num_whole = num_values // BLOCK * BLOCK
    whole = values[:, :num_whole].unflatten(1, (-1, BLOCK)).amax(-1)
    if num_whole == num_values:
        return whole
    return torch.cat((whole, values[:, num_whole:].amax(-1, keepdim=True)), dim=1)


def block_ids(blocks: Tensor, num_values: int) -> tuple[Tensor, Tensor]:
    """Indices of the values in blocks `[n, m]`, and a mask of those that exist: both `[n, m * BLOCK]`."""
    ids = (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=blocks.device)).flatten(1)
    return ids.clamp(max=num_values - 1), ids < num_values


def row_argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row and its index, the lowest one on ties. A row with a NaN gives NaN."""
    if values.device.type != "cpu":
        best = values.max(dim=-1)
        return best.values, best.indices
    found = [_host_argmax(part) for part in values.split(_HOST_ROWS)]
    maxima, indices = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
    return maxima.to(values.dtype), indices


def _host_argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """numpy's argmax, which takes a fifth of torch's time, conversion from bfloat16 included."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32)).numpy()
    best = wide.argmax(axis=-1)  # of the first NaN, where there is one
    return torch.from_numpy(wide[np.arange(len(best)), best]), torch.from_numpy(best)
