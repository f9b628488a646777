"""LoRA on experts and routers equals PEFT, in mixed batches."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from support.backends import PatchedBackend
from support.dense import dense_logits, make_dense
from support.driver import Job, Rig, make_rig, random_prompts
from support.native_kernels import native_kernels
from support.native_models import SIZES
from support.peft_files import load_lora
from support.zoo import MIXTURES, VOCAB_SIZE, random_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraplex_adapters.io.safetensors import PIECE_BYTES
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.plan import AdapterUse
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.cpu.attention import NativePagedAttention
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cpu.lora import NativeOps
from loraplex_server.backends.cpu.torch_lora import CpuOps
from loraplex_server.layers.experts import AdaptedExperts
from loraplex_server.model.loader import adopt_model

NUM_TOKENS = 8
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ALL: dict[str, Any] = {"target_modules": "all-linear"}
FAST = ("mixtral", "deepseek_v3")
ADAPTERS: dict[str, dict[str, Any]] = {
    "all-linear": ALL | {"r": 3, "lora_alpha": 5},
    "experts": {"target_modules": [], "target_parameters": EXPERTS, "r": 2, "lora_alpha": 3, "use_rslora": True},
    "plain": {"target_modules": ["q_proj", "o_proj"], "r": 4, "lora_alpha": 6},
    "down": {"target_modules": ["v_proj"], "target_parameters": EXPERTS[1:], "r": 4, "lora_alpha": 1},
    "all-linear-again": ALL | {"r": 3, "lora_alpha": 2, "alpha_pattern": {"down_proj": 9}},
}
# Their routers compute in float32, with the terms added to the weight or to the product.
FLOAT32_ROUTERS = {
    *("deepseek_v2", "deepseek_v3", "glm4_moe", "ernie4_5_moe", "dots1", "exaone_moe", "hunyuan_v1_moe"),
    "gpt_oss",
    "llama4-experts",
}
# PEFT cannot run its own wrapper of a router that is a subclass of nn.Linear, but merges it.
MERGED = {"phimoe", "llama4-experts"}


@dataclass
class World:
    """A base model, PEFT's model of each adapter, and a rig that holds adapter i in slot i."""

    base: PreTrainedModel
    peft: list[nn.Module]
    weights: list[AdapterWeights]
    rig: Rig


def save(base: PreTrainedModel, folder: Path, seed: int, **fields: Any) -> PeftModel:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **fields))
        with torch.no_grad():
            for name, parameter in peft.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.25)
        peft.save_pretrained(folder)
    return peft.eval()


def make_world(
    root: Path,
    family: str,
    adapters: dict[str, dict[str, Any]],
    dtype: torch.dtype,
    backend: Backend | None = None,
    **sizes: int,
) -> World:
    base = make_dense(random_model(family, dtype, 0, sizes))
    peft: list[nn.Module] = []
    for seed, (name, fields) in enumerate(adapters.items()):
        made = save(base, root / name, seed, **fields)
        peft.append(made.merge_and_unload() if family in MERGED else made)
    return rigged(root, family, base, peft, list(adapters), backend)


def rigged(
    root: Path,
    family: str,
    base: PreTrainedModel,
    peft: list[nn.Module],
    names: list[str],
    backend: Backend | None = None,
) -> World:
    backend = backend or PatchedBackend(merges=True)
    loaded = adopt_model(copy.deepcopy(base), model_id=family, backend=backend)
    targets = loaded.base_targets(max_rank=16)
    weights = [load_lora(root, name, targets) for name in names]
    kernels = backend.kernels if isinstance(backend, CpuBackend) else None
    options: dict[str, Any] = {"ops": CpuOps() if kernels is None else NativeOps(kernels)}
    if loaded.decoder is not None and kernels is not None:
        options["attention"] = NativePagedAttention(kernels)
    rig = make_rig(loaded, seed=4, max_rows=6, num_slots=len(weights), **options)
    for slot, one in enumerate(weights):
        rig.slots.install(slot, one)
    return World(base, peft, weights, rig)


def uses(world: World, slot: int | None) -> tuple[AdapterUse, ...]:
    """A plain LoRA comes as a mixture of itself, half and half."""
    if slot is None:
        return ()
    installed = world.rig.slots.installed(slot)
    assert installed is not None
    return (AdapterUse(slot, 0.5),) * 2 if installed.is_plain else (AdapterUse(slot),)


def run(world: World, slots: list[int | None], drafts: list[list[int]] | None = None) -> list[Job]:
    """Runs one request for each slot. `drafts`: texts, of which tokens are proposed beside wrong ones."""
    prompts = random_prompts(len(slots), VOCAB_SIZE, seed=8)
    jobs = [Job(prompt, NUM_TOKENS, uses(world, slot)) for slot, prompt in zip(slots, prompts, strict=True)]
    for job, text in zip(jobs, drafts or (), strict=False):
        whole = [*job.prompt, *text]
        job.propose = lambda tokens, whole=whole: [*whole[len(tokens) : len(tokens) + 2], 7, 8]
    world.rig.run(jobs)
    return jobs


def check(world: World, jobs: list[Job], adapters: list[int | None], tolerance: float) -> None:
    for adapter, job in zip(adapters, jobs, strict=True):
        assert job.error is None
        want = dense_logits(world.base if adapter is None else world.peft[adapter], job.prompt, job.tokens)
        assert job.tokens == want.argmax(dim=-1).tolist(), "each token is the one that the texts so far lead to"
        torch.testing.assert_close(world.rig.logits(job), want, rtol=tolerance, atol=tolerance)
        if adapter is not None:
            assert not torch.allclose(want, dense_logits(world.base, job.prompt, job.tokens), atol=1e-3), adapter


