"""Patterns from adapters: equal to PEFT's `re.match`, in bounded time."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loraplex_adapters.formats.peft_patterns import MAX_PATTERN_CHARS, compile_budget, compile_pattern, match_budget
from loraplex_contracts.errors import AdapterUnsupported

PATHS = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.10.self_attn.q_proj",
    "model.layers.10.mlp.down_proj",
    "model.embed_tokens",
    "lm_head",
    "transformer.h.3.attn.c_attn",
    "q_proj",
]


def as_peft_does(pattern: str, path: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", path) is not None


def ours(pattern: str, path: str) -> bool:
    return compile_pattern(pattern, "rank_pattern", compile_budget()).matches(path, match_budget())


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "self_attn.q_proj",
        "model.layers.0.self_attn.q_proj",
        "^model.layers.0.self_attn.q_proj",
        "layers.1",
        "roj",
        "x_proj",
        r"layers\.0\.self_attn\.q_proj",
        r"layers\.(0|10)\.self_attn\.[qk]_proj",
        r".*\.mlp\..*",
        r"model\.layers\.\d+\.(?:self_attn|mlp)\.\w+",
        r"model\.layers\.\d{2}\..*",
        r"model\.layers\.\d{2,}\..*?",
        r"model\.layers\.[0-9]{1,2}\.[^.]+\.[a-z_]+",
        "lm_head$",
        "^lm_head",
        "q_proj|down_proj",
        "(^lm_head|h.3.attn.c_attn)",
        ".*",
        "",
        "a*",
        "(a|b)*q_proj",
        "(layers.)?0.self_attn.q_proj",
        "[]a-z_]+",
        "[^a]*",
        "q_pro[j-]",
        "()q_proj",
        r"\blm_head",
        r"\Amodel.*\bq_proj\b",
        r"model\..*\Bproj",
        r".*(?i:Q_PROJ)",
        "(?is:.*MLP.*)",
        "(?P<part>layers.0)[.](?P<rest>.*)",
        "\ud800|q_proj",
    ],
)
def test_like_peft(pattern: str) -> None:
    answers = [ours(pattern, path) for path in PATHS]
    assert answers == [as_peft_does(pattern, path) for path in PATHS]


_atoms = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", r"\d", "^", "$"])
_patterns = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        inner.filter(lambda p: p not in ("^", "$")).flatmap(
            lambda p: st.sampled_from([f"(?:{p})*", f"(?:{p})+?", f"({p})?", f"(?:{p}){{2}}", f"(?:{p}){{0,2}}"])
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(_patterns, st.text(alphabet="ab.1", max_size=6))
def test_the_same_language_as_re(pattern: str, path: str) -> None:
    assume(len(pattern) <= MAX_PATTERN_CHARS)
    assert ours(pattern, path) == as_peft_does(pattern, path)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|aa)+",
        "(.*a){12}",
        "(?:a?){64}a{64}",
        "(.*)*(.*)*(.*)*x",
        "((a*)*)*",
    ],
)
def test_patterns_that_hang_a_backtracking_matcher_are_quick(pattern: str) -> None:
    started = time.perf_counter()
    budget = match_budget()
    compiled = compile_pattern(pattern, "rank_pattern", compile_budget())
    compiled.matches("a" * 120 + "!", budget)
    assert time.perf_counter() - started < 2.0


@pytest.mark.parametrize(
    "pattern",
    [
        "(((a{99}){99}){99}){99}",  # compiled as written, it would exhaust memory
        "((((){999}){999}){999}){999}",  # nothing, very often
        "a{999}{999}",
        "(" * 200 + ")" * 200,
        "a" * (MAX_PATTERN_CHARS + 1),
        r"(a)\1",
        "(?=a)a",
        "(?!a)b",
        "(?P=x)",
        "(?P<x>a)(?P=x)",
        "(?<!x)a",
        "(?>a)b",
        "(?(1)a|b)",
        "(?x: a)",
        "(?i-s:a)",
        "(?R)",
        "(?i)a",
        r"\p{L}",
        r"[\b]a",
        "[[a]]",
        "[z-a]",
        "[a",
        "(a",
        "a)",
        "*a",
        "a{2",
        "a{2,1}",
        "a{,3}x{e}",
        "a**",
        "[[:alpha:]]",
        "a{,3}",
        r"q\Z",
        "\\",
    ],
)
def test_what_is_not_served_is_refused_by_name(pattern: str) -> None:
    started = time.perf_counter()
    with pytest.raises(AdapterUnsupported, match="rank_pattern"):
        compile_pattern(pattern, "adapter_config.json: rank_pattern", compile_budget())
    assert time.perf_counter() - started < 1.0


def test_all_of_an_adapters_matching_together_is_bounded() -> None:
    compiled = compile_pattern("(.?){120}", "rank_pattern", compile_budget())
    budget = match_budget()
    started = time.perf_counter()
    with pytest.raises(AdapterUnsupported, match="too long"):
        for layer in range(10_000):
            compiled.matches(f"model.layers.{layer}.self_attn.q_proj", budget)
    assert time.perf_counter() - started < 10.0
