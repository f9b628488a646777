"""Rules of pooling: the values that an adapter's files allow and choose."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from loraplex_adapters.cache.states import AdapterTraits
from loraplex_contracts.errors import ClassifiesOnly, FailedPrecondition, InvalidArgument, NoClassifier
from loraplex_contracts.request import MAX_CLASS_VALUES, PooledPositions, Request

# Positions by the mode that an adapter's files name; the empty mode is that of adapters that name none.
POOLED_BY_MODE: Final[dict[str, PooledPositions]] = {"": "last", "lasttoken": "last", "mean": "mean"}


def resolve_pooling(request: Request, traits: AdapterTraits | None) -> Request:
    """The request with what its adapter says about pooled values. `traits`: the adapter's, None without one.

    Raises NoClassifier, ClassifiesOnly where an adapter with a classifier is asked for a text, FailedPrecondition for
    embeddings that are made otherwise, or InvalidArgument for more than MAX_CLASS_VALUES.
    """
    classifier = None if traits is None else traits.classifier
    pooling = request.pooling
    if pooling is not None and pooling.task == "classify":
        if classifier is None:
            name = f"adapter {request.adapter_id!a}" if traits is not None else "the base model"
            raise NoClassifier(
                f"{name} has no classifier: name an adapter that was trained to classify (task_type SEQ_CLS or "
                "TOKEN_CLS), or ask for embeddings or a text",
                field="adapter_id",
            )
        num_tokens, num_labels = len(request.prompt_token_ids), len(classifier.labels)
        if classifier.per_token and num_tokens * num_labels > MAX_CLASS_VALUES:
            raise InvalidArgument(
                f"adapter {request.adapter_id!a} gives each token {num_labels} values, and an input has {num_tokens} "
                f"tokens; {MAX_CLASS_VALUES} values may be asked for at once: shorten the input to "
                f"{MAX_CLASS_VALUES // num_labels} tokens, or split it",
                field="inputs",
            )
        positions = "each" if classifier.per_token else "last"
        return replace(request, pooling=replace(pooling, positions=positions, labels=classifier.labels))
    if classifier is not None and (pooling is None or pooling.task == "next_token"):
        raise ClassifiesOnly(
            f"adapter {request.adapter_id!a} was trained to classify and writes no text: ask Classify (over HTTP "
            "/classify) for its labels, or name another adapter",
            field="adapter_id",
        )
    if pooling is not None and pooling.task == "embed" and pooling.positions is None:
        mode = "" if traits is None else traits.pooling
        if mode not in POOLED_BY_MODE:
            raise FailedPrecondition(
                f"adapter {request.adapter_id!a} makes embeddings by {mode!a}, which is not available here: ask for "
                "last_token or mean, if that is what you want",
                field="pooling",
            )
        return replace(request, pooling=replace(pooling, positions=POOLED_BY_MODE[mode]))
    return request
