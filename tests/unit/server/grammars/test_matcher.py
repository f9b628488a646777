"""Compiled grammars against texts drawn at random from their masks."""

from __future__ import annotations

import gc
import json
import random
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from jsonschema import validate
from support.masks import allowed
from support.schemas import random_schema, refused_schema
from support.world import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument
from loraplex_contracts.request import Grammar
from loraplex_server.grammars import matcher as module
from loraplex_server.grammars import source
from loraplex_server.grammars.matcher import CompileLimit, Compiler, Grammars, MaskThread, Matcher, allowed_tokens
from loraplex_server.grammars.tokenizer import LibraryTokenizer

EOS = 256
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ['{"', '":', "},", "tr", "ue"]


def tokenizer() -> Tokenizer:
    """Every byte is a token; then an end-of-sequence token, and tokens of several bytes."""
    vocabulary = {char: idx for idx, char in enumerate([*LETTERS, "</s>", *WORDS])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    return made


TOKENIZER = tokenizer()
NUM_LOGITS = 270  # more than there are tokens
LIMITS: Mapping[str, Any] = module._LIMITS  # pyright: ignore[reportPrivateUsage]
COMPILER = Compiler(LibraryTokenizer.of(TOKENIZER.to_str(), NUM_LOGITS, [EOS]))


@pytest.fixture(scope="module")
def grammars() -> Compiler:
    return COMPILER


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def text_of(token_ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(token_ids))


def draw(matcher: Matcher, dice: random.Random, num_tokens: int = 400) -> tuple[list[int], bool]:
    """Random tokens, and whether they came to the end."""
    drawn: list[int] = []
    for _ in range(num_tokens):
        token_id = dice.choice(allowed(matcher)[0])
        if token_id == EOS:
            return drawn, True
        drawn.append(token_id)
        if matcher.advance(token_id):
            return drawn, True
    return drawn, False


def check(grammars: Compiler, seed: int) -> bool:
    dice = random.Random(seed)
    schema = random_schema(dice)
    grammar = source.json_schema(json.dumps(schema), compact=bool(seed % 2))
    drawn, is_over = draw(grammars.compile(grammar).copy(), dice)
    if is_over:
        validate(json.loads(text_of(drawn)), schema)
    return is_over


def test_texts_follow_generated_schemas(grammars: Compiler) -> None:
    assert sum(check(grammars, seed) for seed in range(60)) > 40


@pytest.mark.slow
def test_texts_follow_many_generated_schemas(grammars: Compiler) -> None:
    assert sum(check(grammars, seed) for seed in range(1000, 5000)) > 3000


def fits(grammars: Compiler, schema: Mapping[str, object], text: str, *, compact: bool = True) -> bool:
    matcher = grammars.compile(source.json_schema(json.dumps(schema), compact=compact)).copy()
    return matcher.inner.try_consume_tokens(ids(text)) == len(ids(text)) and matcher.inner.is_accepting()


@pytest.mark.parametrize(
    ("given", "fitting"),
    [
        ({"item_separator": ", ", "key_separator": ": "}, "B"),  # as guidance writes them
        ({"item_separator": ",", "key_separator": ":"}, "A"),
        ({"item_separator": r"\s*,\s*", "key_separator": ["x"], "whitespace_flexible": True}, "AB"),
        ({"key_separator": ": "}, "B"),
        (None, "AB"),
    ],
)
def test_separators_are_those_that_the_schema_gives(grammars: Compiler, given: object, fitting: str) -> None:
    schema = {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["a", "b"]}
    schema |= {"additionalProperties": False, "x-guidance": given}
    texts = {"A": '{"a":null,"b":null}', "B": '{"a": null, "b": null}', "C": '{"a" : null ,"b": null}'}
    assert "".join(name for name, text in texts.items() if fits(grammars, schema, text, compact=False)) == fitting
    assert "".join(name for name, text in texts.items() if fits(grammars, schema, text)) == "A"


@pytest.mark.parametrize(
    ("bounds", "outside", "inside"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "0 0.0 -0 0.51", "0.1 0.5 0.000000001"),
        ({"exclusiveMinimum": 1, "minimum": 0.5, "exclusiveMaximum": 1.25}, "0.5 1 1.0 1.25", "1.1 1.2499"),
        ({"exclusiveMinimum": 1, "minimum": 1.125, "maximum": 1.25}, "1 1.1", "1.125 1.25"),
        ({"exclusiveMaximum": 0, "minimum": -0.5}, "0 -0 -0.0 0.1", "-0.1 -0.5"),
        ({"exclusiveMaximum": -99, "exclusiveMinimum": -99.5, "maximum": 5}, "-99 -99.0 -99.5", "-99.1"),
        ({"exclusiveMinimum": 2**40, "maximum": 2**40 + 0.5}, f"{2**40} {2**40 + 1}", f"{2**40 + 0.25}"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0 1", "0.5"),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, "0 0.0 0.51", "0.1 0.5"),
        ({"exclusiveMaximum": 9, "anyOf": [{"minimum": 8.5}, {"maximum": 5}]}, "8.4 9 9.0", "-1 5 8.6"),
        ({"$ref": "#/$defs/p", "maximum": 0.5, "$defs": {"p": {"exclusiveMinimum": 0}}}, "0 0.0 0.51", "0.1 0.5"),
        ({"exclusiveMinimum": 0}, "0 0.0 -0 -1", "0.1 1 1000.5 0.0000000001"),
        ({"minimum": 0, "exclusiveMaximum": 1}, "1 1.0 -0.1", "0 0.5 0.9 0.99"),
        ({"exclusiveMaximum": 2**40, "minimum": 2**40 - 0.5}, f"{2**40} {2**40 - 1}", f"{2**40 - 0.25}"),
        ({"exclusiveMinimum": 0, "type": "integer"}, "0 -0 -1", "1 2 1000"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 10, "type": "integer"}, "0 10", "1 9"),
        ({"exclusiveMinimum": 3, "type": "integer", "allOf": [{"maximum": 7}]}, "3 8", "4 7"),
    ],
)
def test_excluded_bounds_are_left_out(
    grammars: Compiler, bounds: Mapping[str, object], outside: str, inside: str
) -> None:
    for texts, is_inside in ((outside, False), (inside, True)):
        assert [fits(grammars, {"type": "number", **bounds}, text) for text in texts.split()] == [
            is_inside for _ in texts.split()
        ]


