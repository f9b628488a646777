"""Mixed batches of adapters equal each request alone and PEFT."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    BOFTConfig,
    EvaConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    VeraConfig,
    get_peft_model,
    initialize_lora_eva_weights,
)
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from safetensors.torch import load_file, save_file
from support.backends import PatchedBackend
from support.dense import dense_logits, greedy, make_dense
from support.driver import Job, Rig, make_rig, random_prompts
from support.parity import NOT_SERVED
from support.peft_files import RICH_SPECS, SPECS, LoraSpec, load_lora, save_adapter, save_initialised, save_variant
from support.world import byte_tokenizer
from support.zoo import LORA_FAMILIES, OWN_ATTENTION, SLOW_LORA, VOCAB_SIZE, random_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from loraplex_adapters.formats.peft_loftq import NF4, NF4_BLOCK
from loraplex_adapters.io.safetensors import PIECE_BYTES
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.errors import AdapterInvalid
from loraplex_contracts.plan import AdapterUse
from loraplex_server.backends.cpu.torch_lora import CpuOps
from loraplex_server.backends.reference import ReferenceOps
from loraplex_server.layers.linear import AdaptedLinear
from loraplex_server.layers.lora import SegmentedLora
from loraplex_server.model.loader import adopt_model

NUM_TOKENS = 10
# Their routers compute in float32, where a last bit may tip over, or all of attention does.
TOLERANCE = dict.fromkeys(("deepseek_v2", "deepseek_v3", "llama4-chunks", "gpt_oss", *OWN_ATTENTION), 1e-5)
OPS: dict[str, type[SegmentedLora]] = {"reference": ReferenceOps, "cpu": CpuOps}  # type: ignore[type-abstract]


@dataclass
class World:
    """A base model, PEFT's models of all adapters, and a rig that holds adapter i in slot i."""

    base: PreTrainedModel
    peft: Sequence[PeftModel]
    weights: list[AdapterWeights]
    rig: Rig

    def reference(self, adapter_idx: int | None) -> nn.Module:
        return self.base if adapter_idx is None else self.peft[adapter_idx]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of adapters that several tests share."""
    return tmp_path_factory.mktemp("adapters")


@functools.lru_cache(maxsize=1)  # cases of one family stand together
def saved_adapters(
    root: Path, family: str, dtype: torch.dtype, specs: Sequence[LoraSpec]
) -> tuple[PreTrainedModel, Path, list[PeftModel]]:
    """A base model, and PEFT's models of adapters, whose files are in the folder beside it. Nobody changes them."""
    base = make_dense(random_model(family, dtype))
    folder = Path(tempfile.mkdtemp(dir=root))
    return base, folder, [save_adapter(base, spec, folder / spec.name, seed) for seed, spec in enumerate(specs)]


def make_world(
    root: Path,
    family: str,
    ops: SegmentedLora,
    dtype: torch.dtype = torch.float64,
    max_rows: int = 6,
    *,
    joins: bool = False,
    specs: Sequence[LoraSpec] = SPECS,
) -> World:
    base, folder, peft = saved_adapters(root, family, dtype, tuple(specs))
    loaded = adopt_model(copy.deepcopy(base), model_id=family, backend=PatchedBackend(merges=joins))
    targets = loaded.base_targets(max_rank=16)
    weights = [load_lora(folder, spec.name, targets) for spec in specs]
    rig = make_rig(loaded, ops=ops, seed=4, max_rows=max_rows, num_slots=len(specs))
    for slot, lora in enumerate(weights):
        rig.slots.install(slot, lora)
    return World(base, peft, weights, rig)


def mixed_jobs(num_adapters: int) -> list[tuple[int | None, Job]]:
    """Every adapter once, the base twice."""
    owners: list[int | None] = [None, *range(num_adapters), None]
    prompts = random_prompts(len(owners), VOCAB_SIZE, seed=8)
    return [
        (owner, Job(prompt, NUM_TOKENS, () if owner is None else (AdapterUse(owner),)))
        for owner, prompt in zip(owners, prompts, strict=True)
    ]


WAYS = (("reference", False), ("reference", True), ("cpu", False))


@pytest.mark.parametrize(
    ("family", "ops", "joins"),
    [
        pytest.param(family, ops, joins, marks=pytest.mark.slow if family in SLOW_LORA and ops != "cpu" else ())
        for family in LORA_FAMILIES
        for ops, joins in WAYS
    ],
)
def test_mixed_batch_equals_peft(family: str, ops: str, joins: bool, root: Path) -> None:
    world = make_world(root, family, OPS[ops](), joins=joins)
    check_mixed_batch(world, SPECS, TOLERANCE.get(family, 1e-9))


