"""`loraplex chat`, conversations of `loraplex generate`, and the sentences of commands that fail."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.cli import healthcheck
from loraplex.cli.main import main
from loraplex_contracts import errors
from loraplex_proto.v1 import inference_pb2
from loraplex_proto.v1.inference_pb2 import GenerateStreamResponse

Capture = pytest.CaptureFixture[str]


def talk(fake: Any, monkeypatch: pytest.MonkeyPatch, lines: str, *argv: str) -> int:
    fake.chunks = [
        GenerateStreamResponse(text_delta="ab"),
        GenerateStreamResponse(text_delta="c", finish_reason=inference_pb2.FINISH_REASON_EOS),
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", "-s", fake.address, *argv])


def turns(fake: Any) -> list[Any]:
    return [seen.request for seen in fake.seen if seen.method.startswith("Generate")]


def test_each_line_is_a_turn(fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert talk(fake, monkeypatch, "hi\n\nmore\n", "--system", "be brief", "-a", "sql", "--max-tokens", "5") == 0
    assert capsys.readouterr().out == "abc\nabc\n"
    first, second = turns(fake)
    assert [one.content for one in first.chat.messages] == ["be brief", "hi"]
    assert [one.content for one in second.chat.messages] == ["be brief", "hi", "abc", "more"]
    assert (second.adapter_id, second.stopping.max_tokens) == ("sql", 5)


def test_adapter_and_speculation_change_in_between(fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    lines = "/adapter json\n/speculation prompt_lookup\na\n/adapter\n/speculation\nb\n/history\n/reset\nc\n/quit\nd\n"
    assert talk(fake, monkeypatch, lines, "-a", "sql") == 0
    first, second, third = turns(fake)
    assert (first.adapter_id, first.speculation.WhichOneof("kind")) == ("json", "prompt_lookup")
    assert (second.adapter_id, second.HasField("speculation")) == ("", False)
    assert [one.content for one in third.chat.messages] == ["c"]
    err = capsys.readouterr().err
    assert "answers come from json" in err
    assert "user: a\nassistant: abc\nuser: b\nassistant: abc\n" in err


def test_a_terminal_whose_python_has_no_readline(fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setitem(sys.modules, "readline", None)  # importing it raises ModuleNotFoundError
    monkeypatch.setattr(sys, "stdin", Terminal("/quit\n"))
    assert main(["chat", "-s", fake.address]) == 0, capsys.readouterr().err


def test_a_command_that_there_is_not(fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert talk(fake, monkeypatch, "/adaptor x\n") == 2
    assert "did you mean /adapter?" in capsys.readouterr().err
    assert talk(fake, monkeypatch, "/help\n") == 0
    assert "/speculation KIND[:NAME]" in capsys.readouterr().err


def test_an_error_ends_a_chat_without_a_terminal(fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    fake.stream_error = errors.WorkerLost("the worker went away")
    assert talk(fake, monkeypatch, "a\nb\n") == 1
    assert "the worker went away" in capsys.readouterr().err
    assert len(turns(fake)) == 1


def test_a_chat_as_json_lines(fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert talk(fake, monkeypatch, "a\nb\n", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["completions"][0]["text"] for line in lines] == ["text 0", "text 0"]


# --- generate -------------------------------------------------------------------------------------------------------


def test_messages_of_a_file(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "messages.json"
    path.write_text('[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]')
    assert main(["generate", "c", "-s", fake.address, "--messages", str(path)]) == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO('[{"role": "user", "content": "d"}]'))
    assert main(["generate", "-s", fake.address, "--messages", "-", "--system", "s"]) == 0
    first, second = ([one.content for one in request.chat.messages] for request in turns(fake))
    assert (first, second) == (["a", "b", "c"], ["s", "d"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "--messages is not JSON"),
        pytest.param("[" * 100_000, "--messages is not JSON", id="nested"),
        ("{}", "a list of messages"),
        ("[1]", "messages"),
    ],
)
def test_messages_that_are_none(fake: Any, tmp_path: Path, capsys: Capture, text: str, says: str) -> None:
    path = tmp_path / "messages.json"
    path.write_text(text)
    assert main(["generate", "-s", fake.address, "--messages", str(path)]) == 2
    assert says in capsys.readouterr().err
    assert main(["generate", "-s", fake.address]) == 2
    assert "give a PROMPT, --messages or --token-ids" in capsys.readouterr().err
    assert fake.seen == []


def test_the_other_options_reach_the_request(fake: Any, tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "f"}}]')
    argv = ["generate", "x", "-s", fake.address, "--json", "--chat", "--tools", str(tools), "--tool-choice", "f"]
    argv += ["--min-tokens", "2", "--stop-token-ids", "5,6", "--priority", "-3", "--request-id", "r", "--top-logprobs"]
    argv += ["2", "--logprobs", "--prompt-tokens", "--cache-salt", "s", "--include-stop", "--parse-chat"]
    argv += ["--adapters", "a,b", "--merge", "ties", "--merge-density", "0.5"]
    assert main(argv) == 0
    (request,) = turns(fake)
    assert json.loads(request.chat.tools_json)[0]["function"]["name"] == "f"
    assert request.chat.tool_choice.name == "f"
    assert (request.stopping.min_tokens, list(request.stopping.stop_token_ids)) == (2, [5, 6])
    assert (request.priority, request.request_id, request.cache_salt) == (-3, "r", "s")
    assert (request.output.top_logprobs, request.output.prompt_tokens, request.output.parse_chat) == (2, True, True)
    assert (request.merge.strategy, request.merge.density) == ("ties", 0.5)
    assert main(["generate", "-s", fake.address, "--token-ids", "4,5"]) == 0
    assert list(turns(fake)[1].token_ids.ids) == [4, 5]
    assert main(["generate", "x", "-s", fake.address, "--merge-density", "0.5"]) == 2


def test_every_option_of_the_api_has_a_flag() -> None:
    from support.command_lines import command_of

    import loraplex

    flags = {flag for one in command_of("generate").params for flag in one.opts}
    elsewhere = {
        "adapter_id": "--adapter",
        "timeout_s": "--timeout",
        "grammar": "--json-schema",
        "n": "-n",
        "fixed_draft_length": "--fixed-length",
    }
    missing = [
        one.name
        for one in loraplex.options_help()
        if elsewhere.get(one.name, "--" + one.name.replace("_", "-")) not in flags
    ]
    assert missing == ["parallel_tool_calls"], "its flag is the opposite"
    assert "--one-tool-call" in flags


# --- sentences ------------------------------------------------------------------------------------------------------


def test_a_token_that_is_not_known_names_the_flag(fake: Any, capsys: Capture) -> None:
    fake.error = errors.Unauthenticated("this credential is not known here")
    assert main(["generate", "x", "-s", fake.address, "--token", "t"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["adapters", "list", "-s", fake.address]) == 1
    assert "with LORAPLEX_TOKEN or --token" in capsys.readouterr().err


def test_a_failed_connection_is_one_line(fake: Any) -> None:
    """The whole process prints one line, though gRPC's own code prints lines too."""
    argv = ["generate", "x", "-s", fake.address, "--tls", "--retries", "1"]
    run = subprocess.run([sys.executable, "-m", "loraplex", *argv], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        f"error: the server at {fake.address} cannot be reached: it does not use TLS; "
        "leave out tls (--tls, --ca-cert)\n"
    )


def test_a_certificate_needs_its_key(tmp_path: Path, capsys: Capture) -> None:
    assert main(["generate", "x", "--client-cert", str(tmp_path / "c.pem")]) == 2
    assert "--client-cert and --client-key go together" in capsys.readouterr().err


def test_the_health_check_says_what_it_found(fake: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # it goes round it
    monkeypatch.delenv("no_proxy", raising=False)
    assert healthcheck.main(fake.address) == 1
    assert "the server has no health service" in capsys.readouterr().err
    fake.hang_up()
    assert healthcheck.main(fake.address, "") == 1
    assert f"the server at {fake.address}: no server can be reached" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "code"), [(["-h"], 0), (["localhost:1", "--help"], 0), ([], 1)])
def test_the_health_check_has_a_help(arguments: list[str], code: int) -> None:
    command = [sys.executable, "-m", healthcheck.__name__, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (run.returncode, healthcheck.HELP in run.stdout) == (code, code == 0)
    assert (run.stdout if code == 0 else run.stderr).startswith("Usage: python -m loraplex.cli.healthcheck HOST:PORT")
