"""Benchmark inputs: base model, LoRA adapters and workloads on disk.

Weights are random, because speed does not depend on them; never read acceptance of drafts off such a model. Everything
is written as `save_pretrained` of Transformers and PEFT write it, so that any system can be given the same files.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    GPTNeoXConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Ministral3Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    StableLmConfig,
    Starcoder2Config,
)
from workloads import BATCHES, KINDS, drawn, make_arrivals, make_workload

SPECIALS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
SIZES_245M: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "max_position_embeddings": 4096,
    **SPECIALS,
}
SHAPES: Mapping[str, PretrainedConfig] = {
    "245m": LlamaConfig(**SIZES_245M, num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False),
    # The same sizes in families whose layers differ from Llama's.
    "245m-deepseek2": DeepseekV2Config(  # latent attention with V2-Lite's heads, and 16 experts
        **SIZES_245M,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=None,
        kv_lora_rank=256,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=1,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=704,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        tie_word_embeddings=False,
    ),
    "245m-gemma3": Gemma3TextConfig(
        **SIZES_245M, num_attention_heads=4, num_key_value_heads=1, head_dim=256, tie_word_embeddings=True
    ),
    "245m-gemma4": Gemma4TextConfig(  # as E2B and E4B: inputs of layers' own, and keys and values that layers share
        **SIZES_245M,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        global_head_dim=512,
        num_kv_shared_layers=8,
        hidden_size_per_layer_input=128,
        vocab_size_per_layer_input=32000,
        tie_word_embeddings=True,
    ),
    "245m-glm4": Glm4Config(
        **SIZES_245M, num_attention_heads=16, num_key_value_heads=4, head_dim=64, tie_word_embeddings=False
    ),
    "245m-ministral3": Ministral3Config(  # with its long context, of which rotations are made
        **(SIZES_245M | {"max_position_embeddings": 1 << 18}),
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    ),
    "245m-neox": GPTNeoXConfig(**SIZES_245M, num_attention_heads=16, tie_word_embeddings=False),
    "245m-phi3": Phi3Config(**SIZES_245M, num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False),
    "245m-qwen3moe": Qwen3MoeConfig(  # 32 experts, of which a token goes to four
        **SIZES_245M,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=704,
    ),
    "245m-starcoder2": Starcoder2Config(
        **SIZES_245M, num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=False
    ),
    "273m-qwen3.5": Qwen3_5TextConfig(  # the gated delta rule in three of four layers
        **(SIZES_245M | {"intermediate_size": 1792, "num_hidden_layers": 20}),
        layer_types=[*(3 * ["linear_attention"]), "full_attention"] * 5,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128,
        linear_num_key_heads=8,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=False,
    ),
    "273m-granite4": GraniteMoeHybridConfig(  # Mamba 2 in seven of eight layers
        **(SIZES_245M | {"num_hidden_layers": 16}),
        layer_types=[*(7 * ["linear_attention"]), "full_attention"] * 2,
        num_attention_heads=16,
        num_key_value_heads=4,
        shared_intermediate_size=2048,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=128,
        residual_multiplier=0.25,
        attention_multiplier=0.125,
        position_embedding_type="nope",
        tie_word_embeddings=False,
    ),
    "261m-stablelm": StableLmConfig(  # heads of 80, as models of 2560 features have, a quarter of which turns
        **(SIZES_245M | {"hidden_size": 1280, "intermediate_size": 3456, "num_hidden_layers": 9}),
        num_attention_heads=16,
        num_key_value_heads=16,
        tie_word_embeddings=False,
    ),
    "qwen2-0.5b": Qwen2Config(  # tied embeddings, biases, a large vocabulary
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        **SPECIALS,
    ),
    "3b": LlamaConfig(
        vocab_size=32000,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=32,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        **SPECIALS,
    ),
    "108m": LlamaConfig(  # each of its tokens has a text, as clients that read texts want it
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **SPECIALS,
    ),
    "279m": LlamaConfig(  # as 108m, three times as deep: its steps are long beside a client's own work
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        **SPECIALS,
    ),
    "small": LlamaConfig(  # for thousands of adapters: half a megabyte each at rank 4
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **SPECIALS,
    ),
    "tiny": LlamaConfig(  # to see that it runs
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        **SPECIALS,
    ),
}
TARGETS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"),
    *("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    *("in_proj_qkv", "in_proj_z", "out_proj"),
)
MIXED_RANKS = (8, 8, 16, 32)  # as many weights as with rank 16 throughout
MAX_TOKENIZER_SIZE = 4096
NUM_ARRIVALS = 64


def make_inputs(
    out: Path,
    shape: str,
    *,
    num_adapters: int,
    rank: int,
    prompt_tokens: int | tuple[int, int],
    max_tokens: int,
    rate: float | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> None:
    """OUT as a whole, and OUT/mixed-ranks: the same again with adapters of MIXED_RANKS. `prompt_tokens` as of
    make_workload. `rate`: of the arrivals of one more workload. `temperature`: 0 for greedy requests."""
    config = SHAPES[shape]
    make_model(out / "model", config)
    vocab_size = make_tokenizer(out / "model", config)
    make_adapters(out / "adapters", config, num_adapters, [rank])
    (out / "workloads").mkdir()
    for batch in BATCHES:
        for kind in KINDS:
            rows = make_workload(kind, batch, prompt_tokens=prompt_tokens, max_tokens=max_tokens, vocab_size=vocab_size)
            (out / "workloads" / f"{kind}-{batch}.json").write_text(json.dumps(drawn(rows, temperature, top_p)))
    if rate is not None:
        lengths: dict[str, Any] = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens, "vocab_size": vocab_size}
        rows = make_arrivals(NUM_ARRIVALS, rate, num_adapters, **lengths)
        (out / "workloads" / f"arrivals-{NUM_ARRIVALS}.json").write_text(json.dumps(drawn(rows, temperature, top_p)))
    mixed = out / "mixed-ranks"
    make_adapters(mixed / "adapters", config, num_adapters, MIXED_RANKS)
    for name in ("model", "workloads"):
        (mixed / name).symlink_to(Path("..") / name, target_is_directory=True)


def make_model(path: Path, config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)


def make_tokenizer(path: Path, config: PretrainedConfig) -> int:
    """A byte-level BPE tokenizer, trained on the standard library's source. Returns how many tokens it has."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(MAX_TOKENIZER_SIZE, config.get_text_config().vocab_size),
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py"))
    tokenizer.train([str(source) for source in sources], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(path)
    return tokenizer.get_vocab_size()


def make_adapters(
    root: Path,
    config: PretrainedConfig,
    num_adapters: int,
    ranks: Sequence[int],
    dtype: torch.dtype = torch.float32,  # as PEFT keeps adapters of models in half precision
) -> None:
    """ROOT/a000 and so on, on every linear of every layer; `ranks` are cycled over them."""
    linears = _linears(config)
    targets = sorted({name.rpartition(".")[2] for name in linears})
    width = max(3, len(str(num_adapters - 1)))
    for number in range(num_adapters):
        rank = ranks[number % len(ranks)]
        generator = torch.Generator().manual_seed(number + 1)
        tensors: dict[str, torch.Tensor] = {}
        for name, (num_out, num_in) in linears.items():
            a = torch.randn(rank, num_in, generator=generator) * num_in**-0.5
            b = torch.randn(num_out, rank, generator=generator) * 0.02
            tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
            tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
        path = root / f"a{number:0{width}}"
        config_of_adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, inference_mode=True)
        config_of_adapter.save_pretrained(str(path))
        save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})


def _linears(config: PretrainedConfig) -> dict[str, tuple[int, int]]:
    """Module -> (output, input) features, of what adapters change."""
    with torch.device("meta"):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config)
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in TARGETS
    }
