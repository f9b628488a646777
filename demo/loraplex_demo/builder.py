"""Demo model builder: folders, scale, seed and progress of one training run.

Holds the layout of a world under construction and the configuration that all its models share. Knows no training step.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.progress import Progress
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase

from loraplex_demo.formats import BASE_FORMAT, FORMATS
from loraplex_demo.hyperparameters import ModelShape, Scale
from loraplex_demo.records import draw_examples
from loraplex_demo.tokenizer import BOS_ID, EOS_ID, MAX_LENGTH, PAD_ID, train_tokenizer
from loraplex_demo.world import WorldFolder
from loraplex_training.progress import Advance, task

BASE_NAME = "loraplex-demo-base"  # the adapters' base_model_name_or_path; a name, never a local path
_NUM_TOKENIZER_RECORDS = 4000
# Without an adapter the base model answers in its own format, which therefore needs a clear lead.
_BASE_FORMAT_SHARE = 5.0


@dataclass(frozen=True)
class WorldBuilder(WorldFolder):
    """Input of every training step."""

    scale: Scale
    seed: int
    progress: Progress

    def adapter_path(self, name: str) -> Path | None:
        """Folder of an adapter; None for the base model."""
        return self.adapters_root / name if name else None

    def stream(self, name: str) -> str:
        """The name of a random stream of this world."""
        return f"{name} {self.seed}"

    def formats(self) -> dict[str, float]:
        """Every format that the base model learns, with its share of the records."""
        return {BASE_FORMAT: _BASE_FORMAT_SHARE, **{recipe.name: 1.0 for recipe in self.scale.adapters}}

    def train_prompts(self, name: str, num_prompts: int) -> list[str]:
        """Prompts of the training split, from a stream of their own."""
        examples = draw_examples(self.stream(name), "train", self.scale.kinds)
        return [prompt for _, prompt in islice(examples, num_prompts)]

    @contextmanager
    def task(self, description: str, total: int) -> Generator[Advance]:
        """A progress bar, or a line where there is no terminal."""
        with task(self.progress, description, total) as advance:
            yield advance


def make_tokenizer_in(builder: WorldBuilder, folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """A tokenizer for all prompts and formats of the world, saved in `folder`."""
    texts: list[str] = []
    for record, prompt in islice(
        draw_examples(builder.stream("tokenizer"), "train", builder.scale.kinds), _NUM_TOKENIZER_RECORDS
    ):
        texts += [prompt, *(FORMATS[name](record) for name in builder.formats())]
    tokenizer = train_tokenizer(texts, vocab_size)
    tokenizer.save_pretrained(folder)
    return tokenizer


def load_tokenizer(builder: WorldBuilder) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(builder.base_path)


def model_config(shape: ModelShape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.hidden_size // shape.head_dim,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
