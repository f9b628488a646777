"""Mixtures through a live worker and router, over gRPC and HTTP, against PEFT."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import httpx2
import pytest
import torch
from peft import LoraModel, PeftModel
from support.dense import greedy
from support.processes import loraplex
from support.world import CHAT_TEMPLATE, RANKS, TinyWorld, make_world
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex import AdapterNotFound, Client, Merge

PROMPT = "the cat sat on"
NUM_TOKENS = 16
FIRST, SECOND, SAME_RANK = "a000", "a001", f"a{len(RANKS):03d}"


class Served(NamedTuple):
    world: TinyWorld
    client: Client
    http: httpx2.Client


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    world = make_world(tmp_path_factory.mktemp("world"), len(RANKS) + 1, chat_template=CHAT_TEMPLATE)
    arguments = ("serve", str(world.model), "--adapters", str(world.adapters), "--dtype", "float64", "--threads", "1")
    with loraplex(*arguments, "--adapter-slots", "2", "--port", "0", "--http-port", "0") as running:
        found = re.search(r"HTTP on ([\d.:]+\d)", running.output)
        assert found, running.output
        address = httpx2.Client(base_url=f"http://{found[1]}", timeout=60, trust_env=False)
        with address as http, Client(running.address) as client:
            yield Served(world, client, http)


def wanted(world: TinyWorld, members: Sequence[tuple[str, float]], how: str, **more: Any) -> str:
    """The text of PEFT's own mixture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(world.model, dtype=torch.float64)
        peft = PeftModel.from_pretrained(copy.deepcopy(model), str(world.adapters / members[0][0]), members[0][0])
        for name, _ in members[1:]:
            peft.load_adapter(str(world.adapters / name), name)
        names, weights = [name for name, _ in members], [weight for _, weight in members]
        cast(LoraModel, peft.base_model).add_weighted_adapter(names, weights, "mixed", cast(Any, how), **more)
        peft.set_adapter("mixed")
    tokenizer = AutoTokenizer.from_pretrained(world.model)
    return tokenizer.decode(greedy(peft, tokenizer(PROMPT).input_ids, NUM_TOKENS), skip_special_tokens=True)


def test_sums(served: Served) -> None:
    world, client, http = served
    text = wanted(world, ((FIRST, 0.75), (SECOND, -0.5)), "cat")
    mine = client.generate(PROMPT, adapters={FIRST: 0.75, SECOND: -0.5}, max_tokens=NUM_TOKENS)
    assert mine.text == text
    plain = client.generate(PROMPT, adapter_id=FIRST, max_tokens=NUM_TOKENS)
    assert plain.text != text
    members = [{"id": SECOND, "weight": -0.5}, {"id": FIRST, "weight": 0.75}]
    answer = http.post(
        "/v1/completions", json={"prompt": PROMPT, "adapters": members, "max_tokens": NUM_TOKENS, "temperature": 0}
    ).json()
    assert answer["choices"][0]["text"] == text
    assert answer["loraplex"]["adapter_digest"] == mine.adapter_digest
    assert (answer["loraplex"]["adapter_id"], answer["loraplex"]["adapters"]) == (None, members)
    assert len(mine.adapter_digest or "") == 64


def test_other_routes_take_mixtures(served: Served) -> None:
    """SGLang's, whose meta_info has the recipe, and OpenAI's of responses, which are chats."""
    world, _, http = served
    ids, weights = [FIRST, SAME_RANK], [0.75, 1.5]
    merged = {"ids": ids, "weights": weights, "merge_strategy": "ties", "density": 0.5}
    text = wanted(world, tuple(zip(ids, weights, strict=True)), "ties", density=0.5)
    params = {"max_new_tokens": NUM_TOKENS, "temperature": 0}
    found = http.post(
        "/generate", json={"text": [PROMPT, PROMPT], "sampling_params": params, "merged_adapters": merged}
    ).json()
    recipe = {
        "adapters": [{"id": one, "weight": weight} for one, weight in zip(ids, weights, strict=True)],
        "merge": {"strategy": "ties", "density": 0.5},
    }
    for one in found:
        assert (one["text"], one["meta_info"]["loraplex"]) == (text, recipe)
    members = [{"id": FIRST, "weight": 0.75}, {"id": SECOND, "weight": -0.5}]
    body = {"temperature": 0, "adapters": members}
    chat = [{"role": "user", "content": PROMPT}]
    answers = [
        http.post("/v1/responses", json={**body, "input": PROMPT, "max_output_tokens": NUM_TOKENS}).json(),
        http.post("/v1/chat/completions", json={**body, "messages": chat, "max_tokens": NUM_TOKENS}).json(),
    ]
    assert answers[0]["output"][0]["content"][0]["text"] == answers[1]["choices"][0]["message"]["content"]
    assert answers[0]["loraplex"]["adapters"] == answers[1]["loraplex"]["adapters"] == members
    assert answers[0]["loraplex"]["adapter_digest"] == answers[1]["loraplex"]["adapter_digest"]
    refused = http.post("/generate", json={"text": PROMPT, "lora_path": FIRST, "adapters": members})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "adapters")


def test_merged_adapters_of_lorax(served: Served) -> None:
    world, client, http = served
    ids, weights = [FIRST, SAME_RANK], [0.75, 1.5]
    for merged, how, more in (
        ({"merge_strategy": "linear"}, "linear", {}),
        ({}, "linear", {}),
        ({"merge_strategy": "cat"}, "cat", {}),
        (
            {"merge_strategy": "ties", "density": 0.5, "majority_sign_method": "frequency"},
            "ties",
            {"density": 0.5, "majority_sign_method": "frequency"},
        ),
    ):
        text = wanted(world, tuple(zip(ids, weights, strict=True)), how, **more)
        parameters = {
            "merged_adapters": {"ids": ids, "weights": weights, **merged},
            "max_new_tokens": NUM_TOKENS,
        }
        answer = http.post("/generate", json={"inputs": PROMPT, "parameters": parameters})
        assert answer.status_code == 200, answer.text
        assert answer.json()["generated_text"] == text, merged
    drawn = [
        client.generate(
            PROMPT,
            adapters={FIRST: 1.0, SAME_RANK: 1.0},
            merge=Merge("dare_ties", 0.5, seed=seed),
            max_tokens=NUM_TOKENS,
        )
        for seed in (1, 1, 2, None, None)
    ]
    digests = [one.adapter_digest for one in drawn]
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] == digests[4]
    assert drawn[0].text == drawn[1].text
    assert not any(":" in row.adapter_id for row in client.adapters.list())


def test_refusals(served: Served) -> None:
    _, client, http = served
    with pytest.raises(AdapterNotFound, match="nowhere"):
        client.generate(PROMPT, adapters={FIRST: 1.0, "nowhere": 1.0}, max_tokens=2)
    for body, status, word in (
        ({"merged_adapters": {"ids": [FIRST, "nowhere"]}}, 404, "nowhere"),
        ({"merged_adapters": {"ids": [FIRST, SECOND]}}, 400, "ranks are equal"),
        ({"adapters": [{"id": FIRST, "weight": 0}]}, 400, "that of 'a000' is 0"),
        ({"adapters": [{"id": FIRST}, {"id": SECOND}, {"id": SAME_RANK}]}, 429, "3 adapters of the mixture"),
    ):
        answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, **body})
        assert (answer.status_code, word in answer.text) == (status, True), answer.text
