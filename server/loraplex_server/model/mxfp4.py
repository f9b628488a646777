"""MXFP4 checkpoints, which are served dequantised."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils.quantization_config import Mxfp4Config

from loraplex_server.model.language import make_language_model

log = logging.getLogger(__name__)

# Families whose experts Transformers reads in MXFP4.
FAMILIES = {"gpt_oss"}


def quantization_of(config: PreTrainedConfig) -> Any:
    """The quantization that Transformers reads the checkpoint by: the whole configuration's, else that of its text
    model. None where it is not quantised."""
    found: Any = getattr(config, "quantization_config", None)
    return getattr(config.get_text_config(), "quantization_config", None) if found is None else found


def is_mxfp4(config: PreTrainedConfig) -> bool:
    """True if the checkpoint's experts are in MXFP4, and its family is one that is read so."""
    fields = quantization_of(config)
    method = fields.get("quant_method") if isinstance(fields, Mapping) else getattr(fields, "quant_method", None)
    return method == "mxfp4" and config.model_type in FAMILIES


def dequantising(config: PreTrainedConfig, dtype: torch.dtype | str) -> dict[str, Any]:
    """Options of `from_pretrained` for this configuration: none where nothing is dequantised. Else the log says what
    memory the weights take. `dtype`: what is asked for, perhaps "auto"."""
    if not is_mxfp4(config):
        return {}
    served = dtype if isinstance(dtype, torch.dtype) else getattr(config, "dtype", None) or torch.bfloat16
    log.warning(
        "the experts of this checkpoint are in MXFP4 and are served in %s: the weights take %.1f GB of memory",
        str(served).removeprefix("torch."),
        weight_bytes(config, served) / 1e9,
    )
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def weight_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a model's weights in `dtype`, by its configuration alone."""
    plain = copy.deepcopy(config)
    vars(plain).pop("quantization_config", None)
    with torch.device("meta"):
        model = make_language_model(plain, dtype=dtype)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
