"""Templates beside an adapter, as Transformers saves them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny_tokenizers import tiny_tokenizer

from loraplex_adapters.formats.templates import read_templates
from loraplex_adapters.sources.directory import open_folder
from loraplex_adapters.weights import AdapterLayout, FactorShape, place_adapter
from loraplex_contracts.adapters import MAX_TEMPLATE_BYTES, AdapterTemplates
from loraplex_contracts.errors import AdapterInvalid


def read(folder: Path, **files: str) -> AdapterTemplates | None:
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    with open_folder(folder, "a") as opened:
        return read_templates(opened)


RESPONSE = {"start_anchor": "x", "fields": {"content": {}}}


@pytest.mark.parametrize("template", ["{{ messages }}", {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}])
@pytest.mark.parametrize("in_files", [True, False])
def test_what_transformers_saves(tmp_path: Path, template: Any, in_files: bool) -> None:
    tiny: Any = copy.copy(tiny_tokenizer("byte_level"))
    tiny.chat_template, tiny.response_template = template, RESPONSE
    tiny.save_pretrained(tmp_path, save_jinja_files=in_files)
    found = read(tmp_path)
    assert found is not None
    named: dict[str, str] = {"default": template} if isinstance(template, str) else template
    assert found.chat == named["default"]
    # Of several in files, the default is beside the adapter and the others are in a folder that is not read.
    assert found.chat_with_tools == ("" if in_files else named.get("tool_use", ""))
    assert json.loads(found.response) == RESPONSE


def test_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    assert read(tmp_path) is None
    assert read(tmp_path, tokenizer_config__json="{}") is None
    assert read(tmp_path, tokenizer_config__json='{"chat_template": "1"}') == AdapterTemplates("1")
    assert read(tmp_path, chat_template__json='{"chat_template": "2"}') == AdapterTemplates("2")
    assert read(tmp_path, chat_template__jinja="3") == AdapterTemplates("3")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config__json", '{"chat_template": 5}', "neither"),
        ("tokenizer_config__json", '{"chat_template": [{"name": "x"}]}', "neither"),
        ("tokenizer_config__json", '{"response_template": []}', "not an object"),
        ("tokenizer_config__json", "{", "not valid JSON"),
        ("tokenizer_config__json", json.dumps({"chat_template": "x" * (MAX_TEMPLATE_BYTES + 1)}), "more than"),
        ("chat_template__jinja", "x" * (MAX_TEMPLATE_BYTES + 1), "at most"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: str, words: str) -> None:
    with pytest.raises(AdapterInvalid, match=words):
        read(tmp_path, **{name: content})


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(AdapterInvalid, match="not UTF-8"):
        read(tmp_path)


def test_templates_are_part_of_the_content() -> None:
    plain = place_adapter("float32", [FactorShape("q", 2, 4, 4, 1.0)])
    assert "templates" not in plain.to_json(), "digests of others stay as they are"
    own = AdapterLayout.from_json({**plain.to_json(), "templates": {"chat": "x", "response": "{}"}})
    assert own.templates == AdapterTemplates("x", response="{}")
    assert AdapterLayout.from_json(own.to_json()) == own
    for wrong in ({"chat": 5}, {"other": "x"}, "x"):
        with pytest.raises(ValueError, match="templates"):
            AdapterLayout.from_json({**plain.to_json(), "templates": wrong})
