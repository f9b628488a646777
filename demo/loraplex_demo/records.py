"""Records of the demo (people, orders, books) and their English prompts.

Owns the record schemas, the seeded generator and the split. Every number, price, date and code belongs to exactly one
split by its hash: a held-out record has known words and values that training has never shown.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from loraplex_demo import vocabulary

Split = Literal["train", "heldout"]
Value = str | int | float

HELDOUT_SHARE = 8  # one open value in eight is held out
MADE_UP_SHARE = 0.05
PROMPT_END = " =>"  # no trailing white space: shells, YAML files and people strip it


@dataclass(frozen=True)
class Record:
    """One record: its kind and its fields in the order of the kind's schema."""

    kind: str
    fields: tuple[tuple[str, Value], ...]


class ValueSource:
    """Draws values that belong to one split. Owns its random stream and nothing else."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split = split

    def open_value(self, draw: Callable[[], str]) -> str:
        """Draws until the value belongs to this source's split."""
        while True:
            value = draw()
            if split_of(value) == self.split:
                return value

    def integer(self, low: int, high: int) -> int:
        return int(self.open_value(lambda: str(self.rng.randint(low, high))))

    def price(self) -> float:
        # Cents never end in 0, so that the number reads the same in every format.
        def draw() -> str:
            return f"{self.rng.randint(2, 480)}.{self.rng.randint(0, 9)}{self.rng.randint(1, 9)}"

        return float(self.open_value(draw))

    def date(self) -> str:
        def draw() -> str:
            return f"{self.rng.randint(2019, 2031)}-{self.rng.randint(1, 12):02d}-{self.rng.randint(1, 28):02d}"

        return self.open_value(draw)

    def code(self) -> str:
        def draw() -> str:
            letters = "".join(self.rng.choice("ABCDEFGHKLMNPRSTVWXZ") for _ in range(2))
            return f"{letters}-{self.rng.randint(100, 9999)}"

        return self.open_value(draw)

    def word(self, known: tuple[str, ...]) -> str:
        """A word of the list or sometimes a made-up one, so that no list limits variety. Used in both splits."""
        return self._made_up() if self.rng.random() < MADE_UP_SHARE else self.rng.choice(known)

    def _made_up(self) -> str:
        if self.rng.random() < 0.5:
            syllables = (self.rng.choice(vocabulary.ONSETS) + self.rng.choice(vocabulary.VOWELS) for _ in range(2))
            return "".join(syllables) + self.rng.choice(vocabulary.CODAS)
        # Two halves of real words, so that their pieces appear in new combinations.
        head, tail = self.rng.choice(vocabulary.ANY), self.rng.choice(vocabulary.ANY)
        return (head[: (len(head) + 1) // 2] + tail[len(tail) // 2 :]).lower()


def split_of(value: str) -> Split:
    """The split that an open value belongs to; case does not matter, as names appear in both."""
    return "heldout" if zlib.crc32(value.lower().encode()) % HELDOUT_SHARE == 0 else "train"


def _full_name(source: ValueSource) -> str:
    return f"{source.word(vocabulary.FIRST_NAMES).capitalize()} {source.word(vocabulary.LAST_NAMES).capitalize()}"


def _title(source: ValueSource) -> str:
    return f"{source.word(vocabulary.ADJECTIVES).capitalize()} {source.word(vocabulary.NOUNS).capitalize()}"


def _item(source: ValueSource) -> str:
    return f"{source.word(vocabulary.ADJECTIVES)} {source.word(vocabulary.NOUNS)}"


def _city(source: ValueSource) -> str:
    return source.word(vocabulary.CITIES).capitalize()


def _event_title(source: ValueSource) -> str:
    return f"{source.word(vocabulary.NOUNS).capitalize()} {source.rng.choice(vocabulary.GATHERINGS)}"


def _email(source: ValueSource) -> str:
    first, last = source.word(vocabulary.FIRST_NAMES).lower(), source.word(vocabulary.LAST_NAMES).lower()
    return f"{first}.{last}@{source.rng.choice(vocabulary.DOMAINS)}"


@dataclass(frozen=True)
class Field:
    """One field of a kind: how its value is drawn, how a sentence states it, and whether a record may lack it."""

    key: str
    draw: Callable[[ValueSource], Value]
    phrases: tuple[str, ...]
    optional: bool = False


SCHEMAS: dict[str, tuple[Field, ...]] = {
    "person": (
        Field("name", _full_name, ("Meet {}", "This is {}")),
        Field("age", lambda s: s.integer(18, 97), ("aged {}", "{} years old")),
        Field("city", _city, ("living in {}", "at home in {}"), optional=True),
        Field("email", _email, ("reached at {}", "writing from {}"), optional=True),
    ),
    "purchase": (
        Field("id", lambda s: s.code(), ("Purchase {}", "We have purchase {}")),
        Field("item", _item, ("for a {}", "asking for {}")),
        Field("quantity", lambda s: s.integer(2, 99), ("{} pieces", "{} of them")),
        Field("price", lambda s: s.price(), ("at {} each", "costing {}"), optional=True),
        Field("status", lambda s: s.rng.choice(vocabulary.STATUSES), ("now {}", "marked {}"), optional=True),
    ),
    "book": (
        Field("title", _title, ("The book {}", "We read {}")),
        Field("author", _full_name, ("written by {}", "by {}")),
        Field("year", lambda s: s.integer(1850, 2025), ("out in {}", "from {}")),
        Field("pages", lambda s: s.integer(80, 990), ("{} pages long", "with {} pages"), optional=True),
        Field("genre", lambda s: s.rng.choice(vocabulary.GENRES), ("filed under {}", "shelved as {}"), optional=True),
    ),
    "event": (
        Field("title", _event_title, ("Come to the {}", "Announcing the {}")),
        Field("date", lambda s: s.date(), ("on {}", "held on {}")),
        Field("city", _city, ("in {}", "taking place in {}")),
        Field("seats", lambda s: s.integer(20, 900), ("room for {}", "{} seats"), optional=True),
    ),
    "flight": (
        Field("number", lambda s: s.code(), ("Flight {}", "Now boarding {}")),
        Field("origin", _city, ("leaving {}", "out of {}")),
        Field("target", _city, ("bound for {}", "going to {}")),
        Field("date", lambda s: s.date(), ("on {}", "departing {}"), optional=True),
        Field("gate", lambda s: s.integer(1, 99), ("from gate {}", "at gate {}"), optional=True),
    ),
    "sensor": (
        Field("id", lambda s: s.code(), ("Sensor {}", "A signal from {}")),
        Field("room", lambda s: s.rng.choice(vocabulary.ROOMS), ("in the {}", "mounted in the {}")),
        Field("reading", lambda s: s.price(), ("showing {}", "measured {}")),
        Field("battery", lambda s: s.integer(1, 99), ("battery at {}", "{} percent charged"), optional=True),
        Field("owner", _full_name, ("owned by {}", "cared for by {}"), optional=True),
    ),
}

KINDS = tuple(SCHEMAS)


def draw_record(source: ValueSource, kinds: Sequence[str]) -> Record:
    """One record of a random kind; each optional field is missing in a quarter of the records."""
    kind = source.rng.choice(kinds)
    kept = [field for field in SCHEMAS[kind] if not (field.optional and source.rng.random() < 0.25)]
    return Record(kind, tuple((field.key, field.draw(source)) for field in kept))


def prompt_for(record: Record, rng: random.Random) -> str:
    """States the record in English, ending with the arrow after which an answer starts; no format is ever named."""
    text = _as_sentence(record, rng) if rng.random() < 0.5 else _as_note(record, rng)
    return text + PROMPT_END


def _as_sentence(record: Record, rng: random.Random) -> str:
    """One clause per field: the first field leads, the others follow in any order."""
    phrases = {field.key: field.phrases for field in SCHEMAS[record.kind]}
    clauses = [rng.choice(phrases[key]).format(value) for key, value in record.fields]
    followers = clauses[1:]
    rng.shuffle(followers)
    return ", ".join([clauses[0], *followers]) + "."


def _as_note(record: Record, rng: random.Random) -> str:
    """The kind and its fields as terse notes, in any order."""
    notes = [f"{key}={value}" for key, value in record.fields]
    rng.shuffle(notes)
    return f"{record.kind.capitalize()}: {'; '.join(notes)}."


def draw_examples(stream: str, split: Split, kinds: Sequence[str] = KINDS) -> Iterator[tuple[Record, str]]:
    """An endless (record, prompt) stream, seeded by its name, in which every open value belongs to `split`."""
    rng = random.Random(f"{split} {stream}")
    source = ValueSource(rng, split)
    while True:
        record = draw_record(source, kinds)
        yield record, prompt_for(record, rng)
