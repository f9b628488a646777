from __future__ import annotations

from loraplex_server.engine.pacing import DEVICE_SHARE, Pacer, delivery_share


class Clocks:
    def __init__(self) -> None:
        self.now_s = 10.0
        self.cpu_s = 3.0

    def pass_by(self, seconds: float, cpu_seconds: float) -> None:
        self.now_s += seconds
        self.cpu_s += cpu_seconds


def pacer(share: float) -> tuple[Pacer, Clocks]:
    clocks = Clocks()
    return Pacer(share, lambda: clocks.now_s, lambda: clocks.cpu_s), clocks


def test_sending_waits_until_it_has_taken_no_more_than_its_share() -> None:
    paced, clocks = pacer(0.05)
    paced.sent(32)
    clocks.pass_by(0.030, 0.003)  # a tenth of a core
    assert not paced.is_due()
    clocks.pass_by(0.031, 0.0)
    assert paced.is_due()


def test_what_was_sent_before_counts_no_longer() -> None:
    paced, clocks = pacer(0.05)
    paced.sent(32)
    clocks.pass_by(0.1, 0.1)
    assert not paced.is_due()
    paced.sent(32)
    clocks.pass_by(0.1, 0.004)
    assert paced.is_due()


def test_few_streams_are_sent_at_once() -> None:
    paced, clocks = pacer(0.05)
    for _ in range(100):
        clocks.pass_by(0.017, 0.0004)
        assert paced.is_due()
        paced.sent(1)


def test_short_steps_do_not_count_what_it_takes_to_hear_of_them() -> None:
    paced, clocks = pacer(0.05)
    paced.sent(1)
    for _ in range(4):
        clocks.pass_by(0.001, 0.0002)
        assert paced.is_due() == (clocks.now_s >= 10.004)


def test_what_else_takes_cpu_time_holds_nothing_back_for_long() -> None:
    paced, clocks = pacer(0.05)
    for _ in range(10):
        paced.sent(1)
        clocks.pass_by(0.01, 0.0002)
        assert paced.is_due()
    paced.sent(1)
    clocks.pass_by(0.01, 0.01)  # a request came in
    assert paced.is_due()


def test_what_a_message_costs_is_learned() -> None:
    paced, clocks = pacer(0.05)
    for _ in range(100):
        paced.sent(1)
        clocks.pass_by(0.2, 0.002)
        paced.is_due()
    paced.sent(1)
    clocks.pass_by(0.03, 0.002)
    assert not paced.is_due()  # 40 ms
    clocks.pass_by(0.011, 0.0)
    assert paced.is_due()


def test_an_engine_on_another_device_leaves_the_cpu_to_sending() -> None:
    assert delivery_share("cuda:0") == DEVICE_SHARE
    assert 0 < delivery_share("cpu") <= DEVICE_SHARE
