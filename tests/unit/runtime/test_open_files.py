"""Limit of open files."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from loraplex_runtime.open_files import raise_file_limit


@pytest.fixture
def hard() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_is_raised_as_far_as_it_goes(hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    raise_file_limit()
    soft, after = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == (min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20)
    assert after == hard


def test_a_limit_is_never_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("changed")

    for soft, hard in ((1 << 20, 1 << 30), (1 << 21, 1 << 30), (64, 64), (resource.RLIM_INFINITY,) * 2):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=(soft, hard): limits)
        monkeypatch.setattr(resource, "setrlimit", refuse)
        raise_file_limit()
