"""PEFT's OFT and BOFT as rotations of inputs, block by block.

OFT (arXiv 2306.07280) and BOFT (arXiv 2311.06243) multiply the input of a linear with an orthogonal matrix that has
blocks on its diagonal, and BOFT the product with a scale for each output. The file has the skew-symmetric matrices from
which the blocks are made (Cayley's transform, or a truncated Neumann series in its place).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from loraplex_adapters.formats.files import CONFIG_NAME
from loraplex_adapters.formats.peft_plan import PlannedSaved, Read, check_shape
from loraplex_adapters.io.safetensors import TensorInfo
from loraplex_adapters.weights import SavedShape, TargetModule
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported, ShapeMismatch

PARAMETER: Final = "input_rotation"  # [blocks, size, size]; one block of two inputs or more stands for all that fit
MAX_TERMS: Final = 16  # of Neumann's series, each a product of whole blocks; PEFT takes 5


@dataclass(frozen=True, slots=True)
class Rotation:
    """The configuration of OFT, as far as it decides what is computed."""

    is_shared: bool = False
    is_constrained: bool = False
    eps: float = 6e-5
    num_terms: int = 5  # of the series; 0: Cayley's transform
    block_size: int = 0  # 0: num_blocks counts
    num_blocks: int = 0

    @staticmethod
    def parsed(fields: Mapping[str, Any]) -> Rotation:
        """The rotation of a configuration. Raises AdapterInvalid or AdapterUnsupported."""
        if "oft_block_size" not in fields:
            raise AdapterUnsupported(
                f"{CONFIG_NAME} has no oft_block_size: it is of PEFT before 0.14, whose OFT computed something else"
            )
        num_terms, eps = fields.get("num_cayley_neumann_terms", 5), fields.get("eps", 6e-5)
        if type(num_terms) is not int or not 1 <= num_terms <= MAX_TERMS:
            raise AdapterInvalid(f"{CONFIG_NAME}: num_cayley_neumann_terms must be a number from 1 to {MAX_TERMS}")
        if not isinstance(eps, int | float) or not 0 < eps <= 1:
            raise AdapterInvalid(f"{CONFIG_NAME}: eps must be a number above 0, at most 1")
        return Rotation(
            bool(fields.get("block_share")),
            bool(fields.get("coft")),
            float(eps),
            num_terms if fields.get("use_cayley_neumann", True) else 0,
            *parse_blocks(fields, "oft_block_size", "r", 32),
        )

    def plan(self, tensor: TensorInfo, target: TargetModule) -> PlannedSaved:
        """The planned rotation of oft_R [blocks, size * (size - 1) / 2], the values above the diagonals. Raises
        ShapeMismatch."""
        inputs = target.in_features
        size = (
            near_divisor(inputs, self.block_size)
            if self.block_size
            else inputs // near_divisor(inputs, self.num_blocks)
        )
        num_blocks = 1 if self.is_shared else inputs // size
        check_shape(tensor, (num_blocks, size * (size - 1) // 2))
        if size == 1:
            num_blocks = inputs  # native kernels take blocks of one input for a gain of each

        def make(read: Read) -> Tensor:
            values = read(tensor)
            skew = values.new_zeros(num_blocks, size, size)
            skew[(slice(None), *torch.triu_indices(size, size, 1))] = values
            skew = skew - skew.mT
            if self.is_constrained:
                skew = self._projected(skew)
            return self._series(skew) if self.num_terms else cayley(skew)

        return PlannedSaved(SavedShape(target.path, PARAMETER, (num_blocks, size, size)), tensor, made=make)

    def _projected(self, skew: Tensor) -> Tensor:
        """The matrices, cut to the length that the constraint allows where they are longer, which PEFT has in
        float32."""
        longest = self.eps / torch.tensor(len(skew)).sqrt()
        lengths = torch.linalg.vector_norm(skew, dim=(1, 2), keepdim=True)
        return torch.where(lengths <= longest, skew, longest * (skew / lengths))

    def _series(self, skew: Tensor) -> Tensor:
        """Neumann's series 1 + 2 Q + 2 Q^2 + ..., and the last term once, as PEFT has it."""
        found = torch.eye(skew.shape[-1], dtype=skew.dtype).expand_as(skew).clone()
        if self.num_terms == 1:
            return found
        found += 2 * skew
        if self.num_terms == 2:
            return found
        power = skew @ skew
        found += 2 * power
        for _ in range(3, self.num_terms - 1):
            power = power @ skew
            found += 2 * power
        return found + power @ skew


NO_ROTATION: Final = Rotation()


def parse_blocks(fields: Mapping[str, Any], size_name: str, num_name: str, size: int) -> tuple[int, int]:
    """Size and number of blocks, one of which is 0, in the fields of these names; `size` where they are not there.
    Raises AdapterInvalid."""
    found = fields.get(size_name, size), fields.get(num_name, 0)
    if not all(type(one) is int and one >= 0 for one in found) or (found[0] > 0) is (found[1] > 0):
        raise AdapterInvalid(f"{CONFIG_NAME}: one of {size_name} and {num_name} must be a number above 0, the other 0")
    return found


def near_divisor(inputs: int, wanted: int) -> int:
    """PEFT's divisor near a wanted one: the nearest, except for wanted ones above `inputs`."""
    if wanted >= inputs:
        return inputs
    above = next(one for one in range(wanted, inputs + 1) if inputs % one == 0)
    below = next(one for one in range(wanted, 0, -1) if inputs % one == 0)
    return below if wanted - below <= above - wanted else above


def plan_boft(
    parts: Mapping[str, TensorInfo], target: TargetModule, block_size: int, num_blocks: int
) -> tuple[PlannedSaved, TensorInfo]:
    """The planned rotation of boft_R [1, blocks, size, size], and the scale boft_s [out, 1]. Raises AdapterUnsupported
    for more than one butterfly factor, or ShapeMismatch. One of `block_size` and `num_blocks` is 0."""
    matrices, scale = parts["boft_R"], parts["boft_s"]
    num_factors = matrices.shape[0] if len(matrices.shape) == 4 else 0
    if num_factors > 1:
        raise AdapterUnsupported(
            f"{matrices.where} has {num_factors} butterfly factors (boft_n_butterfly_factor), of which one is served"
        )
    size = block_size or target.in_features // num_blocks
    num_blocks = num_blocks or target.in_features // size
    if size * num_blocks != target.in_features:
        raise ShapeMismatch(
            f"{matrices.where}: {CONFIG_NAME} makes no blocks for the {target.in_features} inputs of {target.path!a}"
        )
    check_shape(matrices, (1, num_blocks, size, size))
    check_shape(scale, (target.out_features, 1))

    def make(read: Read) -> Tensor:
        (found,) = read(matrices)
        return cayley(0.5 * (found - found.mT))

    return PlannedSaved(SavedShape(target.path, PARAMETER, (num_blocks, size, size)), matrices, made=make), scale


def cayley(skew: Tensor) -> Tensor:
    """Cayley's transform (1 - Q) (1 + Q)^-1 of skew-symmetric matrices: orthogonal ones."""
    one = torch.eye(skew.shape[-1], dtype=skew.dtype).expand_as(skew)
    found: Tensor = torch.linalg.solve(one + skew, one - skew, left=False)
    return found