@pytest.mark.parametrize("bound", [1, 10**8, 2**30, 2**40, 2**50, 2**52 + 1, 2**53 - 2, 2**53 - 1])
def test_excluded_bounds_may_be_large(grammars: Compiler, bound: int) -> None:
    for signed in (bound, -bound):
        for kind in ("integer", "number"):
            for name, inside in (("exclusiveMinimum", signed + 1), ("exclusiveMaximum", signed - 1)):
                schema = {"type": kind, name: signed}
                assert [fits(grammars, schema, str(one)) for one in (signed, inside)] == [False, True], schema


def test_a_schema_without_a_type_that_tells_of_properties_is_one_of_an_object(grammars: Compiler) -> None:
    """As in TGI's examples."""
    schema = {"properties": {"a": {"properties": {"b": {"type": "boolean"}}}}, "required": ["a"]}
    for text, is_ok in (('{"a":{"b":true}}', True), ('{"a":1}', False), ("[]", False), ("true", False), ("{}", False)):
        assert fits(grammars, schema, text) == is_ok, text


@pytest.mark.parametrize(
    ("idle", "demanding"),
    [
        ({"propertyNames": {"type": "string"}}, {"propertyNames": {"type": "string", "maxLength": 3}}),
        ({"propertyNames": True}, {"propertyNames": False}),
        ({"uniqueItems": False, "dependentRequired": {}, "dependentSchemas": {}}, {"uniqueItems": True}),
        ({"contains": {"const": 1}, "minContains": 0}, {"contains": True}),
        ({"minContains": 0}, {"contains": True, "minContains": 0, "maxContains": 2}),
    ],
)
def test_keywords_that_demand_nothing_are_dropped(
    grammars: Compiler, idle: Mapping[str, object], demanding: Mapping[str, object]
) -> None:
    schema = {"type": ["object", "array"], "additionalProperties": {"type": "integer"}}
    nested = [{"type": "object", "properties": {"a": {**schema, **more}}} for more in ({}, idle)]
    plain, same = (source.json_schema(json.dumps(one)) for one in nested)
    assert same == plain
    with pytest.raises(InvalidArgument, match=next(iter(demanding))):
        grammars.compile(source.json_schema(json.dumps({**schema, **demanding})))


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ('^[^"]$', "\\\n!a]-é"),
        ('^[^"\\\\]$', "\n!a]-é"),
        ("^[\\x00-!]$", "\n!"),
        ("^\\p{Cc}$", "\n"),
        ("^\\PL$", '"\\\n!]-'),
        ("^[^]a]$", '"\\\n!-é'),
        ("^[a[^\\x22-z]]$", "\n!aé"),
        ("^(?:a|]|[-a])$", "a]-"),
    ],
)
def test_classes_hold_in_strings(grammars: Compiler, pattern: str, wanted: str) -> None:
    """A class that leaves out the quotation mark or the backslash leaves out its escape too."""
    chars = '"\\\n!a]-é'
    value = {"type": "string", "pattern": pattern}
    assert "".join(one for one in chars if fits(grammars, value, json.dumps(one, ensure_ascii=False))) == wanted
    named = {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False}
    assert [one for one in '"\\' if fits(grammars, named, "{" + json.dumps(one) + ":null}")] == [
        one for one in '"\\' if one in wanted
    ]


