"""A tiny model on disk with LoRA adapters, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANKS = (2, 4, 8)
LEAN_SCALE = 0.5  # measured: the first hidden value behind the last norm, see `lean`
# ChatML, with tools and tool calls as Qwen and Hermes write them.
CHAT_SPECIALS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True)
class TinyWorld:
    model: Path
    adapters: Path
    names: tuple[str, ...]


def byte_tokenizer(special_tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Every byte is a token; <s>, </s>, <pad> and `special_tokens` come behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _fast(tokenizer, special_tokens)


def _fast(tokenizer: Tokenizer, special_tokens: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>", *special_tokens])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def word_tokenizer(text: str, size: int, special_tokens: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """`byte_tokenizer` with a token for each word of `text`, and further ones that no text becomes, `size` in all
    (special tokens apart)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocab, merges = dict.fromkeys(alphabet), dict[tuple[str, str], None]()
    for word, _ in splitter.pre_tokenize_str(text):
        for end in range(1, len(word)):
            merges[word[:end], word[end]] = None
            vocab[word[: end + 1]] = None
    more = (first + second for first in alphabet for second in alphabet if first + second not in vocab)
    names = [*vocab, *islice(more, size - len(vocab))]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=list(merges)))
    tokenizer.pre_tokenizer = splitter
    return _fast(tokenizer, special_tokens)


def make_world(
    root: Path,
    num_adapters: int = 4,
    *,
    hidden_size: int = 32,
    num_layers: int = 2,
    max_context: int = 512,
    chat_template: str | None = None,
    special_tokens: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> TinyWorld:
    """Writes model and adapters under `root`. Adapters are strong enough that each changes the text. `tokenizer` is by
    default that of bytes, with `special_tokens`."""
    torch.manual_seed(0)
    tokenizer = tokenizer or byte_tokenizer(special_tokens)
    tokenizer.chat_template = chat_template
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_context,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    names: list[str] = []
    for i in range(num_adapters):
        torch.manual_seed(100 + i)
        rank = RANKS[i % len(RANKS)]
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, init_lora_weights=False)
        peft = get_peft_model(model, lora)
        names.append(f"a{i:03d}")
        peft.save_pretrained(root / "adapters" / names[-1])
        model = peft.unload()
    return TinyWorld(root / "model", root / "adapters", tuple(names))


def lean(model: Path, logits: Mapping[int, float]) -> None:
    """Changes a model of `make_world` so that its tokens have about so much on their logits, whatever the text: the
    first hidden value becomes constant."""
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][:, 0] = 1.0
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    weights["lm_head.weight"][:, 0] = 0.0
    for token, logit in logits.items():
        weights["lm_head.weight"][token, 0] = logit / LEAN_SCALE
    save_file(weights, model / "model.safetensors", {"format": "pt"})
