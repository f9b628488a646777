"""Mixtures of LoRA adapters: weighted sums, and recipes of merges."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from loraplex_contracts.adapters import OWN_ORIGIN, AdapterId, AdapterKey, AdapterOrigin

# Each takes a device slot as long as a completion runs: an eighth of the slots that a worker has by default.
MAX_MEMBERS: Final = 8
MAX_WEIGHT: Final = 1000.0  # far beyond what leaves a text; products with larger ones overflow in half precision
DEFAULT_WEIGHT: Final = 1.0

MergeStrategy = Literal["linear", "ties", "dare_linear", "dare_ties", "magnitude_prune"]
MajoritySign = Literal["total", "frequency"]
MERGE_STRATEGIES: Final[tuple[MergeStrategy, ...]] = (
    "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune",
)  # fmt: skip
MAJORITY_SIGNS: Final[tuple[MajoritySign, ...]] = ("total", "frequency")

WeightedKey = tuple[AdapterKey, float]

_WEIGHT: Final = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class Member:
    """An adapter of a mixture."""

    adapter_id: AdapterId
    weight: float
    origin: AdapterOrigin = OWN_ORIGIN  # of the adapter, for this caller; without a source that of its name


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge of members into one adapter, as PEFT's `add_weighted_adapter` makes it."""

    strategy: MergeStrategy
    density: float = 1.0  # share of values that are kept; of strategies that prune
    majority_sign: MajoritySign = "total"
    seed: int | None = None  # of what is pruned at random; None: from the recipe


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several adapters in the place of one. Without `merge`: the sum of their terms, each times its weight."""

    members: tuple[Member, ...]
    merge: Merge | None = None

    @property
    def adapter_ids(self) -> tuple[AdapterId, ...]:
        return tuple(member.adapter_id for member in self.members)

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(member.weight for member in self.members)

    @property
    def without_tokens(self) -> Mixture:
        """The mixture without its tokens, as it may be kept: a token is for one fetch."""
        return replace(self, members=tuple(replace(one, origin=one.origin.without_token) for one in self.members))


@dataclass(frozen=True, slots=True)
class Recipe:
    """A merge of certain contents."""

    mixture: Mixture
    keys: tuple[AdapterKey, ...]  # of the members
    merge: Merge

    @property
    def digest(self) -> str:
        merge = self.merge
        seed = "" if merge.seed is None else str(merge.seed)
        parts = (merge.strategy, merge.density.hex(), merge.majority_sign, seed)
        pairs = tuple(zip(self.keys, self.mixture.weights, strict=True))
        return _digest(b"loraplex merge\x01", pairs, "\n".join(parts).encode())

    @property
    def name(self) -> str:
        """The merged adapter's name in the adapter cache. No adapter id has a colon, so no request can name it."""
        return f"merge:{self.digest}"

    @property
    def seed(self) -> int:
        return int(self.digest[:16], 16) if self.merge.seed is None else self.merge.seed


def mixture_name(adapter_ids: Iterable[str]) -> str:
    """One name for the requests of a set of adapters, in queues and forecasts. No adapter id has a plus sign."""
    return "+".join(sorted(set(adapter_ids)))


def sum_weights(keys: Sequence[AdapterKey], weights: Sequence[float]) -> tuple[WeightedKey, ...]:
    """The contents, each once, with summed weights, in one order for all requests: equal mixtures are computed alike
    and share a prefix cache."""
    found: dict[AdapterKey, float] = {}
    for key, weight in sorted(zip(keys, weights, strict=True)):
        found[key] = found.get(key, 0.0) + weight
    return tuple(found.items())


def mixture_digest(adapters: Sequence[WeightedKey]) -> str:
    """Digest of a sum of adapters: 64 hexadecimal digits."""
    return _digest(b"loraplex mixture\x01", adapters)


def _digest(kind: bytes, adapters: Sequence[WeightedKey], tail: bytes = b"") -> str:
    """SHA-256 of a set of adapters. Every part but the last has one width."""
    parts = [bytes.fromhex(key.digest) + _WEIGHT.pack(weight) for key, weight in adapters]
    return hashlib.sha256(b"".join((kind, len(parts).to_bytes(4, "little"), *parts, tail))).hexdigest()