@pytest.mark.parametrize("char", [*map(chr, range(32)), "\x7f"])
def test_control_characters_with_a_short_escape_are_served(grammars: Compiler, char: str) -> None:
    for schema, value in (
        ({"const": char}, char),
        ({"enum": [char]}, char),
        ({"type": "object", "properties": {char: {"type": "null"}}, "required": [char]}, {char: None}),
    ):
        if char in "\b\t\n\f\r":
            assert fits(grammars, schema, json.dumps(value, separators=(",", ":")))
        else:
            with pytest.raises(InvalidArgument, match="control characters"):
                source.json_schema(json.dumps(schema))


@pytest.mark.parametrize("reference", ["#/x", "#/x/y", "#/properties/a/enum/0", "#/$defs", "#/prefixItems/-1"])
def test_references_lead_to_parts_that_are_checked(reference: str) -> None:
    schema = {"$ref": reference, "x": {"y": {"divisibleBy": 3}}, "$defs": {}, "properties": {"a": {"enum": [{}]}}}
    with pytest.raises(InvalidArgument, match=r"`\$ref` cannot be enforced"):
        source.json_schema(json.dumps(schema))


@pytest.mark.parametrize("reference", ["#", "#/$defs/a~1b%20c", "#/properties/a/anyOf/1", "#/properties/b"])
def test_references_to_parts(reference: str) -> None:
    part = {"type": "integer"}
    properties = {"a": {"anyOf": [True, part]}, "b": True, "c": {"$ref": reference}}
    schema = {"type": "object", "$defs": {"a/b c": part}, "properties": properties}
    source.json_schema(json.dumps(schema))


def test_a_schema_that_needs_itself_is_refused(grammars: Compiler) -> None:
    node: dict[str, Any] = {"properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}
    schema = {"type": "array", "items": {"$ref": "#/$defs/node"}, "$defs": {"node": node}}
    for make, text in ((source.json_schema, json.dumps(schema)), (source.lark, f"start: %json {json.dumps(schema)}")):
        with pytest.raises(InvalidArgument, match=r"no text fits `\$ref` '#/\$defs/node', because") as caught:
            make(text)
        assert caught.value.field == f"grammar.{make.__name__}"
    node["properties"]["next"] = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    assert fits(grammars, schema, '[{"next":{"next":null}}]')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 3, "maxLength": 2},
        {"enum": []},
        {"anyOf": [False]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"properties": {"a": False}, "required": ["a"]},
    ],
)
def test_a_schema_that_nothing_fits_is_refused(grammars: Compiler, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"`grammar.json_schema` is refused: Unsatisfiable schema"):
        grammars.compile(source.json_schema(json.dumps(schema)))


