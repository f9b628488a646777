"""`loraplex generate | adapters | doctor` against a scripted server."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.cli import doctor, terminal
from loraplex.cli.main import main
from loraplex_contracts import errors
from loraplex_contracts.sampling import SAMPLING_OPTIONS
from loraplex_proto.v1 import inference_pb2
from loraplex_proto.v1.inference_pb2 import GenerateStreamResponse

Capture = pytest.CaptureFixture[str]


def chunks() -> list[GenerateStreamResponse]:
    return [
        GenerateStreamResponse(text_delta="ab"),
        GenerateStreamResponse(
            text_delta="c",
            finish_reason=inference_pb2.FINISH_REASON_EOS,
            usage=inference_pb2.Usage(completion_tokens=2),
            timings=inference_pb2.Timings(total_s=0.5, time_to_first_token_s=0.1),
        ),
    ]


# --- generate -------------------------------------------------------------------------------------------------------


def test_plain_output_is_the_text_and_nothing_else(fake: Any, capsys: Capture) -> None:
    assert main(["generate", "hello", "--server", fake.address, "--adapter", "sql", "--max-tokens", "4"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "text 0\n"
    assert captured.err == ""
    (seen,) = fake.seen
    assert (seen.method, seen.request.text, seen.request.adapter_id) == ("Generate", "hello", "sql")
    assert seen.request.stopping.max_tokens == 4


@pytest.mark.parametrize(
    ("argv", "kind", "value"),
    [
        (["--json-schema", "FILE"], "json_schema", '{"type": "null"}'),
        (["--lark", "FILE"], "lark", '{"type": "null"}'),
        (["--json-object"], "json_object", True),
        (["--regex", "a+"], "regex", "a+"),
        (["--choice", "a", "--choice", "b c"], "choice", inference_pb2.Choices(texts=["a", "b c"])),
    ],
)
def test_forms_reach_the_request(fake: Any, tmp_path: Path, argv: list[str], kind: str, value: Any) -> None:
    path = tmp_path / "form"
    path.write_text('{"type": "null"}')
    argv = [str(path) if part == "FILE" else part for part in argv]
    assert main(["generate", "x", "-s", fake.address, *argv]) == 0
    grammar = fake.seen[0].request.grammar
    assert (grammar.WhichOneof("kind"), getattr(grammar, kind)) == (kind, value)


@pytest.mark.parametrize("argv", [["--regex", "a", "--json-object"], ["--json-schema", "/nowhere/to/be/found"]])
def test_forms_that_cannot_be_sent(fake: Any, argv: list[str], capsys: Capture) -> None:
    assert main(["generate", "x", "-s", fake.address, *argv]) == 2
    assert argv[0] in capsys.readouterr().err


def test_options_reach_the_request(fake: Any) -> None:
    argv = [
        "generate",
        "x",
        "-s",
        fake.address,
        "--temperature",
        "0.5",
        "--top-p",
        "0.9",
        "--top-k",
        "5",
        "--seed",
        "7",
    ]
    argv += ["--stop", "a", "--stop", "b", "--ignore-eos", "-n", "2", "--speculation", "off", "--logprobs", "--json"]
    assert main(argv) == 0
    request = fake.seen[0].request
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (0.5, 0.9, 5)
    assert (request.sampling.seed, list(request.stopping.stop), request.stopping.ignore_eos) == (7, ["a", "b"], True)
    assert (request.n, request.speculation.off, request.output.logprobs) == (2, True, True)


def test_every_sampling_option_has_a_flag(fake: Any) -> None:
    argv = [part for name in SAMPLING_OPTIONS for part in ("--" + name.replace("_", "-"), SAMPLING_FLAGS[name][0])]
    assert main(["generate", "x", "-s", fake.address, *argv]) == 0
    expected = {name: value for name, (_, value) in SAMPLING_FLAGS.items()}
    assert fake.seen[0].request.sampling == inference_pb2.Sampling(**expected)


SAMPLING_FLAGS: dict[str, tuple[str, Any]] = {
    "logit_bias": ("5:-1.5,7:2", {5: -1.5, 7: 2.0}),
    "repetition_penalty": ("1.5", 1.5),
    "frequency_penalty": ("0.5", 0.5),
    "presence_penalty": ("-0.5", -0.5),
    "temperature": ("0", 0.0),
    "top_k": ("3", 3),
    "top_p": ("0.5", 0.5),
    "min_p": ("0.25", 0.25),
    "bad_words": ("a b", ["a b"]),
    "allowed_token_ids": ("5,2", [5, 2]),
    "typical_p": ("0.75", 0.75),
    "seed": ("0", 0),
}


def test_a_mixture_and_a_repository(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["generate", "x", "-s", fake.address, "--adapters", "org/sql:0.75,terse:-1,plain"]) == 0
    members = [(one.id, one.weight) for one in fake.seen[0].request.adapters]
    assert members == [("org/sql", 0.75), ("terse", -1.0), ("plain", 1.0)]
    monkeypatch.setenv("LORAPLEX_HUB_TOKEN", "hf_secret")
    ask = ["generate", "x", "-s", fake.address, "-a", "org/sql"]
    assert main(ask) == 0
    assert not fake.seen[1].request.HasField("hub")
    assert main([*ask, "--revision", "v1"]) == 0
    assert (fake.seen[2].request.hub.revision, fake.seen[2].request.hub.token) == ("v1", "hf_secret")
    assert main([*ask, "--hub"]) == 0
    assert fake.seen[3].request.hub.token == "hf_secret"
    assert main(["generate", "x", "-s", fake.address, "--adapters", "org/a:0.5,org/b", "--hub"]) == 0
    members = [(one.id, one.weight, one.hub.token) for one in fake.seen[4].request.adapters]
    assert members == [("org/a", 0.5, "hf_secret"), ("org/b", 1.0, "hf_secret")]
    assert main([*ask, "--in-bucket"]) == 0
    assert fake.seen[5].request.in_bucket


@pytest.mark.parametrize("text", ["", ":1", "a:x", "a:1:2", "a,", "a,a:2"])
def test_a_mixture_that_is_none(fake: Any, capsys: Capture, text: str) -> None:
    assert main(["generate", "x", "-s", fake.address, "--adapters", text]) == 2
    assert "--adapters takes names and weights" in capsys.readouterr().err
    assert fake.seen == []


@pytest.mark.parametrize("text", ["", "5", "5:x", "5:1:2", "x:1", "5:1,"])
def test_a_bias_that_is_none(fake: Any, capsys: Capture, text: str) -> None:
    assert main(["generate", "x", "-s", fake.address, "--logit-bias", text]) == 2
    assert "--logit-bias takes token ids and values" in capsys.readouterr().err
    assert fake.seen == []


def test_what_is_not_given_is_not_sent(fake: Any) -> None:
    assert main(["generate", "x", "-s", fake.address]) == 0
    request = fake.seen[0].request
    request.ClearField("request_id")
    assert request == inference_pb2.GenerateRequest(text="x", n=1)


def test_chat(fake: Any) -> None:
    assert main(["generate", "hi", "-s", fake.address, "--system", "be brief"]) == 0
    assert main(["generate", "hi", "-s", fake.address, "--chat"]) == 0
    first, second = (seen.request for seen in fake.seen)
    assert [(m.role, m.content) for m in first.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert [(m.role, m.content) for m in second.chat.messages] == [("user", "hi")]


def test_streaming(fake: Any, capsys: Capture) -> None:
    fake.chunks = chunks()
    assert main(["generate", "hello", "-s", fake.address, "--stream"]) == 0
    assert capsys.readouterr().out == "abc\n"
    assert fake.seen[0].method == "GenerateStream"


def test_json(fake: Any, capsys: Capture) -> None:
    assert main(["generate", "hello", "-s", fake.address, "--json", "-n", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [c["text"] for c in document["completions"]] == ["text 0", "text 1"]
    assert document["completions"][0]["finish_reason"] == "eos"
    assert document["usage"]["completion_tokens"] == 2
    assert document["timings"]["total_s"] == 0.5


def test_json_stream_is_a_line_per_chunk(fake: Any, capsys: Capture) -> None:
    fake.chunks = chunks()
    assert main(["generate", "hello", "-s", fake.address, "--json", "--stream", "-n", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == ["ab", "c"]
    assert lines[1]["finish_reason"] == "eos"


def test_several_streams_at_once_are_refused(fake: Any, capsys: Capture) -> None:
    assert main(["generate", "hello", "-s", fake.address, "--stream", "-n", "2"]) == 2
    assert "--json" in capsys.readouterr().err
    assert fake.seen == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--logprobs"], "--logprobs has nowhere to go; add --json"),
        (["-n", "0"], "-n must be at least 1"),
        (["--timeout", "-1"], "--timeout must be 0, for ever, or above"),
    ],
)
def test_flags_that_mean_nothing_are_refused(fake: Any, capsys: Capture, argv: list[str], says: str) -> None:
    assert main(["generate", "hello", "-s", fake.address, *argv]) == 2
    assert says in capsys.readouterr().err
    assert fake.seen == []


@pytest.mark.parametrize(("given", "prompt"), [("one\ntwo\n", "one\ntwo"), ("x\n\n", "x\n"), ("", "")])
def test_prompt_from_stdin(fake: Any, monkeypatch: pytest.MonkeyPatch, given: str, prompt: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    assert main(["generate", "-", "-s", fake.address]) == 0
    assert fake.seen[0].request.text == prompt


def test_stdin_is_read_once(fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO('[{"role": "user", "content": "d"}]'))
    assert main(["generate", "-", "--messages", "-", "-s", fake.address]) == 2
    assert "standard input can be read once" in capsys.readouterr().err
    assert fake.seen == []


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the second in the locale C
def test_stdin_that_is_no_text(errors: str, fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\xff"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", given)
    assert main(["generate", "-", "-s", fake.address]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_server_errors_are_one_sentence_on_stderr(fake: Any, capsys: Capture) -> None:
    fake.error = errors.AdapterNotFound("there is no adapter 'sqll'")
    assert main(["generate", "x", "-s", fake.address, "-a", "sqll"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: there is no adapter 'sqll'\n")


def test_an_error_in_mid_stream_keeps_what_was_written(fake: Any, capsys: Capture) -> None:
    fake.chunks, fake.error = chunks()[:1], errors.WorkerLost("the worker went away")
    assert main(["generate", "x", "-s", fake.address, "--stream"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("ab\n", "error: the worker went away\n")


def test_no_server(capsys: Capture) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert main(["generate", "x", "-s", f"127.0.0.1:{port}"]) == 1
    assert "cannot be reached: Connection refused" in capsys.readouterr().err


def test_token_and_server_from_the_environment(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_SERVER", fake.address)
    monkeypatch.setenv("LORAPLEX_TOKEN", "t0k")
    assert main(["generate", "x", "--timeout", "7"]) == 0
    assert fake.seen[0].metadata["authorization"] == "Bearer t0k"
    assert 5 < fake.seen[0].time_remaining_s < 8


def test_a_certificate_that_cannot_be_read(tmp_path: Path, capsys: Capture) -> None:
    assert main(["generate", "x", "--ca-cert", str(tmp_path / "none.pem")]) == 2
    assert "none.pem, the file of --ca-cert, cannot be read" in capsys.readouterr().err
    for file in ("key.der", "cert.der"):
        (tmp_path / file).write_bytes(b"\x30\x82")
    assert main(["generate", "x", "--ca-cert", str(tmp_path / "cert.der")]) == 2
    assert "cert.der, the file of --ca-cert, is not PEM" in capsys.readouterr().err
    pair = ["--client-key", str(tmp_path / "key.der"), "--client-cert", str(tmp_path / "cert.der")]
    assert main(["generate", "x", *pair]) == 2
    assert "key.der, the file of --client-key, is not PEM" in capsys.readouterr().err


def command(*argv: str, **more: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "loraplex", *argv], **more)


def test_ctrl_c_ends_the_request_and_exits_130(fake: Any) -> None:
    fake.is_endless = True
    process = command("generate", "x", "-s", fake.address, "--stream", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(1) == b"x"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert fake.cancelled.wait(3)


def test_ctrl_c_while_waiting_exits_130(fake: Any) -> None:
    fake.delay_s = 30.0
    process = command("generate", "x", "-s", fake.address, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert fake.arrived.wait(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert fake.cancelled.wait(3)


def test_a_reader_that_goes_away_is_no_traceback(fake: Any) -> None:
    fake.is_endless = True
    process = command("generate", "x", "-s", fake.address, "--stream", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()  # as `| head -c 1` does
    assert process.wait(10) == 1
    assert process.stderr.read() == b""
    process.stderr.close()
    assert fake.cancelled.wait(3)


def test_on_a_terminal_it_streams_and_escapes_control_characters(fake: Any) -> None:
    fake.chunks = [GenerateStreamResponse(text_delta="a\x1b]0;title\x07\n", seed=7), *chunks()[1:]]
    ours, theirs = pty.openpty()
    process = command("generate", "x", "-s", fake.address, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL)
    os.close(theirs)
    assert process.wait(20) == 0
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert fake.seen[0].method == "GenerateStream"
    assert shown.startswith("a\\x1b]0;title\\x07\r\nc\r\n")
    assert "2 tokens in 0.50 s (4/s), first after 0.10 s, ended by eos" in shown
    assert ", seed 7" in shown


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", {"auto": True}),
        ("prompt_lookup", {"prompt_lookup": {}}),
        ("medusa", {"medusa": {}}),
        ("medusa:org/heads", {"medusa": {"adapter_id": "org/heads"}}),
        ("draft_model", {"draft_model": {}}),
        ("draft_model:tiny:v2", {"draft_model": {"name": "tiny:v2"}}),
    ],
)
def test_speculation_reaches_the_request(fake: Any, given: str, expected: dict[str, Any]) -> None:
    assert main(["generate", "x", "-s", fake.address, "--speculation", given]) == 0
    assert fake.seen[0].request.speculation == inference_pb2.Speculation(**expected)


def test_the_length_of_drafts(fake: Any) -> None:
    assert main(["generate", "x", "-s", fake.address, "--max-draft-tokens", "5", "--fixed-length"]) == 0
    assert fake.seen[0].request.speculation == inference_pb2.Speculation(max_draft_tokens=5, fixed_length=True)


@pytest.mark.parametrize("given", ["fast", "", "medusa:"])
def test_speculation_that_there_is_not(fake: Any, capsys: Capture, given: str) -> None:
    assert main(["generate", "x", "-s", fake.address, "--speculation", given]) == 2
    err = capsys.readouterr().err
    assert "`speculation` takes off, auto" in err
    assert repr(given) in err
    assert fake.seen == []


def speculated() -> inference_pb2.Usage:
    return inference_pb2.Usage(
        completion_tokens=12,
        drafted_tokens=10,
        accepted_tokens=7,
        steps=5,
        proposers=[
            inference_pb2.ProposerUsage(name="medusa", drafted_tokens=6, accepted_tokens=5),
            inference_pb2.ProposerUsage(name="prompt_lookup", drafted_tokens=4, accepted_tokens=2),
        ],
    )


def test_json_shows_what_was_drafted(fake: Any, capsys: Capture) -> None:
    fake.generate_response = lambda request: inference_pb2.GenerateResponse(
        completions=[inference_pb2.Completion(text="x", usage=speculated())], usage=speculated()
    )
    assert main(["generate", "x", "-s", fake.address, "--json"]) == 0
    usage = json.loads(capsys.readouterr().out)["usage"]
    assert (usage["drafted_tokens"], usage["accepted_tokens"], usage["steps"]) == (10, 7, 5)
    assert usage["proposers"] == [
        {"name": "medusa", "drafted_tokens": 6, "accepted_tokens": 5},
        {"name": "prompt_lookup", "drafted_tokens": 4, "accepted_tokens": 2},
    ]


def test_on_a_terminal_the_summary_says_how_speculation_went(
    fake: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    said: list[str] = []
    monkeypatch.setattr(terminal, "remark", said.append)
    usage = speculated()
    fake.generate_response = lambda request: inference_pb2.GenerateResponse(
        completions=[inference_pb2.Completion(text="x")], usage=usage
    )
    assert main(["generate", "x", "-s", fake.address]) == 0
    assert said[1:] == ["7 of 10 drafted tokens accepted (medusa 5/6, prompt_lookup 2/4), 2.4 tokens per step"]
    usage.ClearField("steps")  # a server that does not count them
    fake.chunks = chunks()
    fake.chunks[1].usage.CopyFrom(usage)
    assert main(["generate", "x", "-s", fake.address, "--stream"]) == 0
    assert said[-1] == "7 of 10 drafted tokens accepted (medusa 5/6, prompt_lookup 2/4)"
    said.clear()
    usage.Clear()
    assert main(["generate", "x", "-s", fake.address]) == 0
    assert len(said) == 1, "nothing drafted, nothing said"
    capsys.readouterr()


# --- adapters -------------------------------------------------------------------------------------------------------


def test_adapters_list(fake: Any, make_adapter: Callable[..., Any], capsys: Capture) -> None:
    fake.adapters = [make_adapter(), make_adapter("bad", error="NaN in\nlayer 1", error_reason="NON_FINITE")]
    assert main(["adapters", "list", "-s", fake.address]) == 0
    columns, first, second = (line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert columns[:4] == ["NAME", "KIND", "STATE", "TIER"]
    assert first[:4] == ["sql", "lora", "on_device", "device"]
    assert first[5] == "1.0 MiB"
    assert second[-1] == "NON_FINITE: NaN in layer 1"
    assert fake.seen[0].request.include_unloaded
    assert main(["adapters", "list", "-s", fake.address, "--loaded"]) == 0
    assert not fake.seen[1].request.include_unloaded


def test_adapters_list_of_some(fake: Any, make_adapter: Callable[..., Any], capsys: Capture) -> None:
    fake.max_page_size = 1
    fake.adapters = [make_adapter("a"), make_adapter("b1"), make_adapter("b2")]
    assert main(["adapters", "list", "-s", fake.address, "--prefix", "b", "--state", "on_device"]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == ["NAME", "b1", "b2"]
    assert main(["adapters", "list", "-s", fake.address, "--state", "asleep"]) == 2
    assert "on_device" in capsys.readouterr().err
    assert main(["adapters", "list", "-s", fake.address, "--state", "on_devise"]) == 2
    assert "did you mean on_device?" in capsys.readouterr().err


def test_adapters_as_json(fake: Any, make_adapter: Callable[..., Any], capsys: Capture) -> None:
    fake.adapters = [make_adapter()]
    for verb in (["list"], ["load", "sql", "--pin"], ["unload", "sql"]):
        assert main(["adapters", *verb, "-s", fake.address, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["adapter_id"], row["tier"], row["rank"]) == ("sql", "device", 8)
    assert [seen.method for seen in fake.seen] == ["ListAdapters", "LoadAdapter", "UnloadAdapter"]
    assert fake.seen[1].request.pin


def test_a_load_from_the_hub(fake: Any, make_adapter: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_HUB_TOKEN", "hf_secret")
    fake.adapters = [make_adapter()]
    assert main(["adapters", "load", "sql", "-s", fake.address, "--source", "hub:org/sql", "--revision", "v1"]) == 0
    assert main(["adapters", "load", "sql", "-s", fake.address, "--source", "team/sql"]) == 0
    assert [(seen.request.revision, seen.request.token) for seen in fake.seen] == [("v1", "hf_secret"), ("", "")]


def test_an_adapter_name_that_is_none(fake: Any, capsys: Capture) -> None:
    assert main(["adapters", "load", "../etc", "-s", fake.address]) == 2
    assert "not a valid name" in capsys.readouterr().err
    assert fake.seen == []


def test_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(terminal, "is_terminal", lambda: True)
    terminal.write_table(("NAME", "NOTE"), [("sql", "[red]a\x1b[31m")])
    out = capsys.readouterr().out
    assert "NAME" in out
    assert "[red]a\\x1b[31m" in out, "neither markup nor escapes of others are obeyed"


# --- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor(capsys: Capture) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packages"]["grpcio"]
    assert report["missing"] == {"router": [], "server": [], "demo": []}
    assert report["broken"] == {}
    assert report["devices"][0]["name"] == "cpu"
    assert report["devices"][0]["usable"]
    (native,) = report["cpu_kernels"]
    assert native["name"] == "native"
    assert native["note"], "the instruction set, or why not"
    for part in ("lora_operations", "attention"):
        assert any(row["usable"] for row in report[part]), f"nothing usable for {part}: {report[part]}"


def test_doctor_of_a_model_without_a_name(capsys: Capture) -> None:
    assert main(["doctor", "--model", ""]) == 2
    assert "--model must not be empty" in capsys.readouterr().err


def test_doctor_in_words(capsys: Capture) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "extra server\tcomplete" in out
    assert "attention torch\tusable" in out


def test_doctor_loads_what_servers_load(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may be there without what it needs itself."""
    monkeypatch.delitem(sys.modules, "loraplex_router.http.app", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["missing"]["router"] == []
    assert set(report["broken"]) == {"router"}
    assert "fastapi" in report["broken"]["router"]


def test_a_name_without_an_address_is_named(capsys: Capture) -> None:
    assert main(["generate", "x", "-s", "nowhere.invalid:5", "--retries", "0"]) == 1
    expected = "the server at nowhere.invalid:5 cannot be reached: no address is known for this name; check it"
    assert expected in capsys.readouterr().err
