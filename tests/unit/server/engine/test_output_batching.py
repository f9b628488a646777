from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Callable

import pytest

from loraplex_contracts.adapters import AdapterInfo, CacheUsage, ListingChanges
from loraplex_contracts.errors import Cancelled
from loraplex_contracts.events import Admitted, CompletionEnd, Event, FinishReason, RequestFailed, Tokens
from loraplex_contracts.load import Load
from loraplex_contracts.plan import PositionLogprobs
from loraplex_server.engine.messages import Batch, FromEngine, Reply, Starting
from loraplex_server.engine.output_batching import Outbox, can_wait, join
from loraplex_server.engine.send_pacing import Pacer


def later(*token_ids: int, request_id: str = "r", index: int = 0, proposer: str = "") -> Tokens:
    num_accepted = len(token_ids) - 1
    return Tokens(
        request_id,
        index,
        token_ids,
        num_drafted=num_accepted,
        num_accepted=num_accepted,
        proposer=proposer,
        can_wait=True,
    )


def first(*token_ids: int) -> Tokens:
    return Tokens("r", 0, token_ids)


ROW = AdapterInfo("a", "lora", "0" * 64, "on_device", "device", 1, 4, 0, pinned=False)
END = CompletionEnd("r", 0, FinishReason.LENGTH, None, 2, 0)
URGENT = [
    Batch((first(1),)),
    Batch((later(1), END)),
    Batch((later(1), RequestFailed("q", Cancelled("gone")))),
    Batch((Admitted("r", "", 0.0),)),
    Batch((later(1),), (Reply(1),)),
    Batch((first(1),), changes={"a": ()}),
    Batch(),  # the queue has changed
    Starting("loading"),
]


def reluctant(wait_s: float = 600.0) -> Outbox:
    """One in which everything waits that can."""
    outbox = Outbox()
    outbox.pacer = Pacer(share=1e-9, max_wait_s=wait_s)
    outbox.put(Batch((first(0),)))
    assert outbox.take() == [Batch((first(0),))]
    return outbox


