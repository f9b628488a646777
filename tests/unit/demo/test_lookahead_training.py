"""Lookahead training: loss, labels, and a model that learns."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loraplex_demo.datasets import Row, pad_rows
from loraplex_demo.fitting import base_optimizers, fit
from loraplex_demo.lookahead_training import ModelWithHeads, later_tokens, lookahead_loss
from loraplex_training.hidden_states import NOTHING

# Two rows, of 3 and of 1 token to be learned.
BATCH = pad_rows([Row([3, 4], [5, 6, 7]), Row([3], [8])])


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True,
        )
    )  # fmt: skip


def test_heads_are_asked_for_the_tokens_after_the_next_that_count() -> None:
    labels = later_tokens(BATCH, 3)
    assert labels.shape == (2, 4, 3)
    # The first row's positions: 3 and 4 are given, 5 6 7 are learned.
    assert labels[0].tolist() == [[5, 6, 7], [6, 7, NOTHING], [7, NOTHING, NOTHING], [NOTHING] * 3]
    assert labels[1].eq(NOTHING).all()  # nothing comes after its one token


def test_the_loss_of_heads_that_know_nothing_is_that_of_chance(model: LlamaForCausalLM) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    # ln 16 for the next token and, with falling weights, for each of the two heads.
    assert lookahead_loss(ModelWithHeads(model, 2), BATCH).item() == pytest.approx(math.log(16) * (1 + 0.3 + 0.3 * 0.8))


def test_heads_without_any_label_cost_nothing(model: LlamaForCausalLM) -> None:
    few = lookahead_loss(ModelWithHeads(model, 2), BATCH)
    many = lookahead_loss(ModelWithHeads(model, 5), BATCH)  # 7 is the last token there is: heads 2 to 4 have nothing
    assert many.item() == pytest.approx(few.item())


def test_the_model_itself_learns_to_look_ahead(model: LlamaForCausalLM) -> None:
    both = ModelWithHeads(model, 2)
    batch = pad_rows([Row([3, first], [5, 6, first, first + 1]) for first in (8, 10, 12)])
    losses: list[float] = []
    optimizers = base_optimizers(both, lr=1e-2)
    fit(both, optimizers, iter([batch] * 80), num_steps=80, on_step=losses.append, loss_of=lookahead_loss)
    assert losses[-1] < 0.3 * losses[0]
    assert both.heads.weight.abs().sum() > 0
    # Where 5 is said next, the state tells by now what is copied two tokens later.
    with torch.inference_mode():
        states = model.model(input_ids=batch.token_ids).last_hidden_state[:, 1]
        assert model.lm_head(both.heads(states))[1].argmax(dim=-1).tolist() == [8, 10, 12]
