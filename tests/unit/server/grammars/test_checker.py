"""Grammars that hang or crash the library end the process that compiles them first."""

from __future__ import annotations

import json
import os
import signal

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.grammars import checker as module
from loraplex_server.grammars import source
from loraplex_server.grammars.checker import Checker
from loraplex_server.grammars.matcher import CompileLimit
from loraplex_server.grammars.tokenizer import LibraryTokenizer


def test_a_grammar_that_hangs_or_crashes_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COMPILE_S", 1.0)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: idx for idx, char in enumerate([*letters, "</s>"])}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    checker = Checker(LibraryTokenizer.of(tokenizer.to_str(), 257, [256]))
    try:
        checker.check(source.regex("a+"))
        rules = "\n".join(f'r{number}: r{number + 1} r{number + 1} | "a"' for number in range(5000))
        with pytest.raises(CompileLimit, match=r"ended the process|more than 1 s"):
            checker.check(source.lark(f'start: r0\n{rules}\nr5000: "b"'))
        with pytest.raises(CompileLimit, match=r"more than 1 s"):
            checker.check(source.json_schema('{"type": "integer", "multipleOf": 999983}'))
        with pytest.raises(InvalidArgument, match="look-around"):
            checker.check(source.regex("(?=a)b"))
        checker.check(source.regex("b+"))
        pid = checker.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        checker.check(source.regex("c+"))  # not the grammar's fault
        assert checker.pid not in (pid, None)
    finally:
        checker.close()


def test_simple_grammars_are_not_compiled_apart() -> None:
    properties = {"not": {"type": "integer", "minimum": 3}, "a": {"$ref": "#/$defs/a"}}
    simple = {"type": "object", "properties": properties, "$defs": {"a": {"type": "null"}}}
    assert source.json_schema(json.dumps(simple)).is_simple
    assert source.json_object().is_simple
    assert source.choice(["a", "b"]).is_simple
    assert not source.json_schema('{"type": "object", "properties": {"a": {"pattern": "a+"}}}').is_simple
    assert not source.json_schema(f'{{"description": "{"x" * source.MAX_SIMPLE_CHARS}"}}').is_simple
    assert not source.regex("a").is_simple
