"""Progress of weights: tensors that are read, bytes that are fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from huggingface_hub.utils.tqdm import _create_progress_bar
from support.zoo import random_model

from loraplex_runtime.reports import share_of
from loraplex_server.model.loader import load_model
from loraplex_server.model.weights_progress import telling_of_weights


def test_tensors_are_counted(tmp_path: Path) -> None:
    random_model("llama", torch.float32).save_pretrained(tmp_path)
    said: list[str] = []
    load_model(str(tmp_path), progress=said.append)
    counts = [text for text in said if text.startswith("reading weights: ")]
    assert share_of(counts[-1]) == 1.0
    assert counts[-1].endswith(" tensors")
    assert "checking what the model computes" in said
    assert any(text.startswith("packing weights") for text in said)


def test_bytes_of_all_files_are_one_count() -> None:
    said: list[str] = []
    with telling_of_weights(said.append) as options:
        for total in (10**9, 3 * 10**9):
            bar = _create_progress_bar(cls=options["tqdm_class"], log_level=20, unit="B", total=total, desc="file")
            bar.update(10**9)
    assert said == ["fetching from the Hub: 1 of 1 GB", "fetching from the Hub: 2 of 4 GB"]


@pytest.mark.parametrize(
    ("text", "share"),
    [("reading weights: 3 of 12 tensors", 0.25), ("32,800 tokens of KV cache", None), ("x: 1 of 0 y", None)],
)
def test_shares_of_texts(text: str, share: float | None) -> None:
    assert share_of(text) == share
