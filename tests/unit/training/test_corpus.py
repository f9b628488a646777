"""Prompts and texts from files, and errors for bad files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loraplex_contracts.errors import InvalidArgument
from loraplex_training.corpus import read_prompts, read_texts


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_txt_has_one_prompt_per_line(tmp_path: Path) -> None:
    path = written(tmp_path / "p.txt", "\ufeffone =>\r\n\n  \nhe said \u2028 this \n")
    assert read_prompts(path) == ["one =>", "he said \u2028 this "]


def test_a_jsonl_has_strings_objects_and_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi\nyou"}]
    lines = ["one", {"prompt": "two", "id": 3}, {"messages": [{**messages[0], "name": "x"}]}]
    path = written(tmp_path / "p.jsonl", "\n".join(json.dumps(line) for line in lines))
    assert read_prompts(path) == ["one", "two", messages]


def test_texts_have_a_field_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", '{"text": "a\\nb"}\n"c"\n')
    assert read_texts(path) == ["a\nb", "c"]
    with pytest.raises(InvalidArgument, match=r"line 1: .*`text`"):
        read_texts(written(tmp_path / "u.jsonl", '{"prompt": "a"}'))


@pytest.mark.parametrize(
    "line",
    ["[]", "3", '""', '" "', "{}", '{"prompt": 3}', '{"messages": []}', '{"messages": "x"}', '{"messages": [3]}',
     '{"messages": [{"role": "user"}]}', '{"messages": [{"role": 1, "content": "x"}]}'],
)  # fmt: skip
def test_a_line_that_does_not_fit_is_named(tmp_path: Path, line: str) -> None:
    path = written(tmp_path / "p.jsonl", f'"fine"\n\n{line}\n')
    with pytest.raises(InvalidArgument, match=r"line 3: .*`messages`") as caught:
        read_prompts(path)
    assert caught.value.field == "--prompts"


@pytest.mark.parametrize("line", ["{", "nonsense", "[" * 100_000])
def test_a_line_that_is_no_json_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidArgument, match="line 1 is not JSON"):
        read_prompts(written(tmp_path / "p.jsonl", line))


@pytest.mark.parametrize(
    "line", [r'"\ud800"', r'{"prompt": "a\udfff"}', r'{"messages": [{"role": "user", "content": "\ud800"}]}']
)
def test_a_line_with_half_a_surrogate_pair_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidArgument, match="line 2 has half of a surrogate pair"):
        read_prompts(written(tmp_path / "p.jsonl", f'"\\ud83d\\ude00 is whole"\n{line}\n'))


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.txt")
    with pytest.raises(InvalidArgument, match="cannot be read: it is not a regular file"):
        read_prompts(tmp_path / "p.txt")


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
        read_prompts(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InvalidArgument, match="cannot be read: Is a directory"):
        read_texts(tmp_path / "folder.txt")
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        read_prompts(written(tmp_path / "bad.txt", b"a\xff\n"))
    with pytest.raises(InvalidArgument, match=r"ends in \.txt"):
        read_prompts(written(tmp_path / "p.csv", "a,b"))
    for content in ("", "\n \n"):
        with pytest.raises(InvalidArgument, match="is empty"):
            read_prompts(written(tmp_path / "empty.txt", content))
