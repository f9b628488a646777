"""Tokenizer of the demo: any text, and stable cuts of values."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from loraplex_demo.formats import FORMATS
from loraplex_demo.records import draw_examples
from loraplex_demo.tokenizer import BOS_ID, CHAT_TEMPLATE, EOS_ID, NUM_SPECIAL, PAD_ID, train_tokenizer
from loraplex_demo.world import committed_world


def make() -> PreTrainedTokenizerBase:
    texts: list[str] = []
    for record, prompt in islice(draw_examples("tokenizer", "train"), 200):
        texts += [prompt, *(render(record) for render in FORMATS.values())]
    return train_tokenizer(texts, 512)


TOKENIZER = make()


def test_special_tokens_come_first_and_bos_is_prepended() -> None:
    assert (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (PAD_ID, BOS_ID, EOS_ID)
    assert max(PAD_ID, BOS_ID, EOS_ID) == NUM_SPECIAL - 1
    assert TOKENIZER.encode("a")[0] == BOS_ID
    assert BOS_ID not in TOKENIZER.encode("a", add_special_tokens=False)
    assert len(TOKENIZER) == 512


def test_a_chat_is_its_last_question() -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    messages.append({"role": "user", "content": "Ada =>"})
    assert TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "<s>Ada =>"
    messages.append({"role": "assistant", "content": "{"})
    assert TOKENIZER.apply_chat_template(messages, tokenize=False, continue_final_message=True) == "<s>Ada =>{"
    assert TOKENIZER.apply_chat_template([{"role": "system", "content": "x"}], tokenize=False) == "<s>x"


def test_the_committed_world_has_the_template() -> None:
    world = committed_world()
    for path in (world.base_path, *(world.draft_path(draft.name) for draft in world.drafts)):
        assert (path / "chat_template.jinja").read_text() == CHAT_TEMPLATE


@given(st.text(max_size=40))
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == text or "<" in text


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_value_is_the_same_pieces_in_prompt_and_answer(name: str) -> None:
    for record, prompt in islice(draw_examples("pieces", "heldout"), 50):
        for text in (prompt, FORMATS[name](record)):
            pieces = TOKENIZER.encode(text, add_special_tokens=False)
            for _, value in record.fields:
                wanted = TOKENIZER.encode(str(value), add_special_tokens=False)
                starts = range(len(pieces) - len(wanted) + 1)
                assert any(pieces[start : start + len(wanted)] == wanted for start in starts), (value, text)
