"""Gumbel noise as a pure function of (seed, position, token id).

Drawing a token is `argmax(scores + noise)`. No generator is advanced: the noise of a token is computed from its
coordinates, so a request's tokens do not depend on the batch around it, on chunking, on drafts before it or on which
candidates are computed. A draft model that adds the same noise to its own scores mostly draws the same tokens.

Uses only wrapping integer arithmetic, table look-ups, and single float32 multiplications and additions, which every
device rounds in the same way. The last bit of a vectorised `log` depends on the device and even on the tensor's shape.
The tables are made once on the host, in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Bits of the mantissa that choose a cell of the tables; the rest interpolates. Error of the noise below 1e-5.
_CELL_BITS = 7
_LOW_BITS = 23 - _CELL_BITS
_LOW_MASK = (1 << _LOW_BITS) - 1
_NUM_CELLS = 1 << (9 + _CELL_BITS)  # sign, exponent, cell

# -log(-log(1/2)), where the two halves of the hash's range meet.
_MIDDLE = -math.log(math.log(2.0))
# Constant that callers add to `NoiseField.bounds`. Its margin exceeds the errors of interpolation and float32.
BOUND_SHIFT = (159 - 256) * math.log(2.0) + 1e-3

_UINT64 = 0xFFFFFFFFFFFFFFFF


def seed_to_int64(seed: int) -> int:
    """The uint64 seed with the same bits as a signed number, as tensors hold it."""
    seed &= _UINT64
    return seed - (1 << 64) if seed >> 63 else seed


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

    def __init__(self, vocab_size: int, device: torch.device | str) -> None:
        self.vocab_size = vocab_size
        device = torch.device(device)
        values, slopes = _tables()
        self._values = values.to(device)  # [_NUM_CELLS]
        self._slopes = slopes.to(device)  # [_NUM_CELLS]
        self._mixed_ids = _mix32(torch.arange(vocab_size, dtype=torch.int32, device=device))  # [vocab_size]

    def dense(self, keys: Tensor, start: int = 0, stop: int | None = None) -> Tensor:
        """Noise of the token ids `start` to `stop` (default: all) in every row: `[num_rows, stop - start]` float32."""
        return self._gumbel(_hash(keys, self._mixed_ids[start:stop]))

    def at(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        """Noise of chosen token ids: `[num_rows, num_ids]` float32, from ids of that shape."""
        return self._gumbel(_hash(keys, self._mixed_ids[token_ids]))

    def bounds(self, keys: Tensor, start: int, stop: int) -> Tensor:
        """Upper bounds of `dense(...)` less `BOUND_SHIFT`, tight where the noise is large, at a third of its cost."""
        bits = _hash(keys, self._mixed_ids[start:stop]).to(torch.float32).view(torch.int32)
        # A float's bits, read as an integer, approximate its logarithm with an error of at most 0.086 (Mitchell), which
        # only raises the bound here. The noise is large for negative hashes; for others it stays below the middle.
        return bits.to(torch.float32).mul_(-math.log(2.0) / (1 << 23)).clamp_(min=_MIDDLE - BOUND_SHIFT)

    def _gumbel(self, hashes: Tensor) -> Tensor:
        bits = hashes.to(torch.float32).view(torch.int32).view(-1)
        cells = (bits >> _LOW_BITS).add_(_NUM_CELLS >> 1)  # the sign makes the shifted bits negative
        noise = self._slopes.index_select(0, cells)
        noise.mul_(bits.bitwise_and(_LOW_MASK).to(torch.float32))
        noise.add_(self._values.index_select(0, cells))
        return noise.view(hashes.shape)


def _hash(keys: Tensor, mixed_ids: Tensor) -> Tensor:
    """`[num_rows, num_ids]` int32, uniform over all 32 bits."""
    hashes = torch.bitwise_xor(mixed_ids, keys[:, 0:1])
    hashes.mul_(keys[:, 1:2])
    hashes.bitwise_xor_(hashes >> 15)
    return hashes.mul_(keys[:, 2:3])


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
    x = (x ^ (x >> 15)) * _signed32(0x846CA68B)
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


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _signed32(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value
