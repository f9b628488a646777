"""Pooling beside an adapter, as sentence-transformers saves it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from loraplex_adapters.formats.files import POOLING_NAME
from loraplex_adapters.formats.pooling import MAX_POOLING_BYTES, read_pooling
from loraplex_adapters.io.confined_folder import Folder
from loraplex_adapters.io.source_files import AdapterFiles
from loraplex_adapters.sources.directory import open_folder
from loraplex_adapters.weights import AdapterLayout, FactorShape, place_adapter
from loraplex_contracts.errors import AdapterInvalid, AdapterOutsideRoot


def write(folder: Path, content: str) -> Path:
    path = folder / POOLING_NAME
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


def read(folder: Path) -> str:
    with open_folder(folder, "a") as files:
        return read_pooling(files)


OLD = {
    "word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False, "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False, "pooling_mode_lasttoken": False, "include_prompt": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**OLD, "pooling_mode_mean_tokens": True}, "mean"),
        ({**OLD, "pooling_mode_lasttoken": True}, "lasttoken"),
        ({**OLD, "pooling_mode_cls_token": True}, "cls"),
        ({**OLD, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max+mean"),
        ({"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": True}, "mean"),
        ({"pooling_mode": ["cls", "lasttoken"]}, "cls+lasttoken"),
    ],
)
def test_what_sentence_transformers_saves(tmp_path: Path, config: dict[str, Any], expected: str) -> None:
    write(tmp_path, json.dumps(config))
    assert read(tmp_path) == expected


def test_most_have_none(tmp_path: Path) -> None:
    assert read(tmp_path) == ""
    (tmp_path / "1_Pooling").mkdir()
    assert read(tmp_path) == ""


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", json.dumps(OLD), '{"pooling_mode": 5}', '{"pooling_mode": []}', '{"pooling_mode": "a b"}',
     '{"pooling_mode": "\\u00e9"}', " " * (MAX_POOLING_BYTES + 1)],
)  # fmt: skip
def test_others_are_refused(tmp_path: Path, content: str) -> None:
    write(tmp_path, content)
    with pytest.raises(AdapterInvalid, match="1_Pooling"):
        read(tmp_path)


def test_a_link_does_not_lead_out_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "root" / "a" / "1_Pooling").mkdir(parents=True)
    os.symlink(write(tmp_path, '{"pooling_mode": "mean"}'), tmp_path / "root" / "a" / POOLING_NAME)
    root = Folder.root(tmp_path / "root")
    with AdapterFiles(root.open_folder("a"), "a") as files, pytest.raises(AdapterOutsideRoot):
        read_pooling(files)
    root.close()


def test_it_is_part_of_the_content() -> None:
    plain = place_adapter("float32", [FactorShape("q", 2, 4, 4, 1.0)])
    assert "pooling" not in plain.to_json(), "digests of others stay as they are"
    own = AdapterLayout.from_json({**plain.to_json(), "pooling": "mean"})
    assert own.pooling == "mean"
    assert AdapterLayout.from_json(own.to_json()) == own
    with pytest.raises(ValueError, match="pooling"):
        AdapterLayout.from_json({**plain.to_json(), "pooling": 5})
