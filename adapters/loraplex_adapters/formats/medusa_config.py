"""`config.json` beside Medusa heads: parsed with limits, and believed as little as possible.

Of a heads-only directory it is the heads' own configuration, of a whole model the base model's with a few fields more;
so fields that mean nothing here are the rule and are left alone. What it says of counts and sizes is for warnings only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loraplex_adapters.io.strict_json import parse_object

MODEL_CONFIG_NAME = "config.json"
MAX_MODEL_CONFIG_BYTES = 1 << 20
MAX_BASE_CHARS = 512


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """What a configuration says. None: it says nothing, or nothing that could be meant."""

    is_heads_only: bool  # `model_type: medusa`: the directory's model is the heads
    base_model: str
    num_heads: int | None
    num_layers: int | None
    hidden_size: int | None
    original_lm_head: bool


def parse_medusa_config(data: bytes) -> MedusaConfig:
    """Raises AdapterInvalid when it is no JSON object."""
    fields = parse_object(data, MODEL_CONFIG_NAME, MAX_MODEL_CONFIG_BYTES)
    is_heads_only = fields.get("model_type") == "medusa"
    base = fields.get("base_model_name_or_path")
    return MedusaConfig(
        is_heads_only=is_heads_only,
        base_model=base if isinstance(base, str) and len(base) <= MAX_BASE_CHARS else "",
        num_heads=_count(fields, "medusa_num_heads", "num_heads" if is_heads_only else None),
        # A base model's num_hidden_layers are its own.
        num_layers=_count(fields, "medusa_num_layers", "num_hidden_layers" if is_heads_only else None),
        hidden_size=_count(fields, "hidden_size", None),
        original_lm_head=fields.get("original_lm_head") is True,
    )


def _count(fields: Mapping[str, Any], name: str, other: str | None) -> int | None:
    value = fields.get(name)
    if value is None and other is not None:
        value = fields.get(other)
    return value if type(value) is int and value >= 0 else None
