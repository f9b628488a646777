"""Models with weights of few bits: what is rounded, and what is left."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.driver import Job
from support.native_kernels import native_kernels
from support.native_models import native_model, native_rig, rounded_model
from support.zoo import random_model
from torch import Tensor, nn

from loraplex_adapters.io.safetensors import weight_sha256
from loraplex_contracts.errors import Unimplemented, UnsupportedModel
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.layers.quantization import INT4, INT8, WeightFormat
from loraplex_server.model.loader import adopt_model, load_model
from loraplex_server.model.rounding import round_weights


def is_rounded(matrix: Tensor, form: WeightFormat = INT8) -> bool:
    return torch.equal(form.quantize(matrix).widened(matrix.dtype), matrix)


@pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_linears_are_rounded_and_nothing_else_is(family: str, form: WeightFormat) -> None:
    model = native_model(family, torch.bfloat16)
    rounded = rounded_model(model, form)
    num_changed = 0
    for (path, before), (_, after) in zip(model.named_modules(), rounded.named_modules(), strict=True):
        weight = getattr(before, "weight", None)
        if not isinstance(weight, Tensor):
            continue
        if type(before) is nn.Linear or type(before).__name__ == "Conv1D":
            matrix = cast(Tensor, after.weight).t() if type(before).__name__ == "Conv1D" else cast(Tensor, after.weight)
            assert is_rounded(matrix, form), path
            assert not torch.equal(weight, cast(Tensor, after.weight)), path
            num_changed += 1
        elif not isinstance(before, nn.Embedding):  # which may be tied to the head
            assert torch.equal(weight, cast(Tensor, after.weight)), path
    assert num_changed > 7
    with torch.inference_mode():
        out = [m(input_ids=torch.tensor([[5, 6, 7]])).logits for m in (model, rounded)]
    assert 0 < float((out[0] - out[1]).norm() / out[0].norm()) < (0.05 if form is INT8 else 0.5)


def test_a_tied_embedding_stays_tied() -> None:
    model = native_model("llama", torch.bfloat16, tie_word_embeddings=True)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    rounded = rounded_model(model)
    assert rounded.get_input_embeddings().weight is rounded.get_output_embeddings().weight
    assert is_rounded(cast(Tensor, rounded.get_input_embeddings().weight))


@pytest.mark.parametrize("tied", [False, True])
def test_copies_in_adapters_are_known_by_the_weights_before(tied: bool) -> None:
    """PEFT saves the embedding and the head of the model that it trained on, which nobody has rounded."""
    model = native_model("llama", torch.bfloat16, tie_word_embeddings=tied)
    words, head = (cast(Tensor, part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings()))
    loaded = adopt_model(copy.deepcopy(model), backend=CpuBackend(native_kernels()), form=INT8)
    modules = loaded.base_targets(max_rank=8).modules
    assert modules[loaded.embedding_path].weight_sha256 == weight_sha256(words)
    assert modules["lm_head"].weight_sha256 == weight_sha256(head)


def test_a_plain_model_has_no_other_digests() -> None:
    assert adopt_model(native_model("llama"), backend=CpuBackend(native_kernels())).digests == {}


def test_a_dtype_that_the_kernels_do_not_know() -> None:
    with pytest.raises(
        Unimplemented, match=r"--quantize int8 is there for linears in float32, or in .*float16, has none"
    ):
        round_weights(native_model("llama", torch.float16), INT8)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), -(2.0**118)])
def test_weights_that_eight_bits_are_not_made_for(bad: float) -> None:
    model = native_model("llama", torch.bfloat16)
    weight = cast(Tensor, model.get_submodule("model.layers.1.mlp.up_proj").weight)
    weight.data[3, 4] = bad
    with pytest.raises(UnsupportedModel, match=r"model.layers.1.mlp.up_proj are not finite, .*: leave out --quantize"):
        round_weights(model, INT8)


def test_linears_that_stay_as_they_are_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model = native_model("llama", torch.bfloat16, intermediate_size=80)
    with caplog.at_level(logging.INFO):
        rounded = rounded_model(model)
    assert "2 of 15 linears are not rounded: no multiple of 32 inputs" in caplog.text
    down = "model.layers.0.mlp.down_proj"
    before, after = (cast(Tensor, one.get_submodule(down).weight) for one in (model, rounded))
    assert torch.equal(before, after)


def mapped_kib(path: Path, field: str) -> int:
    """KiB of a file in this process's memory, by a field of /proc/self/smaps."""
    found, is_it = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_it = line.endswith(str(path))
        elif is_it and line.startswith(f"{field}:"):
            found += int(line.split()[1])
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_no_page_of_the_file_is_written_to(tied: bool, tmp_path: Path) -> None:
    """A page that is written to would stay in memory as long as anything of the file is used, the embedding say."""
    native_model("llama", torch.bfloat16, tie_word_embeddings=tied, vocab_size=4000).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), device="cpu", backend=CpuBackend(native_kernels()), form=INT8)
    assert mapped_kib(tmp_path / "model.safetensors", "Anonymous") == 0
    head = loaded.model.get_output_embeddings()
    assert head is not None
    assert cast(Tensor, head.weight).is_meta == (not tied)


# --- experts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [INT8, INT4], ids=["int8", "int4"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_rounded_and_packed(family: str, form: WeightFormat) -> None:
    """Experts may have weights that lie the other way round. The rounded model is served, to the bit."""
    model = random_model(family, torch.float32)
    rounded = rounded_model(model, form)
    rigs = native_rig(model, native_kernels(), form), native_rig(rounded, native_kernels())
    experts = rigs[0].loaded.experts
    assert len(experts) == 2
    for one in experts:
        fused: Any = one.fused
        products: Any = one.products.values()
        packed = fused._packed if fused is not None else [product._packed for product in products]
        assert [weight.format for weight in packed] == [form] * 2
    jobs = [Job([5, 6, 7, 8], 4) for _ in rigs]
    for rig, job in zip(rigs, jobs, strict=True):
        rig.run([job])
    assert jobs[0].tokens == jobs[1].tokens
    assert torch.equal(rigs[0].logits(jobs[0]), rigs[1].logits(jobs[1]))
