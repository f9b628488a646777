"""Models whose linears are rounded to eight bits: what is rounded, what is remembered of it, and what is refused."""

from __future__ import annotations

import copy
from typing import cast

import pytest
import torch
from support.native_kernels import native_kernels
from support.native_models import native_model, rounded_model
from torch import Tensor, nn

from loraplex_adapters.lora.convert import weight_sha256
from loraplex_adapters.native.int8 import to_int8
from loraplex_proto.errors import Unimplemented, UnsupportedModel
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.native.rounding import round_linears


def is_rounded(matrix: Tensor) -> bool:
    return torch.equal(to_int8(matrix).widened(matrix.dtype), matrix)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_linears_are_rounded_and_nothing_else_is(family: str) -> None:
    model = native_model(family, torch.bfloat16)
    rounded = rounded_model(model, native_kernels())
    num_changed = 0
    for (path, before), (_, after) in zip(model.named_modules(), rounded.named_modules(), strict=True):
        weight = getattr(before, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        if type(before) is nn.Linear or type(before).__name__ == "Conv1D":
            matrix = cast(Tensor, after.weight).t() if type(before).__name__ == "Conv1D" else cast(Tensor, after.weight)
            assert is_rounded(matrix), path
            assert not torch.equal(weight, cast(Tensor, after.weight)), path
            num_changed += 1
        elif not isinstance(before, nn.Embedding):  # which may be tied to the head
            assert torch.equal(weight, cast(Tensor, after.weight)), path
    assert num_changed > 7
    with torch.inference_mode():
        out = [m(input_ids=torch.tensor([[5, 6, 7]])).logits for m in (model, rounded)]
    assert 0 < float((out[0] - out[1]).norm() / out[0].norm()) < 0.05


def test_a_tied_embedding_stays_tied() -> None:
    model = native_model("llama", torch.bfloat16, tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    rounded = rounded_model(model, native_kernels())
    assert rounded.get_input_embeddings().weight is rounded.get_output_embeddings().weight
    assert is_rounded(cast(Tensor, rounded.get_input_embeddings().weight))


@pytest.mark.parametrize("tied", [False, True])
def test_copies_in_adapters_are_known_by_the_weights_before(tied: bool) -> None:
    """PEFT saves the embedding and the head of the model that it trained on, which nobody has rounded."""
    model = native_model("llama", torch.bfloat16, tie_word_embeddings=tied)
    words, head = (cast(Tensor, part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings()))
    loaded = adopt_model(copy.deepcopy(model), native=native_kernels(), int8=True)
    modules = loaded.base_targets(max_rank=8).modules
    assert modules[loaded.embedding_path].weight_sha256 == weight_sha256(words)
    assert modules["lm_head"].weight_sha256 == weight_sha256(head)


def test_a_plain_model_has_no_other_digests() -> None:
    assert adopt_model(native_model("llama"), native=native_kernels()).digests == {}


def test_a_dtype_that_the_kernels_do_not_know() -> None:
    with pytest.raises(
        Unimplemented, match=r"--quantize int8 is there for linears in bfloat16 or float32.*float16, has"
    ):
        round_linears(native_model("llama", torch.float16), native_kernels())


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite(bad: float) -> None:
    model = native_model("llama", torch.bfloat16)
    weight = cast(Tensor, model.get_submodule("model.layers.1.mlp.up_proj").weight)
    weight.data[3, 4] = bad
    with pytest.raises(UnsupportedModel, match=r"weights of model.layers.1.mlp.up_proj are not finite"):
        round_linears(model, native_kernels())
