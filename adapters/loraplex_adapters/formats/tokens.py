"""Tokens that an adapter has rows for, beside those of the base model.

Texts are tokenized by the base model's tokenizer alone. An adapter that was trained with tokens of its own, which lie
beside it as its tokenizer's, would get other ids for the same text.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final, cast

from loraplex_adapters.formats.files import ADDED_TOKENS_NAME, TOKENIZER_NAME
from loraplex_adapters.formats.peft_plan import LoraPlan
from loraplex_adapters.io.source_files import AdapterFiles, parse_object, read_all
from loraplex_adapters.weights import BaseTargets
from loraplex_contracts.errors import AdapterUnsupported

MAX_TOKENIZER_BYTES: Final = 64 << 20
_ADDED: Final = re.compile(r'"added_tokens"\s*:\s*\[')


def check_tokens(files: AdapterFiles, plan: LoraPlan, targets: BaseTargets) -> None:
    """Raises AdapterUnsupported where an adapter changes the embedding of tokens, or the head's rows for them, and its
    tokenizer has tokens that the base model's lacks."""
    names = [name for name in (TOKENIZER_NAME, ADDED_TOKENS_NAME) if name in files.names]
    changed = {module.shape.path for module in plan.modules} | {one.shape.path for one in plan.saved}
    if not names or targets.tokens is None or changed.isdisjoint({targets.embedding, targets.head}):
        return
    base = targets.tokens()
    for name in names:
        data = read_all(files.open(name), MAX_TOKENIZER_BYTES)
        own = _added_in(data) if name == TOKENIZER_NAME else parse_object(data, name, MAX_TOKENIZER_BYTES)
        differing = {one: token_id for one, token_id in own.items() if base.get(one) != token_id}
        # Beyond the embedding there are no rows, and PEFT's model fails at such a token.
        unknown = next((one for one, at in differing.items() if type(at) is not int or at < targets.vocab_size), None)
        if unknown is not None:
            raise AdapterUnsupported(
                f"{name} beside the adapter has the token {unknown[:80]!a} ({own[unknown]!r:.20}), which the "
                f"tokenizer of {targets.model_id!a} does not have, and the adapter has rows of the embedding or the "
                "head: an adapter's own tokenizer is not served; give the base model that tokenizer"
            )


def _added_in(data: bytes) -> dict[str, Any]:
    """Ids of a tokenizer.json's tokens beside its vocabulary, by the first list of the name `added_tokens`. It comes
    before the vocabulary in such files, so megabytes of that are not parsed, which would hold up the other threads of
    the process. Raises AdapterInvalid."""
    with contextlib.suppress(ValueError, RecursionError):
        text = data.decode("utf-8")
        if found := _ADDED.search(text):
            rows: object = json.JSONDecoder().raw_decode(text, found.end() - 1)[0]
            return added_tokens({"added_tokens": rows})
    return added_tokens(parse_object(data, TOKENIZER_NAME, MAX_TOKENIZER_BYTES))


def added_tokens(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of a tokenizer.json's tokens beside its vocabulary."""
    rows: Any = tokenizer.get("added_tokens")
    found = [cast("dict[str, Any]", row) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {str(row.get("content")): row.get("id") for row in found}


def all_tokens(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Ids of all tokens of a tokenizer.json."""
    model: Any = tokenizer.get("model")
    vocabulary: Any = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):  # Unigram's: pairs with a score
        vocabulary = {str(pair[0]): idx for idx, pair in enumerate(cast("list[Any]", vocabulary))}
    return {**(vocabulary or {}), **added_tokens(tokenizer)}
