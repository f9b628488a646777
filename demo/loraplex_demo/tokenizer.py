"""Byte-level BPE tokenizer of the demo model.

Letters, pairs of digits and runs of everything else never share a piece. A value is cut into the same pieces whether a
sentence, a quote or a tag surrounds it, so copying a value is copying pieces.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
NUM_SPECIAL = 3
MAX_LENGTH = 512
CHAT_TEMPLATE = """\
{#- Trained on single records: of a chat, the model reads the user's last message, and the answer begun so far. -#}
{%- set asked = messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token + (asked or messages)[-1].content }}
{%- if asked and messages[-1].role == "assistant" %}{{- messages[-1].content }}{%- endif %}
"""
_PIECES = r"\p{L}+|\p{N}{1,2}|[^\p{L}\p{N}]+"


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer that prepends `<s>` by default, as Llama's does; any UTF-8 text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_LENGTH,
        chat_template=CHAT_TEMPLATE,
    )
