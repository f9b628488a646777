"""Models with Medusa heads on the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.model.medusa_model import ServedModel, served_model

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 32,
    "medusa_num_heads": 1,
    "medusa_num_layers": 1,
}
SHARDS = {"medusa_head.0.0.linear.weight": "heads.safetensors", "model.norm.weight": "layers.safetensors"}


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that were asked of a Hub, whose repository has its heads beside its layers."""
    asked: list[str] = []

    def snapshot_download(model: str, *, local_dir: Path, allow_patterns: list[str], **_: Any) -> None:
        asked.extend(allow_patterns)
        if "config.json" in allow_patterns:
            (local_dir / "config.json").write_text(json.dumps(CONFIG))
            (local_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": SHARDS}))
        elif model == "broken/model":
            raise OSError("503 Server Error")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_only_files_with_heads_are_fetched(fetched: list[str]) -> None:
    with served_model("some/model", None) as served:
        assert served.heads is not None
        assert served == ServedModel("some/model", None, served.heads)
    assert "heads.safetensors" in fetched
    assert "layers.safetensors" not in fetched


def test_heads_that_cannot_be_fetched_refuse_the_model(fetched: list[str]) -> None:
    with (
        pytest.raises(UnsupportedModel, match=r"^broken/model cannot be loaded: its Medusa heads .*503 Server Error"),
        served_model("broken/model", None),
    ):
        pass
