"""Which attention back ends there are, whether they can be used here, and which one is taken."""

from __future__ import annotations

import torch

from loraplex_proto.errors import InvalidArgument
from loraplex_server.model.attention.base import AttentionBackend, PagedAttention
from loraplex_server.model.attention.torch_paged import TorchPagedAttention


def available_attention(device: torch.device | None = None) -> list[AttentionBackend]:
    """All back ends for `device`, best first."""
    return [AttentionBackend("torch", True, "plain torch, any device", TorchPagedAttention)]


def make_attention(name: str = "auto", device: torch.device | None = None) -> PagedAttention:
    """The back end called `name`, or the best usable one. Raises InvalidArgument."""
    backends = available_attention(device)
    for backend in backends:
        if backend.name == name or (name == "auto" and backend.is_usable):
            if backend.make is None or not backend.is_usable:
                raise InvalidArgument(f"the attention back end {name!r} cannot be used here: {backend.reason}")
            return backend.make()
    known = ", ".join(backend.name for backend in backends)
    raise InvalidArgument(f"there is no attention back end {name!r}; known are: auto, {known}")
