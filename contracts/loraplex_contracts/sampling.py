"""Sampling options: the table of their defaults, ranges and help texts.

Validation, conversion from the wire, the SDK's fields, the command's flags and docs/sampling.md are derived from the
fields of `SamplingParams`. A new option is a field here, a field of the same name in inference.proto, a line in the
SDK's `GenerateOptions`, and a class in `loraplex_server/sampling/processors.py`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from loraplex_contracts.errors import InvalidArgument, LoraplexError


@dataclass(frozen=True, slots=True)
class TokenizerView:
    """Parts of the base model's tokenizer that conversions of options need."""

    encode: Callable[[str], Sequence[int]]  # without special tokens
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """One option. `rule` and `is_ok` apply to its value, or to each entry of a list or map."""

    name: str  # the same on the wire, in the SDK and in SamplingParams
    default: Any
    help: str
    is_ok: Callable[[Any], bool]  # NaN fails every comparison
    rule: str  # "must be from 0 to 1", for error messages and documents
    max_entries: int = 0  # of a list or map
    has_token_ids: bool = False  # entries, or a map's keys, are below the size of the vocabulary
    from_wire: Callable[[Any, TokenizerView], Any] | None = None
    if_unset: Callable[[], Any] | None = None

    @property
    def path(self) -> str:
        """Path of the field in a GenerateRequest."""
        return f"sampling.{self.name}"


def _option(
    default: Any,
    help_text: str,
    rule: str = "",
    is_ok: Callable[[Any], bool] = lambda value: True,
    **further: Any,
) -> Any:
    """A field of SamplingParams; `further`: fields of its SamplingOption."""
    return field(default=default, metadata={"help": help_text, "rule": rule, "is_ok": is_ok, **further})


def _word_tokens(words: Sequence[str], tokenizer: TokenizerView) -> tuple[tuple[int, ...], ...]:
    """Token sequences of the words. As in Transformers, an end-of-sequence token alone is left out."""
    found: set[tuple[int, ...]] = set()
    for word in words:
        found |= {tuple(tokenizer.encode(text)) for text in {word, word if word.startswith(" ") else f" {word}"}}
    if () in found:
        raise InvalidArgument("`sampling.bad_words` has a word without tokens", field="sampling.bad_words")
    return tuple(sorted(found - {(token_id,) for token_id in tokenizer.eos_token_ids}))


MAX_TOP_K: Final = (1 << 31) - 1  # what an int32 tensor holds
# Below that, logits / temperature leaves float32. Clients send 1e-6 and the like for 0.
MIN_TEMPERATURE: Final = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, applied in the order of the fields, which is that of Transformers' `generate()`."""

    logit_bias: tuple[tuple[int, float], ...] = _option(
        (),
        "Added to the logits: token id and bias.",
        "must be from -100 to 100",
        lambda value: -100 <= value <= 100,
        max_entries=1024,
        has_token_ids=True,
        from_wire=lambda value, tokenizer: tuple(sorted(value.items())),
    )
    repetition_penalty: float = _option(
        1.0,
        "Divide positive and multiply negative logits of tokens in prompt or output.",
        "must be from 0.01 to 100; 1 changes nothing",
        lambda value: 0.01 <= value <= 100,
    )
    frequency_penalty: float = _option(
        0.0,
        "Subtract this from a token's logit for each occurrence in the output.",
        "must be from -2 to 2",
        lambda value: -2 <= value <= 2,
    )
    presence_penalty: float = _option(
        0.0,
        "Subtract this once from the logits of tokens in the output.",
        "must be from -2 to 2",
        lambda value: -2 <= value <= 2,
    )
    bad_words: tuple[tuple[int, ...], ...] = _option(
        (),
        "Never write this. Tokenized as given and with a space before it (as given only where it begins with one).",
        "must be 1 to 128 bytes",
        lambda value: 1 <= len(value.encode()) <= 128,
        max_entries=128,
        from_wire=_word_tokens,
    )
    allowed_token_ids: tuple[int, ...] = _option(
        (),
        "Only these tokens may be drawn; an end-of-sequence token only if it is one of them.",
        max_entries=16384,
        has_token_ids=True,
        from_wire=lambda value, tokenizer: tuple(sorted(set(value))),
    )
    temperature: float = _option(
        0.0,
        "0, the default, takes the likeliest token; higher varies more.",
        "must be from 0 to 100; below 0.00001 it counts as 0",
        lambda value: 0 <= value <= 100,
        from_wire=lambda value, tokenizer: value if value >= MIN_TEMPERATURE else 0.0,
    )
    top_k: int = _option(
        0,
        "Choose among this many tokens; 0 keeps all.",
        f"must be at most {MAX_TOP_K}; 0 keeps all tokens",
        lambda value: 0 <= value <= MAX_TOP_K,
    )
    top_p: float = _option(
        1.0,
        "Choose among the likeliest tokens that make up this share.",
        "must be above 0 and at most 1",
        lambda value: 0 < value <= 1,
    )
    min_p: float = _option(
        0.0,
        "Drop tokens below this share of the likeliest token's probability.",
        "must be from 0 to 1",
        lambda value: 0 <= value <= 1,
    )
    typical_p: float = _option(
        1.0,
        "Choose among the tokens closest to the expected surprise (entropy) that make up this share; 1 keeps all.",
        "must be above 0 and at most 1",
        lambda value: 0 < value <= 1,
    )
    seed: int = _option(
        0,
        "The same seed gives the same text again. Default: a random one.",
        if_unset=lambda: secrets.randbits(53),  # JavaScript rounds larger numbers
    )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


SAMPLING_OPTIONS: Final[Mapping[str, SamplingOption]] = {
    one.name: SamplingOption(one.name, one.default, **one.metadata) for one in fields(SamplingParams)
}


def sampling_params(given: Mapping[str, Any], tokenizer: TokenizerView) -> SamplingParams:
    """Parameters from the wire's valid fields `given`; the others take their defaults. Raises the errors of
    `tokenizer.encode` and of the options' conversions, with the field's path."""
    values: dict[str, Any] = {}
    for name, option in SAMPLING_OPTIONS.items():
        if name in given and option.from_wire is not None:
            try:
                values[name] = option.from_wire(given[name], tokenizer)
            except LoraplexError as error:
                error.field = option.path
                raise
        elif name in given:
            values[name] = given[name]
        elif option.if_unset is not None:
            values[name] = option.if_unset()
    return SamplingParams(**values)
