"""Token masks by row: which columns of the logits count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.int32]  # [num_masks, num_words], 32 values a word, the lowest bit first


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Masks of values, and for each row the number of its mask: -1 where all values count."""

    numbers: Sequence[int]
    bits: Bits
