"""Modules that a PEFT configuration chooses, against PEFT's own choice."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists

from loraplex_adapters.formats import peft_targets
from loraplex_adapters.formats.peft_targets import TargetChoice

ENDS = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.experts.1.down_proj")
STEMS = ("model.layers", "model.language_model.layers", "transformer.h", "layers", "model.vision_tower.blocks.3.layers")
PATHS = [
    *(f"{stem}.{layer}.{end}" for stem, layer, end in itertools.product(STEMS, (0, 1, 10), ENDS)),
    *("lm_head", "model.embed_tokens", "q_proj", "3.q_proj", "model.layers.q_proj", "model.norm"),
]
# Written by Unsloth.
LONG = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|out_proj"
    r"|fc1|fc2|o_proj|gate_proj|up_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mlp|"
    r"feed_forward|ffn|dense)\.(?:(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2|o_proj|gate_proj|up_proj|down_proj)))"
)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "mlp.down_proj"]},
        {"target_modules": ["model.layers.1.self_attn.q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ["layers.0.self_attn.q_proj", "mlp.down_proj"]},
        {"target_modules": ["q_proj", "down_proj"], "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": ["q_proj", "v_proj", "lm_head"], "layers_to_transform": [0, 10]},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": []},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "model.layers"]},
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": r"model\.layers\.\d+\.self_attn\.q_proj|.*down_proj$"},
        {"target_modules": "q_proj"},
        {"target_modules": LONG},
        {"target_modules": r".*_proj", "exclude_modules": r"(model\.)?layers\..*"},
    ],
)  # fmt: skip
def test_choices_are_pefts(fields: dict[str, Any]) -> None:
    config, choice = LoraConfig(**fields), TargetChoice(fields)
    found = {path for path in PATHS if not choice.field_against(path)}
    wanted = {path for path in PATHS if check_target_module_exists(config, path)}
    # With a list of layers, releases of PEFT differ in which number they take: the first or the last.
    nested = {path for path in PATHS if "layers_to_transform" in fields and len(re.findall(r"\.\d+\.", path)) > 1}
    assert found - nested == wanted - nested
    assert found >= wanted
    assert found < set(PATHS)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"target_modules": None},
        {"target_modules": "all-linear"},
        {"target_modules": "ALL-LINEAR", "exclude_modules": []},
        {"target_modules": r"^(model\.layers(?=\.)(?!lm_head).*\.q_proj)$"},  # written by ms-swift
        {"target_modules": r"(.*)\1"},
        {"target_modules": "(" * 100},
        {"target_modules": "a{1000}{1000}"},
        {"target_modules": "x" * 10_000},
        {"target_modules": None, "layers_to_transform": ["1"]},
        {"target_modules": ".*", "layers_to_transform": [7]},  # which PEFT refuses
        {"target_modules": None, "exclude_modules": {"a": 1}},
        {"layers_to_transform": [7], "layers_pattern": "(layers|h)"},
    ],
)
def test_what_cannot_be_told_chooses_all(fields: dict[str, Any]) -> None:
    choice = TargetChoice(fields)
    assert not any(choice.field_against(path) for path in PATHS)


def test_the_field_is_named() -> None:
    fields = {"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"], "layers_to_transform": [1]}
    choice = TargetChoice(fields)
    assert choice.field_against("model.layers.1.self_attn.q_proj") == ""
    assert choice.field_against("model.layers.1.self_attn.v_proj") == "exclude_modules"
    assert choice.field_against("model.layers.1.self_attn.o_proj") == "target_modules"
    assert choice.field_against("model.layers.0.self_attn.q_proj") == "layers_to_transform"


def test_matching_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths beyond the bound are taken as they are."""
    monkeypatch.setattr(peft_targets, "MAX_STEPS", 10_000)
    choice = TargetChoice({"target_modules": r".*(a|b)+x"})
    found = [choice.field_against(f"model.layers.{idx}.q_proj") for idx in range(100)]
    assert found[0] == "target_modules"
    assert found[-1] == ""
