from __future__ import annotations

import pytest

from loraplex_server.engine.send_pacing import DEVICE_SHARE, FIRST_MESSAGE_S, Pacer, SendingMeter, delivery_share


class Meter(SendingMeter):
    """One whose process spends what it is told to."""

    def __init__(self) -> None:
        self.cpu_s = 3.0
        super().__init__(lambda: self.cpu_s)

    def after(self, num_messages: int, cpu_s: float) -> float | None:
        self.sent(num_messages)
        self.cpu_s += cpu_s
        return self.look()


def test_the_pause_leaves_sending_its_share() -> None:
    pacer = Pacer(0.05, max_wait_s=1.0)
    pacer.message_s = 1e-4
    assert pacer.pause_s(32) == pytest.approx(4e-3 / 0.05)
    assert pacer.pause_s(1) < pacer.pause_s(2) < 0.05


def test_nothing_waits_longer_than_it_may() -> None:
    assert Pacer(1e-9, max_wait_s=0.1).pause_s(1) == 0.1
    assert Pacer(1e-9, max_wait_s=0.0).pause_s(1000) == 0.0


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
