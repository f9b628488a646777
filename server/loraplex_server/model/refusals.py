"""Refusals of models by configuration and class, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.library_errors import error_line
from loraplex_server.model.language import has_other_parts, language_class
from loraplex_server.model.mxfp4 import is_mxfp4, quantization_of
from loraplex_server.model.own_attention import has_known_form
from loraplex_server.model.probe import ATTENTION_LAYERS, OTHER_LAYERS, STATE_LAYERS, layer_types

ROPE_TYPES = {"default", *ROPE_INIT_FUNCTIONS}
# Their attention does not go through Transformers' attention interface.
OWN_ATTENTION = {
    "xlnet": "relative positions",
}

# Their main input is text by the class, but the forward asks for an image as well.
ASKS_FOR_IMAGES = {"idefics"}


def refuse_config(config: PreTrainedConfig, model_id: str) -> None:
    """Raises UnsupportedModel when this configuration cannot be served rightly."""
    try:
        reason = next(_reasons(config), None)
    except Exception as error:  # of which part is meant, or whatever a field of an unusual kind leads to
        reason = f"its configuration does not describe one language model ({error_line(error)})"
    if reason is not None:
        raise UnsupportedModel(f"{model_id} ({config.model_type}) cannot be served: {reason}")


def refuse_class(config: PreTrainedConfig, model_id: str) -> None:
    """Raises UnsupportedModel for what Transformers' class shows, so that no weights are fetched in vain."""
    model_class = language_class(config)
    can_set = getattr(model_class, "_can_set_attn_implementation", None)
    if model_class is None:
        reason = "Transformers has no class for it that generates text from text"
    elif can_set is not None and not has_other_parts(config) and not can_set() and not has_known_form(model_class):
        reason = "its attention does not use Transformers' attention interface"
    elif model_class.main_input_name != "input_ids" or config.model_type in ASKS_FOR_IMAGES:
        reason = f"{model_class.__name__} takes no text without an image, and images are not served"
    else:
        return
    raise UnsupportedModel(f"{model_id} ({config.model_type}) cannot be served: {reason}")


def _reasons(config: PreTrainedConfig) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model; only decoders are served"
    if quantization_of(config) is not None and not is_mxfp4(config):
        yield "its checkpoint is quantised; use the unquantised checkpoint"
    if config.model_type in OWN_ATTENTION:
        yield f"its attention ({OWN_ATTENTION[config.model_type]}) does not use Transformers' attention interface"
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", 1) < 1 or (getattr(text, "max_position_embeddings", None) or 2) < 2:
        yield "its configuration leaves no layer or no position"
    if unknown := set(layer_types(text)) - (ATTENTION_LAYERS | STATE_LAYERS | OTHER_LAYERS):
        yield f"its layers of type {_names(unknown)} are of a kind that is not known"
    if (unknown := _rope_types(getattr(text, "rope_parameters", None)) - ROPE_TYPES) and _has_rope(type(text)):
        yield (
            f"its rotary embedding ({_names(unknown)}) is of a kind that Transformers does not know; it has "
            f"{_names(ROPE_TYPES)}"
        )
    if (getattr(text, "num_kv_shared_layers", None) or 0) >= getattr(text, "num_hidden_layers", 1):
        yield "its layers take the keys and values of another model"
    if (getattr(text, "n_recurrent_loops", None) or 1) > 1:
        yield "an attention layer runs several times per token"
    if getattr(text, "use_bidirectional_attention", False) not in (False, None, "vision"):  # no images come here
        yield "it attends to later tokens"


def _has_rope(config_class: type[PreTrainedConfig]) -> bool:
    """True where the family reads rope parameters; others pass over those that a configuration has."""
    return hasattr(config_class, "rope_parameters") or hasattr(config_class(), "rope_parameters")


def _rope_types(parameters: Any) -> set[str]:
    """The rope types in one set of rope parameters, or in one set per layer type."""
    if not isinstance(parameters, Mapping):
        return set()
    own = parameters.get("rope_type") or parameters.get("type")
    found = {str(own)} if own else set[str]()
    for nested in parameters.values():
        found |= _rope_types(nested)
    return found


def _names(values: set[str]) -> str:
    return ", ".join(sorted(values))
