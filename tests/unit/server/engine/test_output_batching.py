"""Output batching on the way to the front end."""

from __future__ import annotations

import pickle
import random
import threading
import time
from collections.abc import Callable

import pytest

from loraplex_contracts.adapters import AdapterInfo, CacheUsage, ListingChanges
from loraplex_contracts.errors import Cancelled
from loraplex_contracts.load import Load
from loraplex_contracts.request import (
    Admitted,
    CompletionEnd,
    Event,
    FinishReason,
    PositionLogprobs,
    RequestFailed,
    Tokens,
)
from loraplex_server.engine.output_batching import (
    DEVICE_SHARE,
    FIRST_MESSAGE_S,
    OutputQueue,
    SendCostMeter,
    SendThrottle,
    can_wait,
    delivery_share,
    join,
)
from loraplex_server.engine.pipe import Batch, FromEngine, Reply, Starting


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


def reluctant(wait_s: float = 600.0) -> OutputQueue:
    """A queue in which everything waits that can."""
    outputs = OutputQueue()
    outputs.throttle = SendThrottle(share=1e-9, max_wait_s=wait_s)
    outputs.put(Batch((first(0),)))
    assert outputs.take() == [Batch((first(0),))]
    return outputs


class Writer(threading.Thread):
    """Takes messages until the queue of outputs is closed."""

    def __init__(self, outputs: OutputQueue) -> None:
        super().__init__(daemon=True)
        self._outbox = outputs
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
    outputs = reluctant()
    writer = Writer(outputs)
    outputs.put(Batch((later(5, request_id="q"),)))
    time.sleep(0.02)
    assert not writer.taken
    assert not can_wait(message)
    outputs.put(message)
    wait_until(lambda: bool(writer.taken))
    events = [event for one in writer.taken[0] if isinstance(one, Batch) for event in one.events]
    assert events[0] == later(5, request_id="q")
    outputs.close()
    writer.join(20)
    assert not writer.is_alive()


@pytest.mark.parametrize("events", [(later(1),), (later(1), later(2))])
@pytest.mark.parametrize("changes", [None, {"a": ()}])
def test_what_nobody_waits_for(events: tuple[Tokens, ...], changes: ListingChanges | None) -> None:
    assert can_wait(Batch(events, changes=changes))
    assert can_wait(Batch(changes={"a": (ROW,)}))


def test_what_is_held_goes_when_the_pause_is_over_and_starts_another() -> None:
    outputs = reluctant(wait_s=0.05)
    started_s = time.monotonic()
    for token_id in (1, 2, 3):
        outputs.put(Batch((later(token_id),)))
    assert outputs.take() == [Batch((Tokens("r", 0, (1, 2, 3), num_steps=3, can_wait=True),))]
    assert time.monotonic() - started_s > 0.02
    outputs.put(Batch((later(4),)))
    assert outputs.take() == [Batch((later(4),))]
    assert time.monotonic() - started_s > 0.06


def test_tokens_that_come_after_the_pause_do_not_wait() -> None:
    outputs = reluctant(wait_s=0.01)
    writer = Writer(outputs)
    for number in range(1, 4):
        time.sleep(0.03)
        outputs.put(Batch((later(number),)))
        wait_until(lambda number=number: len(writer.taken) == number)
    outputs.close()


def test_without_a_pace_nothing_waits() -> None:
    outputs = OutputQueue()
    for token_id in (1, 2):
        outputs.put(Batch((later(token_id),)))
        assert outputs.take() == [Batch((later(token_id),))]


def test_closing_brings_out_what_is_held_and_then_nothing() -> None:
    outputs = reluctant()
    outputs.put(Batch((later(1),)))
    outputs.close()
    assert outputs.take() == [Batch((later(1),))]
    assert outputs.take() == []


def test_messages_between_batches_keep_their_place() -> None:
    outputs = reluctant()
    outputs.put(Batch((later(1),)))
    outputs.put(Starting("x"))
    outputs.put(Batch((later(2),)))
    assert outputs.take() == [Batch((later(1),)), Starting("x"), Batch((later(2),))]


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
    outputs = OutputQueue()
    outputs.throttle = SendThrottle(share=1e-9, max_wait_s=rng.choice([0.0, 0.001, 0.01]))
    writer = Writer(outputs)
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
        outputs.put(Batch(tuple(events)))
        time.sleep(rng.choice([0, 0.001]))
    outputs.close()
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


class Meter(SendCostMeter):
    """A meter whose process spends what it is told to."""

    def __init__(self) -> None:
        self.cpu_s = 3.0
        super().__init__(lambda: self.cpu_s)

    def after(self, num_messages: int, cpu_s: float) -> float | None:
        self.sent(num_messages)
        self.cpu_s += cpu_s
        return self.look()


def test_the_pause_leaves_sending_its_share() -> None:
    throttle = SendThrottle(0.05, max_wait_s=1.0)
    throttle.message_s = 1e-4
    assert throttle.pause_s(32) == pytest.approx(4e-3 / 0.05)
    assert throttle.pause_s(1) < throttle.pause_s(2) < 0.05


def test_nothing_waits_longer_than_it_may() -> None:
    assert SendThrottle(1e-9, max_wait_s=0.1).pause_s(1) == 0.1
    assert SendThrottle(1e-9, max_wait_s=0.0).pause_s(1000) == 0.0


def test_what_a_message_takes_is_told_once_it_is_known() -> None:
    meter = Meter()
    told = [message_s for _ in range(100) if (message_s := meter.after(32, 40 * 5e-4)) is not None]
    assert told, "five times what was taken for granted"
    assert told == sorted(told)
    assert told[-1] == pytest.approx(5e-4, rel=0.3)
    assert len(told) < 20, "small changes are not worth telling"


def test_one_that_is_as_thought_is_not_told() -> None:
    meter = Meter()
    for num_messages in (1, 8, 32) * 20:
        assert meter.after(num_messages, (8 + num_messages) * FIRST_MESSAGE_S) is None


def test_what_else_takes_cpu_time_does_not_count() -> None:
    meter = Meter()
    for number in range(100):
        assert meter.after(8, 16 * FIRST_MESSAGE_S + (1.0 if number % 10 == 0 else 0.0)) is None


def test_looking_when_nothing_was_sent_learns_nothing() -> None:
    meter = Meter()
    for _ in range(100):
        meter.cpu_s += 1.0
        assert meter.look() is None


def test_an_engine_on_another_device_leaves_the_cpu_to_sending() -> None:
    assert delivery_share("cuda:0") == DEVICE_SHARE
    assert 0 < delivery_share("cpu") <= DEVICE_SHARE
