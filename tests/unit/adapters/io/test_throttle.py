"""Shares of a core that a throttled thread takes."""

from __future__ import annotations

import threading

import pytest

from loraplex_adapters.io.throttle import MAX_SHARE, SHARE, Throttle, checkpoint, throttled


class FakeClocks:
    """CPU time of the thread and of its process; while it sleeps the other threads work as much as `others` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: float) -> None:
        self.thread_s = self.process_s = 0.0
        self.pauses: list[float] = []
        self._others = others
        monkeypatch.setattr("time.thread_time", lambda: self.thread_s)
        monkeypatch.setattr("time.perf_counter", lambda: self.thread_s + sum(self.pauses))
        monkeypatch.setattr("time.process_time", lambda: self.process_s)
        monkeypatch.setattr("time.sleep", self._sleep)

    def work(self, seconds: float) -> None:
        self.thread_s += seconds
        self.process_s += seconds

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.process_s += self._others * seconds


@pytest.mark.parametrize("num_waiting", [0, 1, 3, 20])
def test_beside_busy_threads_it_takes_its_share(monkeypatch: pytest.MonkeyPatch, num_waiting: int) -> None:
    clocks = FakeClocks(monkeypatch, others=1.9)
    throttle = Throttle(lambda: num_waiting)
    for _ in range(1000):
        clocks.work(0.0001)
        throttle()
    assert len(clocks.pauses) >= 40  # in short spells
    share = min(MAX_SHARE, SHARE * (1 + num_waiting))
    assert 0.1 / (0.1 + sum(clocks.pauses)) == pytest.approx(share, rel=0.15)


def test_alone_it_hardly_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = FakeClocks(monkeypatch, others=0.01)
    throttle = Throttle()
    for _ in range(300):
        clocks.work(0.0001)
        throttle()
    assert 0.03 / (0.03 + sum(clocks.pauses)) > 0.65
    assert max(clocks.pauses[1:]) <= 0.001


def test_waiting_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a slow disk costs the steps nothing."""
    clocks = FakeClocks(monkeypatch, others=1.0)
    now_s = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    throttle = Throttle()
    for _ in range(10):
        now_s[0] += 1.0
        throttle()
    assert clocks.pauses == []


def test_only_checkpoints_of_the_throttled_thread_pause() -> None:
    calls: list[int] = []
    checkpoint()
    with throttled(lambda: calls.append(threading.get_ident())):
        checkpoint()
        other = threading.Thread(target=checkpoint)
        other.start()
        other.join()
    checkpoint()
    assert calls == [threading.get_ident()]
