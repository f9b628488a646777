"""A child whose parent dies while it is stopped."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest
from support.processes import wait_until

CHILD = """
import os
from loraplex_server.parent import continue_when_parent_dies
continue_when_parent_dies()
print("started", flush=True)
os.read(0, 1)
print("alone", flush=True)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no signal for the death of a parent")
def test_a_stopped_child_goes_on() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "started\n"
        (child,) = psutil.Process(parent.pid).children()
        child.suspend()
        wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
        parent.kill()
        parent.wait(10)
        assert parent.stdout.readline() == "alone\n"
