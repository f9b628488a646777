"""Mixtures in scheduler and residency table: no deadlock or leak in any order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler_fakes import FakeResidency, adapter
from support.scheduler_harness import Harness, make_request

from loraplex_adapters.cache.residency import ResidencyTable
from loraplex_adapters.cache.states import KeyState, Promote, Stage
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import Cancelled, LoraplexError

NUM_SLOTS = 3
KEYS = tuple(adapter(name) for name in "abcde")


class TableResidency(FakeResidency):
    """The real table. Moves end after as many polls as the dice say."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__(NUM_SLOTS)
        self.table = ResidencyTable(1 << 30, 1 << 30, NUM_SLOTS, 10.0)
        self.dice = dice
        self.moves: list[Stage | Promote] = []
        for key in KEYS:
            self.table.bind(key, key.digest, 64, 4)

    @property
    def leases(self) -> dict[AdapterKey, int]:
        return {key: record.num_leases for key, record in self.table.records.items() if record.num_leases}

    def acquire(self, key: AdapterKey) -> int | None:
        return self.table.acquire(key)

    def acquire_all(self, keys: tuple[AdapterKey, ...]) -> tuple[int, ...] | None:
        return self.table.acquire_all(keys)

    def put_first(self, wants: object) -> None:
        self.table.put_first(wants)  # type: ignore[arg-type]

    def release(self, key: AdapterKey) -> None:
        self.table.release(key)

    def failure(self, *keys: AdapterKey) -> LoraplexError | None:
        return self.table.failure(*keys)

    def poll(self) -> None:
        while self.moves and self.dice.random() < 0.7:
            move = self.moves.pop(0)
            if isinstance(move, Promote):
                self.table.promoted(move.key)
            else:
                self.table.staged(move.key)
        self.table.advance(0.0)
        self.moves += [move for move in self.table.moves if isinstance(move, Stage | Promote)]
        self.table.moves.clear()
        self.table.check_integrity()

    def key_in(self, slot: int) -> AdapterKey | None:
        records = self.table.records.values()
        return next((one.key for one in records if one.slot == slot and one.state is KeyState.ON_DEVICE), None)


Arrival = tuple[frozenset[int], int, int]  # adapters, n, turns before the next one
arrivals = st.tuples(
    st.frozensets(st.integers(0, len(KEYS) - 1), max_size=NUM_SLOTS), st.integers(1, 3), st.integers(0, 4)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(arrivals, min_size=4, max_size=24), st.integers(0, 1 << 16), st.sampled_from([1, 2]))
def test_every_mixture_is_served(found: list[Arrival], seed: int, depth: int) -> None:
    dice = random.Random(seed)
    residency = TableResidency(dice)
    harness = Harness(
        num_blocks=24, max_running=4, max_bypasses=3, max_adapter_wait_s=0.1, depth=depth, residency=residency
    )
    held: dict[str, tuple[AdapterKey, ...]] = {}

    def turn() -> None:
        harness.turn()
        for request_id in [name for name in held if harness.logs[name].is_over]:
            for key in held.pop(request_id):
                residency.table.drop_hold(key)

    for number, (members, n, num_turns) in enumerate(found):
        keys = tuple(sorted(KEYS[idx] for idx in members))
        request = make_request(f"r{number}", range(1, 2 + dice.randrange(9)), max_tokens=dice.randint(1, 9), n=n)
        held[request.request_id] = keys
        for key in keys:
            residency.table.hold(key)
        if len(keys) > 1:
            harness.add_mixture(request, keys)
        else:
            harness.add(request, keys[0] if keys else None)
        for _ in range(num_turns):
            turn()
        if dice.random() < 0.1:
            name = f"r{dice.randint(0, number)}"
            harness.cancel(name, Cancelled("gone"))
    for _ in range(3000):
        if not harness.has_work:
            break
        turn()
    harness.run(max_turns=1)  # all is done, and nothing is left
    assert residency.leases == {}
    for name, log in harness.logs.items():
        if log.error is None:
            harness.check_output(name)
        else:
            assert isinstance(log.error, Cancelled)
