"""adapter_config.json: what is carried out, and what is refused by name."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.lora.config import BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig
from support.adapter_files import lora_config

from loraplex_adapters.formats.files import MAX_CONFIG_BYTES
from loraplex_adapters.formats.peft_config import PeftLoraConfig, parse_lora_config, parse_peft_fields
from loraplex_adapters.formats.peft_patterns import match_budget
from loraplex_adapters.io.throttle import throttled
from loraplex_contracts.errors import AdapterInvalid, AdapterUnsupported

PATH = "model.layers.3.self_attn.q_proj"


def parse(**fields: Any) -> PeftLoraConfig:
    return parse_lora_config(parse_peft_fields(json.dumps(lora_config(**fields)).encode()))


def test_plain() -> None:
    config = parse(r=8, lora_alpha=12)
    assert config.rank_and_scale(PATH, match_budget()) == (8, 1.5)


def test_rslora() -> None:
    rank, scale = parse(r=8, lora_alpha=12, use_rslora=True).rank_and_scale(PATH, match_budget())
    assert (rank, scale) == (8, 12 / math.sqrt(8))


def test_the_first_pattern_that_matches_wins_and_the_scale_is_the_modules_own() -> None:
    config = parse(
        r=8,
        lora_alpha=16,
        rank_pattern={"layers.3.self_attn.q_proj": 4, "q_proj": 2},
        alpha_pattern={"nothing": 1, r".*self_attn\..*": 6},
    )
    assert config.rank_and_scale(PATH, match_budget()) == (4, 1.5)
    assert config.rank_and_scale("model.layers.4.self_attn.q_proj", match_budget()) == (2, 3.0)
    assert config.rank_and_scale("model.layers.4.mlp.down_proj", match_budget()) == (8, 2.0)


def test_a_fresh_peft_configuration_is_accepted() -> None:
    fields = LoraConfig(target_modules=["q_proj"], r=4, lora_alpha=8).to_dict() | {"target_modules": ["q_proj"]}
    config = parse_lora_config(parse_peft_fields(json.dumps(fields, default=str).encode()))
    assert config.r == 4


def test_settings_of_ms_swifts_training_do_not_matter() -> None:
    settings = {"lora_dtype": "fp32", "lorap_lr_ratio": 16.0, "lorap_emb_lr": 1e-06}
    assert parse_lora_config({"peft_type": "LORA", "r": 4, **settings}).r == 4


def test_every_field_of_the_installed_peft_is_known() -> None:
    """Whatever PEFT's class has, with its default, is accepted; with a value, nothing passes as unknown."""
    import dataclasses

    from loraplex_adapters.formats import peft_config

    names = {f.name for f in dataclasses.fields(LoraConfig)}
    known = {*peft_config._REFUSED, *peft_config._WITHOUT_EFFECT, *peft_config._USED}
    assert names <= known, names - known


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"alora_invocation_tokens": "1 2"}, AdapterInvalid, "list of at most"),
        ({"alora_invocation_tokens": [1, -2]}, AdapterInvalid, "list of at most"),
        ({"alora_invocation_tokens": [1] * 1025}, AdapterInvalid, "list of at most"),
        ({"task_type": None}, AdapterUnsupported, "task_type CAUSAL_LM"),
        ({"use_dora": True}, AdapterUnsupported, "together with use_dora"),
        ({"init_lora_weights": "pissa"}, AdapterUnsupported, "together with init_lora_weights 'pissa'"),
        ({"target_parameters": ["q_proj.weight"]}, AdapterUnsupported, "together with target_parameters"),
    ],
)
def test_activated_adapters_that_would_not_do_as_in_peft(
    fields: dict[str, Any], error: type[Exception], named: str
) -> None:
    assert parse(alora_invocation_tokens=[3, 4]).invocation == (3, 4)
    assert parse(alora_invocation_tokens=[], task_type=None).invocation == ()
    with pytest.raises(error, match=named):
        parse(**{"alora_invocation_tokens": [1, 2], **fields})


@pytest.mark.parametrize(("name", "init"), [("pissa", "pissa"), ("olora", "olora"), ("OLoRA", "olora")])
def test_initialisations_that_peft_repeats(name: str, init: str) -> None:
    assert parse(init_lora_weights=name).init == init
    with pytest.raises(AdapterUnsupported, match="together with lora_bias"):
        parse(init_lora_weights=name, lora_bias=True)


def test_dora_with_a_bias_on_b_is_refused() -> None:
    with pytest.raises(AdapterUnsupported, match="use_dora together with lora_bias"):
        parse(use_dora=True, lora_bias=True)


@pytest.mark.parametrize(
    "value", ["a", [1.5], [-1], [3, 3], {"a": 3}, {"a": [True]}, [2**14] * 3, [*range((1 << 14) + 1)]]
)
def test_token_rows_must_be_lists_of_ids(value: Any) -> None:
    with pytest.raises(AdapterInvalid, match="trainable_token_indices"):
        parse(trainable_token_indices=value)


