"""Lock of a Ray cluster: one command at a time changes what Serve runs.

Serve takes its whole configuration at once, so whoever changes a part reads the rest first and must be alone meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from typing import Any, Final

import ray
from ray.exceptions import RayError

from loraplex_contracts.errors import Unavailable
from loraplex_fleet.directory import NAMESPACE

NAME: Final = "loraplex-changing"
WAIT_S: Final = 60.0
LOOK_S: Final = 0.1


class _Holder:
    """An actor that does nothing: while it lives, no other one of its name can be made. Ray takes the name at once,
    before the actor's process starts, and ends the actor with the command that made it, however that ends."""


@contextlib.contextmanager
def changing() -> Generator[None]:
    """Holds the lock for a block. Raises Unavailable where another command has it for a minute."""
    holder = _take()
    try:
        yield
    finally:
        if ray.is_initialized():  # else it has ended with Ray, or with the connection
            with contextlib.suppress(RayError):
                ray.kill(holder)


def _take() -> Any:
    until_s = time.monotonic() + WAIT_S
    kind: Any = ray.remote(_Holder)
    while True:
        try:
            return kind.options(name=NAME, namespace=NAMESPACE, num_cpus=0).remote()
        except ValueError as error:  # the name is taken
            if time.monotonic() > until_s:
                raise Unavailable(
                    f"another `loraplex up` or `down` has been changing fleets for {WAIT_S:.0f} s; try again"
                ) from error
        time.sleep(LOOK_S)
