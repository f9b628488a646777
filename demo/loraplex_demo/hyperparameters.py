"""Hyperparameters of the demo: sizes, adapters, heads and draft models.

The adapters differ on purpose in rank, target modules, scaling and stored dtype, as the adapters of real users do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from loraplex_demo.records import KINDS

ScaleName = Literal["full", "small"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class AdapterRecipe:
    """One PEFT LoRA adapter, named after its output format."""

    name: str
    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    use_rslora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    alpha_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    num_rounds: int = 1  # formats that repeat no key beside its value take longer

    @property
    def summary(self) -> str:
        """The recipe in one line, for the demo's table."""
        parts = [f"rank {self.rank}", *(f"{key} {rank}" for key, rank in self.rank_pattern.items())]
        wide = set(self.target_modules) == {*ATTENTION, *MLP}
        targets = "all linears" if wide else ", ".join(name.removesuffix("_proj") for name in self.target_modules)
        return f"{', '.join(parts)}{', rslora' if self.use_rslora else ''}; {targets}"


@dataclass(frozen=True)
class HeadsRecipe:
    """Medusa heads that draft for one adapter, or for the base model alone."""

    name: str  # their adapter id
    adapter: str  # "": the base model
    is_combined: bool = False  # a copy of the LoRA lies beside the heads: one id brings both
    num_heads: int = 4


@dataclass(frozen=True)
class ModelShape:
    """Shape of a Llama model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    head_dim: int
    num_kv_heads: int


@dataclass(frozen=True)
class DraftRecipe:
    """A smaller model that drafts for the base with any adapter; the text so far shows it the format."""

    name: str
    vocab_size: int | None = None  # of a tokenizer of its own; None: the base model's
    hidden_size: int = 96
    intermediate_size: int = 256
    num_layers: int = 2
    head_dim: int = 32
    num_kv_heads: int = 3

    def shape(self, base_vocab_size: int) -> ModelShape:
        return ModelShape(
            self.vocab_size or base_vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_layers,
            self.head_dim,
            self.num_kv_heads,
        )


ADAPTERS = (
    AdapterRecipe("json", 8, 16, ATTENTION, dtype="bfloat16"),
    AdapterRecipe("yaml", 4, 8, ("q_proj", "v_proj")),
    AdapterRecipe("sql", 16, 32, (*ATTENTION, *MLP), dtype="bfloat16", num_rounds=4),
    AdapterRecipe("xml", 8, 8, ATTENTION, use_rslora=True),
    AdapterRecipe(
        "toml",
        8,
        16,
        MLP,
        dtype="float16",
        rank_pattern={"down_proj": 16},
        alpha_pattern={"down_proj": 32},
    ),
    AdapterRecipe("ini", 4, 8, (*ATTENTION, *MLP)),
)


# Heads alone for the base and for one adapter, and a combined directory for another: both layouts that users have.
HEADS = (
    HeadsRecipe("base-heads", ""),
    HeadsRecipe("json-heads", "json"),
    HeadsRecipe("sql-with-heads", "sql", is_combined=True),
)

DRAFTS = (DraftRecipe("draft"), DraftRecipe("draft-universal", vocab_size=512))


@dataclass(frozen=True)
class Scale:
    """The sizes of one world."""

    name: str
    kinds: tuple[str, ...]
    adapters: tuple[AdapterRecipe, ...]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_recall_steps: int
    num_base_steps: int
    num_adapter_steps: int
    num_eval_records: int
    num_rows: int = 32
    head_dim: int = 32
    num_kv_heads: int = 2
    base_lr: float = 7e-3
    num_polish_rounds: int = 1
    num_polish_steps: int = 400  # of each round
    polish_lr: float = 4e-3
    num_lookahead_steps: int = 900
    num_lookahead_tokens: int = 5  # tokens after the next one
    lookahead_lr: float = 4e-3
    adapter_lr: float = 3e-3
    heads: tuple[HeadsRecipe, ...] = HEADS
    num_heads_prompts: int = 2400
    heads_epochs: int = 6
    heads_lr: float = 1e-2
    heads_batch_rows: int = 512
    drafts: tuple[DraftRecipe, ...] = DRAFTS
    num_draft_recall_steps: int = 600
    num_draft_steps: int = 2400
    draft_lr: float = 7e-3
    num_drafted: int = 4  # in the report; heads draft as many as there are
    num_speculation_records: int = 64

    @property
    def base_shape(self) -> ModelShape:
        return ModelShape(
            self.vocab_size,
            self.hidden_size,
            self.intermediate_size,
            self.num_layers,
            self.head_dim,
            self.num_kv_heads,
        )


SCALES: dict[ScaleName, Scale] = {
    "full": Scale(
        name="full",
        kinds=KINDS,
        adapters=ADAPTERS,
        vocab_size=1024,
        hidden_size=192,
        intermediate_size=512,
        num_layers=4,
        num_recall_steps=400,
        num_base_steps=1600,
        num_polish_rounds=2,
        num_polish_steps=1200,
        num_adapter_steps=120,
        num_eval_records=512,
    ),
    "small": Scale(
        name="small",
        kinds=("person", "book"),
        adapters=tuple(recipe for recipe in ADAPTERS if recipe.name == "json"),
        vocab_size=768,
        hidden_size=128,
        intermediate_size=256,
        num_layers=3,
        num_recall_steps=300,
        num_base_steps=450,
        num_polish_steps=400,
        num_lookahead_steps=100,
        num_adapter_steps=60,
        num_eval_records=64,
        heads=(HeadsRecipe("base-heads", ""), HeadsRecipe("json-with-heads", "json", is_combined=True)),
        num_heads_prompts=300,
        num_draft_recall_steps=100,
        num_draft_steps=200,
        num_speculation_records=32,
    ),
}
