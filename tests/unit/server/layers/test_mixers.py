"""Specs of mixers: modules that have one, sizes, recurrences."""

from __future__ import annotations

from typing import Any

import pytest
from support.zoo import random_model

from loraplex_server.layers.mixers import Layout, MixerSpec, recurrences_of, spec_of
from loraplex_server.layers.recurrences import TimeSteps


def mixer_of(family: str, path: str, **changes: Any) -> Any:
    return random_model(family, changes=changes).get_submodule(f"model.layers.0.{path}")


@pytest.mark.parametrize(
    ("family", "path", "layout"),
    [
        ("qwen3_5", "linear_attn", Layout.APART),
        ("qwen3_next", "linear_attn", Layout.BY_KEY_HEADS),
        ("granitemoehybrid", "mamba", Layout.TOGETHER),
        ("bamba", "mamba", Layout.TOGETHER),
    ],
)
def test_sizes_are_those_of_the_modules_linears(family: str, path: str, layout: Layout) -> None:
    module = mixer_of(family, path)
    spec = spec_of(module, first_state=4)
    assert spec is not None
    assert (spec.layout, spec.first_state) == (layout, 4)
    assert spec.channels == module.conv1d.weight.shape[0]
    assert spec.size == module.out_proj.in_features
    inputs = {name: one.out_features for name, one in module.named_children() if name.startswith("in_proj")}
    num_gates = 1 if layout is Layout.TOGETHER else 2
    assert sum(inputs.values()) == spec.channels + spec.size + num_gates * spec.num_heads
    convolution, attention = recurrences_of(module)
    assert convolution.weight.shape == (spec.channels, module.conv1d.kernel_size[0])
    assert attention.gates is not None
    assert attention.gates.rates.shape == (spec.num_heads,)
    assert attention.is_delta is (layout is not Layout.TOGETHER)


def test_norms_of_groups() -> None:
    spec = spec_of(mixer_of("bamba", "mamba", mamba_n_groups=2), 0)
    assert isinstance(spec, MixerSpec)
    assert (spec.norm_size, spec.gates_first) == (spec.size // 2, True)


def test_limits_of_time_steps() -> None:
    _, attention = recurrences_of(mixer_of("granitemoehybrid", "mamba", time_step_limit=(0.01, 0.1)))
    assert isinstance(attention.gates, TimeSteps)
    assert attention.gates.limits == (0.01, 0.1)


@pytest.mark.parametrize(
    ("family", "path", "changes"),
    [
        ("jamba", "mamba", {}),  # Mamba 1
        ("lfm2", "conv", {}),
        ("granitemoehybrid", "mamba", {"hidden_act": "gelu"}),
    ],
)
def test_other_mixers_have_no_spec(family: str, path: str, changes: dict[str, Any]) -> None:
    assert spec_of(mixer_of(family, path, **changes), 0) is None
