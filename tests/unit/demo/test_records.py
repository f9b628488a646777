"""Records of the demo: seed, split and prompts."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from loraplex_demo.formats import FORMATS
from loraplex_demo.records import KINDS, PROMPT_END, SCHEMAS, Split, draw_examples, split_of

NUM_RECORDS = 600
SPLITS: tuple[Split, ...] = ("train", "heldout")


def test_a_stream_is_its_name() -> None:
    first, again = (list(islice(draw_examples("a", "train"), 20)) for _ in range(2))
    assert first == again
    assert first != list(islice(draw_examples("b", "train"), 20))
    assert first != list(islice(draw_examples("a", "heldout"), 20))


def test_held_out_numbers_dates_and_codes_are_never_shown_in_training() -> None:
    coded = {"date", "id", "number"}
    seen: dict[Split, set[str]] = {"train": set(), "heldout": set()}
    for split, values in seen.items():
        for record, _ in islice(draw_examples("values", split), NUM_RECORDS):
            values |= {str(value) for key, value in record.fields if key in coded or not isinstance(value, str)}
    assert len(seen["heldout"]) > 100
    assert not seen["train"] & seen["heldout"]
    assert {split_of(value) for value in seen["heldout"]} == {"heldout"}


@pytest.mark.parametrize("split", SPLITS)
def test_prompts_state_every_value_and_name_no_format(split: Split) -> None:
    for record, prompt in islice(draw_examples("prompts", split), NUM_RECORDS):
        assert prompt.endswith(PROMPT_END)
        for _, value in record.fields:
            assert str(value) in prompt
        assert not set(re.findall(r"\w+", prompt.lower())) & set(FORMATS)


def test_every_kind_and_both_ways_of_stating_it_appear() -> None:
    examples = list(islice(draw_examples("kinds", "heldout"), NUM_RECORDS))
    assert {record.kind for record, _ in examples} == set(KINDS)
    num_notes = sum(prompt.startswith(f"{record.kind.capitalize()}: ") for record, prompt in examples)
    assert 0.3 < num_notes / NUM_RECORDS < 0.7


def test_only_asked_kinds_are_drawn() -> None:
    assert {record.kind for record, _ in islice(draw_examples("some", "train", ("book",)), 50)} == {"book"}


def test_fields_keep_the_order_of_the_schema() -> None:
    for record, _ in islice(draw_examples("order", "train"), 100):
        keys = [key for key, _ in record.fields]
        assert keys == [field.key for field in SCHEMAS[record.kind] if field.key in keys]
        assert all(field.optional or field.key in keys for field in SCHEMAS[record.kind])
