"""Rules of pooling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from loraplex_adapters.cache.states import PLAIN_TRAITS, AdapterTraits
from loraplex_contracts.adapters import ClassifierInfo
from loraplex_contracts.errors import ClassifiesOnly, FailedPrecondition, InvalidArgument, LoraplexError, NoClassifier
from loraplex_contracts.request import (
    MAX_CLASS_VALUES,
    PooledPositions,
    PoolingParams,
    PoolingTask,
    Request,
    StoppingParams,
)
from loraplex_server.engine.pooling import resolve_pooling

LABELS = ("good", "bad")
OF_TEXTS = AdapterTraits(classifier=ClassifierInfo(LABELS))
OF_TOKENS = AdapterTraits(classifier=ClassifierInfo(LABELS, per_token=True))


def request(task: PoolingTask | None, positions: PooledPositions | None = None, num_prompt: int = 5) -> Request:
    pooling = PoolingParams(task, positions) if task is not None else None
    return Request("r", tuple(range(num_prompt)), StoppingParams(4), adapter_id="a", pooling=pooling)


@pytest.mark.parametrize(
    ("traits", "task", "error"),
    [
        (None, "classify", NoClassifier),
        (PLAIN_TRAITS, "classify", NoClassifier),
        (OF_TEXTS, None, ClassifiesOnly),
        (OF_TOKENS, "next_token", ClassifiesOnly),
    ],
)
def test_what_an_adapter_was_not_made_for(
    traits: AdapterTraits | None, task: PoolingTask | None, error: type[LoraplexError]
) -> None:
    with pytest.raises(error, match="the base model" if traits is None else "adapter 'a'") as raised:
        resolve_pooling(request(task), traits)
    assert raised.value.field == "adapter_id"


@pytest.mark.parametrize("task", [None, "next_token"])
@pytest.mark.parametrize("traits", [None, PLAIN_TRAITS, AdapterTraits(pooling="cls")])
def test_other_requests_stay_as_they_are(traits: AdapterTraits | None, task: PoolingTask | None) -> None:
    asked = request(task)
    assert resolve_pooling(asked, traits) is asked


@pytest.mark.parametrize(("traits", "positions"), [(OF_TEXTS, "last"), (OF_TOKENS, "each")])
def test_labels_are_the_classifiers(traits: AdapterTraits, positions: PooledPositions) -> None:
    told = resolve_pooling(request("classify"), traits)
    assert told == replace(request("classify"), pooling=PoolingParams("classify", positions, labels=LABELS))


def test_a_classification_of_too_many_values_is_refused() -> None:
    labels = tuple(map(str, range(MAX_CLASS_VALUES // 4)))
    of_texts, of_tokens = (AdapterTraits(classifier=ClassifierInfo(labels, each)) for each in (False, True))
    resolve_pooling(request("classify", num_prompt=5), of_texts)
    resolve_pooling(request("classify", num_prompt=4), of_tokens)
    with pytest.raises(InvalidArgument, match="shorten the input to 4 tokens"):
        resolve_pooling(request("classify", num_prompt=5), of_tokens)


@pytest.mark.parametrize(
    ("asked", "own", "expected"),
    [
        (None, None, "last"),
        (None, "", "last"),
        (None, "lasttoken", "last"),
        (None, "mean", "mean"),
        ("last", "mean", "last"),
        ("mean", "cls", "mean"),
    ],
)
def test_embeddings_are_pooled_as_asked_or_as_the_adapter_says(
    asked: PooledPositions | None, own: str | None, expected: PooledPositions
) -> None:
    traits = None if own is None else AdapterTraits(pooling=own)
    assert resolve_pooling(request("embed", asked), traits).pooling == PoolingParams("embed", expected)


@pytest.mark.parametrize("own", ["cls", "mean+max"])
def test_embeddings_that_are_made_otherwise_are_refused(own: str) -> None:
    with pytest.raises(FailedPrecondition, match=own.replace("+", r"\+")) as raised:
        resolve_pooling(request("embed"), AdapterTraits(pooling=own))
    assert raised.value.field == "pooling"
