"""Dtypes and block sizes of the Triton kernels.

Every launch says whether a product is rounded before it is added (`enable_fp_fusion`): the default of Triton 3.10 is
another than that of earlier ones.
"""

from __future__ import annotations

from typing import Final

import torch

# Anything else (float64, of checks) is computed by the reference: a tensor core would narrow it.
SUPPORTED: Final = (torch.bfloat16, torch.float16, torch.float32)


def next_power(number: int) -> int:
    """The smallest power of two that is not less, at least 1: Triton's blocks have no other sizes."""
    return 1 << max(0, number - 1).bit_length()
