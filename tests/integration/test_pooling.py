"""Embeddings, classes and scores by a live worker: gRPC, SDK and HTTP agree."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from support.fake_workers import router_for, until
from support.inline_worker import inline_worker
from support.world import TinyWorld
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from loraplex import (
    AdapterNotFound,
    AsyncClient,
    ClassifiesOnly,
    Client,
    ContextLengthExceeded,
    FailedPrecondition,
    InvalidArgument,
    NoClassifier,
    PoolingKind,
)
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig, WorkerConfig
from loraplex_server.grpc.server import Worker

pytestmark = pytest.mark.timeout(120)
POOLINGS: tuple[PoolingKind, ...] = ("last_token", "mean")
TEXTS = ["Ada, 36, London", "b", "a long text with many words in it"]


@dataclass(frozen=True)
class World:
    worker: Worker
    tokenizer: Any
    base: Any
    classifiers: dict[str, PeftModel]

    def ids(self, text: str) -> torch.Tensor:
        return torch.tensor([self.tokenizer(text).input_ids])

    def probabilities(self, name: str, text: str) -> torch.Tensor:
        with torch.no_grad():
            return self.classifiers[name](input_ids=self.ids(text)).logits[0].softmax(-1)

    def vector(self, text: str) -> torch.Tensor:
        """The last hidden state of the base model, of length 1."""
        with torch.no_grad():
            return torch.nn.functional.normalize(self.base.model(self.ids(text)).last_hidden_state[0, -1], dim=0)


@pytest.fixture(scope="module")
def world(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("adapters")
    classifiers: dict[str, PeftModel] = {}
    for name, kind, num_labels in (("mood", "SEQ_CLS", 3), ("rank", "SEQ_CLS", 1), ("names", "TOKEN_CLS", 3)):
        torch.manual_seed(num_labels)
        auto = AutoModelForTokenClassification if kind == "TOKEN_CLS" else AutoModelForSequenceClassification
        model = auto.from_pretrained(tiny_world.model, num_labels=num_labels, dtype=torch.float64)
        config = LoraConfig(task_type=TaskType[kind], r=2, target_modules=["q_proj"], init_lora_weights=False)
        classifiers[name] = get_peft_model(model, config).eval()
        classifiers[name].save_pretrained(str(root / name))
    for name in ("plain", "mean", "cls"):
        shutil.copytree(tiny_world.adapters / tiny_world.names[0], root / name)
        if name != "plain":
            (root / name / "1_Pooling").mkdir()
            (root / name / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": name}))
    engine = EngineConfig(
        ModelConfig(str(tiny_world.model), dtype="float64", max_context_tokens=64),
        KvConfig(memory_bytes=4 << 20),
        BatchConfig(max_running=8, max_step_tokens=16),
        AdaptersConfig(root=root, num_device_slots=2),
    )
    base = AutoModelForCausalLM.from_pretrained(tiny_world.model, dtype=torch.float64)
    with inline_worker(WorkerConfig(engine, port=0)) as worker:
        yield World(worker, AutoTokenizer.from_pretrained(tiny_world.model), base, classifiers)


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[Client]:
    with Client(world.worker.address) as one:
        yield one


def test_embeddings(world: World, client: Client) -> None:
    found = client.embed(TEXTS)
    for vector, text in zip(found.vectors, TEXTS, strict=True):
        torch.testing.assert_close(torch.tensor(vector).double(), world.vector(text), rtol=1e-5, atol=1e-6)
    ids = world.ids(TEXTS[0])[0].tolist()
    assert client.embed(ids).vectors == client.embed([ids]).vectors == (found.vectors[0],)
    assert found.usage.prompt_tokens == sum(len(world.ids(text)[0]) for text in TEXTS)
    cut = client.embed(TEXTS[0], dimensions=5).vector
    assert len(cut) == 5
    assert math.isclose(sum(value * value for value in cut), 1.0, rel_tol=1e-5)
    raw = client.embed(TEXTS[0], normalize=False, pooling="mean").vector
    with torch.no_grad():
        want = world.base.model(world.ids(TEXTS[0])).last_hidden_state[0].mean(0)
    torch.testing.assert_close(torch.tensor(raw).double(), want, rtol=1e-5, atol=1e-6)
    of_adapter = client.embed(TEXTS[0], adapter_id="plain")
    assert of_adapter.adapter_digest
    assert of_adapter.vector != found.vector


def test_an_adapter_says_how_its_texts_are_pooled(client: Client) -> None:
    vectors = {pooling: client.embed(TEXTS, adapter_id="plain", pooling=pooling).vectors for pooling in POOLINGS}
    assert vectors["mean"] != vectors["last_token"]
    assert client.embed(TEXTS, adapter_id="plain").vectors == vectors["last_token"]
    mean = client.embed(TEXTS, adapter_id="mean")
    assert mean.vectors == vectors["mean"]
    assert mean.adapter_digest != client.embed("x", adapter_id="plain").adapter_digest
    for name in ("mean", "cls"):
        for pooling in POOLINGS:
            assert client.embed(TEXTS, adapter_id=name, pooling=pooling).vectors == vectors[pooling]
    cosine = client.score(TEXTS[0], TEXTS[1:], adapter_id="mean").scores
    assert cosine == client.score(TEXTS[0], TEXTS[1:], adapter_id="plain", pooling="mean").scores
    with pytest.raises(FailedPrecondition, match="by 'cls', which is not available") as caught:
        client.embed("x", adapter_id="cls")
    assert caught.value.field == "pooling"
    assert client.generate("x", adapter_id="cls", max_tokens=1).usage.completion_tokens == 1


def test_a_prompt_may_fill_the_context_and_no_more(client: Client) -> None:
    assert client.embed([[5] * 64]).usage.prompt_tokens == 64
    with pytest.raises(ContextLengthExceeded):
        client.embed([[5] * 65])
    assert client.embed([[5] * 65], truncate_prompt=0).usage.prompt_tokens == 64


def test_classes(world: World, client: Client) -> None:
    found = client.classify(TEXTS, adapter_id="mood")
    assert (found.labels, found.per_token) == (("LABEL_0", "LABEL_1", "LABEL_2"), False)
    for one, text, best in zip(found.inputs, TEXTS, found.best, strict=True):
        want = world.probabilities("mood", text)
        torch.testing.assert_close(torch.tensor(one.rows, dtype=torch.float64), want[None], rtol=1e-9, atol=1e-9)
        assert best == f"LABEL_{int(want.argmax())}"
    tokens = client.classify(TEXTS[0], adapter_id="names")
    want = world.probabilities("names", TEXTS[0])
    torch.testing.assert_close(torch.tensor(tokens.inputs[0].rows, dtype=torch.float64), want, rtol=1e-9, atol=1e-9)
    spans = [TEXTS[0][a:b] for a, b in zip(tokens.inputs[0].starts, tokens.inputs[0].ends, strict=True)]
    assert "".join(spans) == TEXTS[0]
    cut = client.classify(TEXTS[0], adapter_id="names", truncate_prompt=4)
    assert [TEXTS[0][a:b] for a, b in zip(cut.inputs[0].starts, cut.inputs[0].ends, strict=True)] == spans[-4:]


def test_scores(world: World, client: Client) -> None:
    query, documents = "who?", TEXTS[:2]
    with torch.no_grad():
        logits = [
            world.classifiers["rank"](input_ids=torch.tensor([world.tokenizer(query, text).input_ids])).logits.item()
            for text in documents
        ]
    found = client.score(query, documents, adapter_id="rank", logits=True).scores
    assert found == pytest.approx(logits, rel=1e-9)
    sigmoids = [1 / (1 + math.exp(-one)) for one in logits]
    assert client.score(query, documents, adapter_id="rank").scores == pytest.approx(sigmoids, rel=1e-9)
    cosines = [float(world.vector(query) @ world.vector(text)) for text in documents]
    assert client.score(query, documents).scores == pytest.approx(cosines, rel=1e-9)
    assert client.score(query, documents, adapter_id="rank", method="cosine").scores != pytest.approx(cosines)
    template = "{query}|{document}:"
    found = client.score(
        query, documents, method="next_token", template=template, true_token="y", false_token="n", logits=True
    ).scores
    for score, text in zip(found, documents, strict=True):
        with torch.no_grad():
            row = world.base(world.ids(f"{query}|{text}:")).logits[0, -1]
        yes, no = (world.ids(word)[0, 0] for word in ("y", "n"))
        assert score == pytest.approx(float(row[yes] - row[no]), rel=1e-9)
    with pytest.raises(InvalidArgument, match="one token"):
        client.score(query, documents, method="next_token")


def test_what_an_adapter_cannot_do(client: Client) -> None:
    with pytest.raises(ClassifiesOnly):
        client.generate("x", adapter_id="mood", max_tokens=1)
    for adapter_id in ("plain", ""):
        with pytest.raises(NoClassifier):
            client.classify("x", adapter_id=adapter_id)
    with pytest.raises(FailedPrecondition, match="3 labels"):
        client.score("x", ["y"], adapter_id="mood")
    with pytest.raises(InvalidArgument, match="`template` is for query and document together"):
        client.score("x", ["y"], template="{query}{document}")
    with pytest.raises(AdapterNotFound):
        client.embed("x", adapter_id="nobody")
    assert client.generate("x", adapter_id="plain", max_tokens=1).usage.completion_tokens == 1
    assert client.info().tasks == ("generate", "embed", "classify", "score")


async def test_the_same_over_http_beside_generation(world: World) -> None:
    async with router_for([world.worker.address], http_port=0) as (router, _):
        assert router.http is not None
        await until(lambda: router.replicas.num_routable == 1)
        async with (
            httpx2.AsyncClient(base_url=f"http://{router.http.address}", timeout=30, trust_env=False) as http,
            AsyncClient(router.address) as client,
        ):
            body = {"model": "plain", "input": TEXTS, "encoding_format": "base64"}
            rerank = {"query": "who?", "documents": TEXTS, "model": "rank"}
            lorax = {"inputs": TEXTS[0], "parameters": {"adapter_id": "names"}}
            embedded, classed, entities, ranked, text, vectors, labels, scores = await asyncio.gather(
                http.post("/v1/embeddings", json=body),
                http.post("/classify", json={"model": "mood", "input": TEXTS}),
                http.post("/classify", json=lorax),
                http.post("/rerank", json=rerank),
                client.generate("x", adapter_id="plain", max_tokens=20, ignore_eos=True),
                client.embed(TEXTS, adapter_id="plain"),
                client.classify(TEXTS, adapter_id="mood"),
                client.score("who?", TEXTS, adapter_id="rank"),
            )
            assert text.usage.completion_tokens == 20
            for row, vector in zip(embedded.json()["data"], vectors.vectors, strict=True):
                raw = base64.b64decode(row["embedding"])
                assert struct.unpack(f"<{len(vector)}f", raw) == pytest.approx(vector, rel=1e-6)
            assert embedded.json()["loraplex"]["adapter_digest"] == vectors.adapter_digest
            for row, one in zip(classed.json()["data"], labels.inputs, strict=True):
                assert row["probs"] == pytest.approx(one.rows[0], rel=1e-9)
            assert all(row["word"] in TEXTS[0] for row in entities.json())
            order = sorted(range(len(TEXTS)), key=lambda index: -scores.scores[index])
            assert [row["index"] for row in ranked.json()["results"]] == order
            refused = await http.post("/v1/completions", json={"model": "mood", "prompt": "x", "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "CLASSIFIES_ONLY")
            refused = await http.post("/classify", json={"model": "plain", "input": "x"})
            assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "NO_CLASSIFIER")
            assert (await http.post("/classify", json={"model": "nobody", "input": "x"})).status_code == 404
            cards = {card["id"]: card["loraplex"] for card in (await http.get("/v1/models")).json()["data"][1:]}
            assert cards["mood"]["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
            assert "labels" not in cards["plain"]


async def test_a_client_that_leaves_frees_what_it_held(world: World) -> None:
    async with AsyncClient(world.worker.address) as client:
        many = asyncio.ensure_future(client.embed([[number % 60 + 1] * 60 for number in range(500)]))
        await asyncio.sleep(0.2)
        many.cancel()
        await asyncio.gather(many, return_exceptions=True)
        await client.embed("x")

    def is_idle() -> bool:
        load = world.worker.engine.state.load
        return load.num_running == load.num_queued == 0

    await until(is_idle)


async def test_texts_and_vectors_may_have_one_request_id(tiny_world: TinyWorld) -> None:
    """The engine's own ids are unique over both services: clients may choose equal ones."""
    engine = EngineConfig(ModelConfig(str(tiny_world.model), max_context_tokens=64), KvConfig(memory_bytes=4 << 20))
    with inline_worker(WorkerConfig(engine, port=0)) as worker:
        async with AsyncClient(worker.address) as client:
            texts = [client.generate("Ada", request_id="same", max_tokens=40, ignore_eos=True) for _ in range(8)]
            vectors = [client.embed("Ada", request_id="same") for _ in range(8)]
            answers = await asyncio.gather(*texts, *vectors)
    assert [answer.usage.prompt_tokens for answer in answers] == [answers[0].usage.prompt_tokens] * 16
