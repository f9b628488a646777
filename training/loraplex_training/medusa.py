"""Training pipeline of Medusa heads: from prompts or texts to a directory.

Order: encode, generate, compute hidden states, fit, measure, write. The output directory appears only when complete.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.progress import Progress

from loraplex_adapters.formats.files import MEDUSA_WEIGHTS_NAME, MODEL_CONFIG_NAME, TEMPLATE_NAMES, WANTED_NAMES
from loraplex_contracts.errors import DiskFull, InvalidArgument
from loraplex_training.corpus import Prompt
from loraplex_training.fitting import Accuracy, FitRecipe, fit_heads, measure, num_steps
from loraplex_training.heads import MedusaHeads, write_heads
from loraplex_training.hidden_states import StateCache
from loraplex_training.output import disk_errors, new_directory, scratch_directory
from loraplex_training.progress import task
from loraplex_training.target import Example, Target, in_batches, out_of_memory


@dataclass(frozen=True, slots=True)
class MedusaRecipe:
    """Shape and training of the heads. `heldout_share` of the examples are kept for measuring."""

    num_heads: int = 4
    num_layers: int = 1
    fit: FitRecipe = field(default_factory=FitRecipe)
    max_new_tokens: int = 256
    batch_size: int = 32  # examples that the target runs at once
    heldout_share: float = 0.1


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a training run."""

    num_train_positions: int
    num_skipped: int  # examples that are too long, or too short to draft in
    accuracy: Accuracy
    heldout: tuple[Example, ...] = ()


def examples_of_prompts(
    target: Target, prompts: Sequence[Prompt], recipe: MedusaRecipe, progress: Progress
) -> list[Example]:
    """Each prompt with the target's own answer, because drafts are verified against the target's text."""
    encoded = _distinct([target.encode(prompt) for prompt in prompts])
    room = target.max_context_tokens - recipe.max_new_tokens
    fitting = [tokens for tokens in encoded if 0 < len(tokens) <= room]
    if not fitting:
        raise InvalidArgument(
            f"no prompt leaves room for {recipe.max_new_tokens} new tokens in {target.max_context_tokens}; "
            "shorten the prompts or lower --max-new-tokens",
            field="--max-new-tokens",
        )
    made: list[Example] = [Example([], 0)] * len(fitting)
    lengths, are_equal = [len(tokens) for tokens in fitting], not target.takes_padding()
    with task(progress, "generating", len(fitting)) as advance:
        for batch in in_batches(lengths, recipe.batch_size, are_equal=are_equal):
            examples = target.generate([fitting[idx] for idx in batch], recipe.max_new_tokens)
            for idx, example in zip(batch, examples, strict=True):
                made[idx] = example
            advance(f"{sum(len(each.token_ids) - each.num_given for each in made)} tokens", len(batch))
    return made


def examples_of_texts(target: Target, texts: Sequence[str]) -> list[Example]:
    """Each text, cut at the context length."""
    encoded = _distinct([target.encode(text)[: target.max_context_tokens] for text in texts])
    return [Example(tokens, 0) for tokens in encoded]


def _distinct(sequences: Sequence[list[int]]) -> list[list[int]]:
    """Drops duplicates: a text that is both learned and held out would measure nothing."""
    return list({tuple(tokens): tokens for tokens in sequences}.values())


def train_medusa(
    target: Target,
    examples: Sequence[Example],
    recipe: MedusaRecipe,
    *,
    out: Path,
    base_name: str,
    dtype: torch.dtype | None = None,
    combine_with: Path | None = None,
    progress: Progress,
    num_given: int | None = None,
) -> Report:
    """Writes the heads to the new directory `out`, in `dtype` (the target's if None), beside a copy of the LoRA in
    `combine_with` if there is one. `num_given` is how many different examples there were before some were left out,
    for the report. Raises InvalidArgument, DiskFull and OutOfMemory."""
    usable = [each for each in examples if len(each.token_ids) >= each.first + 3]
    if len(usable) < 2:
        raise InvalidArgument("too little to train on: at least two prompts or texts with some tokens are needed")
    with new_directory(out) as folder, scratch_directory(out) as scratch, out_of_memory():
        _check_room(scratch, usable, target, recipe)
        chosen = _held_out(len(usable), recipe)
        train, heldout = _cache_states(target, usable, chosen, recipe, scratch, progress)
        heads = MedusaHeads(recipe.num_heads, recipe.num_layers, target.hidden_size, target.device)
        with task(progress, "training", num_steps(train, recipe.fit)) as advance:
            fit_heads(heads, target.head, train, recipe.fit, advance)
        if not all(parameter.isfinite().all() for parameter in heads.parameters()):
            raise InvalidArgument(f"training went astray with --lr {recipe.fit.lr}; try a lower one", field="--lr")
        saved = heads.to(dtype or target.dtype)
        accuracy = measure(saved, target.head, heldout.pieces())
        write_heads(folder, saved, base_name=base_name, dtype=dtype or target.dtype)
        if combine_with is not None:
            with disk_errors(out):
                _copy_adapter(combine_with, folder)
    num_skipped = (num_given or len(examples)) - len(usable)
    return Report(train.num_rows, num_skipped, accuracy, tuple(usable[idx] for idx in sorted(chosen)))


def _copy_adapter(adapter: Path, folder: Path) -> None:
    """Copies all that a server reads of the adapter, except for the two files that the heads have written there."""
    for name in {*WANTED_NAMES, *TEMPLATE_NAMES} - {MEDUSA_WEIGHTS_NAME, MODEL_CONFIG_NAME}:
        if (adapter / name).is_file():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(adapter / name, folder / name)


def _check_room(scratch: Path, examples: Sequence[Example], target: Target, recipe: MedusaRecipe) -> None:
    """Raises DiskFull before the work if the hidden states do not fit."""
    num_rows = sum(len(each.token_ids) - each.first - 2 for each in examples)
    wanted = num_rows * (target.hidden_size * target.dtype.itemsize + 4 * recipe.num_heads)
    free = shutil.disk_usage(scratch).free
    if wanted > free:
        raise DiskFull(
            f"the hidden states of {num_rows} positions need {wanted / 2**20:,.1f} MiB beside --out, where "
            f"{free / 2**20:,.1f} MiB are free; give fewer examples or another --out",
            resource=str(scratch.parent),
        )


def _held_out(num_examples: int, recipe: MedusaRecipe) -> set[int]:
    """Indices of the examples that are measured with, and not learned."""
    order = list(range(num_examples))
    random.Random(recipe.fit.seed).shuffle(order)
    return set(order[: min(len(order) - 1, max(1, round(recipe.heldout_share * len(order))))])


def _cache_states(
    target: Target,
    examples: Sequence[Example],
    is_heldout: set[int],
    recipe: MedusaRecipe,
    scratch: Path,
    progress: Progress,
) -> tuple[StateCache, StateCache]:
    """Caches of the hidden states of training and held-out examples."""
    caches: list[StateCache] = []
    for name in ("train", "heldout"):
        (scratch / name).mkdir()
        caches.append(StateCache(scratch / name, recipe.num_heads))
    with task(progress, "hidden states", len(examples)) as advance:
        for batch in in_batches([len(each.token_ids) for each in examples], recipe.batch_size):
            chosen = [examples[idx] for idx in batch]
            for idx, example, hidden in zip(batch, chosen, target.hidden_states(chosen), strict=True):
                caches[idx in is_heldout].add(example, hidden)
            advance(steps=len(batch))
    for cache in caches:
        cache.flush()
    return caches[0], caches[1]
