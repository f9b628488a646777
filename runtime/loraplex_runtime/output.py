"""Standard output and error of a process that must not depend on anybody reading them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Generator


@contextlib.contextmanager
def unread_output_is_lost() -> Generator[None]:
    """For a block that prints: a closed pipe or terminal raises nothing in here, nor when the process ends."""
    try:
        yield
    except OSError:
        _mute_broken_streams()


def _mute_broken_streams() -> None:
    """What could not be written is still in the stream's buffer, and would raise again at the end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
        except (AttributeError, ValueError):
            continue  # there is none, or it is closed
