"""Grammars over gRPC: texts have the form that a request asks for."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jsonschema import validate
from support.inline_worker import inline_worker
from support.medusa_files import medusa_config, sequential_tensors, write_heads
from support.schemas import REFUSED, random_schema, refused_schema
from support.world import TinyWorld

from loraplex import Client, FailedPrecondition, Generation, Grammar, InvalidArgument, Medusa
from loraplex_proto.validate import MAX_GRAMMAR_BYTES
from loraplex_server.config import (
    AdaptersConfig,
    BatchConfig,
    EngineConfig,
    KvConfig,
    ModelConfig,
    SpeculationConfig,
    WorkerConfig,
)
from loraplex_server.grpc.server import Worker

pytestmark = pytest.mark.timeout(120)

# Keywords of REFUSED that concern values of one type.
TYPED = {"uniqueItems": "array", "contains": "array", "format": "string", "pattern": "string"}

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
def worker(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """A worker with an adapter, Medusa heads and a draft model, and too little KV memory for all rows."""
    root = tmp_path_factory.mktemp("adapters")
    shutil.copytree(tiny_world.adapters / "a000", root / "a000")
    write_heads(root / "heads", sequential_tensors(hidden=32), medusa_config())
    engine = EngineConfig(
        ModelConfig(str(tiny_world.model), dtype="float64"),
        KvConfig(memory_bytes=256 << 10),
        BatchConfig(max_running=8, max_step_tokens=64, max_queued=64),
        AdaptersConfig(root=root, num_device_slots=3),
        speculation=SpeculationConfig(draft_models=(f"small={tiny_world.model}",)),
    )
    with inline_worker(WorkerConfig(engine, port=0)) as running:
        yield running


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[Client]:
    with Client(worker.address) as one:
        yield one


def person(client: Client, seed: int = 0, **options: Any) -> Generation:
    wanted = {"grammar": Grammar(json_schema=PERSON), "temperature": 1.0, "seed": seed, "max_tokens": 200} | options
    return client.generate("Write a person: ", **wanted)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar(json_schema=PERSON), r'\{"name": ?".*", ?"age": ?\d+, ?"tags": ?\[.*\]\}'),
        (Grammar(json_schema=PERSON, compact=True), r'\{"name":".*","age":\d+,"tags":\[("\w+",?)*\]\}'),
        (Grammar(regex="(ab|cd){3}e?"), "(ab|cd){3}e?"),
        (Grammar(regex="a\x00b[\\x00-\\x02]"), "a\x00b[\x00-\x02]"),
        (
            Grammar(choice=["yes", "no", 'a "quoted" \\ text', "né\n", "\x00/😀"]),
            'yes|no|a "quoted" \\\\ text|né\n|\x00/😀',
        ),
        (Grammar(lark='start: "a" B "c"\nB: /[0-9]{2}/'), r"a\d\dc"),
        (Grammar(gbnf='root ::= "x" [0-9] "y"'), r"x\dy"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_have_the_form(client: Client, grammar: Grammar, pattern: str, temperature: float) -> None:
    result = client.generate("Go: ", grammar=grammar, temperature=temperature, seed=5, max_tokens=200)
    assert re.fullmatch(pattern, result.text, re.DOTALL), result.text
    assert result.finish_reason == "eos"


def test_any_object_is_json(client: Client) -> None:
    """Strings have no end in sight at temperature 1, so most are cut."""
    results = [
        client.generate("{", grammar=Grammar(json_object=True), temperature=1.0, seed=seed, max_tokens=200)
        for seed in range(2)
    ]
    for result in results:
        assert result.text.startswith("{")
        if result.finish_reason == "eos":
            json.loads(result.text)


def test_structures_follow_their_tags(client: Client) -> None:
    tag = {
        "structures": [{"begin": "<f>", "schema": {"type": "integer", "maximum": 9, "minimum": 0}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    boost = {client.tokenize(char).token_ids[0]: 100.0 for char in "<"}
    result = client.generate("x", grammar=Grammar(structural_tag=tag), logit_bias=boost, max_tokens=40)
    assert not re.search("<f(?!>[0-9]</f>|>[0-9]?<?/?f?$|>?$)", result.text), result.text


@pytest.mark.parametrize("adapter_id", [None, "a000"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_drafts_do_not_change_the_text(client: Client, adapter_id: str | None, seed: int) -> None:
    alone = person(client, seed, adapter_id=adapter_id, speculation="off", logprobs=True)
    validate(json.loads(alone.text), PERSON)
    kinds = ("prompt_lookup", "draft_model", "auto", Medusa("heads"))
    for kind in kinds:
        found = person(
            client, seed, adapter_id=adapter_id, speculation=kind, fixed_draft_length=True, max_draft_tokens=5
        )
        assert (kind, found.text, found.finish_reason) == (kind, alone.text, "eos")
    drafted = person(client, seed, speculation="draft_model", adapter_id=None, fixed_draft_length=True)
    assert drafted.usage.accepted_tokens > 0


def test_neighbours_and_preemption_do_not_change_the_text(client: Client, worker: Worker) -> None:
    """Rows with and without grammars, drafts and adapters share batches that do not fit the memory."""

    def run(index: int) -> tuple[str, ...]:
        options: dict[str, Any] = {
            "adapter_id": ("a000", None)[index % 2],
            "speculation": ("off", "draft_model", "prompt_lookup", "auto")[index % 4],
            "n": 1 + index % 2,
            "seed": index,
            "temperature": 1.0,
            "max_tokens": 150,
        }
        if index % 3:
            options["grammar"] = Grammar(json_schema=PERSON)
        return tuple(one.text for one in client.generate("Write a person: ", **options).completions)

    alone = [run(index) for index in range(10)]
    before = worker.engine.state.load.num_preemptions
    with ThreadPoolExecutor(16) as threads:
        for _ in range(5):  # where threads are late the batch may fit
            assert list(threads.map(run, range(10))) == alone
            if worker.engine.state.load.num_preemptions > before:
                break
    assert worker.engine.state.load.num_preemptions > before
    for index, texts in enumerate(alone):
        for text in texts if index % 3 else ():
            validate(json.loads(text), PERSON)


def test_each_completion_has_its_own_way(client: Client) -> None:
    result = person(client, 3, n=6)
    texts = [one.text for one in result.completions]
    assert len(set(texts)) > 1
    assert {one.finish_reason for one in result.completions} == {"eos"}
    for text in texts:
        validate(json.loads(text), PERSON)


def test_logprobs_are_the_models_own(client: Client) -> None:
    """Logprobs are those of the distribution before the mask, and of the token that was drawn."""
    result = client.generate("x", grammar=Grammar(choice=["{}"]), logprobs=True, top_logprobs=1, max_tokens=9)
    free = client.generate("x", logprobs=True, top_logprobs=1, max_tokens=1)
    assert result.text == "{}"
    first = result.completions[0].logprobs[0]
    assert first.top[0].token_id == free.completions[0].token_ids[0]
    assert first.logprob < first.top[0].logprob


def test_a_text_may_be_cut(client: Client) -> None:
    result = client.generate("x", grammar=Grammar(regex="a{50}"), max_tokens=10)
    assert (result.text, result.finish_reason) == ("a" * 10, "length")
    result = client.generate("x", grammar=Grammar(regex="a{10}"), max_tokens=10)
    assert (result.text, result.finish_reason) == ("a" * 10, "eos")


def test_stop_strings_end_it_before_the_grammar_does(client: Client) -> None:
    result = client.generate("x", grammar=Grammar(regex="ab+c"), stop="bb", max_tokens=50, temperature=1.0, seed=1)
    assert result.finish_reason in ("stop", "eos")
    assert "bb" not in result.text


# --- refusals -------------------------------------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return schema


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        *(
            (Grammar(json_schema={name: value}), re.escape(name))
            for name, value in REFUSED.items()
            if name not in TYPED
        ),
        *((Grammar(json_schema={"type": kind, name: REFUSED[name]}), name) for name, kind in TYPED.items()),
        (Grammar(json_schema={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (Grammar(json_schema={"type": "frog"}), "type"),
        (Grammar(json_schema={"const": "a\x01"}), "const"),
        (Grammar(json_schema={"properties": {"a": {"enum": ["\x7f"]}}}), "enum"),
        (Grammar(json_schema={"type": "object", "properties": {"a\x02": {}}}), "properties"),
        (Grammar(json_schema={"x-guidance": {"lenient": True}, "not": {}}), "not"),
        (Grammar(json_schema={"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no text"),
        (Grammar(json_schema="{"), "not JSON"),
        (Grammar(json_schema="[]"), "object"),
        (Grammar(json_schema=nested(200)), "limit|deep"),
        (Grammar(json_schema="[" * 100_000), "deep"),
        (Grammar(json_schema={"description": "x" * MAX_GRAMMAR_BYTES}), "bytes"),
        (Grammar(regex="(?=a)b"), "regex"),
        (Grammar(regex="(a"), "regex"),
        (Grammar(lark="start: nothing"), "lark"),
        (Grammar(gbnf="no rule"), "gbnf"),
        (Grammar(choice=[]), "choice"),
        (Grammar(structural_tag={"format": {}}), "format"),
        (Grammar(structural_tag={"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}), "begin"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(client: Client, grammar: Grammar, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as caught:
        client.generate("x", grammar=grammar, max_tokens=4)
    assert str(caught.value.field).startswith("grammar")
    assert len(str(caught.value)) < 1000


def test_ends_of_sequence_cannot_be_ignored(client: Client) -> None:
    with pytest.raises(InvalidArgument) as caught:
        client.generate("x", grammar=Grammar(regex="a"), ignore_eos=True)
    assert caught.value.field == "stopping.ignore_eos"


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [5]},
        {"bad_words": ["a"]},
        {"min_tokens": 3, "max_tokens": 5},
        {"allowed_token_ids": [5], "speculation": "draft_model", "fixed_draft_length": True},
    ],
)
def test_a_ban_that_leaves_no_token_ends_that_request_alone(client: Client, options: dict[str, Any]) -> None:
    with ThreadPoolExecutor(2) as threads:
        neighbour = threads.submit(person, client, 7)
        for _ in range(5):
            with pytest.raises(FailedPrecondition, match="leave no token"):
                client.generate("x", grammar=Grammar(regex="a"), **options)
    assert neighbour.result().text == person(client, 7).text


def test_large_and_hostile_grammars_harm_no_neighbour(client: Client) -> None:
    members = [f"e{number}" for number in range(20_000)]
    grammars = [
        Grammar(json_schema={"enum": members}),
        Grammar(regex="(a{1,1000}){1,1000}"),
        Grammar(regex="(((((a?){50}){50}){50}){50})b"),
        Grammar(regex="(.*a){20}"),
        Grammar(lark="start: r0\n" + "".join(f'r{i}: r{i + 1} r{i + 1} | "a"\n' for i in range(5000)) + 'r5000: "b"'),
        Grammar(json_schema={"type": "array", "minItems": 3, "maxItems": 100_000, "items": nested(20)}),
        Grammar(choice=members),
    ]

    def run(grammar: Grammar) -> str:
        try:
            return client.generate("x", grammar=grammar, max_tokens=12, temperature=1.0, seed=2).text
        except (InvalidArgument, FailedPrecondition) as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        neighbours = [threads.submit(person, client, seed) for seed in range(3)]
        found = list(threads.map(run, grammars))
    assert json.loads(found[0]) in members
    assert found[-1] in members
    assert "refused" in found[4]
    assert [one.result().text for one in neighbours] == [person(client, seed).text for seed in range(3)]


# --- generated schemas ----------------------------------------------------------------------------------------------


def check_schema(client: Client, seed: int) -> None:
    dice = random.Random(seed)
    schema = random_schema(dice)
    result = client.generate(
        f"{seed}: ",
        grammar=Grammar(json_schema=schema, compact=bool(seed % 2)),
        temperature=1.0,
        seed=seed,
        max_tokens=300,
        adapter_id=dice.choice([None, "a000"]),
        speculation=dice.choice(["off", "auto", "prompt_lookup", "draft_model"]),
        n=dice.choice([1, 1, 2]),
        timeout_s=600,  # on a machine that has other work
    )
    for one in result.completions:
        if one.finish_reason != "length":
            validate(json.loads(one.text), schema)


def check_refusal(client: Client, seed: int) -> None:
    schema, keyword = refused_schema(random.Random(seed))
    with pytest.raises(InvalidArgument) as caught:
        client.generate("x", grammar=Grammar(json_schema=schema), max_tokens=4)
    assert f"{keyword}" in str(caught.value), schema


def test_generated_schemas_hold(client: Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda seed: check_schema(client, seed), range(25)))
        list(threads.map(lambda seed: check_refusal(client, seed), range(25)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_thousand_generated_schemas_hold(client: Client) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda seed: check_schema(client, seed), range(25, 1025)))
        list(threads.map(lambda seed: check_refusal(client, seed), range(25, 1025)))
