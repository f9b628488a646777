"""Small tokenizers of every kind that decoder-only models use."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The quick brown fox jumps over the lazy dog. It doesn't stop, does it?",
    "SELECT name, price FROM items WHERE price > 10.50 AND name = 'café';",
    '{"name": "Zoë", "tags": ["a", "b"], "ok": true}',
    "naïve façade — über straße, señor; Привет, мир! 你好\uff0c世界。 こんにちは",
    "def main():\n    for i in range(10):\n        print(i)\n",
    "emoji: 😀 👩‍👩‍👧 🇫🇷 and more   spaces",
] * 4
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    # One that is part of the text, and one that is not.
    tokenizer.add_tokens([AddedToken("[tool]", special=False), AddedToken("né", special=False, single_word=True)])
    tokenizer.add_special_tokens([AddedToken("<|turn|>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def _byte_level() -> PreTrainedTokenizerFast:
    """GPT-2, Llama 3, Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrap(tokenizer)


def _sentencepiece_bpe(*, strip: bool) -> PreTrainedTokenizerFast:
    """Llama 2 and Mistral (strip), Gemma: pieces with a space in front, unknown characters as bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    parts = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *parts] if strip else parts)
    ascii_only = [text.encode("ascii", "ignore").decode() for text in TEXT]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*SPECIALS, *BYTES], show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    tokenizer.train_from_iterator(ascii_only, trainer)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    wrapped = _wrap(tokenizer)
    # Bytes are ordinary pieces there, not special tokens.
    return _without_special(wrapped, BYTES)


def _without_special(tokenizer: PreTrainedTokenizerFast, pieces: list[str]) -> PreTrainedTokenizerFast:
    import json

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in set(pieces)]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def _metaspace_unigram() -> PreTrainedTokenizerFast:
    """T5, XGLM, and others that come from SentencePiece's unigram."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrap(tokenizer)


def _wordpiece() -> PreTrainedTokenizerFast:
    """BERT's decoder: words are joined with spaces, punctuation drawn to the word before it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrap(tokenizer)


def _suffix_bpe() -> PreTrainedTokenizerFast:
    """OpenAI GPT: the last piece of a word ends in `</w>`, whose space belongs to the next word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return _wrap(tokenizer)


_MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": _byte_level,
    "llama_bpe": lambda: _sentencepiece_bpe(strip=True),
    "gemma_bpe": lambda: _sentencepiece_bpe(strip=False),
    "metaspace": _metaspace_unigram,
    "wordpiece": _wordpiece,
    "suffix_bpe": _suffix_bpe,
}
KINDS = tuple(_MAKERS)


@cache
def tiny_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    return _MAKERS[kind]()
