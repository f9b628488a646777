"""Native RMS norms and gates in the place of a model's own."""

from __future__ import annotations

import pytest
import torch
from support.backends import ReferenceFused
from support.driver import Job
from support.native_kernels import isas, native_kernels, using
from support.native_models import native_model, native_rig
from support.zoo import VOCAB_SIZE
from transformers import AutoModelForCausalLM, BitNetConfig

from loraplex_server.backends.cpu.fused import NativeFused
from loraplex_server.backends.fusion import FORMS, NormForm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS[:3])
def test_norms_round_as_models_do(form: NormForm, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 5, 3, 96).to(dtype).transpose(1, 2), torch.randn(96).to(dtype)
    got = NativeFused(native_kernels()).rms_norm(x, weight, 1e-5, form)
    want = ReferenceFused().rms_norm(x, weight, 1e-5, form)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # where a sum's last bit tips a rounding
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert (got == want).float().mean() > 0.9 or dtype == torch.float32


@pytest.mark.parametrize("gates_first", [False, True])
@pytest.mark.parametrize(
    ("x_dtype", "dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("isa", isas())
def test_norms_beside_gates_round_as_models_do(
    isa: str, x_dtype: torch.dtype, dtype: torch.dtype, *, gates_first: bool
) -> None:
    torch.manual_seed(0)
    x, gate = torch.randn(2, 5, 3, 93).transpose(2, 3).contiguous().transpose(2, 3).unbind()
    x, gate, weight = x.to(x_dtype), gate.to(dtype), torch.randn(93).to(dtype)
    want = ReferenceFused().gated_norm(x, gate, weight, 1e-5, gates_first=gates_first)
    with using(isa):
        got = NativeFused(native_kernels()).gated_norm(x, gate, weight, 1e-5, gates_first=gates_first)
    tolerance = 2e-6 if x_dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert (got == want).float().mean() > 0.9 or x_dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", isas())
def test_gates_round_as_models_do(isa: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = (8 * torch.randn(2, 5, 2 * 1051)).to(dtype).chunk(2, dim=-1)  # as a merged linear leaves them
    want = ReferenceFused().silu_product(gate, up)
    with using(isa):
        ops = NativeFused(native_kernels())
        got, alone = ops.silu_product(gate, up), ops.silu_product(gate[1:, 3:4], up[1:, 3:4])
        turned = ops.silu_product(gate.mT, up.mT)
    tolerance = 2e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(turned, want.mT, rtol=tolerance, atol=tolerance)
    assert (got == want).float().mean() > 0.9 or dtype == torch.float32
    assert torch.equal(alone, got[1:, 3:4])


def test_others_stay() -> None:
    ops = NativeFused(native_kernels())
    with pytest.raises(TypeError, match="float64"):
        ops.rms_norm(torch.randn(2, 8).double(), torch.randn(8).double(), 1e-5, FORMS[0])
    with pytest.raises(TypeError, match="form"):
        ops.rms_norm(torch.randn(2, 8), torch.randn(8), 1e-5, NormForm(1.0, True))
    with pytest.raises(TypeError, match=r"bfloat16 by torch\.float32"):
        ops.gated_norm(torch.randn(2, 8).bfloat16(), torch.randn(2, 8), torch.randn(8), 1e-5, gates_first=True)
    with pytest.raises(TypeError, match=r"bfloat16 \(2, 8\) by torch\.float32"):
        ops.silu_product(torch.randn(2, 8).bfloat16(), torch.randn(2, 8))


def test_a_gated_mlp_with_a_norm_in_it() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = BitNetConfig(vocab_size=VOCAB_SIZE, num_hidden_layers=2, initializer_range=0.2, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    rig = native_rig(model, native_kernels())
    job = Job([3, 4, 5, 6], 4)
    rig.run([job])
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([[*job.prompt, *job.tokens]]), use_cache=False).logits[0, 3:-1]
    torch.testing.assert_close(rig.logits(job), want, rtol=0, atol=1e-4 * float(want.abs().max()))


@pytest.mark.parametrize(("family", "num_norms"), [("llama4-chunks", 5), ("qwen3_5", 4), ("llama", 0)])
def test_models_take_them_where_no_stack_has_its_own(family: str, num_norms: int) -> None:
    loaded = native_rig(native_model(family), native_kernels()).loaded
    found = [
        path
        for path, module in loaded.named_modules()
        if "norm" in path.rpartition(".")[2] and "forward" in vars(module)
    ]
    assert len(found) >= num_norms if num_norms else not found