def check_mixed_batch(world: World, specs: Sequence[LoraSpec], tolerance: float = 1e-9) -> None:
    jobs = mixed_jobs(len(specs))
    world.rig.run([job for _, job in jobs])
    for owner, job in jobs:
        name = "base" if owner is None else specs[owner].name
        tokens, want, plain = expected(world.reference(owner), world.base, tuple(job.prompt))
        assert job.error is None, name
        assert job.tokens == tokens, name
        torch.testing.assert_close(
            world.rig.logits(job), want, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
        if owner is not None:  # an adapter that changes nothing would prove nothing
            assert not torch.allclose(want, plain, atol=1e-3), name


@functools.lru_cache(maxsize=32)  # the cases of one family
def expected(reference: nn.Module, base: nn.Module, prompt: Sequence[int]) -> tuple[list[int], Tensor, Tensor]:
    """The text, its logits, and the base model's of the same text."""
    tokens = greedy(reference, prompt, NUM_TOKENS)
    want = dense_logits(reference, prompt, tokens)
    return tokens, want, want if reference is base else dense_logits(base, prompt, tokens)


def check_by_name(
    root: Path, family: str, base: PreTrainedModel, peft: Sequence[PeftModel], names: Sequence[str]
) -> None:
    """The adapters in the folders of these names below `root`, in one engine, are PEFT's."""
    loaded = adopt_model(copy.deepcopy(base), model_id=family, backend=PatchedBackend(merges=True))
    rig = make_rig(loaded, ops=CpuOps(), seed=4, num_slots=len(names))
    weights = [load_lora(root, name, loaded.base_targets(max_rank=8)) for name in names]
    for slot, lora in enumerate(weights):
        rig.slots.install(slot, lora)
    check_mixed_batch(World(base, list(peft), weights, rig), [LoraSpec(name, 0, 0) for name in names])


@pytest.mark.parametrize(
    ("family", "ops", "joins"),
    [
        ("qwen2", "cpu", True),
        *(
            pytest.param(family, ops, joins, marks=pytest.mark.slow)
            for family in LORA_FAMILIES
            for ops, joins in (("reference", True), ("cpu", False))
        ),
    ],
)
def test_more_than_low_rank_terms_equals_peft(family: str, ops: str, joins: bool, root: Path) -> None:
    """DoRA, biases and saved parameters in one batch with each other, plain LoRA and the base."""
    specs = [spec for spec in RICH_SPECS if spec.name != NOT_SERVED.get(family)]
    world = make_world(root, family, OPS[ops](), joins=joins, specs=specs)
    check_mixed_batch(world, specs, TOLERANCE.get(family, 1e-9))


VARIANTS: dict[str, PeftConfig] = {
    "vera": VeraConfig(r=8, target_modules=["q_proj", "down_proj"], projection_prng_key=3),
    "loha": LoHaConfig(r=3, alpha=5, target_modules=["k_proj", "up_proj"], rank_pattern={"k_proj": 2}),
    "lokr": LoKrConfig(r=2, alpha=3, target_modules=["q_proj", "o_proj"], decompose_factor=4),
    "lokr-both": LoKrConfig(r=1, alpha=1, target_modules=["q_proj", "down_proj"], decompose_both=True),
    "ia3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "oft": OFTConfig(oft_block_size=8, target_modules=["q_proj", "down_proj"], num_cayley_neumann_terms=6),
    "oft-cayley": OFTConfig(r=4, oft_block_size=0, target_modules=["v_proj", "o_proj"], use_cayley_neumann=False),
    "oft-shared": OFTConfig(oft_block_size=4, target_modules=["q_proj", "k_proj"], block_share=True),
    "oft-constrained": OFTConfig(oft_block_size=8, target_modules=["up_proj"], coft=True, eps=0.9),
    "boft": BOFTConfig(boft_block_size=8, target_modules=["q_proj", "down_proj"]),
    # Plain LoRAs whose modules are chosen otherwise than by a list of names.
    "lora-but": LoraConfig(r=2, target_modules="all-linear", exclude_modules=["v_proj", "model.layers.0.mlp.up_proj"]),
    "lora-but-regex": LoraConfig(r=3, target_modules=r".*\.(q|k)_proj", exclude_modules=r".*layers\.1\..*k_proj"),
    "lora-one-layer": LoraConfig(
        r=2, target_modules=["q_proj", "o_proj"], layers_to_transform=[1], layers_pattern="layers"
    ),
}


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_kinds_that_reduce_to_low_rank_terms_equal_peft(family: str, tmp_path: Path) -> None:
    base = make_dense(random_model(family, torch.float64))
    peft = [save_variant(base, config, tmp_path / name) for name, config in VARIANTS.items()]
    loaded = adopt_model(copy.deepcopy(base), model_id=family, backend=PatchedBackend(merges=True))
    targets = loaded.base_targets(max_rank=64)
    weights = [load_lora(tmp_path, name, targets) for name in VARIANTS]
    rig = make_rig(loaded, ops=CpuOps(), seed=4, max_rows=len(VARIANTS) + 2, num_slots=len(VARIANTS))
    for slot, lora in enumerate(weights):
        rig.slots.install(slot, lora)
    specs = [LoraSpec(name, 0, 0) for name in VARIANTS]
    check_mixed_batch(World(base, peft, weights, rig), specs)


@pytest.mark.parametrize("bias", ["all", "only"])
def test_biases_beside_other_kinds_equal_peft(bias: str, tmp_path: Path) -> None:
    """OPT has biases of linears and of norms."""
    base = make_dense(random_model("opt", torch.float64))
    targets = ["q_proj", "fc2"]
    configs: dict[str, PeftConfig] = {
        "vera": VeraConfig(r=4, target_modules=targets, bias="all" if bias == "all" else "vera_only"),
        "oft": OFTConfig(oft_block_size=8, target_modules=targets, bias="all" if bias == "all" else "oft_only"),
        "boft": BOFTConfig(boft_block_size=8, target_modules=targets, bias="all" if bias == "all" else "boft_only"),
    }
    peft = [save_variant(base, config, tmp_path / name) for name, config in configs.items()]
    loaded = adopt_model(copy.deepcopy(base), model_id="opt", backend=PatchedBackend(merges=True))
    weights = [load_lora(tmp_path, name, loaded.base_targets(max_rank=64)) for name in configs]
    rig = make_rig(loaded, ops=CpuOps(), seed=4, max_rows=len(configs) + 2, num_slots=len(configs))
    for slot, lora in enumerate(weights):
        rig.slots.install(slot, lora)
    check_mixed_batch(World(base, peft, weights, rig), [LoraSpec(name, 0, 0) for name in configs])


def test_oft_with_blocks_of_one_input_equals_peft(tmp_path: Path) -> None:
    """PEFT takes the nearest divisor of a linear's inputs: of 49 it is 1, and saves tensors without elements."""
    base = make_dense(random_model("llama", torch.float64, changes={"intermediate_size": 49}))
    config = OFTConfig(oft_block_size=4, target_modules=["q_proj", "down_proj"])
    peft = [save_variant(base, config, tmp_path / "oft")]
    loaded = adopt_model(copy.deepcopy(base), model_id="llama", backend=PatchedBackend(merges=True))
    weights = [load_lora(tmp_path, "oft", loaded.base_targets(max_rank=64))]
    rig = make_rig(loaded, ops=CpuOps(), seed=4, num_slots=1)
    rig.slots.install(0, weights[0])
    check_mixed_batch(World(base, peft, weights, rig), [LoraSpec("oft", 0, 0)])


# The weights of modules, which PEFT adapts as they are kept: Conv1D's and embeddings' the other way round.
PARAMETERS: dict[str, list[str]] = {
    "llama": ["q_proj.weight", "mlp.down_proj.weight", "embed_tokens.weight", "lm_head.weight"],
    "gpt2": ["attn.c_attn.weight", "mlp.c_proj.weight", "wte.weight", "lm_head.weight"],  # of a tied head
}


@pytest.mark.parametrize("family", PARAMETERS)
def test_parameters_of_two_dimensions_equal_peft(family: str, tmp_path: Path) -> None:
    base = make_dense(random_model(family, torch.float64))
    configs = {
        f"p{idx}": LoraConfig(
            r=3,
            lora_alpha=5,
            target_modules=[],
            target_parameters=names,
            rank_pattern={names[0]: 5},
            use_rslora=idx % 2 == 1,
        )
        for idx, names in enumerate([*([name] for name in PARAMETERS[family]), PARAMETERS[family]])
    }
    peft = [save_variant(base, config, tmp_path / name) for name, config in configs.items()]
    loaded = adopt_model(copy.deepcopy(base), model_id=family, backend=PatchedBackend(merges=True))
    rig = make_rig(loaded, ops=CpuOps(), seed=4, max_rows=len(configs) + 2, num_slots=len(configs))
    weights = [load_lora(tmp_path, name, loaded.base_targets(max_rank=8)) for name in configs]
    for slot, lora in enumerate(weights):
        rig.slots.install(slot, lora)
    check_mixed_batch(World(base, peft, weights, rig), [LoraSpec(name, 0, 0) for name in configs])


@pytest.mark.parametrize(
    ("family", "embedding", "linear"), [("qwen2", "embed_tokens", "q_proj"), ("gpt2", "wte", "c_attn")]
)
def test_saved_embeddings_of_tied_models_equal_peft(family: str, embedding: str, linear: str, tmp_path: Path) -> None:
    """PEFT ties the head to a saved embedding by the embedding's name: GPT-2's it does not."""
    base = make_dense(random_model(family, torch.float64))
    names = ["tied", "not-tied"]
    peft = [
        save_variant(
            base,
            LoraConfig(
                r=2,
                target_modules=[linear],
                modules_to_save=[embedding],
                ensure_weight_tying=name == "tied",
                fan_in_fan_out=family == "gpt2",
            ),
            tmp_path / name,
        )
        for name in names
    ]
    check_by_name(tmp_path, family, base, peft, names)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_weights_under_adapters_that_are_not_the_bases_equal_peft(family: str, target: str, tmp_path: Path) -> None:
    """PEFT writes the weight of an embedding or head that it adapts, and loads it into the base model: a tied one into
    both, and DoRA goes by its norms."""
    base = make_dense(random_model(family, torch.float64))
    assert base.config.tie_word_embeddings == (family == "qwen2")
    names, peft = ["lora", "dora"], []
    for name in names:
        folder = tmp_path / name
        config = LoraConfig(r=2, target_modules=["q_proj", target], use_dora=name == "dora")
        save_variant(base, config, folder)
        tensors = load_file(folder / "adapter_model.safetensors")
        (own,) = (key for key in tensors if key.endswith("base_layer.weight"))
        tensors[own] += torch.randn_like(tensors[own]) * 0.2
        save_file(tensors, folder / "adapter_model.safetensors")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied weights
            peft.append(PeftModel.from_pretrained(copy.deepcopy(base), str(folder)).eval())
    check_by_name(tmp_path, family, base, peft, names)


INITS: dict[str, LoraConfig] = {
    "pissa": LoraConfig(r=4, lora_alpha=6, init_lora_weights="pissa", rank_pattern={"first": 2}),
    "pissa-dora": LoraConfig(r=3, init_lora_weights="pissa", use_dora=True, use_rslora=True),
    "olora": LoraConfig(r=4, lora_alpha=3, init_lora_weights="olora"),
}


@pytest.mark.parametrize(("family", "targets"), [("llama", ["q_proj", "v_proj", "down_proj"]), ("gpt2", ["c_attn"])])
def test_initialisations_that_change_the_base_equal_peft(family: str, targets: list[str], tmp_path: Path) -> None:
    """Adapters equal PEFT as saved, where PEFT changes the base model again when it loads them, and as PEFT converts
    them. PEFT does it in float32, on a base model of at most that."""
    base = random_model(family, torch.float32)
    names = [name for name in INITS if (family, name) != ("gpt2", "olora")]
    for seed, name in enumerate(names):
        config = copy.deepcopy(INITS[name])
        config.target_modules, config.rank_pattern = set(targets), dict.fromkeys(config.rank_pattern and targets[:1], 2)
        config.fan_in_fan_out = family == "gpt2"
        save_initialised(base, config, tmp_path / name, seed)
    names += [f"{name}-converted" for name in names if "dora" not in name]
    peft = [
        make_dense(PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / name)).double()).eval()
        for name in names
    ]
    loaded = adopt_model(make_dense(copy.deepcopy(base).double()), model_id=family, backend=PatchedBackend(merges=True))
    rig = make_rig(loaded, ops=CpuOps(), seed=4, max_rows=len(names) + 2, num_slots=len(names))
    weights = [load_lora(tmp_path, name, loaded.base_targets(max_rank=8)) for name in names]
    for slot, lora in enumerate(weights):
        rig.slots.install(slot, lora)
    world = World(make_dense(base.double()), peft, weights, rig)
    check_mixed_batch(world, [LoraSpec(name, 0, 0) for name in names], tolerance=1e-5)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_initialisations_of_more_ranks_than_the_weight_has_equal_peft(init: str, tmp_path: Path) -> None:
    """PEFT saves as many ranks as there are, and divides alpha by those of the configuration."""
    base = random_model("llama", torch.float32)
    config = LoraConfig(r=50, lora_alpha=6, init_lora_weights=init, target_modules=["q_proj", "down_proj"])
    torch.manual_seed(0)
    made = get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    made.save_pretrained(tmp_path / init)
    peft = make_dense(PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / init)).double()).eval()
    loaded = adopt_model(
        make_dense(copy.deepcopy(base).double()), model_id="llama", backend=PatchedBackend(merges=True)
    )
    weights = load_lora(tmp_path, init, loaded.base_targets(max_rank=64))
    rig = make_rig(loaded, ops=CpuOps(), seed=4, num_slots=1)
    rig.slots.install(0, weights)
    world = World(make_dense(base.double()), [peft], [weights], rig)
    check_mixed_batch(world, [LoraSpec(init, 0, 0)], tolerance=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_loftq_equals_peft_on_the_quantized_base(family: str, tmp_path: Path) -> None:
    """PEFT quantizes the base model when it loads such an adapter, with bitsandbytes on a GPU. Here a model whose
    weights were quantized number by number takes its place, and the adapter is loaded onto that as a plain LoRA."""
    base = random_model(family, torch.float32)
    names = {"all": ["q_proj", "v_proj", "down_proj"], "biases": ["k_proj", "o_proj"]}
    peft: list[PeftModel] = []
    for seed, (name, targets) in enumerate(names.items()):
        made = copy.deepcopy(base)
        for path, module in made.named_modules():
            if isinstance(module, nn.Linear) and path.endswith(tuple(targets)):
                module.weight.data = nearest_of_nf4(module.weight.data)
        config = LoraConfig(r=4, lora_alpha=6, target_modules=targets, bias="all" if name == "biases" else "none")
        peft.append(save_variant(make_dense(made.double()), config, tmp_path / name, seed))
        path = tmp_path / name / "adapter_config.json"
        fields = json.loads(path.read_text())
        fields |= {"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4, "loftq_iter": 1}}
        path.write_text(json.dumps(fields))
    loaded = adopt_model(make_dense(copy.deepcopy(base).double()), model_id=family, backend=PatchedBackend(merges=True))
    rig = make_rig(loaded, ops=CpuOps(), seed=4, num_slots=len(names))
    weights = [load_lora(tmp_path, name, loaded.base_targets(max_rank=8)) for name in names]
    for slot, lora in enumerate(weights):
        rig.slots.install(slot, lora)
    world = World(make_dense(base.double()), peft, weights, rig)
    check_mixed_batch(world, [LoraSpec(name, 0, 0) for name in names], tolerance=1e-5)


def nearest_of_nf4(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.flatten().view(-1, NF4_BLOCK)
    codes = torch.tensor(NF4) * blocks.abs().amax(dim=1, keepdim=True)  # [blocks, 16]
    nearest = (blocks[:, :, None] - codes[:, None, :]).abs().argmin(dim=2)
    return codes.gather(1, nearest).view_as(weight)


def test_initialisations_by_data_equal_peft(tmp_path: Path) -> None:
    """EVA, which gives each module a rank of its own and leaves the base alone, and CorDA as PEFT converts it."""
    base = random_model("llama", torch.float32)
    targets = ["q_proj", "v_proj", "down_proj"]
    ids = torch.randint(2, VOCAB_SIZE, (8, 24), generator=torch.Generator().manual_seed(3))
    eva = LoraConfig(r=4, target_modules=targets, init_lora_weights="eva", eva_config=EvaConfig(rho=2.0))
    made = get_peft_model(copy.deepcopy(base), eva, low_cpu_mem_usage=True)
    data = [{"input_ids": rows, "attention_mask": torch.ones_like(rows)} for rows in ids.split(4)]
    initialize_lora_eva_weights(made, data * 8, show_progress_bar=False)
    assert made.peft_config["default"].rank_pattern
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    made.save_pretrained(str(tmp_path / "eva"))
    names = ["eva"]
    for method in ("ipm", "kpm"):
        corda = LoraConfig(
            r=4, target_modules=targets, init_lora_weights="corda", corda_config=CordaConfig(corda_method=method)
        )
        model = copy.deepcopy(base)
        preprocess_corda(model, corda, run_model=lambda model=model: [model(input_ids=row[None]) for row in ids])
        save_initialised(model, corda, tmp_path / method)
        names.append(f"{method}-converted")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is left of the initialisation's parameters
        peft = [PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / name)).double().eval() for name in names]
    loaded = adopt_model(make_dense(copy.deepcopy(base).double()), model_id="llama", backend=PatchedBackend())
    rig = make_rig(loaded, ops=CpuOps(), seed=4, max_rows=len(names) + 2, num_slots=len(names))
    weights = [load_lora(tmp_path, name, loaded.base_targets(max_rank=8)) for name in names]
    for slot, lora in enumerate(weights):
        rig.slots.install(slot, lora)
    world = World(make_dense(base.double()), [make_dense(one) for one in peft], weights, rig)
    check_mixed_batch(world, [LoraSpec(name, 0, 0) for name in names], tolerance=1e-5)


ADDED_TOKENS: dict[str, dict[str, Any]] = {
    "saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "saved-head": {"modules_to_save": ["lm_head"]},
    "saved-embedding": {"modules_to_save": ["embed_tokens"]},
    "saved-by-itself": {},  # PEFT sees that the embeddings were resized
    "rows": {"trainable_token_indices": [5, 259, 260]},
    "lora": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("is_tied", [False, True])
def test_adapters_with_added_tokens(is_tied: bool, tmp_path: Path) -> None:
    """Such adapters are refused by name on the base model, and served on one with their tokens and their tokenizer."""
    folders = {name: tmp_path / name for name in ("base", "larger")}
    tokenizers = dict(zip(folders, (byte_tokenizer(), byte_tokenizer(["<|im_start|>", "<|im_end|>"])), strict=True))
    base = random_model("llama", changes={"vocab_size": len(tokenizers["base"]), "tie_word_embeddings": is_tied})
    for name, folder in folders.items():
        base.resize_token_embeddings(len(tokenizers[name]), mean_resizing=False)
        base.save_pretrained(folder)
        tokenizers[name].save_pretrained(folder)
    trained = AutoModelForCausalLM.from_pretrained(folders["base"], dtype=torch.float64)
    trained.resize_token_embeddings(len(tokenizers["larger"]), mean_resizing=False)
    for seed, (name, fields) in enumerate(ADDED_TOKENS.items()):
        save_variant(trained, LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | fields), tmp_path / name, seed)
        tokenizers["larger"].save_pretrained(tmp_path / name)
    targets = adopt_model(
        AutoModelForCausalLM.from_pretrained(folders["base"], dtype=torch.float64), model_id=str(folders["base"])
    ).base_targets(max_rank=8)
    for name in ADDED_TOKENS:
        with pytest.raises(AdapterInvalid, match=r"261 tokens.*adds tokens is not served"):
            load_lora(tmp_path, name, targets)
    base = make_dense(AutoModelForCausalLM.from_pretrained(folders["larger"], dtype=torch.float64))
    loaded = adopt_model(copy.deepcopy(base), model_id=str(folders["larger"]), backend=PatchedBackend())
    rig = make_rig(loaded, ops=CpuOps(), seed=4, max_rows=8, num_slots=len(ADDED_TOKENS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights: what is served is exactly what PEFT computes
        peft = [PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / name)).eval() for name in ADDED_TOKENS]
    weights = [load_lora(tmp_path, name, loaded.base_targets(max_rank=8)) for name in ADDED_TOKENS]
    for slot, lora in enumerate(weights):
        rig.slots.install(slot, lora)
    prompt = tokenizers["larger"].encode("<|im_start|>ask me<|im_end|>")
    assert prompt[0] == 259
    jobs = [Job(prompt, NUM_TOKENS, (AdapterUse(slot),)) for slot in range(len(weights))]
    rig.run(jobs)
    for job, reference in zip(jobs, peft, strict=True):
        want = dense_logits(reference, prompt, job.tokens)
        assert job.tokens == want.argmax(dim=-1).tolist()
        torch.testing.assert_close(rig.logits(job), want, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(want, dense_logits(base, prompt, job.tokens), atol=1e-3)


# By name: family, and what PEFT's configuration has beside a LoRA. Tokens 4 and 60 are in the prompt.
WRITTEN_TWICE: dict[str, tuple[str, dict[str, Any]]] = {
    "rows of a tied head alone": ("qwen2", {"trainable_token_indices": {"lm_head": [4, 60]}}),
    "and a saved embedding": (
        "qwen2",
        {"trainable_token_indices": {"lm_head": [4, 60]}, "modules_to_save": ["embed_tokens"]},
    ),
    "rows of a head that is to be tied": (
        "qwen2",
        {"trainable_token_indices": {"lm_head": [4, 60]}, "ensure_weight_tying": True},
    ),
    "rows of a tied embedding": ("qwen2", {"trainable_token_indices": [4, 60]}),
    "a saved linear and all biases": ("qwen2", {"modules_to_save": ["q_proj"], "bias": "all"}),
    "a saved head and all biases": ("phi", {"modules_to_save": ["lm_head"], "bias": "all"}),
}


@pytest.mark.parametrize("name", WRITTEN_TWICE)
def test_what_peft_writes_twice_or_ties(name: str, tmp_path: Path) -> None:
    family, fields = WRITTEN_TWICE[name]
    base = make_dense(random_model(family))
    save_variant(base, LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM", **fields), tmp_path / "x", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights
        peft = make_dense(PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / "x")).eval())
    loaded = adopt_model(copy.deepcopy(base), backend=PatchedBackend())
    rig = make_rig(loaded, ops=CpuOps(), seed=4)
    rig.slots.install(0, load_lora(tmp_path, "x", loaded.base_targets(max_rank=8)))
    job = Job([5, 4, 60, 9], NUM_TOKENS, (AdapterUse(0),))
    rig.run([job])
    want = dense_logits(peft, job.prompt, job.tokens)
    torch.testing.assert_close(rig.logits(job), want, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(want, dense_logits(base, job.prompt, job.tokens), atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_weights_and_alone(family: str, root: Path) -> None:
    """Logits are the same as PEFT's `merge_and_unload`, and the same as each request alone in the engine."""
    world = make_world(root, family, CpuOps())
    jobs = mixed_jobs(len(SPECS))
    world.rig.run([job for _, job in jobs])
    for owner, job in jobs:
        alone = Job(job.prompt, NUM_TOKENS, job.adapters)
        world.rig.run([alone])
        assert alone.tokens == job.tokens
        torch.testing.assert_close(world.rig.logits(alone), world.rig.logits(job), rtol=1e-9, atol=1e-9)
        is_tied = world.base.config.tie_word_embeddings  # there PEFT's own merge changes head and embedding at once
        if owner is not None and not (is_tied and SPECS[owner].targets in ("head", "embedding")):
            merged = copy.deepcopy(world.peft[owner]).merge_and_unload()
            want = dense_logits(merged, job.prompt, job.tokens)
            torch.testing.assert_close(world.rig.logits(job), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2"])
def test_float32(family: str, ops: str, root: Path) -> None:
    """Logits to 1e-4; a text may differ only where the reference's two best are closer than that."""
    world = make_world(root, family, OPS[ops](), torch.float32)
    jobs = mixed_jobs(len(SPECS))
    world.rig.run([job for _, job in jobs])
    for owner, job in jobs:
        want = dense_logits(world.reference(owner), job.prompt, job.tokens)
        torch.testing.assert_close(world.rig.logits(job), want, rtol=1e-4, atol=1e-4)
        best = want.topk(2).values
        for i, token in enumerate(job.tokens):
            assert token == int(want[i].argmax()) or best[i, 0] - best[i, 1] < 1e-4


# Each with a tensor of more values than the reader reads at once in float32, of which others are computed.
LARGE: dict[str, PeftConfig] = {
    "dora": LoraConfig(r=32, use_dora=True, target_modules=["q_proj", "down_proj"]),
    "pissa": LoraConfig(r=32, init_lora_weights="pissa", target_modules=["down_proj"]),
    "vera": VeraConfig(r=32, target_modules=["q_proj", "down_proj"]),
    "oft": OFTConfig(oft_block_size=260, target_modules=["down_proj"]),
}


@pytest.mark.parametrize("name", LARGE)
def test_tensors_of_several_pieces_equal_peft(name: str, tmp_path: Path) -> None:
    inputs = 2080
    assert 32 * inputs * 4 > PIECE_BYTES
    base = make_dense(random_model("llama", torch.float32, changes={"intermediate_size": inputs}))
    with torch.no_grad():  # as many inputs, and the hidden states stay as large
        for layer in base.model.layers:
            layer.mlp.down_proj.weight.mul_(0.2)
    torch.manual_seed(0)
    peft = get_peft_model(copy.deepcopy(base), copy.deepcopy(LARGE[name]))
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    peft.save_pretrained(tmp_path / name)
    peft = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path / name)).eval()
    loaded = adopt_model(copy.deepcopy(base), model_id="llama", backend=PatchedBackend(merges=True))
    weights = load_lora(tmp_path, name, loaded.base_targets(max_rank=64))
    rig = make_rig(loaded, ops=CpuOps(), num_slots=1)
    rig.slots.install(0, weights)
    job = Job([3, 4, 5, 6], NUM_TOKENS, (AdapterUse(0),))
    rig.run([job])
    want = dense_logits(peft, job.prompt, job.tokens)
    torch.testing.assert_close(rig.logits(job), want, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(want, dense_logits(base, job.prompt, job.tokens), atol=1e-3)


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_without_adapter_keep_every_bit(ops: str, dtype: torch.dtype, root: Path) -> None:
    """The rows are the same in the same places, beside neighbours with and without adapters."""
    world = make_world(root, "qwen2", OPS[ops](), dtype)
    prompts = random_prompts(6, VOCAB_SIZE, seed=8)
    same = [[*prompt, *([5] * 19)][:8] for prompt in prompts]  # one length: one order in the row

    def first_logits(owners: list[int | None]) -> list[torch.Tensor]:
        world.rig.dice.seed(1)
        world.rig.max_chunk = 8
        jobs = [
            Job(prompt, 3, () if owner is None else (AdapterUse(owner),))
            for owner, prompt in zip(owners, same, strict=True)
        ]
        world.rig.run(jobs)
        return [world.rig.logits(job)[:1] for job in jobs]

    plain = first_logits([None] * 6)
    mixed = first_logits([None, None, None, 1, 3, 4])
    for i in range(3):
        assert torch.equal(plain[i], mixed[i])
    for i in range(3, 6):
        assert not torch.equal(plain[i], mixed[i])


def test_weighted_mixture_adds_up(root: Path) -> None:
    """Two adapters on the same tokens: as if both had been merged with their weights."""
    world = make_world(root, "llama", CpuOps())
    uses = (AdapterUse(1, 0.5), AdapterUse(4, -1.25))
    job = Job(random_prompts(2, VOCAB_SIZE)[1], NUM_TOKENS, uses)
    world.rig.run([job, *(other for _, other in mixed_jobs(len(SPECS)))])
    merged = copy.deepcopy(world.base)
    with torch.no_grad():
        for use in uses:
            for path, factors in world.weights[use.adapter_slot].factors.items():
                delta = factors.b @ factors.a * (factors.scale * use.weight)
                module = merged.get_submodule(path)
                module.weight.add_(delta.T if isinstance(module, nn.Embedding) else delta)
    want = dense_logits(merged, job.prompt, job.tokens)
    torch.testing.assert_close(world.rig.logits(job), want, rtol=1e-9, atol=1e-9)


def test_slots_change_hands(root: Path) -> None:
    """A slot that is cleared or filled anew leaves nothing of the adapter before."""
    world = make_world(root, "llama", CpuOps())
    prompt = random_prompts(2, VOCAB_SIZE)[1]

    def run(slot: int) -> list[int]:
        job = Job(prompt, NUM_TOKENS, (AdapterUse(slot),))
        world.rig.run([job])
        return job.tokens

    want = {owner: greedy(world.reference(owner), prompt, NUM_TOKENS) for owner in (None, 0, 1, 3, 4)}
    assert run(0) == want[0]
    world.rig.slots.install(0, world.weights[4])
    assert run(0) == want[4]
    world.rig.slots.install(0, world.weights[3])
    assert run(0) == want[3]
    world.rig.slots.install(0, None)
    assert run(0) == want[None]
    for slot in range(1, len(SPECS)):
        world.rig.slots.install(slot, None)
    linears = [module for module in world.rig.loaded.model.modules() if isinstance(module, AdaptedLinear)]
    assert all(module.num_installed == 0 for module in linears)


def test_a_step_without_adapters_never_asks_the_ops(root: Path) -> None:
    class Forbidden(ReferenceOps):
        def prepare(self, *_: object, **__: object) -> object:  # type: ignore[override]
            raise AssertionError("no row has an adapter")

        apply = prepare  # type: ignore[assignment]

    world = make_world(root, "llama", Forbidden())
    job = Job(random_prompts(2, VOCAB_SIZE)[1], NUM_TOKENS)
    world.rig.run([job])
    assert job.tokens == greedy(world.base, job.prompt, NUM_TOKENS)
