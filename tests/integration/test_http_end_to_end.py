"""`loraplex serve --http-port` with the demo's models: HTTP gives the texts that gRPC gives."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from jsonschema import validate
from support.pickers import VLLM, Picked, pick
from support.processes import Running, loraplex, wait_until

from loraplex import Client
from loraplex_demo.world import MAX_NEW_TOKENS, committed_world

DOCS = Path(__file__).parents[2] / "docs" / "http.md"
PROMPT = "name: Ada; age: 36"
ASKED = {"max_tokens": 12, "seed": 5}
PAIR = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def serve() -> Iterator[Running]:
    world = committed_world()
    arguments = ("serve", str(world.base_path), "--adapters", str(world.adapters_root))
    arguments += ("--port", "0", "--http-port", "0", "--metrics-port", "0", "--metrics-names", "vllm", "--http-admin")
    with loraplex(*arguments, "--served-model-name", "demo", "--threads", "1") as running:
        yield running


@pytest.fixture
def http(serve: Running) -> Iterator[httpx2.Client]:
    found = re.search(r"HTTP on ([\d.:]+\d)", serve.output)
    assert found, serve.output
    with httpx2.Client(base_url=f"http://{found[1]}", timeout=30, trust_env=False) as client:
        yield client


def streamed(answer: httpx2.Response) -> list[Any]:
    parts = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
    assert parts.pop() == "[DONE]"
    return [json.loads(part) for part in parts]


def test_an_endpoint_picker_reads_the_metrics(http: httpx2.Client) -> None:
    """The docs' configuration and the built-in one give a picker the same, also before the server's first request."""
    found = re.search(r"```yaml\n(- type: core-metrics-extractor\n.*?)```", DOCS.read_text(), re.DOTALL)
    assert found
    (plugin,) = yaml.safe_load(found[1])
    (ours,) = plugin["parameters"]["engineConfigs"]
    assert set(ours) == set(VLLM)

    def read() -> list[Picked]:
        page = http.get("/metrics").text
        return [pick(page, config) for config in (ours, VLLM)]

    wait_until(lambda: read()[0].max_lora > 0)
    fresh, same = read()
    assert fresh == same
    assert (fresh.waiting, fresh.running, fresh.kv_usage, fresh.active_adapters) == (0, 0, 0.0, frozenset())
    assert min(fresh.block_size, fresh.num_blocks) > 0
    assert fresh.affinity("json") == 0.8
    body = {"prompt": PROMPT, "max_tokens": 1}
    assert http.post("/v1/completions", json={"model": "json", **body}).status_code == 200
    wait_until(lambda: read()[0].active_adapters)
    idle, same = read()
    assert idle == same == replace(fresh, active_adapters=frozenset({"json"}), kv_usage=idle.kv_usage)
    assert 0 <= idle.kv_usage < 1
    assert (idle.affinity("json"), idle.affinity("sql")) == (1.0, 0.8)


def test_an_adapter_syncer_lists_loads_and_unloads(http: httpx2.Client) -> None:
    """Calls of the Gateway API's dynamic-lora-sidecar, which is content with every status below 400."""
    assert http.get("/health").status_code == 200
    assert "xml" in [model["id"] for model in http.get("/v1/models").json()["data"]]
    body = {"lora_name": "xml", "lora_path": str(committed_world().adapters_root / "xml"), "base_model_name": "demo"}
    assert http.post("/v1/load_lora_adapter", json=body).status_code == 200
    asked = {"model": "xml", "prompt": PROMPT, "max_tokens": 1}
    assert http.post("/v1/completions", json=asked).status_code == 200
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "xml"}).status_code == 200
    assert (
        http.post("/v1/load_lora_adapter", json={**body, "lora_name": "none", "lora_path": "none"}).status_code == 404
    )
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "none"}).status_code == 404


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)")
def test_promtool_is_silent(serve: Running, http: httpx2.Client) -> None:
    """promtool remarks on nothing in the pages of HTTP port, router and worker but the colon, which vLLM and SGLang
    use."""
    ports = re.search(r"metrics on (\d+), (\d+)", serve.output)
    assert ports, serve.output
    urls = ["/metrics", *(f"http://127.0.0.1:{port}/metrics" for port in ports.groups())]
    for url in urls:
        page = http.get(url).text
        said = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
        lines = (said.stdout + said.stderr).splitlines()
        assert lines
        assert not [line for line in lines if not line.endswith("metric names should not contain ':'")]
        plain = http.get(url, params={"names": "plain"}).text
        assert "loraplex_" in plain
        said = subprocess.run(["promtool", "check", "metrics"], input=plain, capture_output=True, text=True)
        assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("adapter_id", ["", "json", "sql-with-heads"])