@pytest.mark.parametrize(
    ("one", "other", "is_apart"),
    [
        ({"type": "string"}, {"type": "integer"}, True),
        ({"const": "a"}, {"enum": ["b", "c"]}, True),
        (
            {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
            {"type": "object", "properties": {"kind": {"const": "b"}}, "required": ["kind"]},
            True,
        ),
        ({"type": "integer"}, {"type": "number"}, False),
        ({"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}, False),
    ],
)
def test_one_of_says_what_tells_its_schemas_apart(
    grammars: Compiler, one: dict[str, Any], other: dict[str, Any], is_apart: bool
) -> None:
    schema = {"oneOf": [one, other]}
    if is_apart:
        grammars.compile(source.json_schema(json.dumps(schema)))
        return
    for grammar in (source.json_schema(json.dumps(schema)), source.lark(f"start: %json {json.dumps(schema)}")):
        with pytest.raises(InvalidArgument, match=r"`oneOf` cannot be enforced .*; write `anyOf`") as caught:
            grammars.compile(grammar)
        assert "coerce" not in caught.value.message


@pytest.mark.parametrize("seed", range(30))
def test_refusals_name_the_keyword(grammars: Compiler, seed: int) -> None:
    schema, keyword = refused_schema(random.Random(seed))
    with pytest.raises(InvalidArgument) as caught:
        grammars.compile(source.json_schema(json.dumps(schema)))
    assert f"{keyword}" in caught.value.message
    assert caught.value.field == "grammar.json_schema"


@pytest.mark.parametrize("seed", range(20))
def test_drafts_are_cut_to_what_is_legal(grammars: Compiler, seed: int) -> None:
    """A draft's legal part, then masks at each of its positions, equal a way through the grammar token by token."""
    dice = random.Random(seed)
    grammar = source.json_schema(json.dumps(random_schema(dice)))
    matcher = grammars.compile(grammar).copy()
    drawn, is_over = draw(matcher.copy(), dice)
    at = dice.randrange(len(drawn))
    for token_id in drawn[:at]:
        matcher.advance(token_id)
    for draft in (drawn[at : at + 9], [*drawn[at : at + 4], EOS, EOS], [EOS], [*drawn[at : at + 3], 0, 1, 2], []):
        num = matcher.num_legal(draft)
        plain, wanted = matcher.copy(), [allowed(matcher)[0]]
        for token_id in draft[:num]:
            assert token_id in wanted[-1]
            assert not plain.advance(token_id)
            wanted.append(allowed(plain)[0])
        assert allowed(matcher, draft[:num]) == wanted
        if num < len(draft) and draft[num] in wanted[-1] and draft[num] != EOS:
            assert plain.advance(draft[num]), "only what ends the text is left out"
        assert not matcher.error
    assert matcher.num_legal(drawn[at:]) == len(drawn) - at - is_over * _ends(grammars, grammar, drawn)


def _ends(grammars: Compiler, grammar: Grammar, drawn: Sequence[int]) -> bool:
    """True if nothing may follow, or only an end-of-sequence token was drawn."""
    matcher = grammars.compile(grammar)
    return [matcher.advance(token_id) for token_id in drawn][-1]


@pytest.fixture(params=["at once", "in parallel"])
def is_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """No time at once sends all masks to the library's threads."""
    monkeypatch.setattr(module, "AT_ONCE_S", 60.0 if request.param == "at once" else -1.0)
    return request.param == "at once"


def test_masks_of_many_rows_at_once(grammars: Compiler, is_at_once: bool) -> None:
    matchers = [grammars.compile(source.regex(text)).copy() for text in ("abc", "a|b", "xyz")]
    jobs = [(matchers[0], 0, ids("ab")), (matchers[1], 3, []), (matchers[2], 4, ids("x"))]
    bits = allowed_tokens(jobs, 6)
    unpacked = np.unpackbits(bits.view(np.uint8), axis=1, count=NUM_LOGITS, bitorder="little")
    found = [text_of(np.flatnonzero(row)) for row in unpacked]
    assert found == ["a", "b", "c", "ab", "x", "y"]


def test_masks_beyond_the_time_for_them_are_made_in_parallel(
    grammars: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    matchers = [grammars.compile(source.regex(text)).copy() for text in ("abc", "a|b", "xyz")]
    jobs = [(matcher, row, ()) for row, matcher in enumerate(matchers)]
    whole = allowed_tokens(jobs, 3)
    assert not any(matcher.num_slow for matcher in matchers)
    given: list[Sequence[object]] = []
    fill = module.fill_in_parallel
    monkeypatch.setattr(module, "fill_in_parallel", lambda left, bits: (given.append(left), fill(left, bits)))
    times = iter((0.0, 1.0, 2.0, 2.0, 2.0))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    assert np.array_equal(allowed_tokens(jobs, 3), whole)
    assert given.pop() == jobs[1:]
    assert np.array_equal(allowed_tokens(jobs, 3), whole)
    assert given.pop() == jobs[:1], "the first one was slow"
    assert [matcher.num_slow for matcher in matchers] == [module.NUM_SLOW - 1, 0, 0]


def test_masks_are_made_beside_other_work(grammars: Compiler, is_at_once: bool) -> None:
    matchers = [grammars.compile(source.regex(text)).copy() for text in ("abc", "a|b")]
    jobs = [(matchers[0], 0, ids("ab")), (matchers[1], 3, [])]
    thread = MaskThread()
    for _ in range(3):
        thread.start(jobs, 4)
        assert np.array_equal(thread.wait(), allowed_tokens(jobs, 4))
    names = [one.name for one in threading.enumerate()]
    assert is_at_once or "masks" in names
    del thread
    gc.collect()
    for one in threading.enumerate():
        if one.name == "masks" and names.count("masks") == 1:
            one.join(10)
            assert not one.is_alive()


def test_what_masks_beside_other_work_raise(grammars: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [(grammars.compile(source.regex("abc")).copy(), 0, ())]
    monkeypatch.setattr(module, "AT_ONCE_S", -1.0)
    thread = MaskThread()
    with monkeypatch.context() as broken:
        broken.setattr(module, "_executor", lambda: None)
        thread.start(jobs, 1)
        with pytest.raises(AttributeError):
            thread.wait()
    thread.start(jobs, 1)
    assert np.array_equal(thread.wait(), allowed_tokens(jobs, 1))


def test_ends_are_allowed_where_the_text_may_end(grammars: Compiler) -> None:
    matcher = grammars.compile(source.regex("ab?"))
    assert EOS not in allowed(matcher)[0]
    assert not matcher.advance(ids("a")[0])
    assert sorted(allowed(matcher)[0]) == sorted([EOS, *ids("b")])
    assert matcher.advance(ids("b")[0])
    assert allowed(matcher)[0] == [EOS]


def test_a_model_without_an_end_of_sequence_token() -> None:
    grammars = Compiler(LibraryTokenizer.of(TOKENIZER.to_str(), NUM_LOGITS, []))
    matcher = grammars.compile(source.choice(["yes", "no"]))
    assert [matcher.advance(token_id) for token_id in ids("yes")] == [False, False, True]


@pytest.mark.parametrize("seed", [78, 976])
def test_masks_along_drafts_are_those_of_one_token_after_another(seed: int) -> None:
    """Of schemas and drafts behind some of which the library's own masks for drafts are wrong."""
    made = byte_tokenizer()
    grammars = Compiler(LibraryTokenizer.of(made.backend_tokenizer.to_str(), len(made), [made.eos_token_id]))

    def masks(matcher: Matcher, draft: Sequence[int]) -> list[list[int]]:
        bits = allowed_tokens([(matcher, 0, draft)], len(draft) + 1)
        return [np.flatnonzero(row).tolist() for row in np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")]

    schema = random_schema(random.Random(seed))
    compiled = grammars.compile(source.json_schema(json.dumps(schema), compact=bool(seed % 2)))
    for run in range(3):
        matcher, dice, is_over = compiled.copy(), random.Random(run * 7919 + seed), False
        while not is_over:
            ahead, draft = matcher.copy(), list[int]()
            for _ in range(dice.randint(1, 6)):
                legal = masks(ahead, ())[0]
                draft.append(dice.choice(range(len(made)) if dice.random() < 0.15 else legal))
                if draft[-1] == made.eos_token_id or ahead.error or ahead.advance(draft[-1]) or ahead.error:
                    break
            forced = list(matcher.forced())
            if forced and dice.random() < 0.5:
                draft = forced[:8] + draft[:1]
            draft = draft[: matcher.num_legal(draft)]
            for token_id, row in zip([*draft, None], masks(matcher, draft), strict=True):
                assert row == masks(matcher.copy(), ())[0]
                is_kept = token_id in row and dice.random() < 0.7
                drawn = token_id if is_kept and token_id is not None else dice.choice(row)
                is_over = drawn == made.eos_token_id or matcher.advance(drawn)
                assert not matcher.error
                if is_over or drawn != token_id:
                    break


def test_what_is_forced(grammars: Compiler) -> None:
    matcher = grammars.compile(source.json_schema('{"type": "object", "properties": {"key": {}}, "required": ["key"]}'))
    forced = matcher.forced()
    assert text_of(forced).startswith('{"')
    assert matcher.num_legal(forced) == len(forced)
    assert list(grammars.compile(source.regex("a|b")).forced()) == []


def test_forced_tokens_are_those_of_the_place(grammars: Compiler) -> None:
    """Also where the text has gone along them, or left them by other tokens that spell the same."""
    start = grammars.compile(source.regex('[ab]\\{":true[cd]yes'))
    for seed in range(20):
        matcher, dice = start.copy(), random.Random(seed)
        while True:
            assert list(matcher.forced()) == matcher.inner.compute_ff_tokens()
            drawn = dice.choice(allowed(matcher)[0])
            if matcher.advance(drawn):
                break


def test_a_long_run_of_forced_tokens_is_looked_at_once(grammars: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library finds all of it at each call, which would hold up all steps."""
    monkeypatch.setattr(module, "MAX_FORCED", 8)
    compiled = grammars.compile(source.regex("[ab]x{9}[ab]y{8}"))
    first, other = compiled.copy(), compiled.copy()
    first.advance(ids("a")[0])
    other.advance(ids("b")[0])
    assert text_of(first.forced()) == "x" * 8
    assert list(other.forced()) == []
    for token_id in ids("xxxxxxxxxa"):
        first.advance(token_id)
    assert list(first.forced()) == []


def test_only_a_limit_that_was_met_makes_a_grammar_too_complex(
    grammars: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = grammars.compile(source.regex("aa|bb"))
    assert not lost.error
    lost.advance(ids("c")[0])
    assert "no limit was met" in lost.error
    assert "complex" not in lost.error
    monkeypatch.setattr(module, "_LIMITS", {**LIMITS, "max_lexer_states": 100})
    dice, matcher = random.Random(0), grammars.compile(source.regex("(a|b)*a(a|b){12}")).copy()
    for _ in range(500):
        allowed(matcher)
        if matcher.error:
            break
        matcher.advance(ids(dice.choice("ab"))[0])
    assert matcher.error.startswith("the grammar is too complex to go on in it: lexer error: too many")


def many_states(monkeypatch: pytest.MonkeyPatch, max_states: int) -> Grammar:
    """A grammar whose lexer gets a state for nearly every letter of a text, and the most that it may have."""
    monkeypatch.setattr(module, "_LIMITS", {**LIMITS, "max_lexer_states": max_states})
    return source.regex("(a|b)*a(a|b){14}")


@pytest.mark.parametrize("num_drafted", [0, 3])
@pytest.mark.usefixtures("is_at_once")
def test_a_text_goes_on_where_others_have_filled_the_lexer_that_they_share(
    num_drafted: int, grammars: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = grammars.compile(many_states(monkeypatch, 400))
    matchers, dice = [compiled.copy() for _ in range(8)], random.Random(4)
    for _ in range(60):
        draft = ids("aba")[:num_drafted]
        jobs = [(one, idx * (num_drafted + 1), draft) for idx, one in enumerate(matchers)]
        bits = allowed_tokens(jobs, len(jobs) * (num_drafted + 1))
        assert bits.any(axis=1).all()
        for one in matchers:
            one.advance(ids(dice.choice("ab"))[0])
            assert not one.error
    assert compiled.lexer_is_full


def test_a_text_that_ends_where_the_lexer_is_full_has_ended(
    grammars: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LIMITS", {**LIMITS, "max_lexer_states": 400})
    compiled = grammars.compile(source.regex("((a|b)*a(a|b){14})c"))
    ending, other, dice = compiled.copy(), compiled.copy(), random.Random(5)
    for token_id in ids("a" * 15):
        ending.advance(token_id)
    while not other.error:
        other.advance(ids(dice.choice("ab"))[0])
    assert ending.advance(ids("c")[0])


def test_a_grammar_whose_lexer_is_full_is_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each later request of it would fail."""
    monkeypatch.setattr(module, "MAX_REBUILD_S", 0.0)
    done, grammar, dice = threading.Event(), many_states(monkeypatch, 400), random.Random(6)
    grammars = Grammars(COMPILER, done.set)
    first = resolved(grammars, grammar, done).copy()
    while not first.error:
        allowed(first)
        first.advance(ids(dice.choice("ab"))[0])
    second = resolved(grammars, grammar, done).copy()
    assert allowed(second)[0]
    assert resolved(grammars, grammar, done) is resolved(grammars, grammar, done)
    grammars.close()


def test_copies_go_their_own_way(grammars: Compiler) -> None:
    first = grammars.compile(source.regex("aa|bb"))
    second = first.copy()
    first.advance(ids("a")[0])
    second.advance(ids("b")[0])
    assert [text_of(allowed(one)[0]) for one in (first, second)] == ["a", "b"]


def resolved(grammars: Grammars, grammar: Grammar, done: threading.Event) -> Matcher:
    done.clear()
    while (found := grammars.resolve(grammar)) is None:
        assert done.wait(10)
        done.clear()
    return found


def test_grammars_are_compiled_once_and_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILED", 3)
    done = threading.Event()
    grammars = Grammars(COMPILER, done.set)
    assert not grammars.poll()
    texts = [source.regex(f"a{number}") for number in range(4)]
    first = resolved(grammars, texts[0], done)
    assert grammars.poll()
    assert not grammars.poll()
    assert resolved(grammars, texts[0], done) is first
    for grammar in texts[1:]:
        resolved(grammars, grammar, done)
    assert grammars.resolve(texts[0]) is None, "the least recently used one has gone"
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="regex"):
            resolved(grammars, source.regex("(a"), done)
    grammars.close()


class StuckCheck:
    """A compilation apart that waits, and comes to a limit the first time."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.seen: list[str] = []

    def check(self, grammar: Grammar) -> None:
        self.seen.append(grammar.text)
        self.begun.set()
        assert self.go.wait(10)
        if len(self.seen) == 1:
            raise CompileLimit("it takes too long")

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("asked", "field", "leave_out"),
    [
        ("grammar.regex", "grammar", "`grammar` out"),
        ("chat.tool_choice.required", "chat.tool_choice.required", "`chat.tool_choice.required` out"),
        ("chat.tools_json", "chat.tools_json", "`strict` out of `chat.tools_json`"),
    ],
)
def test_a_model_without_grammars_names_what_asks_for_one(asked: str, field: str, leave_out: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"leave {leave_out}$") as caught:
        Grammars(None).resolve(Grammar(asked, "x"))
    assert caught.value.field == field


def test_grammars_that_nobody_waits_for_are_not_compiled() -> None:
    done, check = threading.Event(), StuckCheck()
    grammars = Grammars(COMPILER, done.set, check)
    texts = [source.regex(f"a{number}") for number in range(20)]
    for grammar in texts:
        assert grammars.resolve(grammar) is None
    assert check.begun.wait(10)
    for grammar in texts[:-1]:
        grammars.forget(grammar)
    check.go.set()
    assert resolved(grammars, texts[-1], done)
    assert check.seen == [texts[0].text, texts[-1].text]  # the first one was under way
    grammars.close()


def test_tenants_take_turns() -> None:
    done, check = threading.Event(), StuckCheck()
    grammars = Grammars(COMPILER, done.set, check)
    flood = [source.regex(f"a{number}") for number in range(20)]
    for grammar in flood:
        assert grammars.resolve(grammar, "flood") is None
    assert check.begun.wait(10)
    one, shared = source.regex("b"), flood[-1]
    assert grammars.resolve(one, "other") is None
    assert grammars.resolve(shared, "third") is None
    for grammar in flood:  # the third still waits for one of them
        grammars.forget(grammar, "flood")
    for grammar in flood[:3]:
        assert grammars.resolve(grammar, "flood") is None
    check.go.set()
    for grammar in (one, shared):
        assert resolved(grammars, grammar, done)
    assert [flood[0].text, one.text, shared.text] == check.seen[:3]
    grammars.close()


def test_a_limit_that_was_met_is_no_verdict_for_ever() -> None:
    now_s = 0.0
    done, check = threading.Event(), StuckCheck()
    check.go.set()
    grammars = Grammars(COMPILER, done.set, check, clock=lambda: now_s)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="too long") as caught:
            resolved(grammars, source.regex("a"), done)
        assert caught.value.field == "grammar.regex"
    now_s = module.RETRY_S
    assert resolved(grammars, source.regex("a"), done)
    assert len(check.seen) == 2
    grammars.close()


def test_a_refusal_keeps_no_frames() -> None:
    done = threading.Event()
    grammars = Grammars(COMPILER, done.set)
    lengths: list[int] = []
    for _ in range(5):
        with pytest.raises(InvalidArgument) as caught:
            resolved(grammars, source.regex("(a"), done)
        lengths.append(len(list(traceback.walk_tb(caught.value.__traceback__))))
    assert lengths[1:] == lengths[1:2] * 4
    grammars.close()


def test_without_a_tokenizer() -> None:
    with pytest.raises(FailedPrecondition, match="tokenizer"):
        Grammars(None).resolve(source.regex("a"))
