"""Checks of tests/gpu, run on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.as_on_cuda import build_as_on_cuda
from support.device_checks import (
    CHECKS,
    Answer,
    Settings,
    World,
    check_replays,
    make_engine,
    make_requests,
    random_model,
    run,
)
from support.device_kinds import check_family, check_formats, check_pooling
from support.device_server import check_server
from support.zoo import HYBRIDS, ON_DEVICES


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float64, marks=pytest.mark.slow), torch.float32, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("check", CHECKS)
def test_on_a_cpu(check: str, dtype: torch.dtype, tmp_path: Path) -> None:
    CHECKS[check](Settings("cpu", dtype), tmp_path)


def slowly(quick: Sequence[str], names: Sequence[str]) -> list[Any]:
    """Parameters, of which some are for the fast tests."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("family", slowly(("deepseek_v3", "bamba"), ON_DEVICES))
def test_families_on_a_cpu(family: str, tmp_path: Path) -> None:
    check_family(Settings("cpu", torch.float32), tmp_path, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "phi3", "gpt2", "lfm2", "bamba"])
def test_families_in_bfloat16(family: str, tmp_path: Path) -> None:
    check_family(Settings("cpu", torch.bfloat16), tmp_path, family)


@pytest.mark.parametrize("family", slowly(("qwen2", "gemma2"), [one for one in ON_DEVICES if one not in HYBRIDS]))
def test_families_as_on_cuda(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_as_on_cuda(monkeypatch)
    replays: Counter[str] = Counter()
    check_family(Settings("cpu", torch.float32, replays=replays), tmp_path, family)
    assert replays["plain replayed"] > 0, replays
    assert replays["adapted replayed"] > 5, replays


@pytest.mark.parametrize("family", slowly((), ("llama", "qwen2", "gpt2")))
def test_kinds_of_adapters_as_on_cuda(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_as_on_cuda(monkeypatch)
    replays: Counter[str] = Counter()
    check_formats(Settings("cpu", torch.float32, replays=replays), tmp_path, family)
    assert replays["adapted replayed"] > 5, replays


def test_pooled_values_on_a_cpu(tmp_path: Path) -> None:
    check_pooling(Settings("cpu", torch.float32), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_as_on_cuda(check: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks pass with graphs that stand-ins replay, and steps that overlap."""
    build_as_on_cuda(monkeypatch)
    replays: Counter[str] = Counter()
    CHECKS[check](Settings("cpu", dtype, replays=replays), tmp_path)
    check_replays(replays)


def test_the_reference_notices_another_adapter(tmp_path: Path) -> None:
    """Answers of one adapter are not taken for another's, nor a wrong token for a right one."""
    settings = Settings("cpu", torch.bfloat16)
    world = World(random_model(settings.dtype), settings.dtype, tmp_path)
    names = [world.add(8, 1), world.add(8, 2)]
    engine = make_engine(world, settings)
    (answer,) = run(engine, make_requests(names, 1, 12)).values()
    engine.close()
    world.check({"right": answer})
    world.loras[names[0]], world.loras[names[1]] = world.loras[names[1]], world.loras[names[0]]
    swapped = World(world.model, world.dtype, world.root, world.loras)
    with pytest.raises(AssertionError, match=r"is off by|worse than the best"):
        swapped.check({"swapped": answer})
    wrong = Answer(answer.request, [*answer.tokens[:-1], (answer.tokens[-1] + 1) % 256], answer.logprobs)
    with pytest.raises(AssertionError, match="worse than the best"):
        world.check({"wrong": wrong})


@pytest.mark.slow
def test_a_server_on_a_cpu(tmp_path: Path) -> None:
    check_server("cpu", tmp_path)
