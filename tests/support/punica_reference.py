"""Punica's two operators (arXiv 2310.18547) in its own layouts, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from loraplex_server.backends.reference import add_low_rank


def sgmv(
    y: Tensor,
    x: Tensor,
    wa: Sequence[Tensor],
    wb: Sequence[Tensor],
    s: Sequence[int],
    layer_idx: int,
    scale: float = 1.0,
) -> None:
    """y[s[i]:s[i+1]] += scale * x[s[i]:s[i+1]] @ wa[i][layer].T @ wb[i][layer], with wa [layers, rank, in] and
    wb [layers, rank, out]: one pair per segment, the segments side by side."""
    for i in range(len(s) - 1):
        rows = slice(s[i], s[i + 1])
        add_low_rank(y[rows], x[rows], wa[i][layer_idx], wb[i][layer_idx].T, scale)


def bgmv(y: Tensor, x: Tensor, wa: Tensor, wb: Tensor, indices: Tensor, layer_idx: int, scale: float = 1.0) -> None:
    """y[i] += scale * x[i] @ wa[indices[i], layer].T @ wb[indices[i], layer].T, with wa [slots, layers, rank, in] and
    wb [slots, layers, out, rank]: every row has its own slot."""
    for i, slot in enumerate(indices.tolist()):
        add_low_rank(y[i : i + 1], x[i : i + 1], wa[slot, layer_idx], wb[slot, layer_idx], scale)
