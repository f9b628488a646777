"""Upper bound of bytes per token of a tokenizer.

With it a text can be refused before it is tokenized: `n` bytes are at least `n / bound` tokens. The bound holds for
tokenizers that never make text shorter: their steps before the model keep every character, the model has a token for
each unknown character, and each token stands for its own content at most. Other tokenizers have no bound; their texts
are tokenized to be counted. Reads the serialized tokenizer (`tokenizer.json`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

from loraplex_server.text.vocabulary import BYTE_ALPHABET

_MAX_CHAR_BYTES: Final = 4
_BYTE_TOKENS: Final = frozenset(f"<0x{value:02X}>" for value in range(256))

_State = dict[str, Any]


def max_bytes_per_token(serialized: str) -> int | None:
    """None: a token may stand for any number of bytes."""
    state: _State = json.loads(serialized)
    normalizers = list(_steps(state["normalizer"], "normalizers"))
    pre_tokenizers = list(_steps(state["pre_tokenizer"], "pretokenizers"))
    is_kept = (
        all(map(_normalizer_keeps_length, normalizers))
        and all(map(_pre_tokenizer_keeps_length, pre_tokenizers))
        and all(map(_post_processor_keeps_tokens, _steps(state["post_processor"], "processors")))
        and not any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])  # they take in whitespace
    )
    if not is_kept:
        return None
    kinds = {step["type"] for step in (*normalizers, *pre_tokenizers)}
    # Each character of such a token is one byte of text. A replacement would count in bytes of the characters.
    is_byte_level = "ByteLevel" in kinds and "Replace" not in kinds
    model: _State = state["model"]
    vocabulary = _contents(model)
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


def _normalizer_keeps_length(step: _State) -> bool:
    match step["type"]:
        case "Prepend" | "ByteLevel":
            return True
        case "Replace":
            pattern = step["pattern"].get("String")
            return pattern is not None and _num_bytes(pattern) <= _num_bytes(step["content"])
        case _:
            return False


def _pre_tokenizer_keeps_length(step: _State) -> bool:
    match step["type"]:
        case "ByteLevel" | "Digits" | "Metaspace":
            return True
        case "Split" | "Punctuation":
            return step["behavior"] != "Removed"
        case _:
            return False


def _post_processor_keeps_tokens(step: _State) -> bool:
    match step["type"]:
        case "ByteLevel" | "BertProcessing" | "RobertaProcessing":
            return True
        case "TemplateProcessing":
            return any("Sequence" in piece for piece in step["single"])
        case _:
            return False


def _contents(model: _State) -> set[str]:
    vocabulary: Any = model["vocab"]
    return {piece for piece, _ in vocabulary} if model["type"] == "Unigram" else set(vocabulary)


def _knows_every_character(model: _State, vocabulary: set[str], is_byte_level: bool) -> bool:
    """Whether each character that no token has is a token of its own, or several."""
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
