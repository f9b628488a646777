"""Families whose mixers keep a state equal Transformers and PEFT over the whole text."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from support.dense import dense_logits, make_dense
from support.drafting import erring_drafts
from support.driver import Job, make_rig, random_prompts
from support.exact_states import exact, whole_text_greedy
from support.peft_files import SPECS, linear_names, load_lora, save_adapter, save_variant
from support.zoo import HYBRIDS, VOCAB_SIZE, random_model

from loraplex_contracts.errors import AdapterUnsupported
from loraplex_contracts.plan import AdapterUse
from loraplex_server.model.loader import adopt_model

NUM_TOKENS = 10
QUICK = ("lfm2", "qwen3_5", "bamba")  # one for each kind of state; the others run with the slow tests
FAMILIES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in HYBRIDS]
# Norms and routers in float32 may tip over at a last bit.
TOLERANCE = 1e-4
# Configurations as no checkpoint of the family may have them: other mixes of layers, widths, biases and groups.
LINEAR, FULL = "linear_attention", "full_attention"
VARIED: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5", {"layer_types": [FULL, LINEAR, FULL, LINEAR], "num_hidden_layers": 4, "linear_conv_kernel_dim": 2}),
    ("qwen3_5", {"layer_types": [LINEAR] * 3, "linear_num_key_heads": 1, "linear_num_value_heads": 6}),
    ("qwen3_5", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 8, "tie_word_embeddings": True}),
    ("qwen3_next", {"num_key_value_heads": 1, "linear_conv_kernel_dim": 3, "decoder_sparse_step": 2}),
    ("mamba2", {"n_groups": 1, "conv_kernel": 2, "use_bias": True, "use_conv_bias": False}),
    ("mamba2", {"n_groups": 4, "time_step_limit": (0.001, 0.1)}),
    ("mamba2", {"chunk_size": 4, "residual_in_fp32": False, "tie_word_embeddings": True}),
    ("bamba", {"mamba_d_conv": 2, "mamba_conv_bias": False, "mamba_proj_bias": True}),
    ("bamba", {"mamba_n_groups": 1, "tie_word_embeddings": True}),
    ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}),
    ("granitemoehybrid", {"layer_types": [FULL, LINEAR, LINEAR], "position_embedding_type": "rope"}),
    ("nemotron_h", {"mamba_proj_bias": True, "n_groups": 1, "use_conv_bias": False}),
    ("falcon_h1", {"mamba_rms_norm": False, "mamba_proj_bias": True, "projectors_bias": True}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1}),
    ("zamba2", {"use_shared_attention_adapter": False, "use_mem_rope": False, "num_mem_blocks": 2}),
    ("jamba", {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 2}),
    ("mamba", {"use_bias": True, "conv_kernel": 3, "use_conv_bias": False}),
    ("lfm2", {"conv_L_cache": 2, "conv_bias": True}),
    ("lfm2", {"conv_L_cache": 9, "num_key_value_heads": 1}),
    ("kimi_linear", {"linear_conv_kernel_dim": 2}),
    ("minimax", {"layer_types": [FULL, LINEAR, LINEAR], "block_size": 256, "tie_word_embeddings": True}),
    ("olmo_hybrid", {"linear_allow_neg_eigval": False, "layer_types": [FULL, LINEAR, FULL]}),
    ("lfm3", {"conv_L_cache": 2, "sliding_window": 3}),
]
LORAS = (1, 3)  # of SPECS: all linears, and the head with rank 13


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_whole_text(family: str) -> None:
    """Packed rows, prompts in chunks of odd lengths, rows that others had before; with drafts, right and wrong ones."""
    check_whole_text(family, {}, longest=30)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), VARIED, ids=str)
def test_other_configurations_equal_the_whole_text(family: str, changes: dict[str, Any]) -> None:
    """The texts are longer than those of the test above."""
    check_whole_text(family, changes, longest=90)


def check_whole_text(family: str, changes: dict[str, Any], longest: int) -> None:
    model = make_dense(random_model(family, seed=3, changes=changes))
    assert not [name for name in changes if not hasattr(model.config, name)]
    rig = make_rig(adopt_model(copy.deepcopy(model)), seed=3, max_chunk=11, num_blocks=300)
    jobs = [Job(prompt, NUM_TOKENS) for prompt in random_prompts(7, VOCAB_SIZE, seed=3, longest=longest)]
    want = [whole_text_greedy(model, job.prompt, NUM_TOKENS) for job in jobs]
    for i, (job, tokens) in enumerate(zip(jobs[:5], want, strict=False)):
        job.propose = erring_drafts(job.prompt + tokens, VOCAB_SIZE, error_rate=i / 4, seed=i)
    rig.run(jobs)
    assert [job.error for job in jobs] == [None] * len(jobs)
    assert [job.tokens for job in jobs] == want
    assert jobs[0].num_accepted > NUM_TOKENS // 2  # always right
    assert jobs[4].num_accepted == jobs[5].num_accepted == 0
    assert len({tuple(tokens) for tokens in want}) > 3
    with exact(model):
        for job in jobs:
            want_logits = dense_logits(model, job.prompt, job.tokens)
            torch.testing.assert_close(rig.logits(job), want_logits, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_adapters_equal_peft(family: str, tmp_path: Path) -> None:
    base = make_dense(random_model(family))
    peft = [save_adapter(base, SPECS[idx], tmp_path / SPECS[idx].name, seed=idx) for idx in LORAS]
    loaded = adopt_model(copy.deepcopy(base), model_id=family)
    rig = make_rig(loaded, seed=4, max_rows=6)
    for slot, idx in enumerate(LORAS):
        rig.slots.install(slot, load_lora(tmp_path, SPECS[idx].name, loaded.base_targets(max_rank=16)))
    owners = (None, 0, 1, 0, None, 1)
    prompts = random_prompts(len(owners), VOCAB_SIZE, seed=8)
    jobs = [
        Job(prompt, NUM_TOKENS, () if owner is None else (AdapterUse(owner),))
        for owner, prompt in zip(owners, prompts, strict=True)
    ]
    rig.run(jobs)
    for owner, job in zip(owners, jobs, strict=True):
        assert job.error is None
        assert job.tokens == whole_text_greedy(base if owner is None else peft[owner], job.prompt, NUM_TOKENS)
    alone = [whole_text_greedy(base, job.prompt, NUM_TOKENS) for job in jobs]
    assert alone[1] != jobs[1].tokens, "an adapter that changes nothing would prove nothing"


# Norms of their recurrent layers are given single heads, of all tokens in one dimension.
_NORMS_OF_HEADS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")


@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if (one if isinstance(one, str) else one.values[0]) not in _NORMS_OF_HEADS]
)
def test_saved_norms_equal_peft(family: str, tmp_path: Path) -> None:
    """Gated ones as well, which read more than the hidden states; rows beside keep the base's."""
    base = make_dense(random_model(family))
    norms = {path.rpartition(".")[2] for path, one in base.named_modules() if "norm" in type(one).__name__.lower()}
    attention, others, _, _ = linear_names(base)
    config = LoraConfig(r=2, target_modules=(attention + others)[:1], modules_to_save=sorted(norms))
    peft = save_variant(base, config, tmp_path / "norms")
    loaded = adopt_model(copy.deepcopy(base), model_id=family)
    rig = make_rig(loaded, seed=4, max_rows=4, num_slots=2)
    rig.slots.install(1, load_lora(tmp_path, "norms", loaded.base_targets(max_rank=4)))
    jobs = [Job(prompt, NUM_TOKENS) for prompt in random_prompts(4, VOCAB_SIZE, seed=8)]
    for job in jobs[1::2]:
        job.adapters = (AdapterUse(1),)
    rig.run(jobs)
    for idx, job in enumerate(jobs):
        assert job.error is None
        assert job.tokens == whole_text_greedy(peft if idx % 2 else base, job.prompt, NUM_TOKENS)
    assert jobs[1].tokens != whole_text_greedy(base, jobs[1].prompt, NUM_TOKENS)


@pytest.mark.parametrize(("family", "name"), [("mamba", "dt_proj"), ("jamba", "dt_proj"), ("qwen3_5", "conv1d")])
def test_adapters_of_what_mixers_read_themselves_are_refused(family: str, name: str, tmp_path: Path) -> None:
    """A LoRA there changes nothing in PEFT's model."""
    base = random_model(family)
    path, module = next(found for found in base.named_modules() if found[0].endswith(f".{name}"))
    num_out, num_in = cast(torch.Tensor, module.weight).shape[:2]
    config = LoraConfig(r=2, target_modules=[name], task_type="CAUSAL_LM", inference_mode=True)
    config.save_pretrained(str(tmp_path / "own"))
    key = f"base_model.model.{path}.lora"
    factors = {f"{key}_A.weight": torch.ones(2, num_in), f"{key}_B.weight": torch.ones(num_out, 2)}
    save_file(factors, tmp_path / "own" / "adapter_model.safetensors")
    targets = adopt_model(base, model_id=family).base_targets(max_rank=16)
    with pytest.raises(
        AdapterUnsupported, match=rf"{name}\.lora_A.* adapts a module of '{family}' that takes no adapters"
    ):
        load_lora(tmp_path, "own", targets)
