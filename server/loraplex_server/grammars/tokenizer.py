"""Tokenizers as llguidance reads them right.

The library finds special tokens in the texts that grammars demand, decodes with spaces as some decoders do not, and
takes marks in angle brackets for special ones: the tokenizer that it gets is changed, so that tokens mean there what
they mean to the model. That takes seconds for a large vocabulary, so it is done once; `serialized` may be handed on.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from tokenizers import AddedToken, Tokenizer

from loraplex_server.text.vocabulary import BYTE_TOKEN, IN_ANGLES, byte_level_spelling

# Others add spaces between tokens. Metaspace and Strip drop one at a text's begin, which is in the prompt.
_PLAIN_DECODERS: Final = frozenset({"ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


@dataclass(frozen=True, slots=True)
class TokenSet:
    """The tokens that masks are made of."""

    num_ids: int
    eos_token_ids: frozenset[int]
    end_id: int | None  # stands for the end of a text where the model has no token for it

    @property
    def num_words(self) -> int:
        """Number of 32-bit words in one mask."""
        return -(-self.num_ids // 32)


@dataclass(frozen=True, slots=True)
class LibraryTokenizer:
    """A model's tokenizer as the library reads it right."""

    serialized: str  # as in `tokenizer.json`
    tokens: TokenSet
    end_ids: tuple[int, ...]  # of the library's ends of a text
    special_ids: Mapping[str, int]  # of special tokens that have another content here, by their own

    @classmethod
    def of(cls, serialized: str, num_logits: int, eos_token_ids: Collection[int]) -> LibraryTokenizer:
        """`serialized`: the model's own (`tokenizer.json`). `num_logits`: token ids below it can be drawn. Raises
        ValueError for a tokenizer that does not spell a text by putting its tokens' bytes together."""
        made, special_ids = _as_library_reads(serialized)
        tokenizer = Tokenizer.from_str(made)
        num_tokens = _num_tokens(tokenizer)
        ends = {token_id for token_id in eos_token_ids if token_id < num_tokens}
        end_id = None
        if not ends:  # the library wants one
            end_id = num_tokens
            tokenizer.add_special_tokens([AddedToken(content_in_no_text(end_id), special=True)])
            ends, num_tokens = {end_id}, _num_tokens(tokenizer)
        tokens = TokenSet(max(num_logits, num_tokens), frozenset((*ends, *eos_token_ids)), end_id)
        return cls(tokenizer.to_str(), tokens, tuple(sorted(ends)), special_ids)


def _as_library_reads(serialized: str) -> tuple[str, Mapping[str, int]]:
    """The tokenizer as the library spells it right, and its special tokens (ids by text) that have another content
    there. Raises ValueError."""
    made: Any = json.loads(serialized)
    decoder: Any = made["decoder"] or {"type": None}
    steps: list[Any] = decoder.get("decoders", [decoder])
    kinds = {one["type"] for one in steps}
    if not kinds <= _PLAIN_DECODERS:
        raise ValueError(f"its decoder is {', '.join(sorted(map(str, kinds)))}")
    tokenizer = Tokenizer.from_str(serialized)
    renamed = _rename_special(made)
    # The library takes an added token for its content, though a normalizer or the decoder may write it otherwise. Those
    # become special here: no text is made of them.
    before = next((one for one in range(tokenizer.get_vocab_size()) if tokenizer.decode([one]).isalnum()), None)
    for one in made["added_tokens"]:
        if one["special"]:
            continue
        context = [] if before is None else [before]
        text = tokenizer.decode([*context, one["id"]], skip_special_tokens=False)
        one["special"] = text != tokenizer.decode(context) + one["content"]
    _make_marks_plain(made, is_byte_level=kinds == {"ByteLevel"})
    if "Metaspace" in kinds:
        if "ByteFallback" not in kinds and any(map(BYTE_TOKEN.fullmatch, tokenizer.get_vocab())):
            raise ValueError("it has tokens of single bytes, which its decoder writes as their names")
        plain = [
            {"type": "Replace", "pattern": {"String": one["replacement"]}, "content": " "}
            if one["type"] == "Metaspace"
            else one
            for one in steps
        ]
        # ByteFallback tells the library that tokens are not spelled as ByteLevel spells them.
        added = [] if "ByteFallback" in kinds else [{"type": "ByteFallback"}, {"type": "Fuse"}]
        made["decoder"] = {"type": "Sequence", "decoders": [*plain, *added]}
    return json.dumps(made), renamed


def _rename_special(made: Any) -> Mapping[str, int]:
    """Gives special tokens contents that are in no text, except for those that merges have. The library would find them
    in the text that a grammar demands, and allow nothing but the token. Changes the tokenizer; returns the ids of those
    tokens by their texts."""
    model: Any = made["model"]
    renamed: dict[str, int] = {one["content"]: one["id"] for one in made["added_tokens"] if one["special"]}
    renamed.pop("", None)  # the library passes over such a token
    for merge in model.get("merges") or ():
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        for piece in (left, right, left + right):
            renamed.pop(piece, None)

    def name(content: Any) -> Any:
        return content_in_no_text(renamed[content]) if content in renamed else content

    for one in made["added_tokens"]:
        one["content"] = name(one["content"])
    vocabulary: Any = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {name(piece): token_id for piece, token_id in cast("dict[str, int]", vocabulary).items()}
    elif vocabulary:
        model["vocab"] = [[name(piece), score] for piece, score in vocabulary]
    if "unk_token" in model:
        model["unk_token"] = name(model["unk_token"])
    return renamed


def content_in_no_text(token_id: int) -> str:
    """The content of a special token that is read in no text, of private characters."""
    return f"\U000f0002{token_id}\U000f0003"


def _make_marks_plain(made: Any, *, is_byte_level: bool) -> None:
    """Makes tokens of the model of added tokens in angle brackets, such as `<tool_call>`: llguidance 1.9.1 takes those
    for special ones, whatever the tokenizer says, and no text would have them. Changes the tokenizer."""
    vocabulary: Any = made["model"].get("vocab")
    if not isinstance(vocabulary, dict):
        return
    others: list[Any] = []
    for one in made["added_tokens"]:
        content: str = one["content"]
        spelling = byte_level_spelling(content) if is_byte_level else content
        is_mark = not one["special"] and IN_ANGLES.fullmatch(content) is not None
        if is_mark and (is_byte_level or " " not in content) and vocabulary.get(spelling, one["id"]) == one["id"]:
            vocabulary[spelling] = one["id"]
        else:
            others.append(one)
            vocabulary.setdefault(content, one["id"])  # those that the vocabulary lacks would get new ids
    made["added_tokens"] = others


def _num_tokens(tokenizer: Tokenizer) -> int:
    """Number of token ids of a tokenizer, those of added tokens included."""
    ids: Any = tokenizer.get_vocab(with_added_tokens=True).values()
    return 1 + max(ids, default=-1)
