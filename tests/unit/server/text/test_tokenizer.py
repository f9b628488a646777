"""The front end's tokenizer: encoding, chats, token texts, and life without one."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizers import KINDS, tiny_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, NoChatTemplate, UnsupportedModel
from loraplex_contracts.request import StoppingParams
from loraplex_server.text.tokenizer import TextTokenizer, Truncation

TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}<|turn|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)


@pytest.fixture
def with_template() -> TextTokenizer:
    copy = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tiny_tokenizer("byte_level")._tokenizer.to_str())
    )
    copy.chat_template = TEMPLATE
    return TextTokenizer(copy)


def encode_chat(
    tokenizer: TextTokenizer, messages: list[dict[str, str]], add_generation_prompt: bool = True
) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat(messages, add_generation_prompt), add_special_tokens=False)


def test_encode() -> None:
    for kind in KINDS:
        tokenizer = TextTokenizer(tiny_tokenizer(kind))
        ids = tokenizer.encode("The quick brown fox")
        assert ids[0] == 1
        assert ids[1:] == tokenizer.encode("The quick brown fox", add_special_tokens=False)
        assert ids == tiny_tokenizer(kind).encode("The quick brown fox")
        assert tokenizer.decode(ids).strip() == "The quick brown fox"
        assert tokenizer.encode("", add_special_tokens=False) == []


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        TextTokenizer(tiny_tokenizer("byte_level")).encode("a\ud800")
    assert caught.value.field == "text"


def test_truncation_and_padding_of_the_files_do_not_apply(tmp_path: Path) -> None:
    backend = Tokenizer.from_str(tiny_tokenizer("byte_level").backend_tokenizer.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=50)
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>").save_pretrained(tmp_path)
    ids = TextTokenizer.from_pretrained(str(tmp_path)).encode("The quick brown fox jumps")
    assert ids == tiny_tokenizer("byte_level").encode("The quick brown fox jumps")


def test_many_threads_may_encode() -> None:
    tokenizer = TextTokenizer(tiny_tokenizer("byte_level"))
    text = "The quick brown fox " * 200
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: tokenizer.encode(text), range(64)))
    assert all(ids == found[0] for ids in found)


def test_chat(with_template: TextTokenizer) -> None:
    assert with_template.has_chat_template
    messages = [{"role": "user", "content": "The fox"}, {"role": "assistant", "content": "dog"}]
    ids = encode_chat(with_template, messages, False)
    assert ids == with_template.encode("<|turn|>user: The fox\n<|turn|>assistant: dog\n", add_special_tokens=False)
    opened = encode_chat(with_template, messages)
    assert opened == ids + with_template.encode("<|turn|>assistant: ", add_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{% if m.role == 'system' %}[{{ m.content }}]{% endif %}{% endfor %}", "[x</s>]"),
        ("{% for m in messages %}{% if m.role == 'developer' %}({{ m.content }}){% endif %}{% endfor %}", "(x</s>)"),
    ],
)
def test_developers_are_the_system_where_a_template_does_not_name_them(template: str, text: str) -> None:
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template = template
    tokenizer = TextTokenizer(tiny)
    for content in ("x</s>", "x"):  # with and without a control token in it
        found = tokenizer.chat_text({"messages": [{"role": "developer", "content": content}]})
        assert (found if isinstance(found, str) else found.plain) == text.replace("x</s>", content)


def test_several_chat_templates() -> None:
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template = {"default": "a", "tool_use": "b"}
    assert [TextTokenizer(tiny).chat_template_for(has_tools=one) for one in (False, True)] == ["a", "b"]
    assert TextTokenizer(tiny_tokenizer("byte_level")).chat_template_for(has_tools=True) == ""


def test_several_chat_templates_without_a_default() -> None:
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template = {"rag": "a", "tool_use": "b"}
    tokenizer = TextTokenizer(tiny)
    assert not tokenizer.has_chat_template
    given: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(NoChatTemplate, match=r"no default chat template.*--chat-template"):
        tokenizer.chat_text(given)
    assert tokenizer.chat_text({**given, "tools": [{"type": "function"}]}) == "b"


def test_chat_that_the_template_refuses(with_template: TextTokenizer) -> None:
    with pytest.raises(InvalidArgument, match="no role system") as caught:
        encode_chat(with_template, [{"role": "system", "content": "x"}])
    assert caught.value.field == "chat"


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_values_that_are_nested_too_deeply(with_template: TextTokenizer, name: str) -> None:
    value = json.loads("[" * 800 + "]" * 800)
    with pytest.raises(InvalidArgument, match="too deeply"):
        with_template.chat_text({"messages": [{"role": "user", "content": "x"}], name: [{"a": value}]})


def test_template_that_fails_on_its_own(with_template: TextTokenizer) -> None:
    with_template._tokenizer.chat_template = "{{ messages[5].content + 1 }}"  # type: ignore[union-attr]
    with pytest.raises(InvalidArgument, match="chat template refuses"):
        encode_chat(with_template, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize("city", ["Ghent", "<|turn|>"])
def test_earlier_calls_in_a_template_that_writes_their_arguments_as_text(city: str) -> None:
    """Control tokens in them stay texts."""
    tiny = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template = "<|turn|>{{ messages[0].tool_calls[0].function.arguments + '!' }}"
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": city}}}
    found = TextTokenizer(tiny).chat_text({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]})
    assert (found if isinstance(found, str) else found.plain) == f'<|turn|>{{"city": "{city}"}}!'
    assert isinstance(found, str) or found.num_controls == 1


def test_no_template() -> None:
    tokenizer = TextTokenizer(tiny_tokenizer("byte_level"))
    assert not tokenizer.has_chat_template
    with pytest.raises(NoChatTemplate):
        encode_chat(tokenizer, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize("kind", KINDS)
def test_token_texts_put_a_text_together(kind: str) -> None:
    """Token texts joined are the text, but for the space in front of everything, and characters of several tokens."""
    tokenizer = TextTokenizer(tiny_tokenizer(kind))
    ids = tokenizer.encode("The quick brown fox jumps", add_special_tokens=False)
    text = "".join(map(tokenizer.token_text, ids))
    assert text.strip() == "The quick brown fox jumps"
    assert any(tokenizer.token_text(token_id).startswith(" ") for token_id in ids)


@pytest.mark.parametrize("kind", KINDS)
def test_token_texts_of_odd_tokens(kind: str) -> None:
    tokenizer = TextTokenizer(tiny_tokenizer(kind))
    assert tokenizer.token_text(2) == "</s>"
    vocab_size = len(tiny_tokenizer(kind))
    assert tokenizer.token_text(vocab_size) == ""
    for token_id in range(vocab_size):
        tokenizer.token_text(token_id).encode("utf-8")
    names = {"byte_level": ("ð", "a"), "llama_bpe": ("<0xF0>", "<0x61>")}
    if kind in names:
        part, letter = (tiny_tokenizer(kind).convert_tokens_to_ids(name) for name in names[kind])
        assert tokenizer.token_text(part) == "\ufffd"
        assert tokenizer.token_text(letter) == "a"


@pytest.mark.parametrize("kind", ["byte_level", "llama_bpe", "gemma_bpe"])
def test_the_bytes_of_tokens_put_a_text_together(kind: str) -> None:
    """The bytes of parts of characters count too, and special tokens by name."""
    tokenizer = TextTokenizer(tiny_tokenizer(kind))
    text = "naïve café: 你好 😀<|turn|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == text
    assert [tokenizer.is_special(token_id) for token_id in ids] == [False] * (len(ids) - 1) + [True]
    assert TextTokenizer(None).token_bytes(5) == b""
    assert not TextTokenizer(None).is_special(5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_is_that_of_transformers(kind: str, special: bool, side: str) -> None:
    tiny = tiny_tokenizer(kind)
    tokenizer, text = TextTokenizer(copy.deepcopy(tiny)), "The quick brown fox doesn't stop [tool]"
    reference = copy.deepcopy(tiny)
    reference.truncation_side = side
    for max_tokens in (1, 2, 5, 500):
        expected = reference(text, truncation=True, max_length=max_tokens, add_special_tokens=special)["input_ids"]
        truncation = Truncation(max_tokens, keep_start=side == "right")
        assert tokenizer.encode(text, add_special_tokens=special, truncation=truncation) == expected
    ids = list(range(9))
    assert Truncation(4).cut(ids) == [5, 6, 7, 8]
    assert Truncation(4, keep_start=True).cut(ids) == [0, 1, 2, 3]
    assert Truncation(9).cut(ids) == ids


def test_facts() -> None:
    tokenizer = TextTokenizer(tiny_tokenizer("byte_level"))
    assert tokenizer.has_text
    assert tokenizer.eos_token_ids == {2}


def test_makes_detokenizers_and_matchers() -> None:
    tokenizer = TextTokenizer(tiny_tokenizer("llama_bpe"))
    prompt, output = tokenizer.encode("The quick"), tokenizer.encode("brown fox", add_special_tokens=False)
    detokenizer = tokenizer.new_detokenizer(tuple(prompt))
    assert detokenizer is not None
    assert detokenizer.push(tuple(output)) + detokenizer.finish() == " brown fox"
    assert tokenizer.new_stop_matcher(StoppingParams(8)) is None
    matcher = tokenizer.new_stop_matcher(StoppingParams(8, stop=("x",), include_stop=True, min_tokens=1))
    assert matcher is not None
    assert matcher.push("ax", num_tokens=1) == "ax"
    assert matcher.push("bxc", num_tokens=2) == "bx"


class TestWithoutOne:
    def test_token_ids_go_on_working(self) -> None:
        tokenizer = TextTokenizer(None)
        assert not tokenizer.has_text
        assert not tokenizer.has_chat_template
        assert tokenizer.eos_token_ids == frozenset()
        assert tokenizer.token_text(5) == ""
        assert tokenizer.new_detokenizer((1, 2)) is None
        assert tokenizer.new_stop_matcher(StoppingParams(8)) is None

    def test_text_is_refused(self) -> None:
        tokenizer = TextTokenizer(None)
        with pytest.raises(FailedPrecondition, match="send token_ids"):
            tokenizer.encode("x")
        with pytest.raises(FailedPrecondition):
            encode_chat(tokenizer, [])
        with pytest.raises(FailedPrecondition):
            tokenizer.decode([1])
        with pytest.raises(FailedPrecondition) as caught:
            tokenizer.new_stop_matcher(StoppingParams(8, stop=("x",)))
        assert caught.value.field == "stopping.stop"

    def test_a_directory_without_one(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        assert not TextTokenizer.from_pretrained(str(tmp_path)).has_text


def test_a_directory(tmp_path: Path) -> None:
    tiny_tokenizer("llama_bpe").save_pretrained(tmp_path)
    tokenizer = TextTokenizer.from_pretrained(str(tmp_path))
    assert tokenizer.encode("The quick brown fox") == tiny_tokenizer("llama_bpe").encode("The quick brown fox")


def test_a_broken_directory_is_an_error(tmp_path: Path) -> None:
    tiny_tokenizer("byte_level").save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        TextTokenizer.from_pretrained(str(tmp_path))


def test_mistrals_own_file(tmp_path: Path) -> None:
    specials = ["<unk>", "<s>", "</s>"]
    vocab = [*(bytes([value]) for value in range(256)), b"th", b"the"]
    config = {
        "pattern": r" ?\p{L}+|\s+|[^\s\p{L}]+",
        "default_vocab_size": len(vocab) + len(specials),
        "default_num_special_tokens": len(specials),
    }
    tokens = [{"rank": rank, "token_bytes": b64encode(one).decode()} for rank, one in enumerate(vocab)]
    named = [{"rank": rank, "token_str": one} for rank, one in enumerate(specials)]
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": tokens, "special_tokens": named}))
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert TextTokenizer.from_pretrained(str(tmp_path)).encode("the</s>") == [260, 2]


@pytest.mark.parametrize("config", [{}, {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "Qwen2Tokenizer"}])
def test_a_directory_without_a_tokenizers_file_says_so(config: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="it has no file that a tokenizer can be read from"):
        TextTokenizer.from_pretrained(str(tmp_path))


def test_sentencepiece_alone_names_the_package(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x07")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModel, match="pip install sentencepiece"):
        TextTokenizer.from_pretrained(str(tmp_path))


def test_code_beside_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    config = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnsupportedModel, match="code beside the checkpoint, which is never run"):
        TextTokenizer.from_pretrained(str(tmp_path))


class TestTemplatesOfProcessors:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        tiny_tokenizer("byte_level").save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "llava"}')
        (tmp_path / "chat_template.json").write_text('{"chat_template": "p{{ messages[0].content }}"}')
        return tmp_path

    def test_one_is_read(self, folder: Path) -> None:
        tokenizer = TextTokenizer.from_pretrained(str(folder))
        assert tokenizer.chat_text({"messages": [{"role": "user", "content": "x"}]}) == "px"

    def test_the_tokenizers_own_and_the_operators_come_first(self, folder: Path) -> None:
        assert TextTokenizer.from_pretrained(str(folder), chat_template="o").chat_template == "o"
        (folder / "chat_template.jinja").write_text("t")
        assert TextTokenizer.from_pretrained(str(folder)).chat_template == "t"

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"chat_template": 1}', "[" * 100_000])
    def test_others_are_not_used(self, folder: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
        (folder / "chat_template.json").write_text(content)
        assert not TextTokenizer.from_pretrained(str(folder)).has_chat_template
        assert "chat_template.json" in caplog.text


@pytest.mark.slow
def test_one_configuration_brings_what_those_of_all_families_share(tmp_path: Path) -> None:
    """In a process of its own, for this one may have imported anything."""
    tiny_tokenizer("byte_level").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    code = (
        "import sys\n"
        "from loraplex_server.text.tokenizer import TextTokenizer, import_library\n"
        "import_library()\n"
        "num_before = len(sys.modules)\n"
        "TextTokenizer.from_pretrained(sys.argv[1])\n"
        "print(len(sys.modules) - num_before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    assert int(done.stdout.splitlines()[-1]) < 20