class Writer(threading.Thread):
    """Takes until the outbox is closed."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__(daemon=True)
        self._outbox = outbox
        self.taken: list[list[FromEngine]] = []
        self.start()

    def run(self) -> None:
        while messages := self._outbox.take():
            self.taken.append(messages)


def wait_until(is_so: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < limit_s
        time.sleep(0.001)


@pytest.mark.parametrize("message", URGENT, ids=str)
def test_what_somebody_waits_for_goes_at_once_and_takes_along_what_is_held(message: FromEngine) -> None:
    outbox = reluctant()
    writer = Writer(outbox)
    outbox.put(Batch((later(5, request_id="q"),)))
    time.sleep(0.02)
    assert not writer.taken
    assert not can_wait(message)
    outbox.put(message)
    wait_until(lambda: bool(writer.taken))
    events = [event for one in writer.taken[0] if isinstance(one, Batch) for event in one.events]
    assert events[0] == later(5, request_id="q")
    outbox.close()
    writer.join(20)
    assert not writer.is_alive()


@pytest.mark.parametrize("events", [(later(1),), (later(1), later(2))])
@pytest.mark.parametrize("changes", [None, {"a": ()}])
def test_what_nobody_waits_for(events: tuple[Tokens, ...], changes: ListingChanges | None) -> None:
    assert can_wait(Batch(events, changes=changes))
    assert can_wait(Batch(changes={"a": (ROW,)}))


def test_what_is_held_goes_when_the_pause_is_over_and_starts_another() -> None:
    outbox = reluctant(wait_s=0.05)
    started_s = time.monotonic()
    for token_id in (1, 2, 3):
        outbox.put(Batch((later(token_id),)))
    assert outbox.take() == [Batch((Tokens("r", 0, (1, 2, 3), num_steps=3, can_wait=True),))]
    assert time.monotonic() - started_s > 0.02
    outbox.put(Batch((later(4),)))
    assert outbox.take() == [Batch((later(4),))]
    assert time.monotonic() - started_s > 0.06


def test_tokens_that_come_after_the_pause_do_not_wait() -> None:
    outbox = reluctant(wait_s=0.01)
    writer = Writer(outbox)
    for number in range(1, 4):
        time.sleep(0.03)
        outbox.put(Batch((later(number),)))
        wait_until(lambda number=number: len(writer.taken) == number)
    outbox.close()


def test_without_a_pace_nothing_waits() -> None:
    outbox = Outbox()
    for token_id in (1, 2):
        outbox.put(Batch((later(token_id),)))
        assert outbox.take() == [Batch((later(token_id),))]


def test_closing_brings_out_what_is_held_and_then_nothing() -> None:
    outbox = reluctant()
    outbox.put(Batch((later(1),)))
    outbox.close()
    assert outbox.take() == [Batch((later(1),))]
    assert outbox.take() == []


def test_messages_between_batches_keep_their_place() -> None:
    outbox = reluctant()
    outbox.put(Batch((later(1),)))
    outbox.put(Starting("x"))
    outbox.put(Batch((later(2),)))
    assert outbox.take() == [Batch((later(1),)), Starting("x"), Batch((later(2),))]


def test_a_joined_batch_says_what_its_parts_said() -> None:
    usage = CacheUsage(*([0] * len(CacheUsage.__dataclass_fields__)))
    joined = join(
        [
            Batch((), (Reply(1),), Load(1), {"a": (), "b": ()}, usage),
            Batch((later(1),), (), Load(2)),
            Batch((END,), (Reply(2),), Load(3), {"b": (ROW,)}),
        ]
    )
    assert joined == Batch((later(1), END), (Reply(1), Reply(2)), Load(3), {"a": (), "b": (ROW,)}, usage)


def test_tokens_that_are_joined_lose_nothing() -> None:
    logprobs = tuple(PositionLogprobs(token_id, -1.0) for token_id in range(3))
    parts = [
        Tokens("r", 0, (7, 8), logprobs[:2], num_drafted=3, num_accepted=1, proposer="heads", can_wait=True),
        Tokens("r", 0, (9,), logprobs[2:], num_drafted=2, num_accepted=0, proposer="heads", can_wait=True),
    ]
    (joined,) = join([Batch((part,)) for part in parts]).events
    assert joined == Tokens("r", 0, (7, 8, 9), logprobs, 5, 1, "heads", num_steps=2, can_wait=True)
    assert pickle.loads(pickle.dumps(joined)) == joined


@pytest.mark.parametrize("seed", range(20))
def test_each_completion_reads_its_events_in_order_whatever_the_pace(seed: int) -> None:
    """Tokens by token, with the proposer of each; how they are put together is not looked at."""
    rng = random.Random(seed)
    outbox = Outbox()
    outbox.pacer = Pacer(share=1e-9, max_wait_s=rng.choice([0.0, 0.001, 0.01]))
    writer = Writer(outbox)
    sent: list[Event] = []
    lengths = {(f"r{request}", index): rng.randint(1, 12) for request in range(3) for index in range(2)}
    begun = set[tuple[str, int]]()
    while lengths:
        events: list[Event] = []
        for (request_id, index), length in list(lengths.items()):
            if rng.random() < 0.3:
                continue
            tokens = later(*range(rng.randint(1, 3)), request_id=request_id, index=index, proposer=rng.choice("ab"))
            is_first = (request_id, index) not in begun
            begun.add((request_id, index))
            events.append(Tokens(request_id, index, tokens.token_ids, proposer="a") if is_first else tokens)
            lengths[request_id, index] -= 1
            if length == 1:
                events.append(CompletionEnd(request_id, index, FinishReason.LENGTH, None, 2, 0))
                del lengths[request_id, index]
        sent += events
        outbox.put(Batch(tuple(events)))
        time.sleep(rng.choice([0, 0.001]))
    outbox.close()
    writer.join(20)
    got = [event for messages in writer.taken for one in messages if isinstance(one, Batch) for event in one.events]
    assert by_completion(got) == by_completion(sent)


def by_completion(events: list[Event]) -> dict[tuple[str, int], list[object]]:
    found: dict[tuple[str, int], list[object]] = {}
    for event in events:
        assert isinstance(event, Tokens | CompletionEnd)
        of_one = found.setdefault((event.request_id, event.index), [])
        of_one += [(token, event.proposer) for token in event.token_ids] if isinstance(event, Tokens) else [event]
    return found
