"""Modules that get fused operations: those that compute the same, and no others."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from support.backends import PatchedBackend, ReferenceFused
from support.zoo import random_model
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention

from loraplex_server.backends.fusion import NormForm, fuse, separate
from loraplex_server.backends.registry import choose_backend
from loraplex_server.model.loader import adopt_model


class Counting(ReferenceFused):
    """Counts the operations that it is asked for."""

    def __init__(self) -> None:
        self.forms: list[NormForm] = []
        self.gated: list[bool] = []  # whether the gate goes first
        self.num_rotations = 0
        self.num_gates = 0

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        self.num_gates += 1
        return super().silu_product(gate, up)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        self.forms.append(form)
        return super().rms_norm(x, weight, eps, form)

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool) -> Tensor:
        self.gated.append(gates_first)
        return super().gated_norm(x, gate, weight, eps, gates_first=gates_first)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        self.num_rotations += 1
        return super().rotate(query, key, cos, sin)


class Norm(nn.Module):
    """An RMS norm of a family of our own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64) / 3, requires_grad=False)
        self.eps = 1e-5
        self.kind = kind

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        wide = x.float() if gate is None else x.float() * nn.functional.silu(gate.float())
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (0.0 if self.kind == "no eps" else self.eps))
        match self.kind:
            case "narrow":
                return self.weight * (wide * root).to(x.dtype)
            case "wide":
                return (self.weight * (wide * root)).to(x.dtype)
            case "offset":
                return ((1 + self.weight.float()) * (wide * root)).to(x.dtype)
            case "mean":
                return self.weight * ((wide - wide.mean(-1, keepdim=True)) * root).to(x.dtype)
            case "three dimensions":
                assert x.dim() == 2
                return x
        return self.weight * (wide * root).to(x.dtype)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("narrow", NormForm(0.0, True)),
        ("wide", NormForm(0.0, False)),
        ("offset", NormForm(1.0, False)),
        ("mean", None),
        ("no eps", None),
        ("three dimensions", None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_is_known_by_what_it_computes(kind: str, form: NormForm | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, ops = Norm(kind).to(dtype), Counting()
    x = torch.randn(1, 7, 64).to(dtype)
    want = copy.deepcopy(norm)(x) if form is not None else None
    assert fuse(norm, [], ops) == ([norm] if form is not None else [])
    if form is None:
        return
    ops.forms.clear()
    got = norm(x)
    assert ops.forms == [form] if dtype == torch.bfloat16 else ops.forms[0].offset == form.offset
    assert torch.equal(got, want)
    other = norm(x.double())  # another dtype than the weight's: its own code
    assert len(ops.forms) == 1
    torch.testing.assert_close(other.float(), want.float(), rtol=2e-2, atol=2e-2)
    separate([norm])
    norm(x)
    assert len(ops.forms) == 1


def test_a_norm_with_a_gate_or_without() -> None:
    """Mamba-2's norms take one or none."""
    norm, ops = Norm("narrow"), Counting()
    x, gate = torch.randn(2, 1, 7, 64)
    plain, gated = norm(x), norm(x, gate)
    assert fuse(norm, [], ops) == [norm]
    ops.forms.clear()
    ops.gated.clear()
    torch.testing.assert_close(norm(x, gate), gated)
    torch.testing.assert_close(norm(x, gate=gate), gated)
    assert (ops.forms, ops.gated) == ([], [True, True])
    torch.testing.assert_close(norm(x), plain)
    assert len(ops.forms) == 1
    with pytest.raises(TypeError, match="other"):  # its own code says what it does not take
        norm(x, other=gate)
    assert torch.equal(norm(x, gate[:, :1]), Norm.forward(norm, x, gate[:, :1]))  # of another shape
    assert len(ops.gated) == 2


class NormBeforeGate(Norm):
    """A norm as Gated DeltaNet has it."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        normed = super().forward(x)
        activation = torch.sigmoid if self.kind == "sigmoid" else nn.functional.silu
        return (normed * activation(gate.float())).to(x.dtype)


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["narrow", "sigmoid", "mean"])
def test_a_norm_before_a_gate_is_known_by_what_it_computes(kind: str, x_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm, ops = NormBeforeGate(kind).to(torch.bfloat16), Counting()
    x, gate = torch.randn(7, 64).to(x_dtype), torch.randn(7, 64).bfloat16()
    want = norm(x, gate)
    is_known = kind == "narrow"
    assert fuse(norm, [], ops) == ([norm] if is_known else [])
    ops.gated.clear()
    torch.testing.assert_close(norm(x, gate), want)
    assert ops.gated == ([False] if is_known else [])


@pytest.mark.parametrize("module", [nn.LayerNorm(8), nn.Linear(8, 8), nn.Embedding(4, 8), nn.BatchNorm1d(8)])
def test_other_modules_are_left_alone(module: nn.Module) -> None:
    assert fuse(module, [], ReferenceFused()) == []


class Gated(nn.Module):
    """A gated MLP of a family of our own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.kind = kind

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        match self.kind:
            case "gelu":
                gate = nn.functional.gelu(gate)
            case "up":
                gate, up = up, nn.functional.silu(up) * 0 + gate
            case "limit":
                gate, up = nn.functional.silu(gate).clamp(max=16.0), up.clamp(-16.0, 16.0)
            case "wide":
                gate, up = nn.functional.silu(gate.float()) * up.float(), torch.ones_like(up)
                gate = gate.to(up.dtype)
            case "whole size":
                gate = nn.functional.silu(gate).view(-1, 48)
            case _:
                gate = nn.functional.silu(gate)
        y: Tensor = self.down_proj(gate * up) * scale
        return y + x if self.kind == "residual" else y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["silu", "gelu", "up", "limit", "wide", "whole size", "residual"])
def test_a_gated_mlp_is_known_by_what_it_computes(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mlp, ops = Gated(kind).requires_grad_(False).to(dtype), Counting()
    x = torch.randn(1, 7, 32).to(dtype)
    want, scaled = mlp(x), mlp(x, 0.3)
    # A product of wide numbers is the same in float32.
    is_fused = kind == "silu" or (kind == "wide" and dtype == torch.float32)
    assert fuse(mlp, [], ops) == ([mlp] if is_fused else [])
    ops.num_gates = 0
    assert torch.equal(mlp(x), want)
    assert ops.num_gates == is_fused
    assert torch.equal(mlp(x, 0.3), scaled), "what else it is given its own code takes"
    assert ops.num_gates == is_fused


def test_values_that_show_a_limit_do_not_overflow_float16() -> None:
    mlps = [Gated(kind).requires_grad_(False).to(torch.float16) for kind in ("silu", "limit")]
    assert fuse(nn.Sequential(*mlps), [], ReferenceFused()) == mlps[:1]


def test_each_gated_mlp_is_proven_by_itself() -> None:
    """Step 3.7's cut values off in some layers."""
    both = nn.Sequential(Gated("silu"), Gated("limit")).requires_grad_(False)
    assert fuse(both, [], ReferenceFused()) == [both[0]]


# By family: fused norms, gated MLPs and attention modules of its two layers, the norm at the end included.
FUSED = {
    "llama": (5, 2, 2), "qwen3": (9, 2, 2), "gemma2": (9, 0, 2), "gemma3": (13, 0, 2), "phi3": (5, 0, 2),
    "gpt2": (0, 0, 0), "opt": (0, 0, 0), "phi": (0, 0, 2), "cohere": (0, 2, 0), "glm4": (9, 0, 0),
    "deepseek_v3": (9, 2, 2),
}  # fmt: skip


@pytest.mark.parametrize("family", FUSED)
def test_families(family: str) -> None:
    loaded = adopt_model(random_model(family), backend=PatchedBackend(fused=ReferenceFused()))
    fused = [module for module in loaded.model.modules() if "forward" in module.__dict__]
    gated = [module for module in fused if hasattr(module, "gate_proj")]
    norms = [module for module in fused if not any(True for _ in module.children())]
    assert (len(norms), len(gated), len(fused) - len(norms) - len(gated)) == FUSED[family]


def test_attention_in_a_wrapper_is_fused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers 5.24 wraps it to take its cache by an earlier name."""
    own = LlamaAttention.forward

    @functools.wraps(own)
    def wrapped(*args: Any, **options: Any) -> Any:
        return own(*args, **options)

    monkeypatch.setattr(LlamaAttention, "forward", wrapped)
    loaded = adopt_model(random_model("llama"), backend=PatchedBackend(fused=ReferenceFused()))
    attention = [module for module in loaded.model.modules() if isinstance(module, LlamaAttention)]
    assert ["forward" in vars(module) for module in attention] == [True, True]


def test_gated_norms_keep_no_other_from_being_fused() -> None:
    model = random_model("granitemoehybrid", changes={"mamba_n_groups": 1})
    loaded = adopt_model(model, backend=PatchedBackend(fused=ReferenceFused()))
    norms = [module for module in loaded.model.modules() if "norm" in type(module).__name__.lower()]
    assert len(norms) == 9
    assert all("forward" in vars(norm) for norm in norms)


def test_a_model_is_served_by_its_own_code_where_the_whole_differs() -> None:
    class Wrong(Counting):
        """Right on what it is proven with, wrong on what the model gives it."""

        def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            query, key = super().rotate(query, key, cos, sin)
            return (query, key) if query.shape[1] == 3 else (query + 0.1, key)

    loaded = adopt_model(random_model("llama"), backend=PatchedBackend(fused=Wrong()))
    assert not [module for module in loaded.model.modules() if "forward" in module.__dict__]


def test_transformers_stays_as_it_is() -> None:
    from transformers.models.llama import modeling_llama

    before = modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward
    ops = Counting()
    loaded = adopt_model(random_model("llama", torch.float32), backend=PatchedBackend(fused=ops), verify=False)
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward) == before
    ops.num_rotations = 0
    other = random_model("llama", torch.float32)
    other(input_ids=torch.tensor([[3, 4]]))
    assert ops.num_rotations == 0
    rotate = loaded.model.model.layers[0].self_attn.forward.__func__.__globals__["apply_rotary_pos_emb"]
    q, k, table = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8)
    options: list[dict[str, Any]] = [{}, {"unsqueeze_dim": 1}]
    found = [rotate(q, k, table, table, **given) for given in options]
    assert ops.num_rotations == 1, "what it does not know its own code computes"
    for one, another in zip(*found, strict=True):
        torch.testing.assert_close(one, another)
    batch = torch.randn(2, 4, 3, 8)
    torch.testing.assert_close(rotate(batch, batch, table, table)[0], before[0](batch, batch, table, table)[0])
    assert ops.num_rotations == 1


def test_a_cpu_without_native_kernels_gets_none() -> None:
    assert choose_backend("cpu", cpu_kernels="torch").fused_ops() is None
