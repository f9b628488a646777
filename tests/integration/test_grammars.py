"""Grammars over gRPC: texts have the form that a request asks for, whatever drafts, and whoever is beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.inline_worker import inline_worker
from support.world import TinyWorld

from loraplex import Client, FailedPrecondition, Grammar, InvalidArgument
from loraplex_proto.validate import MAX_GRAMMAR_BYTES
from loraplex_server.config import (
    AdaptersConfig,
    BatchConfig,
    DraftModelConfig,
    EngineConfig,
    KvConfig,
    ModelConfig,
    SpeculationConfig,
    WorkerConfig,
)
from loraplex_server.grpc.server import Worker

pytestmark = pytest.mark.timeout(120)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def worker(tiny_world: TinyWorld) -> Iterator[Worker]:
    engine = EngineConfig(
        ModelConfig(str(tiny_world.model), dtype="float64"),
        KvConfig(memory_bytes=4 << 20),
        BatchConfig(max_running=8, max_step_tokens=64, max_queued=64),
        AdaptersConfig(root=tiny_world.adapters, num_device_slots=3),
        speculation=SpeculationConfig(drafts=(DraftModelConfig("small", str(tiny_world.model)),)),
    )
    with inline_worker(WorkerConfig(engine, port=0)) as running:
        yield running


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[Client]:
    with Client(worker.address) as one:
        yield one


def person(client: Client, seed: int = 0, **options: Any) -> Any:
    wanted = {"grammar": Grammar(json_schema=PERSON), "temperature": 1.0, "seed": seed, "max_tokens": 200} | options
    return client.generate("Write a person: ", **wanted)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar(json_schema=PERSON), r'\{"name": ?".*", ?"age": ?\d+, ?"tags": ?\[.*\]\}'),
        (Grammar(json_schema=PERSON, compact=True), r'\{"name":".*","age":\d+,"tags":\[("\w+",?)*\]\}'),
        (Grammar(regex="(ab|cd){3}e?"), "(ab|cd){3}e?"),
        (Grammar(choice=["yes", "no", 'a "quoted" \\ text', "né\n"]), 'yes|no|a "quoted" \\\\ text|né\n'),
        (Grammar(lark='start: "a" B "c"\nB: /[0-9]{2}/'), r"a\d\dc"),
        (Grammar(gbnf='root ::= "x" [0-9] "y"'), r"x\dy"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_texts_have_the_form(client: Client, grammar: Grammar, pattern: str, temperature: float) -> None:
    result = client.generate("Go: ", grammar=grammar, temperature=temperature, seed=5, max_tokens=200)
    assert re.fullmatch(pattern, result.text, re.DOTALL), result.text
    assert result.finish_reason == "eos"
