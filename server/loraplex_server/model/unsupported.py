"""Refusal of unsupported models by their configuration, before any weight is read.

The probe checks by running the model what its configuration does not tell.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from loraplex_contracts.errors import LoraplexError, UnsupportedModel

log = logging.getLogger(__name__)

# Positions of one request would change the rotation of its neighbours in the same step.
STATEFUL_ROPE = {"dynamic", "longrope", "su", "yarn_dynamic"}
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
# Their attention does not go through Transformers' attention interface.
OWN_ATTENTION = {"falcon": "ALiBi or its own attention", "bloom": "ALiBi", "mpt": "ALiBi"}


def refuse_config(config: PreTrainedConfig, model_id: str) -> None:
    """Raises UnsupportedModel when this configuration cannot be served rightly."""
    try:
        reason = next(_reasons(config), None)
    except Exception as error:  # of which part is meant, or whatever a field of an unusual kind leads to
        reason = f"its configuration does not describe one language model ({_told(error)})"
    if reason is not None:
        raise UnsupportedModel(f"{model_id} ({config.model_type}) cannot be served: {reason}")


def refuse_class(config: PreTrainedConfig, model_id: str) -> None:
    """The same for what Transformers' class shows, so that no weights are fetched in vain."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    can_set = getattr(model_class, "_can_set_attn_implementation", None)
    if model_class is None:
        reason = "Transformers has no causal language model for it"
    elif can_set is not None and not can_set():
        reason = "its attention does not use Transformers' attention interface"
    else:
        return
    raise UnsupportedModel(f"{model_id} ({config.model_type}) cannot be served: {reason}")


def _reasons(config: PreTrainedConfig) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model; only decoders are served"
    if getattr(config, "quantization_config", None) is not None:
        yield "its checkpoint is quantised; use the unquantised checkpoint"
    if config.model_type in OWN_ATTENTION:
        yield f"its attention ({OWN_ATTENTION[config.model_type]}) does not use Transformers' attention interface"
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", 1) < 1 or (getattr(text, "max_position_embeddings", None) or 2) < 2:
        yield "its configuration leaves no layer or no position"
    layer_types = {str(kind) for kind in getattr(text, "layer_types", None) or ()}
    if layer_types - ATTENTION_LAYERS:
        yield f"its layers of type {_names(layer_types - ATTENTION_LAYERS)} keep a state that pages cannot hold"
    rope_types = _rope_types(getattr(text, "rope_parameters", None))
    if rope_types & STATEFUL_ROPE:
        yield (
            f"its rotary embedding ({_names(rope_types & STATEFUL_ROPE)}) depends on the longest request of the batch, "
            "so requests would change each other's text"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        yield "some of its layers share the keys and values of others"
    if getattr(text, "use_bidirectional_attention", False):
        yield "it attends to later tokens"


def _rope_types(parameters: Any) -> set[str]:
    """Of one set of rope parameters, or of one set per layer type."""
    if not isinstance(parameters, Mapping):
        return set()
    own = parameters.get("rope_type") or parameters.get("type")
    found = {str(own)} if own else set[str]()
    for nested in parameters.values():
        found |= _rope_types(nested)
    return found


@contextmanager
def reading(model_id: str) -> Generator[None]:
    """Whatever the files of a model make Transformers raise, as UnsupportedModel. Full memory is no such thing."""
    try:
        yield
    except (LoraplexError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        log.info("%s cannot be loaded", model_id, exc_info=error)
        raise UnsupportedModel(f"{model_id} cannot be loaded: {_told(error)}") from error


def _told(error: Exception) -> str:
    """What an error of a library says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # The first line of some only introduces the second.
    told = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return told if " " in told else f"{type(error).__name__}: {told}"


def _names(values: set[str]) -> str:
    return ", ".join(sorted(values))
