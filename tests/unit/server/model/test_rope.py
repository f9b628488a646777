"""Rotary embeddings scaled token by token equal Transformers' for each text alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.dense import forget_lengths
from support.driver import make_rig
from support.zoo import LIMIT, MAX_LEN, random_model
from torch import Tensor

from loraplex_contracts.errors import InvalidArgument, UnsupportedModel
from loraplex_server.backends.cuda.graphs import graph_shapes
from loraplex_server.kv.rope import RopeScaling
from loraplex_server.layers.context import StepContext
from loraplex_server.model import rope as rope_module
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.rope import ScaledRotary, scale_by_token

SCALINGS = {
    "phi3-longrope": RopeScaling(LIMIT, has_one_set=True, restarts=True),
    "phimoe-longrope": RopeScaling(LIMIT, has_one_set=True, restarts=True),
    "llama-longrope": RopeScaling(LIMIT, has_one_set=True),
    "llama-dynamic": RopeScaling(LIMIT, has_one_set=False),
}
# Of a family with M-RoPE, which gives its rotary embedding three coordinates of each token.
M_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": LIMIT,
    "mrope_section": [2, 1, 1],
}


@pytest.mark.parametrize("family", [*SCALINGS, "qwen3_5"])
def test_tokens_of_texts_of_many_lengths_in_one_row(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotations are equal bit for bit; with few sets of frequencies kept, too."""
    monkeypatch.setattr(rope_module, "MAX_SETS", 3)
    changes, num_coordinates = ({}, 1) if family in SCALINGS else ({"rope_parameters": M_ROPE}, 3)
    model, context = random_model(family, changes=changes), StepContext()
    fresh = random_model(family, changes=changes)
    own = fresh.model.rotary_emb
    assert scale_by_token(model, context) == SCALINGS.get(family, RopeScaling(LIMIT, has_one_set=True))
    rotary = model.model.rotary_emb
    assert isinstance(rotary, ScaledRotary)
    x = torch.zeros(1, dtype=torch.float32)
    ends = [5, LIMIT, LIMIT + 1, 40, 33, 41, 7]
    spans = [torch.arange(max(0, end - 3), end) for end in ends]
    for _ in range(2):
        context.rope_lengths = np.repeat(ends, 3)
        cos, sin = rotary(x, torch.cat(spans).expand(num_coordinates, 1, -1).squeeze(0))
        context.rope_lengths = None
        for idx, positions in enumerate(spans):
            forget_lengths(fresh)
            want = own(x, positions.expand(num_coordinates, 1, -1).squeeze(0))  # a prompt's last tokens
            part = slice(3 * idx, 3 * idx + 3)
            assert torch.equal(cos[:, part], want[0])
            assert torch.equal(sin[:, part], want[1])


@pytest.mark.parametrize("family", SCALINGS)
def test_without_lengths_it_is_that_of_a_fresh_model(family: str) -> None:
    model, context = random_model(family), StepContext()
    scale_by_token(model, context)
    rotary, x = model.model.rotary_emb, torch.zeros(1)
    short, long = torch.arange(LIMIT)[None], torch.arange(3 * LIMIT)[None]
    first = rotary(x, short)[0]
    rotary(x, long)
    context.rope_lengths = np.full(LIMIT, 50)
    assert not torch.equal(rotary(x, short)[0], first)
    context.rope_lengths = None
    assert torch.equal(rotary(x, short)[0], first)


@pytest.mark.parametrize("family", ["qwen3_5", "granite_swa"])
def test_models_that_use_more_of_their_rotary_embeddings(family: str) -> None:
    """They give it three coordinates of each token, or read its configuration."""
    loaded = adopt_model(random_model(family, changes={"rope_parameters": M_ROPE}))
    assert loaded.spec.rope == RopeScaling(LIMIT, has_one_set=True)


def test_others_stay() -> None:
    assert scale_by_token(random_model("llama"), StepContext()) is None


def test_what_is_not_known_is_refused() -> None:
    model: Any = random_model("llama-dynamic")
    model.model.rotary_emb.rope_type = {"full_attention": "dynamic"}
    with pytest.raises(UnsupportedModel, match="in a way that is not known"):
        scale_by_token(model, StepContext())
    model = random_model("phi3-longrope")
    model.config.original_max_position_embeddings = 64
    with pytest.raises(UnsupportedModel, match=r"64 and 21"):
        scale_by_token(model, StepContext())


def test_what_looks_at_other_tokens_is_refused() -> None:
    """A rotation is refused if it depends on which tokens are computed together, not on the length alone."""
    model = random_model("llama-longrope")
    own = type(model.model.rotary_emb)

    class ByFirst(own):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = super().forward(x, position_ids)
            return cos * (1 + position_ids.min()), sin

    model.model.rotary_emb.__class__ = ByFirst
    with pytest.raises(UnsupportedModel, match="in a way that is not known"):
        scale_by_token(model, StepContext())


def test_dynamic_frequencies_are_for_texts_longer_than_in_training() -> None:
    loaded = adopt_model(random_model("llama-dynamic"))
    assert loaded.spec.max_context_tokens == 6 * LIMIT
    with pytest.raises(InvalidArgument, match=f"2 to {6 * LIMIT}"):
        adopt_model(random_model("llama-dynamic"), max_context_tokens=6 * LIMIT + 1)
    assert adopt_model(random_model("llama-longrope")).spec.max_context_tokens == MAX_LEN


def test_steps_run_without_graphs() -> None:
    told: list[str] = []
    make_rig(adopt_model(random_model("phi3-longrope"))).runner.capture(graph_shapes(4, 2, 64), told.append)
    assert "rotations depend on the lengths of texts" in told[0]
