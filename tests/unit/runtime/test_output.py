"""Output that nobody reads."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, sys
from loraplex_runtime.output import unread_output_is_lost
sys.stdin.read()  # the reader is gone by then
with unread_output_is_lost():
    print("lost", flush=True)
with unread_output_is_lost():
    print("lost too")
print("still heard", file=sys.stderr)
"""


def test_a_closed_pipe_is_no_error_and_the_other_stream_goes_on() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdin, process.stdout, process.stderr:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == "still heard\n"
    assert process.wait(10) == 0
