"""Models whose forward has no option for the rows of the head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.zoo import ZOO
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from loraplex_server.model.head_rows import choose_head_rows


class PlainLlama(LlamaForCausalLM):
    """Llama whose forward computes the logits of all tokens."""

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        return super().forward(input_ids=input_ids, **options)


@pytest.mark.parametrize("rows", [torch.tensor([1, 4]), 2, 0])
def test_gives_the_head_the_rows_that_are_asked_for(rows: Tensor | int) -> None:
    model = PlainLlama(ZOO["llama"]()).eval()
    choose_head_rows(model)
    model.lm_head = nn.Linear(32, 7)  # what takes the head's place is given them, too
    seen: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    ids = torch.arange(5, 11).unsqueeze(0)
    want = LlamaForCausalLM.forward(model, input_ids=ids, logits_to_keep=rows).logits
    got = model(input_ids=ids, logits_to_keep=rows).logits
    assert torch.equal(got, want)
    assert seen == [want.shape[1]] * 2, "watchers see what the head is given"


def test_leaves_a_forward_with_that_option() -> None:
    model = LlamaForCausalLM(ZOO["llama"]())
    choose_head_rows(model)
    assert "forward" not in vars(model)
