"""Prompts and texts from files, and errors for bad files."""

from __future__ import annotations

import json
import os
import re
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
    messages = [{"role": "user", "content": "hi\nyou", "name": "x"}]
    lines = ["one", {"prompt": "two", "id": 3}, {"messages": messages}]
    path = written(tmp_path / "p.jsonl", "\n".join(json.dumps(line) for line in lines))
    assert read_prompts(path) == ["one", "two", {"messages": messages, "tools": []}]


def test_chats_are_read_whole(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    function = {"name": "weather", "arguments": '{"city": "Ulm"}'}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "how is "}, {"type": "text", "text": "Ulm?"}]},
        {"role": "assistant", "content": None, "reasoning": "ask", "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "content": "", "tool_call_id": "1"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{broken"}}]},
    ]
    path = written(tmp_path / "p.jsonl", json.dumps({"messages": given, "tools": tools}))
    (chat,) = read_prompts(path)
    called = {"id": "1", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    thought = {"reasoning": "ask", "reasoning_content": "ask"}
    assert chat == {
        "messages": [
            {"role": "user", "content": "how is Ulm?"},
            {"role": "assistant", "content": "", "tool_calls": [called], **thought},
            {"role": "tool", "content": "", "tool_call_id": "1"},
            {"role": "assistant", "content": "", "tool_calls": given[3]["tool_calls"]},
        ],
        "tools": tools,
    }


@pytest.mark.parametrize(
    ("chat", "reason"),
    [
        ({"messages": []}, "`messages` must be a list with"),
        ({"messages": "x"}, "`messages` must be a list with"),
        ({"messages": [3]}, "`messages[0]` must be an object with a `role`"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": 1}]}, "`messages[1]` must be an object"),
        ({"messages": [{"role": "user"}]}, "`messages[0].content` takes a text"),
        ({"messages": [{"role": "user", "content": {}}]}, "`messages[0].content` takes a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "`messages[0].content` takes a text"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "`messages[0].content` takes a text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "`messages[0].tool_calls` must be a list"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": {"a": 1}}, "`tools` must be a list of objects"),
    ],
)
def test_a_chat_that_does_not_fit_is_named(tmp_path: Path, chat: object, reason: str) -> None:
    path = written(tmp_path / "p.jsonl", json.dumps(chat))
    with pytest.raises(InvalidArgument, match=re.escape(f"line 1: {reason}")):
        read_prompts(path)


def test_texts_have_a_field_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", '{"text": "a\\nb"}\n"c"\n')
    assert read_texts(path) == ["a\nb", "c"]
    with pytest.raises(InvalidArgument, match=r"line 1: .*`text`"):
        read_texts(written(tmp_path / "u.jsonl", '{"prompt": "a"}'))


@pytest.mark.parametrize(
    "line",
    ["[]", "3", '""', '" "', "{}", '{"prompt": 3}'],
)
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
    with pytest.raises(InvalidArgument, match="line 2: it has half of a surrogate pair"):
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
