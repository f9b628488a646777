"""Tokens of a vocabulary one by one, and the bound of bytes per token."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from tokenizers import Tokenizer

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
IN_ANGLES: Final = re.compile("<.*>", re.DOTALL)


class Vocabulary:
    """Token ids to text, bytes and kinds: a read-only view of a fast tokenizer, safe to use from several threads.

    Special tokens have no text, as in `decode(skip_special_tokens=True)`, unless `keep_special` is set.
    """

    def __init__(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        # The library skips by content, so a token of the model with the same content is skipped as well.
        specials = {str(token.content) for token in added.values() if token.special}
        self._specials = frozenset(specials)
        contents = {str(token.content) for token in added.values()}
        self._plain_marks = frozenset(filter(IN_ANGLES.fullmatch, contents)) - self._specials
        self._skipped = frozenset[str]() if keep_special else self._specials
        steps = _decoder_steps(tokenizer)
        # Each token is bytes, and their concatenation is read as UTF-8 at the end.
        self.is_byte_level = steps == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in steps
        self._bytes: dict[int, bytes] = {}  # filled as tokens come; bounded by the vocabulary
        self._texts: dict[int, str] = {}  # likewise

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Special tokens by content."""
        return self._ids(self._specials)

    @property
    def plain_mark_ids(self) -> Mapping[str, int]:
        """Added tokens in angle brackets, such as `<tool_call>`, that are no special tokens, by content."""
        return self._ids(self._plain_marks)

    def _ids(self, contents: Collection[str]) -> Mapping[str, int]:
        found = {content: self._tokenizer.token_to_id(content) for content in sorted(contents)}
        return {content: token_id for content, token_id in found.items() if token_id is not None}

    @property
    def pieces(self) -> Mapping[str, int]:
        """All tokens, added ones included. Made again on each use."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """The tokens of `text` without special ones in front or behind: (token id, start, end in the text) each."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [(token_id, *span) for token_id, span in zip(encoding.ids, encoding.offsets, strict=True)]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The library's text of these tokens by themselves."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=bool(self._skipped))

    def text(self, token_id: int) -> str:
        """A token's text within a text: with its space, special tokens by name, U+FFFD for parts of characters. Empty
        beyond the vocabulary."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self._text(token_id)
        return found

    def _text(self, token_id: int) -> str:
        content = self.content(token_id)
        if content is None or self.is_special(token_id):
            return content or ""
        if self.is_byte_level:
            return self.bytes(token_id).decode("utf-8", errors="replace")
        # Behind itself it is not at the beginning of a text, where decoders leave spaces out.
        alone = self.decode((token_id,))
        behind = self.decode((token_id, token_id))
        return behind[len(alone) :] if behind.startswith(alone) else alone

    def utf8(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, be they part of a character; those of `text` for special tokens."""
        if self.is_byte_level and not self.is_special(token_id):
            return self.bytes(token_id)
        value = self.byte(token_id)
        return self.text(token_id).encode() if value is None else bytes((value,))

    def content(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None beyond the vocabulary (models are often padded)."""
        return self._tokenizer.id_to_token(token_id)

    def is_special(self, token_id: int) -> bool:
        return self.content(token_id) in self._specials

    def is_visible(self, token_id: int) -> bool:
        """False for tokens that decoding skips."""
        content = self.content(token_id)
        return content is not None and content not in self._skipped

    def byte(self, token_id: int) -> int | None:
        """The value of a token that stands for one byte (SentencePiece's byte fallback)."""
        if not self._has_byte_tokens:
            return None
        match = BYTE_TOKEN.fullmatch(self.content(token_id) or "")
        return int(match[1], 16) if match else None

    def bytes(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; none of one that is not visible."""
        found = self._bytes.get(token_id)
        if found is None:
            content = self.content(token_id)
            found = byte_level_bytes(content) if content is not None and content not in self._skipped else b""
            self._bytes[token_id] = found
        return found


def unread_ids(template: str, special_ids: Mapping[str, int]) -> frozenset[int]:
    """Special tokens (ids by text) that a response template (JSON) does not look for in answers."""
    source = _read_in_answers(template)
    return frozenset(token_id for text, token_id in special_ids.items() if text not in source)


@lru_cache(maxsize=256)
def _read_in_answers(template: str) -> str:
    """The part of a response template that reads answers, without its escapes: anchors are in prompts."""
    try:
        fields: Any = json.loads(template)["fields"]
    except (ValueError, RecursionError, TypeError, KeyError):  # it reads nothing
        return ""
    return json.dumps(fields, ensure_ascii=False).replace("\\", "")  # of patterns, too


def byte_level_bytes(content: str) -> bytes:
    """The bytes that a byte-level vocabulary's spelling stands for; as is where it has characters of no byte."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in content)
    except KeyError:
        return content.encode("utf-8")


def byte_level_spelling(text: str) -> str:
    """A text as a byte-level vocabulary spells it."""
    return "".join(_CHAR_OF_BYTE[value] for value in text.encode("utf-8"))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(value): value for value in printable}
    others = (value for value in range(256) if chr(value) not in alphabet)
    return alphabet | {chr(256 + i): value for i, value in enumerate(others)}


_BYTE_OF_CHAR: Mapping[str, int] = _byte_alphabet()
_CHAR_OF_BYTE: Mapping[int, str] = {value: char for char, value in _BYTE_OF_CHAR.items()}
BYTE_ALPHABET: Final = frozenset(_BYTE_OF_CHAR)


def _decoder_steps(tokenizer: Tokenizer) -> list[str]:
    """The kinds of the decoder's steps, in order."""
    decoder: Any = tokenizer.decoder
    return [] if decoder is None else [step["type"] for step in _steps(json.loads(decoder.__getstate__()), "decoders")]


# --- bound of bytes per token ---------------------------------------------------------------------------------------

_MAX_CHAR_BYTES: Final = 4
_BYTE_TOKENS: Final = frozenset(f"<0x{value:02X}>" for value in range(256))

_State = dict[str, Any]


def max_bytes_per_token(serialized: str) -> int | None:
    """Upper bound of bytes per token of a serialized tokenizer (`tokenizer.json`), so that a text can be refused before
    it is tokenized: `n` bytes are at least `n / bound` tokens.

    None for tokenizers that may make text shorter: the bound holds where the steps before the model keep every
    character, the model has a token for each unknown character, and each token stands for its own content at most.
    """
    state: _State = json.loads(serialized)
    normalizers = list(_steps(state["normalizer"], "normalizers"))
    pre_tokenizers = list(_steps(state["pre_tokenizer"], "pretokenizers"))
    if not all(map(_keeps_length, (*normalizers, *pre_tokenizers, *_steps(state["post_processor"], "processors")))):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):  # they take in whitespace
        return None
    kinds = {step["type"] for step in (*normalizers, *pre_tokenizers)}
    # Each character of such a token is one byte of text. A replacement would count in bytes of the characters.
    is_byte_level = "ByteLevel" in kinds and "Replace" not in kinds
    model: _State = state["model"]
    pieces: Any = model["vocab"]
    vocabulary: set[str] = {piece for piece, _ in pieces} if model["type"] == "Unigram" else set(pieces)
    if not _knows_every_character(model, vocabulary, is_byte_level):
        return None
    length: Callable[[str], int] = len if is_byte_level else _num_bytes
    longest = max(map(length, vocabulary), default=0)
    added = max((_added_bytes(token, normalizers) for token in state["added_tokens"]), default=0)
    return max(longest, added, _MAX_CHAR_BYTES)


def _added_bytes(token: _State, normalizers: list[_State]) -> int:
    """Bytes of an added token; of its normalized form too, where the library searches normalized text for it."""
    content: str = token["content"]
    for step in normalizers if token["normalized"] else []:
        match step["type"]:
            case "Prepend":
                content = step["prepend"] + content
            case "Replace":
                content = content.replace(step["pattern"]["String"], step["content"])
            case _:
                content = "".join(chr(256) for _ in content.encode())  # ByteLevel: two bytes for one at most
    return max(_num_bytes(content), _num_bytes(token["content"]))


def _steps(state: _State | None, parts: str) -> Iterator[_State]:
    """A component's steps in order, nested sequences flattened."""
    if state is None:
        return
    if state["type"] != "Sequence":
        yield state
        return
    for part in state[parts]:
        yield from _steps(part, parts)


def _keeps_length(step: _State) -> bool:
    """True if a normalizer, pre-tokenizer or post-processor keeps every character or token."""
    match step["type"]:
        case "ByteLevel" | "Prepend" | "Digits" | "Metaspace" | "BertProcessing" | "RobertaProcessing":
            return True
        case "Replace":
            pattern = step["pattern"].get("String")
            return pattern is not None and _num_bytes(pattern) <= _num_bytes(step["content"])
        case "Split" | "Punctuation":
            return step["behavior"] != "Removed"
        case "TemplateProcessing":
            return any("Sequence" in piece for piece in step["single"])
        case _:
            return False


def _knows_every_character(model: _State, vocabulary: set[str], is_byte_level: bool) -> bool:
    """True if each character that no token has is a token of its own, or several."""
    match model["type"]:
        case "Unigram":  # unknown characters in a row are one token, unless they become bytes
            return bool(model.get("byte_fallback")) and vocabulary >= _BYTE_TOKENS
        case "BPE" if not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")):
            if is_byte_level and vocabulary >= BYTE_ALPHABET:
                return True
            if model.get("byte_fallback") and vocabulary >= _BYTE_TOKENS:
                return True
            return model.get("unk_token") in vocabulary and not model.get("fuse_unk")
        case _:  # WordPiece and WordLevel make one token of a whole unknown word
            return False


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
