"""Training batches of the demo: token ids with a mask of learned positions.

`recall_batches` is an endless stream of random pieces; it teaches looking up a key and copying its value.
`record_batches` is an endless stream of training records. Records alone take three times as long to learn from: common
words can be guessed, so the model memorises them long before it learns to copy. Recall batches mixed into the records
also keep every piece copyable, including words that no training record contains.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from transformers import PreTrainedTokenizerBase

from loraplex_demo.formats import FORMATS
from loraplex_demo.records import draw_examples
from loraplex_demo.tokenizer import BOS_ID, EOS_ID, NUM_SPECIAL, PAD_ID

_POOL_BATCHES = 16  # rows are sorted by length within this many batches, to pad little


@dataclass(frozen=True)
class Row:
    """One sequence: the given tokens and the tokens to be learned."""

    given: list[int]
    target: list[int]


@dataclass(frozen=True)
class Batch:
    token_ids: torch.Tensor  # int64 [num_rows, length], padded on the right
    counts: torch.Tensor  # bool [num_rows, length]: is this token to be learned?


def record_batches(
    tokenizer: PreTrainedTokenizerBase,
    *,
    stream: str,
    kinds: Sequence[str],
    shares: Mapping[str, float],
    num_rows: int,
) -> Iterator[Batch]:
    """Training records, each in one format, drawn by `shares` (format -> weight); the prompt is given."""
    rng = random.Random(stream)
    examples = draw_examples(stream, "train", kinds)
    formats, weights = list(shares), list(shares.values())
    while True:
        pool: list[Row] = []
        for record, prompt in islice(examples, num_rows * _POOL_BATCHES):
            answer = FORMATS[rng.choices(formats, weights)[0]](record)
            pool.append(to_row(tokenizer, prompt, answer))
        pool.sort(key=lambda row: len(row.given) + len(row.target))
        batches = [pool[start : start + num_rows] for start in range(0, len(pool), num_rows)]
        rng.shuffle(batches)
        yield from (pad_rows(rows) for rows in batches)


def recall_batches(tokenizer: PreTrainedTokenizerBase, *, stream: str, num_rows: int) -> Iterator[Batch]:
    """`k1=a b; k2=c; => k2=c; k1=a b;` with random pieces: lookup and copying without anything to memorise."""
    rng = random.Random(stream)
    vocab_size = len(tokenizer)
    separator, equals, arrow = (tokenizer.encode(text, add_special_tokens=False) for text in ("; ", "=", ". =>"))

    def draw() -> int:
        return rng.randrange(NUM_SPECIAL, vocab_size)

    while True:
        token_rows: list[tuple[list[int], list[bool]]] = []
        for _ in range(num_rows):
            pairs = [(draw(), [draw() for _ in range(rng.randint(1, 4))]) for _ in range(rng.randint(1, 4))]
            tokens = [
                BOS_ID,
                *(token for key, values in pairs for token in (key, *equals, *values, *separator)),
                *arrow,
            ]
            counts = [False] * len(tokens)
            rng.shuffle(pairs)
            for key, values in pairs:
                # The order of the keys is random, so only what follows a key counts.
                tokens += [key, *equals, *values, *separator]
                counts += [False] * (1 + len(equals)) + [True] * (len(values) + len(separator))
            token_rows.append((tokens, counts))
        yield _pad(token_rows)


def interleave(main: Iterator[Batch], other: Iterator[Batch], *, every: int) -> Iterator[Batch]:
    """`main` with every `every`-th batch taken from `other`."""
    for count in itertools.count(1):
        yield next(other if count % every == 0 else main)


def to_row(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> Row:
    """Prompt and answer, tokenized separately as they are when the model is served."""
    return Row(tokenizer.encode(prompt), [*tokenizer.encode(answer, add_special_tokens=False), EOS_ID])


def pad_rows(rows: Sequence[Row]) -> Batch:
    masks = [(row.given + row.target, [False] * len(row.given) + [True] * len(row.target)) for row in rows]
    return _pad(masks)


def _pad(rows: Sequence[tuple[list[int], list[bool]]]) -> Batch:
    length = max(len(tokens) for tokens, _ in rows)
    token_ids = [tokens + [PAD_ID] * (length - len(tokens)) for tokens, _ in rows]
    counts = [mask + [False] * (length - len(mask)) for _, mask in rows]
    return Batch(torch.tensor(token_ids), torch.tensor(counts))
