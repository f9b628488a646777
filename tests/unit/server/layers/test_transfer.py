"""Memory on large pages."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loraplex_server.layers.transfer import LARGE_PAGE, large_pages

CPU = torch.device("cpu")


def flags_of(tensor: Tensor) -> str:
    """The flags of the mapping that a tensor begins in, between spaces; empty if there is no such mapping."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            found = begin <= tensor.data_ptr() < end
        elif found and first == "VmFlags:":
            return f"{line} "
    return ""


def test_a_large_tensor_asks_for_large_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has no transparent large pages")
    pages = large_pages((3, 700, 1000), torch.bfloat16, CPU)
    assert (pages.shape, pages.dtype) == ((3, 700, 1000), torch.bfloat16)
    assert " hg " in flags_of(pages)
    pages.fill_(2.5)
    part = pages[2]
    del pages
    gc.collect()
    assert bool((part == 2.5).all()), "a part keeps the whole in memory"


@pytest.mark.parametrize("shape", [(0,), (3, 0, 5), (3, 4, 5)])
def test_a_small_one_is_as_any_other(shape: tuple[int, ...]) -> None:
    pages = large_pages(shape, torch.float32, CPU)
    assert pages.shape == shape
    assert torch.equal(pages.fill_(1.0), torch.ones(shape))


def test_what_the_system_does_not_have_is_refused_as_torch_refuses_it() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        large_pages((1 << 20, LARGE_PAGE << 10), torch.uint8, CPU)