@pytest.mark.parametrize(
    "family",
    ["mixtral", "deepseek_v3", *(pytest.param(one, marks=pytest.mark.slow) for one in MIXTURES if one not in FAST)],
)
def test_mixed_batch_equals_peft(family: str, tmp_path: Path) -> None:
    """PEFT's own `all-linear`, experts alone, one of their parameters, and plain LoRA beside the base. Then once more
    with every adapter in another slot, and drafts."""
    world = make_world(tmp_path, family, ADAPTERS, torch.float64)
    tolerance = 1e-5 if family in FLOAT32_ROUTERS else 1e-9
    num_adapters = len(ADAPTERS)
    adapters = [None, *range(num_adapters), None, 0]
    jobs = run(world, adapters)
    check(world, jobs, adapters, tolerance)
    for slot in range(num_adapters):
        world.rig.slots.install(slot, None)
    for slot in range(num_adapters):
        world.rig.slots.install(slot, world.weights[slot - 1])
    slots = [None if adapter is None else (adapter + 1) % num_adapters for adapter in adapters]
    again = run(world, slots, drafts=[job.tokens for job in jobs])
    assert [job.tokens for job in again] == [job.tokens for job in jobs]
    assert all(job.num_accepted for job in again)
    check(world, again, adapters, tolerance)


@pytest.mark.parametrize(
    ("family", "experts", "names"),
    [
        ("mixtral", "block_sparse_moe.experts", ("w1", "w3", "w2")),
        pytest.param("qwen3_moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj"), marks=pytest.mark.slow),
    ],
)
def test_linears_of_single_experts_equal_peft(
    family: str, experts: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    """The adapters name linears of single experts, as Transformers 4 had them; PEFT converts them when it loads
    them."""
    base = make_dense(random_model(family, torch.float64))
    torch.manual_seed(5)
    r, tensors = 2, dict[str, Tensor]()
    for layer in range(2):
        fused = base.get_submodule(f"model.layers.{layer}.mlp.experts")
        inner, hidden = fused.down_proj.shape[2], fused.down_proj.shape[1]
        shapes = {f"{experts}.{i}.{name}": (inner, hidden) for i in range(4) for name in names[:2]}
        shapes |= {f"{experts}.{i}.{names[2]}": (hidden, inner) for i in range(4)}
        shapes |= {f"{experts.removesuffix('experts')}gate": (4, hidden), "self_attn.q_proj": (32, hidden)}
        for path, (num_out, num_in) in shapes.items():
            key = f"base_model.model.model.layers.{layer}.{path}.lora"
            tensors[f"{key}_A.weight"] = torch.randn(r, num_in) * 0.25
            tensors[f"{key}_B.weight"] = torch.randn(num_out, r) * 0.25
    folder = tmp_path / "old"
    LoraConfig(
        task_type="CAUSAL_LM", r=r, lora_alpha=3, target_modules=["q_proj", "gate", *names], inference_mode=True
    ).save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own patterns, which it thinks match nothing
        peft = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
    world = rigged(tmp_path, family, base, [peft], ["old"])
    jobs = run(world, [0, None, 0])
    check(world, jobs, [0, None, 0], 1e-9)


def test_experts_of_an_older_transformers() -> None:
    """In 5.17 experts had neither a norm of their own nor shards, nor a word about them."""
    base = random_model("qwen3_moe", torch.float64)
    experts = base.model.layers[0].mlp.experts
    del experts.has_post_expert_norm, experts._is_expert_parallel
    assert AdaptedExperts.fits(experts, torch.float64, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_float32(family: str, tmp_path: Path) -> None:
    """Transformers computes the base's experts as grouped products there."""
    world = make_world(tmp_path, family, ADAPTERS, torch.float32)
    adapters = [None, *range(len(ADAPTERS)), None]
    check(world, run(world, adapters), adapters, 1e-3)


def test_tensors_of_several_pieces_equal_peft(tmp_path: Path) -> None:
    """Factors of all experts, of more values than the reader reads at once."""
    base = make_dense(random_model("mixtral", torch.float32, changes={"intermediate_size": 2080}))
    fields: dict[str, Any] = {"target_modules": [], "target_parameters": EXPERTS[1:], "r": 8}
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith(EXPERTS[1]):
                parameter.mul_(0.2)
    peft = save(base, tmp_path / "large", 0, **fields)
    assert max(one.numel() for name, one in peft.named_parameters() if "lora_" in name) * 4 > PIECE_BYTES
    world = rigged(tmp_path, "mixtral", base, [peft], ["large"])
    check(world, run(world, [0, None]), [0, None], 1e-3)


@pytest.mark.parametrize(
    ("family", "is_stacked"),
    [
        ("qwen3_moe", False),
        ("mixtral", True),
        pytest.param("qwen3_moe", True, marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, marks=pytest.mark.slow),
        pytest.param("gpt_oss", True, marks=pytest.mark.slow),
    ],
)
def test_native_products(family: str, is_stacked: bool, tmp_path: Path) -> None:
    """`is_stacked`: with heads that the native decoder takes; else attention is the model's own in it."""
    sizes = SIZES if is_stacked else {}
    world = make_world(tmp_path, family, ADAPTERS, torch.float32, CpuBackend(native_kernels()), **sizes)
    assert world.rig.loaded.decoder is not None
    assert (not world.rig.loaded.decoder.shape.names.own_mixers) is is_stacked
    assert len(world.rig.loaded.experts) == 2
    assert all(one.fused is not None or one.products for one in world.rig.loaded.experts)
    adapters = [None, *range(len(ADAPTERS)), None]
    check(world, run(world, adapters), adapters, 1e-3)
