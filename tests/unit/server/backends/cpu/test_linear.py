"""Packed linears equal plain ones; rounding to eight bits."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from support.backends import PatchedBackend
from support.driver import Job, make_rig
from support.lora_cases import bits
from support.native_kernels import isas, native_kernels, using
from support.native_models import native_model, rounded_model
from support.zoo import random_model
from torch import Tensor, nn

from loraplex_adapters.io.safetensors import weight_sha256
from loraplex_contracts.errors import Unimplemented, UnsupportedModel
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cpu.decoder import StackLinear
from loraplex_server.backends.cpu.linear import (
    NativeLinear,
    PackedLinear,
    can_pack,
    native_linears,
    packed_linear,
    round_linears,
)
from loraplex_server.backends.cpu.lora import NativeOps
from loraplex_server.backends.cpu.native.int8 import to_int8
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import AbsorbedLinear, AdaptedHead, AdaptedLinear, PlainLinear
from loraplex_server.model.loader import adopt_model, load_model


@pytest.fixture(params=isas())
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    with using(request.param):
        yield native_kernels()


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (1, 7, 64), (2, 3, 64), (0, 64), (1, 0, 64)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_product_is_the_plain_one(
    kernels: NativeKernels, shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(80, 64).to(dtype), torch.randn(shape).to(dtype)
    bias = torch.randn(80).to(dtype) if has_bias else None
    linear = native_linears(kernels)(weight, bias)
    assert isinstance(linear, NativeLinear)
    assert linear.is_copy
    out = linear(x)
    assert out.shape == (*shape[:-1], 80)
    torch.testing.assert_close(out, PlainLinear(weight, bias)(x), rtol=tolerance, atol=tolerance)
    out.add_(1)  # the caller may write to it
    x.zero_()


def test_the_weight_is_a_copy_and_the_bias_may_be_a_view(kernels: NativeKernels) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(64, 48).t(), torch.randn(96)[::2], torch.randn(3, 64)
    linear = NativeLinear(kernels, weight, bias)
    want = x @ weight.t() + bias
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-5)
    weight.zero_()
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 4, dtype=torch.float64),
        torch.zeros(4, 4, dtype=torch.float16),
        torch.zeros(4, 33, dtype=torch.bfloat16),
    ],
    ids=lambda w: str(w.dtype),
)
def test_what_the_kernels_do_not_know_is_made_otherwise(kernels: NativeKernels, weight: torch.Tensor) -> None:
    assert isinstance(native_linears(kernels, PlainLinear)(weight, None), PlainLinear)


def test_absorbed_linears_are_computed_by_nobody(kernels: NativeKernels) -> None:
    first, second = torch.randn(8, 64), torch.randn(8, 64)
    absorbed, own = (
        AdaptedLinear(nn.Parameter(weight, False), None, StepContext(), make_base=native_linears(kernels)).base
        for weight in (first.to("meta"), second)
    )
    assert isinstance(absorbed, AbsorbedLinear)
    assert isinstance(own, NativeLinear)
    with pytest.raises(AssertionError, match="stack"):
        absorbed(torch.zeros(1, 64))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_no_weight_is_kept_twice(kernels: NativeKernels, family: str) -> None:
    """Whether its layers became a stack or not."""
    loaded = adopt_model(native_model(family, torch.bfloat16), backend=CpuBackend(kernels))
    linears = [module for module in loaded.targets.values() if isinstance(module, AdaptedLinear)]
    assert len(linears) == 2 * 7 + 1
    kept = [module for module in linears if module.weight.device.type != "meta"]
    assert [type(module) for module in kept] == [AdaptedHead]
    for module in linears:
        is_absorbed = loaded.decoder is not None and not isinstance(module, AdaptedHead)
        assert isinstance(module.base, StackLinear if is_absorbed else NativeLinear)


def test_a_model_of_which_no_weight_packs_is_right(kernels: NativeKernels) -> None:
    """48 features are no multiple of 32, in bfloat16."""
    model = native_model("llama", torch.bfloat16, hidden_size=48)
    loaded = adopt_model(copy.deepcopy(model), backend=CpuBackend(kernels))
    packed = [m for m in loaded.model.modules() if isinstance(m, AdaptedLinear) and isinstance(m.base, NativeLinear)]
    assert loaded.decoder is None
    assert {module.in_features for module in packed} == {96, 128}  # down and o
    rig = make_rig(loaded, ops=NativeOps(kernels))
    job = Job([3, 4, 5, 6], 4)
    rig.run([job])
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([[*job.prompt, *job.tokens]]), use_cache=False).logits[0, 3:-1]
    torch.testing.assert_close(rig.logits(job), want, rtol=0, atol=0.05 * float(want.abs().max()))


def test_tied_weights_stay_tied(kernels: NativeKernels) -> None:
    model = native_model("qwen2")
    assert model.config.tie_word_embeddings
    embedding = model.get_parameter("model.embed_tokens.weight")
    loaded = adopt_model(model, backend=CpuBackend(kernels))
    head = loaded.model.get_output_embeddings()
    assert isinstance(head, AdaptedHead)
    assert head.weight is embedding
    x = torch.randn(3, 128)
    assert torch.equal(bits(head.base(x)), bits(NativeLinear(kernels, embedding, None)(x)))


def test_this_torch_still_has_the_operators() -> None:
    """They are private. When they go, serving on a CPU goes on, slower: see to it then."""
    assert can_pack(torch.zeros(4, 4))


@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (1, 7, 48), (2, 3, 48), (0, 48)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_prepacked_product_is_the_plain_one(
    shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    if not can_pack(torch.zeros(4, 4, dtype=dtype)):
        pytest.skip(f"this CPU multiplies {dtype} through another type")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(shape, generator=generator).to(dtype)
    packed = packed_linear(weight, bias)
    assert isinstance(packed, PackedLinear)
    out = packed(x)
    assert out.shape == (*shape[:-1], 80)
    torch.testing.assert_close(out, PlainLinear(weight, bias)(x), rtol=tolerance, atol=tolerance)


def test_a_transposed_weight_can_be_packed() -> None:
    """Of a Conv1D."""
    weight = torch.randn(48, 80, generator=torch.Generator().manual_seed(0)).t()
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(packed_linear(weight, None)(x), x @ weight.t(), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_packed_stays_plain() -> None:
    assert isinstance(packed_linear(torch.zeros(4, 4, dtype=torch.float64), None), PlainLinear)


def test_packed_weights_are_not_kept_twice() -> None:
    loaded = adopt_model(random_model("llama", torch.float32), backend=PatchedBackend(make_linear=packed_linear))
    linears = [module for module in loaded.model.modules() if isinstance(module, AdaptedLinear)]
    kept = [module for module in linears if module.weight.device.type != "meta"]
    assert kept == [loaded.model.get_output_embeddings()]
    assert all(module.weight.shape == (module.out_features, module.in_features) for module in linears)


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
    loaded = adopt_model(copy.deepcopy(model), backend=CpuBackend(native_kernels()), int8=True)
    modules = loaded.base_targets(max_rank=8).modules
    assert modules[loaded.embedding_path].weight_sha256 == weight_sha256(words)
    assert modules["lm_head"].weight_sha256 == weight_sha256(head)


def test_a_plain_model_has_no_other_digests() -> None:
    assert adopt_model(native_model("llama"), backend=CpuBackend(native_kernels())).digests == {}


def test_a_dtype_that_the_kernels_do_not_know() -> None:
    with pytest.raises(
        Unimplemented, match=r"--quantize int8 is there for linears in float32, or in .*float16, has none"
    ):
        round_linears(native_model("llama", torch.float16), native_kernels())


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), -(2.0**118)])
def test_weights_that_eight_bits_are_not_made_for(bad: float) -> None:
    model = native_model("llama", torch.bfloat16)
    weight = cast(Tensor, model.get_submodule("model.layers.1.mlp.up_proj").weight)
    weight.data[3, 4] = bad
    with pytest.raises(UnsupportedModel, match=r"model.layers.1.mlp.up_proj are not finite, .*: leave out --quantize"):
        round_linears(model, native_kernels())


def test_linears_that_stay_as_they_are_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = native_model("llama", torch.bfloat16, intermediate_size=80)
    with caplog.at_level(logging.INFO):
        rounded = rounded_model(model, native_kernels())
    assert "2 of 15 linears are not rounded: no multiple of 32 inputs" in caplog.text
    down = "model.layers.0.mlp.down_proj"
    before, after = (cast(Tensor, one.get_submodule(down).weight) for one in (model, rounded))
    assert torch.equal(before, after)


def mapped_kib(path: Path, field: str) -> int:
    """Of a file in this process's memory."""
    found, is_it = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_it = line.endswith(str(path))
        elif is_it and line.startswith(f"{field}:"):
            found += int(line.split()[1])
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_no_page_of_the_file_is_written_to(tied: bool, tmp_path: Path) -> None:
    """It would stay in memory as long as anything of the file is used, the embedding say."""
    native_model("llama", torch.bfloat16, tie_word_embeddings=tied, vocab_size=4000).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", backend=CpuBackend(native_kernels()), int8=True)
    assert mapped_kib(tmp_path / "model.safetensors", "Anonymous") == 0
    head = loaded.model.get_output_embeddings()
    assert head is not None
    assert cast(Tensor, head.weight).is_meta == (not tied)
