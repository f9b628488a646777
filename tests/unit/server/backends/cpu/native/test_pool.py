"""Thread pool of the native kernels."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from support.lora_cases import bits, random_problem, random_table
from support.native_kernels import library_or_skip, native_kernels

from loraplex_server.backends.cpu.lora import NativeOps
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.cpu.native.library import load
from loraplex_server.layers.lora import Segment
from loraplex_server.layers.quantization import INT4, INT8


@pytest.fixture(autouse=True)
def built() -> None:
    library_or_skip()


def num_os_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_many_small_jobs_from_many_threads() -> None:
    """All threads share one pool and take turns in it."""
    torch.manual_seed(0)
    kernels = native_kernels(3)
    packed = [kernels.pack([torch.randn(size, 64)]) for size in (33, 200, 2100)]
    inputs = [torch.randn(rows, 64) for rows in (1, 3, 70)]
    want = [[kernels.linear(x, weight, None) for x in inputs] for weight in packed]
    norm = torch.randn(64)
    want_norm = [kernels.rms_norm(x, norm, 1e-5) for x in inputs]

    def work(number: int) -> None:
        for turn in range(150):
            i, j = (number + turn) % 3, (number * turn) % 3
            assert torch.equal(kernels.linear(inputs[j], packed[i], None), want[i][j])
            assert torch.equal(kernels.rms_norm(inputs[j], norm, 1e-5), want_norm[j])

    with ThreadPoolExecutor(5) as threads:
        for done in [threads.submit(work, number) for number in range(5)]:
            done.result()


@pytest.mark.parametrize("num_threads", [4, 16, 64])
def test_more_threads_than_cores(num_threads: int) -> None:
    """A sum has the same bits on a machine of so many cores, and on one that others use too."""
    torch.manual_seed(2)
    one, many = native_kernels(1), native_kernels(num_threads)
    weight = torch.randn(2100, 96).bfloat16()
    table = random_table([8, 3, 16], 96, 300, torch.bfloat16)
    problem = random_problem([Segment(0, 20, 0), Segment(20, 70, 2)], table, 70, torch.bfloat16)
    for form in (None, INT8, INT4):
        packed = one.pack([weight], form)
        assert torch.equal(many.pack([weight], form).memory, packed.memory)
        for num_rows in (1, 9, 70):
            x = torch.randn(num_rows, 96).bfloat16()
            for _ in range(3):
                assert torch.equal(bits(many.linear(x, packed, None)), bits(one.linear(x, packed, None)))
    assert torch.equal(bits(problem.run(NativeOps(many))), bits(problem.run(NativeOps(one))))


def test_pools_beside_each_other() -> None:
    torch.manual_seed(1)
    table = random_table([8, 3, 16], 64, 300, torch.float32)
    problem = random_problem([Segment(0, 20, 0), Segment(20, 21, 1), Segment(21, 40, 2)], table, 40, torch.float32)
    want = problem.run(NativeOps(native_kernels(1)))

    def work(number: int) -> None:
        ops = NativeOps(native_kernels(1 + number % 3))
        for _ in range(60):
            assert torch.equal(bits(problem.run(ops)), bits(want))

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work, number) for number in range(4)]:
            done.result()


def test_jobs_after_a_pause_wake_the_threads() -> None:
    kernels = native_kernels(3)
    weight, x = torch.randn(500, 64), torch.randn(5, 64)
    packed = kernels.pack([weight])
    want = kernels.linear(x, packed, None)
    for pause_s in (0.0, 1e-5, 1e-4, 1e-3, 1e-2) * 8:
        time.sleep(pause_s)
        assert torch.equal(kernels.linear(x, packed, None), want)


def test_a_freed_pool_leaves_no_threads() -> None:
    gc.collect()
    before = num_os_threads()
    for number in range(40):
        kernels = native_kernels(1 + number % 5)
        kernels.linear(torch.zeros(3, 64), kernels.pack([torch.zeros(200, 64)]), None)
        assert num_os_threads() == before + number % 5
        del kernels
        assert num_os_threads() == before


def test_a_fresh_pool_is_freed_at_once() -> None:
    for _ in range(60):
        native_kernels(4)


# Stacks of threads count as memory of the process.
REFUSED_THREADS = """
import resource
from pathlib import Path
from loraplex_contracts.errors import FailedPrecondition
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.cpu.native.library import load
library = load().library
num_pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (num_pages * resource.getpagesize() + (512 << 20),) * 2)
before = len(list(Path("/proc/self/task").iterdir()))
try:
    NativeKernels(library, 5000)
except FailedPrecondition as error:
    assert "5000 threads; take fewer with --threads" in str(error), error
    assert len(list(Path("/proc/self/task").iterdir())) == before
    print("refused")
"""


def test_threads_that_the_system_does_not_give_are_one_error() -> None:
    """Those that had begun end."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_THREADS], timeout=60, check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


# --- processes --------------------------------------------------------------------------------------------------------

EXITING = """
import os, sys, threading, time, torch
torch.set_num_threads(1)
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.cpu.native.library import load
library = load().library
kernels = NativeKernels(library, 3)
x, packed = torch.randn(64, 640), kernels.pack([torch.randn(3000, 640)])
y = torch.empty(64, 3000)
arguments = (kernels._pool, 0, x.data_ptr(), 640, 64, 640, packed.address, 0, 3000, None, y.data_ptr(), 3000)
started = threading.Event()
def work():
    while True:
        library.functions.lp_linear(*arguments)
        started.set()
threading.Thread(target=work, daemon=True).start()
assert started.wait(60)
if sys.argv[1] == "busy":
    sys.exit(7)
for pause_s in (0, 1e-5, 1e-4, 1e-3) * 2:
    time.sleep(pause_s)  # its threads compute, or are about to
    child = os.fork()
    if child == 0:  # has the pool without its threads
        own = NativeKernels(library, 2)
        same = [torch.equal(own.linear(x[:3], packed, None), kernels.linear(x[:3], packed, None)) for _ in range(3)]
        del kernels
        sys.exit(7 if all(same) else 1)
    if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) != 7:
        sys.exit(code)
sys.exit(7)
"""


@pytest.mark.parametrize("how", ["busy", "forked"])
def test_a_process_ends(how: str) -> None:
    """A process ends while a thread is computing. So does one that was forked: it must not wait for threads that it
    does not have."""
    done = subprocess.run([sys.executable, "-c", EXITING, how], timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr


def _product(values: np.ndarray, weight: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    torch.set_num_threads(1)
    library = load().library
    assert library is not None
    kernels = NativeKernels(library, 2)
    return kernels.linear(torch.from_numpy(values), kernels.pack([torch.from_numpy(weight)]), None).numpy()


def test_a_spawned_process_computes_the_same() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(40, 96), torch.randn(70, 96)
    kernels = native_kernels(3)
    want = kernels.linear(x, kernels.pack([weight]), None)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        got = pool.apply_async(_product, (x.numpy(), weight.numpy())).get(timeout=60)
    assert np.array_equal(got, want.numpy())
