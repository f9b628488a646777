"""Lock of a Ray cluster, without Ray."""

from __future__ import annotations

from typing import Any

import pytest
from support.fleet import ray_is_missing

from loraplex_contracts.errors import Unavailable

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own modules
    pytest.mark.skipif(bool(ray_is_missing()), reason=ray_is_missing()),
]


class FakeRay:
    """Named actors, of which another command's is there for the first tries."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_taken: int = 0) -> None:
        from loraplex_fleet import changing

        self.num_taken = num_taken
        self.is_held = False
        monkeypatch.setattr(changing, "ray", self)
        monkeypatch.setattr(changing, "LOOK_S", 0.001)

    def remote(self, *_: Any) -> Any:
        """Both `ray.remote`, whose options say nothing here, and the actor's."""
        if _:
            return self
        self.num_taken -= 1
        if self.num_taken >= 0:
            raise ValueError("the name is taken")
        self.is_held = True
        return self

    def options(self, **_: Any) -> Any:
        return self

    def is_initialized(self) -> bool:
        return True

    def kill(self, holder: Any) -> None:
        assert holder is self
        self.is_held = False


def test_it_is_waited_for_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet.changing import changing

    fake = FakeRay(monkeypatch, num_taken=3)
    with pytest.raises(RuntimeError), changing():
        assert fake.is_held
        raise RuntimeError
    assert not fake.is_held


def test_one_that_stays_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet import changing

    fake = FakeRay(monkeypatch, num_taken=10**9)
    monkeypatch.setattr(changing, "WAIT_S", 0.01)
    with pytest.raises(Unavailable, match="another `loraplex up` or `down`"), changing.changing():
        pass
    assert not fake.is_held
