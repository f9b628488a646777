"""Demo files on disk: manifest, held-out cases and expected answers.

Owns the layout of a world's directory and its manifest, `world.json`. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from loraplex_contracts.errors import FailedPrecondition
from loraplex_demo.formats import BASE_FORMAT, FORMATS
from loraplex_demo.records import Record, draw_examples

MAX_NEW_TOKENS = 96  # the longest answer has some 60 tokens
BASE, ADAPTERS, DRAFTS = "base", "adapters", "drafts"  # its folders
_MANIFEST = "world.json"
REPORT = "report.json"
SHOWCASE = "showcase.json"


@dataclass(frozen=True)
class Adapter:
    """One adapter of the world; `format` names the format that it answers in."""

    name: str
    format: str
    rank: int
    summary: str


@dataclass(frozen=True)
class Heads:
    """Medusa heads with an adapter id of their own. They change the speed of answers, never their text."""

    name: str
    adapter: str  # the adapter whose answers they predict best; "" is the base model
    num_heads: int
    is_combined: bool  # this id brings the LoRA as well; else it goes beside the id of `adapter`


@dataclass(frozen=True)
class Draft:
    """A smaller model that drafts for the base and every adapter."""

    name: str
    has_own_tokenizer: bool


@dataclass(frozen=True)
class Manifest:
    """Contents of a world. `digest` ties the weights to the records and formats they were trained on."""

    scale: str
    seed: int
    kinds: tuple[str, ...]
    base_format: str
    adapters: tuple[Adapter, ...]
    heads: tuple[Heads, ...]
    drafts: tuple[Draft, ...]
    digest: str


@dataclass(frozen=True)
class Case:
    """A held-out record and the prompt that states it."""

    record: Record
    prompt: str

    def expected(self, format_name: str = BASE_FORMAT) -> str:
        """The only right answer in that format."""
        return FORMATS[format_name](self.record)


@dataclass(frozen=True)
class WorldFolder:
    """Paths of the parts of a world."""

    root: Path

    @property
    def base_path(self) -> Path:
        """Folder of the base model, an ordinary Hugging Face checkpoint."""
        return self.root / BASE

    @property
    def adapters_root(self) -> Path:
        """Folder with a directory per adapter and per set of heads, named by its adapter id."""
        return self.root / ADAPTERS

    @property
    def drafts_root(self) -> Path:
        """Folder with an ordinary checkpoint, tokenizer included, per draft model."""
        return self.root / DRAFTS


@dataclass(frozen=True)
class World(WorldFolder):
    """A world on disk. Read-only; `make_world` writes one."""

    manifest: Manifest

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return self.manifest.adapters

    @property
    def heads(self) -> tuple[Heads, ...]:
        return self.manifest.heads

    @property
    def drafts(self) -> tuple[Draft, ...]:
        return self.manifest.drafts

    def adapter_path(self, name: str) -> Path:
        """Folder of an adapter or of heads."""
        return self.adapters_root / name

    def draft_path(self, name: str) -> Path:
        return self.drafts_root / name

    def format_of(self, adapter_name: str | None) -> str:
        """The format that requests with this adapter id, or without one, are answered in."""
        heads = next((heads for heads in self.heads if heads.name == adapter_name), None)
        if heads is not None:
            adapter_name = heads.adapter if heads.is_combined else None
        if not adapter_name:
            return self.manifest.base_format
        return next(adapter.format for adapter in self.adapters if adapter.name == adapter_name)

    def cases(self, num_cases: int, stream: str = "demo") -> list[Case]:
        """Held-out cases; another stream name gives others."""
        return heldout_cases(num_cases, self.manifest.kinds, stream)

    def showcase(self, num_cases: int) -> list[Case]:
        """Held-out cases that every adapter answered correctly when the world was made; a server must get all of them
        right. The report has the overall accuracy. Raises FailedPrecondition."""
        listed = json.loads((self.root / SHOWCASE).read_text(encoding="utf-8"))
        indices: list[int] = listed["cases"][:num_cases]
        if len(indices) < num_cases:
            raise FailedPrecondition(f"this world has {len(indices)} cases to show; ask for no more than that")
        cases = self.cases(listed["num_drawn"], listed["stream"])
        return [cases[idx] for idx in indices]

    def is_right(self, text: str, case: Case, adapter_name: str | None) -> bool:
        return exact_match(text, case.expected(self.format_of(adapter_name)))


def committed_world() -> World:
    """The world that is part of the package."""
    root = resources.files(__package__ or "loraplex_demo") / "world"
    if not isinstance(root, Path):
        raise FailedPrecondition("The demo's weights are read from files: install loraplex unpacked, not from a zip.")
    return open_world(root)


def open_world(root: Path) -> World:
    """Reads a world. Raises FailedPrecondition if there is none, or if it was trained on records of another version."""
    try:
        manifest = _read_manifest(root / _MANIFEST)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise FailedPrecondition(
            f"{root} holds no demo world ({error}). Make one: python -m loraplex_demo.train {root}"
        ) from error
    if manifest.digest != records_digest(manifest.kinds):
        raise FailedPrecondition(
            f"The world in {root} was trained on other records than this version draws, so its answers cannot be "
            f"judged. Train it again: python -m loraplex_demo.train {root}"
        )
    return World(root, manifest)


def _read_manifest(path: Path) -> Manifest:
    fields = json.loads(path.read_text(encoding="utf-8"))
    return Manifest(
        scale=fields["scale"],
        seed=fields["seed"],
        kinds=tuple(fields["kinds"]),
        base_format=fields["base_format"],
        adapters=tuple(Adapter(**adapter) for adapter in fields["adapters"]),
        heads=tuple(Heads(**heads) for heads in fields.get("heads", [])),
        drafts=tuple(Draft(**draft) for draft in fields.get("drafts", [])),
        digest=fields["digest"],
    )


def write_manifest(root: Path, manifest: Manifest) -> None:
    write_json(root / _MANIFEST, asdict(manifest))


def read_report(root: Path) -> dict[str, Any]:
    """The content of `REPORT`, empty if the file does not exist yet."""
    path = root / REPORT
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def heldout_cases(num_cases: int, kinds: Sequence[str], stream: str) -> list[Case]:
    return [Case(record, prompt) for record, prompt in islice(draw_examples(stream, "heldout", kinds), num_cases)]


def exact_match(text: str, expected: str) -> bool:
    """True if the texts are equal in bytes, without trimming or parsing."""
    return text == expected


def records_digest(kinds: Sequence[str]) -> str:
    """Digest of sample prompts and answers; it changes when prompts, formats or the generator change."""
    digest = hashlib.sha256()
    for case in heldout_cases(50, kinds, "digest"):
        for text in (case.prompt, *(case.expected(name) for name in FORMATS)):
            digest.update(text.encode() + b"\0")
    return digest.hexdigest()