def test_target_parameters_are_a_list_of_names() -> None:
    found = parse(target_modules=None, target_parameters=["experts.down_proj", "gate.weight"])
    assert found.names_parameter("model.layers.0.mlp.experts.down_proj")
    assert found.names_parameter("model.layers.0.mlp.gate.weight")
    assert not found.names_parameter("model.layers.0.mlp.down_proj")
    assert found.targets.field_against("model.layers.0.mlp.down_proj"), "without target_modules these are parameters"
    for value in ("down_proj", [1], {"a": 1}, ["x"] * 4097):
        with pytest.raises(AdapterInvalid, match="target_parameters"):
            parse(target_parameters=value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_replication", [[0, 2], [1, 3]]),
        ("use_qalora", True),
        ("use_bdlora", vars(BdLoraConfig(nblocks=2))),
        ("kasa_config", vars(KasaConfig())),
        ("monteclora_config", vars(MontecloraConfig())),
        ("velora_config", vars(VeloraConfig())),
        ("arrow_config", {"top_k": 3}),
        ("megatron_config", {"x": 1}),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "PiSSA"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "something new"),
        ("init_lora_weights", ["pissa"]),
        ("a_field_of_tomorrow", 1),
        ("rank_pattern", {"(?=q)q_proj": 4}),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(AdapterUnsupported, match=field):
        parse(**{field: value})


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_initialisations_that_left_the_base_alone_are_accepted(init: Any) -> None:
    assert parse(init_lora_weights=init).r == 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", -1),
        ("r", None),
        ("r", 1.5),
        ("r", True),
        ("r", "8"),
        ("r", 1 << 40),
        ("lora_alpha", 0),
        ("lora_alpha", None),
        ("lora_alpha", "16"),
        ("lora_alpha", True),
        ("lora_alpha", 1e9),
        ("lora_alpha", 10**400),
        ("use_rslora", "yes"),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", {"q_proj": 2.5}),
        ("rank_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": None}),
        ("alpha_pattern", {"q_proj": 1e300}),
        ("target_modules", 7),
        ("target_modules", [1]),
    ],
)
def test_unusable_values_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(AdapterInvalid, match=field):
        parse(**{field: value})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"peft_type": "LORA", "peft_type": "LORA"}',
        b'{"peft_type": "LORA", "r": 4, "lora_alpha": NaN}',
        b'{"peft_type": "LORA", "r": 4, "lora_alpha": Infinity}',
        b'{"peft_type": "LORA", "r": 4, "lora_alpha": 1e999}',
        b'{"a":' * 100_000,
        b'{"x": "' + b"a" * MAX_CONFIG_BYTES + b'"}',
    ],
    ids=["empty", "list", "cut", "not utf-8", "twice", "nan", "inf", "overflow", "deep", "huge"],
)
def test_malformed_files_are_refused(data: bytes) -> None:
    with pytest.raises(AdapterInvalid, match="adapter_config"):
        parse_lora_config(parse_peft_fields(data))


def test_what_is_left_out_is_as_in_peft() -> None:
    config = parse_lora_config({"peft_type": "LORA", "target_modules": ["q_proj"]})
    default = LoraConfig()
    assert (config.r, config.lora_alpha) == (default.r, default.lora_alpha)


def test_targets() -> None:
    listed = parse(target_modules=["q_proj", "mlp.down_proj"]).targets
    assert not listed.field_against("model.layers.0.self_attn.q_proj")
    assert not listed.field_against("model.layers.0.mlp.down_proj")
    assert listed.field_against("model.layers.0.self_attn.k_proj")
    assert listed.field_against("model.layers.0.self_attn.xq_proj")
    # Of a shorthand the tensors say which modules there are.
    for text in ("all-linear", None):
        assert not parse(target_modules=text).targets.field_against("anything")


def test_compiling_all_patterns_together_is_bounded_and_paced() -> None:
    """Each of them is allowed; 8192 of them would take minutes."""
    hostile = {f"(a{{10}}b?){{10}}{idx:04}": 4 for idx in range(4096)}
    data = json.dumps(lora_config(rank_pattern=hostile, alpha_pattern=hostile)).encode()
    num_pauses = 0

    def pause() -> None:
        nonlocal num_pauses
        num_pauses += 1

    too_large = pytest.raises(AdapterUnsupported, match="rank_pattern and alpha_pattern are too large together")
    with too_large, throttled(pause):
        parse_lora_config(parse_peft_fields(data))
    assert 1000 < num_pauses < 200_000


def test_a_pattern_for_every_linear_of_a_large_model_is_accepted() -> None:
    patterns = {rf"^model\.layers\.{layer}\.self_attn\.[a-z]{linear}": 4 for layer in range(126) for linear in range(7)}
    config = parse(r=8, rank_pattern=patterns, alpha_pattern=patterns)
    assert len(config.rank_pattern) == len(config.alpha_pattern) == 126 * 7