def test_the_text_is_that_of_grpc(serve: Running, http: httpx2.Client, adapter_id: str, temperature: float) -> None:
    with Client(serve.address) as client:
        expected = client.generate(PROMPT, adapter_id=adapter_id, temperature=temperature, **ASKED)
    body = {"prompt": PROMPT, "model": adapter_id or "demo", "temperature": temperature, "logprobs": 1, **ASKED}
    unary = http.post("/v1/completions", json=body).json()
    (choice,) = unary["choices"]
    assert choice["text"] == expected.text
    assert unary["loraplex"]["adapter_digest"] == (expected.adapter_digest or None)
    num_tokens = len(expected.completions[0].token_ids)
    assert unary["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) == num_tokens
    for speculation in ("off", "prompt_lookup"):
        more = {"stream": True, "stream_options": {"include_usage": True}, "speculation": speculation}
        *found, last = streamed(http.post("/v1/completions", json={**body, **more}))
        assert "".join(one["choices"][0]["text"] for one in found) == expected.text
        assert last["usage"]["completion_tokens"] == unary["usage"]["completion_tokens"]
        assert last["system_fingerprint"] == unary["system_fingerprint"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("adapter_id", ["", "json", "sql-with-heads"])
def test_one_text_in_all_dialects(serve: Running, http: httpx2.Client, adapter_id: str, temperature: float) -> None:
    """The same prompt, adapter and seed; streamed or not."""
    with Client(serve.address) as client:
        expected = client.generate(PROMPT, adapter_id=adapter_id, temperature=temperature, **ASKED).text
    lorax: dict[str, Any] = {"adapter_id": adapter_id, "temperature": temperature, "max_new_tokens": 12, "seed": 5}
    body = {"inputs": PROMPT, "parameters": {**lorax, "details": True}}
    (listed,) = http.post("/", json=body).json()
    assert listed["generated_text"] == http.post("/generate", json=body).json()["generated_text"] == expected
    tokens = [listed["details"]["tokens"]]
    for path in ("/", "/generate_stream"):
        parts = http.post(path, json={**body, "stream": True}).text.split("\n\n")
        found = [json.loads(part.removeprefix("data: ")) for part in parts if part]
        assert found[-1]["generated_text"] == expected
        tokens.append([one["token"] for one in found])
    for one in tokens:
        assert "".join(token["text"] for token in one if not token["special"]) == expected
    sampling = {"temperature": temperature, "max_new_tokens": 12, "sampling_seed": 5}
    sglang = {"text": PROMPT, "lora_path": adapter_id, "sampling_params": sampling}
    assert http.post("/generate", json=sglang).json()["text"] == expected
    assert streamed(http.post("/generate", json={**sglang, "stream": True}))[-1]["text"] == expected


def test_chats_are_answered_as_prompts_are(http: httpx2.Client) -> None:
    """The demo's chat template gives the model the last message alone."""
    world = committed_world()
    (case,) = world.showcase(1)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": case.prompt}]
    for adapter in world.adapters:
        body = {"model": adapter.name, "messages": messages, "temperature": 0, "max_tokens": MAX_NEW_TOKENS}
        (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
        assert choice["message"]["content"] == case.expected(adapter.format)
        if adapter.name != "json":
            continue  # texts of others do not fall apart into the same tokens when they are cut
        begun_text = re.match(r"\W*\w+\W+", choice["message"]["content"])  # whole tokens
        assert begun_text
        begun = {"role": "assistant", "content": begun_text[0]}
        more = {"messages": [*messages, begun], "continue_final_message": True, "add_generation_prompt": False}
        (choice,) = http.post("/v1/chat/completions", json={**body, **more}).json()["choices"]
        assert begun["content"] + choice["message"]["content"] == case.expected(adapter.format)


@pytest.mark.parametrize(
    "text", ["{{ 7 * 7 }}", "{% for x in range(9) %}{{ x }}{% endfor %}", "{{ ''.__class__.__mro__ }}", "{# gone #}"]
)
def test_templates_in_messages_are_text(http: httpx2.Client, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    found = http.post("/tokenize", json={"messages": messages, "return_offsets": True}).json()
    assert text in found["rendered"]
    assert http.post("/chat_tokenize", json={"messages": messages}).json()["templated_text"] == found["rendered"]
    named = [{"role": "user", "content": "hi", "name": text}]
    refused = http.post("/tokenize", json={"messages": named})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    assert refused.json()["error"]["message"].startswith("`messages` ")
    answer = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert answer.status_code == 200


def test_a_template_in_a_request_is_refused(http: httpx2.Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "chat_template": "{{ 7 * 7 }}"}
    refused = http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")


def test_the_prompt_with_its_logprobs(http: httpx2.Client) -> None:
    """Evaluation harnesses get what they ask for: prompts as ids, echoed, a logprob for each token but the first."""
    ids = [
        http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in ("name: Ada; age: 36", "name: Bo")
    ]
    body = {"prompt": ids, "model": "json", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    unary = http.post("/v1/completions", json=body).json()["choices"]
    for choice, prompt in zip(unary, ids, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + 1
        assert logprobs["token_logprobs"][0] is None
        assert all(isinstance(one, float) for one in logprobs["token_logprobs"][1:])
        for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert token in top
        assert logprobs["tokens"][0] == "<s>"
        assert "".join(logprobs["tokens"][1:]) == choice["text"]
        assert logprobs["text_offset"][:2] == [0, 0]
    rows: dict[int, list[float | None]] = {0: [], 1: []}
    for chunk in streamed(http.post("/v1/completions", json={**body, "stream": True})):
        (choice,) = chunk["choices"]
        rows[choice["index"]] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    assert [len(row) for row in rows.values()] == [len(prompt) + 1 for prompt in ids]


def test_the_prompt_alone(http: httpx2.Client) -> None:
    body = {"prompt": PROMPT, "model": "json", "echo": True, "logprobs": 1, "return_token_ids": True}
    one = http.post("/v1/completions", json={**body, "max_tokens": 1, "temperature": 0}).json()
    none = http.post("/v1/completions", json={**body, "max_tokens": 0}).json()
    (choice,), (more,) = none["choices"], one["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == (PROMPT, [], "length")
    for name, values in choice["logprobs"].items():
        assert values == more["logprobs"][name][: len(values)], name
    num_prompt = len(choice["prompt_token_ids"])
    assert len(choice["logprobs"]["tokens"]) == num_prompt == len(more["logprobs"]["tokens"]) - 1
    assert (none["usage"]["prompt_tokens"], none["usage"]["completion_tokens"]) == (num_prompt, 0)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = streamed(http.post("/v1/completions", json={**body, "max_tokens": 0, **options}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == PROMPT
    assert chunks[0]["choices"][0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert (chunks[-1]["choices"][0]["finish_reason"], last["usage"]["completion_tokens"]) == ("length", 0)
    body = {"prompt": PROMPT, "model": "json", "max_tokens": 1, "prompt_logprobs": 1}
    rows = http.post("/v1/completions", json=body).json()["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    own = [
        row[str(token_id)]["logprob"] for row, token_id in zip(rows[1:], choice["prompt_token_ids"][1:], strict=True)
    ]
    assert own == choice["logprobs"]["token_logprobs"][1:]


def test_the_tokenizer(http: httpx2.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "Grüße", "return_offsets": True, "return_token_strs": True}).json()
    assert found["rendered"] == "Grüße"
    assert [len(found[name]) for name in ("tokens", "token_strs", "offsets")] == [found["count"]] * 3
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == "<s>Grüße"
    assert http.post("/v1/detokenize", json={"tokens": found["tokens"]}).json()["text"] == "Grüße"
    cut = {"prompt": PROMPT, "max_tokens": 1, "truncate_prompt_tokens": 3, "return_token_ids": True}
    (choice,) = http.post("/v1/completions", json=cut).json()["choices"]
    bos, *ids = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert choice["prompt_token_ids"] == [bos, *ids[-2:]]
    assert {"eos_token", "bos_token", "pad_token", "chat_template"} <= set(http.get("/tokenizer_info").json())


def test_the_seed_that_was_used_gives_the_text_again(http: httpx2.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8}
    first = http.post("/v1/completions", json=body).json()
    again = http.post("/v1/completions", json={**body, "seed": first["loraplex"]["seed"]}).json()
    assert first["choices"][0]["text"] == again["choices"][0]["text"]


def test_models_and_refusals(http: httpx2.Client) -> None:
    cards = http.get("/v1/models").json()["data"]
    assert (cards[0]["id"], cards[0]["parent"]) == ("demo", None)
    assert {"json", "sql"} <= {one["id"] for one in cards[1:]}
    assert http.get("/v1/models/json").json()["parent"] == "demo"
    assert http.get("/v1/models/nothing").status_code == 404
    for stream in (False, True):
        answer = http.post("/v1/completions", json={"prompt": PROMPT, "model": "nothing", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    wrong = http.post("/v1/completions", json={"prompt": "word " * 2000})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert wrong.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "pair", "schema": PAIR, "strict": True}}},
        {"response_format": {"type": "json_object", "value": PAIR}},
        {"guided_json": PAIR},
        {"structured_outputs": {"json": PAIR}},
    ],
)
def test_texts_follow_a_schema(http: httpx2.Client, form: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "model": "json", "max_tokens": 60, "seed": 3, "n": 2, **form}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-loraplex-ignored") is None
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        validate(json.loads(choice["text"]), PAIR)
    texts = ["", ""]
    for chunk in streamed(http.post("/v1/completions", json={**body, "stream": True, "speculation": "auto"})):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in answer.json()["choices"]]


def test_what_no_grammar_can_enforce_is_400(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": PROMPT, "guided_json": {"not": {}}, "stream": True})
    assert (answer.status_code, "not" in answer.json()["error"]["message"]) == (400, True)


def test_it_ends_with_the_server(serve: Running, http: httpx2.Client) -> None:
    assert http.get("/health").status_code == 200
    assert serve.end() == 0
    with pytest.raises(httpx2.TransportError):
        http.get("/health")
