"""LoftQ (arXiv 2310.08659): base weights as PEFT quantizes them at load.

PEFT puts what 4 or 8 bits hold of W in its place. After the first iteration it quantizes W - B0 A0, where B0 A0 are the
r largest singular components of what the quantization before has lost. The trained factors stand beside that:

    y = Q x + s B A x

Q is a weight of full rank, so it is served as a saved one. Values are computed in float32, as in PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_adapters.formats.files import CONFIG_NAME
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.weights import TargetModule
from loraplex_contracts.errors import AdapterUnsupported

# NF4 (arXiv 2305.14314): sixteen values that as many quantiles of a normal distribution are nearest to.
NF4: Final = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
NF4_BLOCK: Final = 64  # values with one scale, in the order in which the weight lies
MAX_ITERATIONS: Final = 16


class LoftqConfig(NamedTuple):
    """Quantization of the base model."""

    num_bits: int  # 4 (NF4) or 8 (of float16, a scale for each row)
    num_iterations: int


def parse_loftq(fields: Mapping[str, Any]) -> LoftqConfig:
    """The quantization of a configuration. Raises AdapterUnsupported."""
    found: Any = fields.get("loftq_config") or {}
    given = found if isinstance(found, dict) else {}
    config = LoftqConfig(given.get("loftq_bits", 4), given.get("loftq_iter", 1))
    is_known = all(type(one) is int for one in config) and config.num_bits in (4, 8)
    if not is_known or not 1 <= config.num_iterations <= MAX_ITERATIONS:
        raise AdapterUnsupported(
            f"{CONFIG_NAME}: loftq_config {ascii(found)[:80]} is not served: loftq_bits are 4 or 8, and loftq_iter is "
            f"at most {MAX_ITERATIONS}"
        )
    return config


def quantized(config: LoftqConfig, module: TargetModule, rank: int) -> Callable[..., Tensor]:
    """Makes Q [out, in] in the place of the module's weight."""
    return partial(_made, config=config, module=module, rank=rank)


def _made(read: object, *, config: LoftqConfig, module: TargetModule, rank: int) -> Tensor:
    assert module.weights is not None, "targets of a loaded model have their weights"
    weight = module.weights()[0].float()
    quantize = _nf4 if config.num_bits == 4 else _int8
    found = quantize(weight)
    for _ in range(config.num_iterations - 1):
        checkpoint()
        u, s, v = torch.linalg.svd(weight - found, full_matrices=False)
        roots = s[:rank].sqrt()
        found = quantize(weight - (u[:, :rank] * roots) @ (roots[:, None] * v[:rank]))
    return found


def _nf4(weight: Tensor) -> Tensor:
    blocks = F.pad(weight.flatten(), (0, -weight.numel() % NF4_BLOCK)).view(-1, NF4_BLOCK)
    values = torch.tensor(NF4, dtype=torch.float32, device=weight.device)
    largest = blocks.abs().amax(dim=1, keepdim=True)
    nearest = torch.bucketize(
        blocks / largest.clamp_min(torch.finfo(torch.float32).tiny), (values[1:] + values[:-1]) / 2
    )
    return (values[nearest] * largest).flatten()[: weight.numel()].view_as(weight)


def _int8(weight: Tensor) -> Tensor:
    halves = weight.half().float()
    largest = halves.abs().amax(dim=1, keepdim=True)
    steps = torch.where(largest > 0, 127 / largest, 0.0)
    return torch.round(halves * steps) * largest * (1 / 127)
