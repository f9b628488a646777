"""CPU back end: torch's threads in steps of few tokens."""

from __future__ import annotations

import pytest
import torch
from support.driver import Job
from support.native_kernels import native_kernels
from support.native_models import native_model, native_rig

from loraplex_server.backends.cpu.backend import FEW_TOKENS


@pytest.mark.parametrize("family", ["mixtral", "falcon"])
def test_torch_takes_one_thread_for_few_tokens(family: str) -> None:
    """Its other threads would spin on cores that the kernels need."""
    rig = native_rig(native_model(family), native_kernels(3), max_chunk=120)
    seen: dict[int, int] = {}  # threads by tokens of a step
    embeddings = rig.loaded.model.get_input_embeddings()
    embeddings.register_forward_hook(
        lambda _module, inputs, _y: seen.update({inputs[0].numel(): torch.get_num_threads()})
    )
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as beside a decoder
    try:
        rig.run([Job([5 + idx % 40 for idx in range(110)], 4) for _ in range(4)])
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    assert min(seen) <= FEW_TOKENS
    assert max(seen) > FEW_TOKENS
    assert all(num_threads == (1 if num_tokens <= FEW_TOKENS else 3) for num_tokens, num_threads in seen.items())
