"""Choice of a worker for a request. Pure; randomness is an argument.

Rendezvous hashing gives every adapter an order of workers that hardly changes when one of them comes or goes. The first
few are its homes. A home that is loaded beyond its share is passed over, a home that has the weights nearer to the
device is preferred, and base requests go to the less loaded of two picked at random.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from random import Random
from typing import Final, Literal, NamedTuple

from loraplex_contracts.adapters import name_in
from loraplex_router.config import PolicyConfig

# Tiers as the wire numbers them (loraplex.v1.AdapterTier): the higher, the sooner an adapter can run.
NOT_RESIDENT: Final = 0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker that can take requests, as the policy sees it."""

    worker_id: str
    # Tokens of work ahead of a new request: prompt tokens to compute and output tokens still allowed.
    work_tokens: int
    # Adapter id -> tier. The base model's requests need none.
    tiers: Mapping[str, int] = field(default_factory=dict[str, int])
    # What adapters are hashed by; empty where that is the id.
    name: str = ""
    # Share of the work that others get: less than 1 for a newcomer, which has cold caches and no adapters.
    share: float = 1.0

    @property
    def hash_name(self) -> str:
        return self.name or self.worker_id


@dataclass(frozen=True, slots=True)
class Route:
    """The part of a request that decides where it goes."""

    # Every adapter that it needs; empty for the base model.
    adapter_ids: tuple[str, ...] = ()
    # Work of the same adapters that is under way already, here: what makes them hot.
    work_in_flight_tokens: int = 0

    @property
    def routing_key(self) -> str:
        """Key of the request's adapters. Requests with the same key share their homes."""
        return routing_key(self.adapter_ids)


# Why a worker was chosen: a request for the base model goes to any; one for an adapter to a home of it, to one of the
# further homes that a hot adapter has, or, where all of them are loaded beyond their share, to another worker.
Decision = Literal["base", "home", "hot", "overflow"]
DECISIONS: Final[tuple[Decision, ...]] = ("base", "home", "hot", "overflow")


class Choice(NamedTuple):
    worker_id: str
    decision: Decision


def routing_key(adapter_ids: Collection[str]) -> str:
    """One name for a set of adapters; empty for the base model. No adapter id contains a line feed. Versions have their
    adapter's homes: those have loaded them."""
    return "\n".join(sorted(map(name_in, adapter_ids)))


def adapters_of(key: str) -> list[str]:
    """The adapters of a routing key, without versions."""
    return key.split("\n") if key else []


def rendezvous_order(key: str, names: Collection[str]) -> list[str]:
    """The workers' names in the order in which they are responsible for `key`.

    A worker that leaves changes nothing in the order of the others, whatever the key.
    """
    return list(_order(key, tuple(names)))


# With a hundred workers an order takes as long as everything else about a request.
@lru_cache(maxsize=1 << 13)
def _order(key: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: (_score(key, name), name), reverse=True))


def _score(key: str, name: str) -> int:
    # Sizes are hashed too, so that no two pairs of names can run into each other.
    text = f"{len(key)}:{key}{name}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest())


def load_bound(workers: Sequence[WorkerView], config: PolicyConfig) -> float:
    """The most work a worker may have and still be given one more request; for a newcomer, times its share.

    There always is a worker that is not above it, because not all are above the mean.
    """
    num_workers = sum(worker.share for worker in workers) or len(workers)
    mean = sum(worker.work_tokens for worker in workers) / num_workers
    return max(config.load_factor * mean, float(config.free_work_tokens))


def num_homes(route: Route, workers: Sequence[WorkerView], config: PolicyConfig) -> int:
    """Number of workers that are an adapter's homes: more when its requests exceed one worker's share."""
    total_tokens = max(sum(worker.work_tokens for worker in workers), route.work_in_flight_tokens)
    if route.work_in_flight_tokens <= config.free_work_tokens or total_tokens == 0:
        return min(config.num_homes, len(workers))
    share = route.work_in_flight_tokens / total_tokens
    wanted = math.ceil(share * len(workers) * config.load_factor)
    return min(max(config.num_homes, wanted), len(workers))


def choose(route: Route, workers: Sequence[WorkerView], config: PolicyConfig, random: Random) -> Choice | None:
    """The worker for one request, or None where there is no worker at all.

    The chosen worker is never above `load_bound`.
    """
    if not workers:
        return None
    bound = load_bound(workers, config)
    open_workers = [worker for worker in workers if worker.work_tokens <= bound * worker.share]
    # Where all are newcomers that have no share yet:
    open_workers = open_workers or [worker for worker in workers if worker.work_tokens <= bound]
    if not route.adapter_ids:
        return Choice(_less_loaded_of_two(open_workers, random).worker_id, "base")
    # Two workers have one name while one takes the place of the other: a home is a name.
    order = _order(route.routing_key, tuple(dict.fromkeys([worker.hash_name for worker in workers])))
    homes = num_homes(route, workers, config)
    by_name = {worker.hash_name: worker for worker in open_workers}
    # Homes first; when all of them are busy, the next free worker takes the overflow.
    candidates = [by_name[name] for name in order[:homes] if name in by_name]
    is_overflow = not candidates
    candidates = candidates or [by_name[name] for name in order if name in by_name]
    best = max(tier_of(route, worker) for worker in candidates)
    equals = [worker for worker in candidates if tier_of(route, worker) == best]
    is_hot = homes > config.num_homes
    # Keeping to the order keeps an adapter's prompts where their prefixes are cached.
    chosen = _less_loaded_of_two(equals, random) if is_hot and best > NOT_RESIDENT else equals[0]
    if is_overflow:
        return Choice(chosen.worker_id, "overflow")
    is_usual = chosen.hash_name in order[: config.num_homes]
    return Choice(chosen.worker_id, "home" if is_usual else "hot")


def tier_of(route: Route, worker: WorkerView) -> int:
    """The tier of the farthest of the request's adapters."""
    return min((worker.tiers.get(adapter_id, NOT_RESIDENT) for adapter_id in route.adapter_ids), default=NOT_RESIDENT)


def _less_loaded_of_two(workers: Sequence[WorkerView], random: Random) -> WorkerView:
    """Power of two choices: nearly as even as picking the least loaded, without all routers picking the same one."""
    pair = random.sample(workers, 2) if len(workers) > 2 else list(workers)
    if len(pair) == 2 and pair[0].work_tokens == pair[1].work_tokens:
        return random.choice(pair)
    return min(pair, key=lambda worker: worker.work_tokens)
