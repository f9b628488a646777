"""Random faults under load: two minutes in the slow suite, ten by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chaos import DEADLINES_S, LATE_S, run_chaos
from support.faults import Stopwatch, fault
from support.world import TinyWorld


@fault(
    "any of these, at random, every few seconds",
    clients_see="the right text or a typed error, once, within the deadline",
    within_s=DEADLINES_S[-1] + LATE_S,
)
@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(120.0, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(600.0, marks=[pytest.mark.nightly, pytest.mark.timeout(1500)]),
    ],
)
async def test_chaos(
    seconds: float, tiny_world: TinyWorld, tmp_path: Path, stopwatch: Stopwatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = await run_chaos(tiny_world, tmp_path, seconds, seed=int(seconds))
    stopwatch.record(tally.longest_s)
    with capsys.disabled():
        print(f"\n{tally.report()}")
    assert not tally.wrong, "\n".join([tally.report(), *tally.wrong[:20]])
    assert tally.ends["right text"] > sum(tally.ends.values()) / 3, tally.report()
