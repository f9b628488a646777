"""Medusa heads and draft models of the demo, and their acceptance report.

The report simulates greedy verification on held-out records with plain Transformers: how many tokens one step of the
target gives when it verifies drafts of each proposer. Heads are trained by the same code as users' heads
(`loraplex_training`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
from rich.progress import Progress
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from loraplex_demo.builder import BASE_NAME, WorldBuilder, load_tokenizer, make_tokenizer_in, model_config
from loraplex_demo.datasets import interleave, recall_batches, record_batches
from loraplex_demo.fitting import base_optimizers, fit
from loraplex_demo.hyperparameters import DraftRecipe, HeadsRecipe
from loraplex_demo.tokenizer import NUM_SPECIAL
from loraplex_demo.world import MAX_NEW_TOKENS, REPORT, heldout_cases, read_report, write_json
from loraplex_training.fitting import FitRecipe, count_steps, measure
from loraplex_training.heads import read_heads
from loraplex_training.hidden_states import piece_of
from loraplex_training.medusa import MedusaRecipe, examples_of_prompts, train_medusa
from loraplex_training.target import Example, Target, load_target

Table = dict[str, dict[str, float]]  # heads or draft -> adapter ("": none) -> tokens per step

_RECALL_EVERY = 6
_BATCH_SIZE = 64


# --- making ---------------------------------------------------------------------------------------------------------


def make_heads(builder: WorldBuilder) -> None:
    for recipe in builder.scale.heads:
        _make_heads(builder, recipe)


def make_drafts(builder: WorldBuilder) -> None:
    shutil.rmtree(builder.drafts_root, ignore_errors=True)
    for recipe in builder.scale.drafts:
        _make_draft(builder, recipe)


def _make_heads(builder: WorldBuilder, recipe: HeadsRecipe) -> None:
    scale = builder.scale
    out = builder.adapters_root / recipe.name
    shutil.rmtree(out, ignore_errors=True)
    fit_recipe = FitRecipe(scale.heads_epochs, scale.heads_lr, scale.heads_batch_rows, builder.seed)
    medusa = MedusaRecipe(recipe.num_heads, 1, fit_recipe, MAX_NEW_TOKENS, _BATCH_SIZE)
    lora = builder.adapter_path(recipe.adapter)
    target = _target(builder, recipe.adapter)
    prompts = builder.train_prompts(f"heads {recipe.name}", scale.num_heads_prompts)
    with builder.task(recipe.name, 3) as advance:
        examples = examples_of_prompts(target, prompts, medusa, Progress(disable=True))
        advance("generated")
        report = train_medusa(
            target,
            examples,
            medusa,
            out=out,
            base_name=BASE_NAME,
            dtype=torch.bfloat16,
            combine_with=lora if recipe.is_combined else None,
            progress=Progress(disable=True),
        )
        advance(f"{report.accuracy.tokens_per_step:.2f} tokens per step", 2)


def _make_draft(builder: WorldBuilder, recipe: DraftRecipe) -> None:
    """Trains a draft model like the base: copying first, then records in all formats with equal shares."""
    scale, path = builder.scale, builder.drafts_root / recipe.name
    if recipe.vocab_size is None:
        tokenizer = load_tokenizer(builder)
        tokenizer.save_pretrained(path)
    else:
        tokenizer = make_tokenizer_in(builder, path, recipe.vocab_size)
    model = LlamaForCausalLM(model_config(recipe.shape(scale.vocab_size)))
    recall = recall_batches(tokenizer, stream=builder.stream(f"recall {recipe.name}"), num_rows=2 * scale.num_rows)
    records = record_batches(
        tokenizer,
        stream=builder.stream(recipe.name),
        kinds=scale.kinds,
        shares=dict.fromkeys(builder.formats(), 1.0),
        num_rows=scale.num_rows,
    )
    mixed = interleave(records, recall, every=_RECALL_EVERY)
    num_steps = scale.num_draft_recall_steps + scale.num_draft_steps
    with builder.task(recipe.name, num_steps) as advance:
        fit(
            model,
            base_optimizers(model, lr=scale.draft_lr),
            chain(islice(recall, scale.num_draft_recall_steps), mixed),
            num_steps=num_steps,
            on_step=lambda loss: advance(f"loss {loss:.3f}"),
        )
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(path)


def _target(builder: WorldBuilder, adapter: str) -> Target:
    device = torch.device("cpu")
    return load_target(str(builder.base_path), builder.adapter_path(adapter), dtype=torch.float32, device=device)


# --- the report -----------------------------------------------------------------------------------------------------


def measure_speculation(builder: WorldBuilder) -> None:
    """Adds the tokens per step of every adapter with all heads and draft models to the report."""
    scale = builder.scale
    prompts = [case.prompt for case in heldout_cases(scale.num_speculation_records, scale.kinds, "speculation")]
    medusa = MedusaRecipe(max_new_tokens=MAX_NEW_TOKENS, batch_size=_BATCH_SIZE)
    found: Table = {each.name: {} for each in (*scale.heads, *scale.drafts)}
    adapters = ["", *(recipe.name for recipe in scale.adapters)]
    with builder.task("speculation", len(adapters)) as advance:
        for adapter in adapters:
            target = _target(builder, adapter)
            examples = examples_of_prompts(target, prompts, medusa, Progress(disable=True))
            for heads in scale.heads:
                found[heads.name][adapter] = _with_heads(builder, heads, target, examples)
            for draft in scale.drafts:
                found[draft.name][adapter] = _with_draft(builder, draft, target, examples)
            advance(adapter)
    entry = {
        "num_heldout_records": len(prompts),
        "num_drafted": {each.name: each.num_heads for each in scale.heads}
        | {each.name: scale.num_drafted for each in scale.drafts},
        "tokens_per_step": found,
    }
    write_json(builder.root / REPORT, read_report(builder.root) | {"speculation": entry})


def speculation_table(entry: dict[str, Any]) -> str:
    """Rows are heads and drafts, columns adapters."""
    table: Table = entry["tokens_per_step"]
    adapters = list(next(iter(table.values()), {}))
    header = f"{'':16}" + "".join(f"{name or '(none)':>8}" for name in adapters)
    return "\n".join(
        [header, *(f"{name:16}" + "".join(f"{row[each]:>8.2f}" for each in adapters) for name, row in table.items())]
    )


def _with_heads(builder: WorldBuilder, recipe: HeadsRecipe, target: Target, examples: Sequence[Example]) -> float:
    heads = read_heads(builder.adapters_root / recipe.name)
    piece = piece_of(examples, target.hidden_states(examples), heads.num_heads)
    return round(measure(heads, target.head, [piece]).tokens_per_step, 4)


def _with_draft(builder: WorldBuilder, recipe: DraftRecipe, target: Target, examples: Sequence[Example]) -> float:
    path = builder.drafts_root / recipe.name
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    num_tokens = num_steps = 0
    for example in examples:
        right = agreeing_tokens(model, tokenizer, target.tokenizer, example)[
            1:
        ]  # the first one comes from the prompt's step
        num_tokens += len(right)
        num_steps += count_steps(runs_of(right, builder.scale.num_drafted))
    return round(num_tokens / max(1, num_steps), 4)


def runs_of(right: Sequence[bool], most: int) -> list[int]:
    """Number of right tokens in a row from each position on, at most `most`."""
    runs = [0] * (len(right) + 1)
    for place in range(len(right) - 1, -1, -1):
        runs[place] = min(most, runs[place + 1] + 1) if right[place] else 0
    return runs[:-1]


@torch.inference_mode()
def agreeing_tokens(
    model: Any, tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase, example: Example
) -> list[bool]:
    """True for each token of the example's answer that the draft model predicts, given all text before the token.

    A greedy chain counts only while it agrees with the text, so one pass over the text shows how far each chain gets.
    A draft model with its own tokenizer agrees with a token if all of its pieces that touch the token are right; a
    chain that starts inside such a piece counts as one that starts before it.
    """
    given, answer = example.token_ids[: example.num_given], example.token_ids[example.num_given :]
    pieces = _reencode(tokenizer, target_tokenizer, answer)
    start = [*_reencode(tokenizer, target_tokenizer, given)]
    logits = model(input_ids=torch.tensor([start + pieces]), use_cache=False).logits[0, len(start) - 1 : -1]
    hits = (logits.argmax(dim=-1) == torch.tensor(pieces)).tolist()
    # By byte: a byte-level piece has one character for each. Special tokens count as one.
    wrong_bytes = {
        byte for (begin, end), hit in zip(_spans(tokenizer, pieces), hits, strict=True) if not hit
        for byte in range(begin, end)
    }  # fmt: skip
    return [wrong_bytes.isdisjoint(range(begin, end)) for begin, end in _spans(target_tokenizer, answer)]


def _reencode(
    tokenizer: PreTrainedTokenizerBase, target_tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]
) -> list[int]:
    """The same text in the draft's tokens; the special tokens of both vocabularies are the same."""
    head = [token for token in token_ids[:1] if token < NUM_SPECIAL]
    tail = [token for token in token_ids[-1:] if token < NUM_SPECIAL]
    inner = list(token_ids[len(head) : len(token_ids) - len(tail)])
    return [*head, *tokenizer.encode(target_tokenizer.decode(inner), add_special_tokens=False), *tail]


def _spans(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Begin and end, in bytes, of each token."""
    spans: list[tuple[int, int]] = []
    position = 0
    for token_id in token_ids:
        length = 1 if token_id < NUM_SPECIAL else len(str(tokenizer.convert_ids_to_tokens(token_id)))
        spans.append((position, position + length))
        position += length
    return spans
