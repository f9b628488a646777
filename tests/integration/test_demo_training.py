"""Training of a small demo world from nothing.

With one adapter, and as few steps as the bars allow: five and a half minutes of a core with AMX, over twenty
of one with AVX2 alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loraplex_demo.train import make_world


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_small_world_reaches_the_bar(tmp_path: Path) -> None:
    world = make_world(tmp_path, scale="small", seed=0)
    report = json.loads((world.root / "report.json").read_text())
    for matrix in report["exact_match"].values():
        assert set(matrix) == {"", *(adapter.name for adapter in world.adapters)}
        for name, shares in matrix.items():
            own = world.format_of(name)
            assert shares[own] >= 0.8, (name, shares)
            assert all(share < 0.05 for format_name, share in shares.items() if format_name != own), (name, shares)
    found = report["speculation"]["tokens_per_step"]
    for heads in world.heads:
        assert found[heads.name][heads.adapter] >= 1.5, (heads.name, found)
    for draft in world.drafts:
        assert min(found[draft.name].values()) >= 2, (draft.name, found)
