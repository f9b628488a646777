"""Which fused operations a device gets."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from loraplex_server.layers.fused import FusedOps


def fused_ops_for(device: torch.device) -> FusedOps | None:
    """None where the model's own code stays: on a CPU, and where there is no triton."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    from loraplex_server.backends.cuda.fused import TritonFused  # takes seconds to import

    return TritonFused()
