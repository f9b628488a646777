"""Training script of the demo: tokenizer, models, adapters, heads and report.

    python -m loraplex_demo.train OUT --scale full|small [--only STEP] [--start STEP]

Each step reads what earlier steps wrote to the world's directory and nothing else, so one step can be repeated alone.
New kinds of weights are further entries of `STEPS`. `fitting` has the training loop, `datasets` the batches,
`hyperparameters` the sizes, `speculation` the heads and draft models.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model
from rich.progress import Progress
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase

from loraplex_demo.builder import BASE_NAME, WorldBuilder, load_tokenizer, make_tokenizer_in, model_config
from loraplex_demo.datasets import Batch, interleave, recall_batches, record_batches
from loraplex_demo.evaluation import Matrix, answered_by_all, exact_match_matrix, matrix_table
from loraplex_demo.fitting import adapter_optimizers, base_optimizers, fit
from loraplex_demo.formats import BASE_FORMAT
from loraplex_demo.hyperparameters import SCALES, AdapterRecipe, Scale, ScaleName
from loraplex_demo.lookahead_training import ModelWithHeads, lookahead_loss
from loraplex_demo.speculation import make_drafts, make_heads, measure_speculation, speculation_table
from loraplex_demo.world import (
    REPORT,
    SHOWCASE,
    Adapter,
    Draft,
    Heads,
    Manifest,
    World,
    heldout_cases,
    open_world,
    read_report,
    records_digest,
    write_json,
    write_manifest,
)
from loraplex_training.progress import quiet_transformers, training_progress

_SHOWCASE_STREAM = "demo"
_NUM_SHOWCASE_DRAWN = 64
_RECALL_EVERY = 6


def make_tokenizer(builder: WorldBuilder) -> None:
    with builder.task("tokenizer", 1) as advance:
        tokenizer = make_tokenizer_in(builder, builder.base_path, builder.scale.vocab_size)
        advance(f"{len(tokenizer)} pieces")


def all_records(builder: WorldBuilder, tokenizer: PreTrainedTokenizerBase, stream: str) -> Iterator[Batch]:
    """Records in all formats, without end."""
    scale = builder.scale
    return record_batches(
        tokenizer, stream=builder.stream(stream), kinds=scale.kinds, shares=builder.formats(), num_rows=scale.num_rows
    )


def make_base(builder: WorldBuilder) -> None:
    """Trains the base: copying first, then records in all formats. Adapters are trained on its stored bfloat16."""
    tokenizer = load_tokenizer(builder)
    model = LlamaForCausalLM(model_config(builder.scale.base_shape))
    scale = builder.scale
    recall = recall_batches(
        tokenizer, stream=builder.stream("recall"), num_rows=2 * scale.num_rows
    )  # rows half as long
    records = all_records(builder, tokenizer, "base")
    mixed = interleave(records, recall, every=_RECALL_EVERY)
    num_steps = scale.num_recall_steps + scale.num_base_steps
    with builder.task("base model", num_steps) as advance:
        fit(
            model,
            base_optimizers(model, lr=scale.base_lr),
            chain(islice(recall, scale.num_recall_steps), mixed),
            num_steps=num_steps,
            on_step=lambda loss: advance(f"loss {loss:.3f}"),
        )
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(builder.base_path)


def polish_base(builder: WorldBuilder) -> None:
    """Trains the base for more rounds on records; the learning rate rises and falls once in each round."""
    tokenizer, scale = load_tokenizer(builder), builder.scale
    model = LlamaForCausalLM.from_pretrained(builder.base_path, dtype=torch.float32)
    for round_idx in range(scale.num_polish_rounds):
        name = "polish" if round_idx == 0 else f"polish {round_idx + 1}"
        records = all_records(builder, tokenizer, name)
        with builder.task(name, scale.num_polish_steps) as advance:
            fit(
                model,
                base_optimizers(model, lr=scale.polish_lr),
                records,
                num_steps=scale.num_polish_steps,
                on_step=lambda loss, advance=advance: advance(f"loss {loss:.3f}"),
            )
        torch.nn.Module.to(model, torch.bfloat16)  # the next round starts from the stored bfloat16 weights
        model.save_pretrained(builder.base_path)
        torch.nn.Module.to(model, torch.float32)


def train_lookahead(builder: WorldBuilder) -> None:
    """Trains the base together with temporary heads in a last round, before the adapters are trained on it."""
    tokenizer, scale = load_tokenizer(builder), builder.scale
    model = LlamaForCausalLM.from_pretrained(builder.base_path, dtype=torch.float32)
    both = ModelWithHeads(model, scale.num_lookahead_tokens)
    records = all_records(builder, tokenizer, "foresight")  # the seed of the committed weights
    with builder.task("lookahead", scale.num_lookahead_steps) as advance:
        fit(
            both,
            base_optimizers(both, lr=scale.lookahead_lr),
            records,
            num_steps=scale.num_lookahead_steps,
            on_step=lambda loss: advance(f"loss {loss:.3f}"),
            loss_of=lookahead_loss,
        )
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(builder.base_path)


def make_adapters(builder: WorldBuilder) -> None:
    shutil.rmtree(builder.adapters_root, ignore_errors=True)
    for recipe in builder.scale.adapters:
        _make_adapter(builder, recipe)


def write_report(builder: WorldBuilder) -> None:
    """Writes the accuracy of the saved files in the dtypes that they are served in."""
    scale = builder.scale
    cases = heldout_cases(scale.num_eval_records, scale.kinds, "report")
    paths = [builder.adapters_root / recipe.name for recipe in scale.adapters]
    matrices: dict[str, Matrix] = {}
    with builder.task("exact match", 2 * (1 + len(paths))) as advance:
        for dtype_name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            matrices[dtype_name] = exact_match_matrix(
                builder.base_path, paths, cases, dtype, lambda name=dtype_name: advance(name)
            )
    found = {"num_heldout_records": len(cases), "exact_match": matrices}
    write_json(builder.root / REPORT, read_report(builder.root) | found)


def choose_showcase(builder: WorldBuilder) -> None:
    """Writes the held-out cases that the demo shows: those that every adapter answers correctly in both dtypes."""
    cases = heldout_cases(_NUM_SHOWCASE_DRAWN, builder.scale.kinds, _SHOWCASE_STREAM)
    paths = {recipe.name: builder.adapters_root / recipe.name for recipe in builder.scale.adapters}
    chosen = set(range(len(cases)))
    with builder.task("showcase", 2) as advance:
        for dtype in (torch.float32, torch.bfloat16):
            chosen &= set(answered_by_all(builder.base_path, paths, BASE_FORMAT, cases, dtype))
            advance(f"{len(chosen)} of {len(cases)}")
    listed = {"stream": _SHOWCASE_STREAM, "num_drawn": len(cases), "cases": sorted(chosen)}
    write_json(builder.root / SHOWCASE, listed)


StepName = Literal[
    "tokenizer", "base", "polish", "lookahead", "adapters", "report", "showcase", "heads", "drafts", "speculation"
]
STEPS: dict[StepName, Callable[[WorldBuilder], None]] = {
    "tokenizer": make_tokenizer,
    "base": make_base,
    "polish": polish_base,
    "lookahead": train_lookahead,
    "adapters": make_adapters,
    "report": write_report,
    "showcase": choose_showcase,
    "heads": make_heads,
    "drafts": make_drafts,
    "speculation": measure_speculation,
}


def make_world(
    out_dir: Path,
    *,
    scale: ScaleName | Scale = "full",
    seed: int = 0,
    progress: Progress | None = None,
    only: StepName | None = None,
    start: StepName = "tokenizer",
) -> World:
    """Trains a world into `out_dir`, or repeats one step of it, or all from `start` on, and opens it."""
    out_dir.mkdir(parents=True, exist_ok=True)
    builder = WorldBuilder(
        out_dir, SCALES[scale] if isinstance(scale, str) else scale, seed, progress or Progress(disable=True)
    )
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        for name in (only,) if only else get_args(StepName)[get_args(StepName).index(start) :]:
            torch.manual_seed(seed)
            STEPS[name](builder)
    write_manifest(out_dir, _manifest(builder))
    return open_world(out_dir)


def _manifest(builder: WorldBuilder) -> Manifest:
    """Lists heads and draft models only if their folders exist: a world can be served without them."""
    heads = [each for each in builder.scale.heads if (builder.adapters_root / each.name).is_dir()]
    drafts = [each for each in builder.scale.drafts if (builder.drafts_root / each.name).is_dir()]
    return Manifest(
        scale=builder.scale.name,
        seed=builder.seed,
        kinds=builder.scale.kinds,
        base_format=BASE_FORMAT,
        adapters=tuple(Adapter(each.name, each.name, each.rank, each.summary) for each in builder.scale.adapters),
        heads=tuple(Heads(each.name, each.adapter, each.num_heads, each.is_combined) for each in heads),
        drafts=tuple(Draft(each.name, each.vocab_size is not None) for each in drafts),
        digest=records_digest(builder.scale.kinds),
    )


def _make_adapter(builder: WorldBuilder, recipe: AdapterRecipe) -> None:
    tokenizer = load_tokenizer(builder)
    base = AutoModelForCausalLM.from_pretrained(builder.base_path, dtype=torch.float32)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.target_modules),
        use_rslora=recipe.use_rslora,
        rank_pattern=dict(recipe.rank_pattern),
        alpha_pattern=dict(recipe.alpha_pattern),
        lora_dropout=0.0,
        bias="none",
    )
    model = get_peft_model(base, config)
    batches = record_batches(
        tokenizer,
        stream=builder.stream(f"adapter {recipe.name}"),
        kinds=builder.scale.kinds,
        shares={recipe.name: 1.0},
        num_rows=builder.scale.num_rows,
    )
    num_steps = recipe.num_rounds * builder.scale.num_adapter_steps
    with builder.task(f"adapter {recipe.name}", num_steps) as advance:
        optimizers = adapter_optimizers(model, lr=builder.scale.adapter_lr)
        fit(model, optimizers, batches, num_steps=num_steps, on_step=lambda loss: advance(f"loss {loss:.3f}"))
    _save_adapter(model, builder.adapters_root / recipe.name, getattr(torch, recipe.dtype))


def _save_adapter(model: Any, path: Path, dtype: torch.dtype) -> None:
    """Saves the adapter as PEFT does, without the empty model card."""
    assert isinstance(model, PeftModel)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    # "auto" would ask the Hub whether the vocabulary has grown.
    model.save_pretrained(str(path), save_embedding_layers=False)
    (path / "README.md").unlink(missing_ok=True)


def main(
    out: Annotated[Path, typer.Argument(help="Directory to write the world to.")],
    scale: Annotated[ScaleName, typer.Option(help="small: minutes, for tests; full: what the package ships.")] = "full",
    seed: Annotated[int, typer.Option(help="Another seed gives another world of the same kind.")] = 0,
    only: Annotated[StepName | None, typer.Option(help="Repeat one step on what is already there.")] = None,
    start: Annotated[StepName, typer.Option(help="Repeat this step and all after it.")] = "tokenizer",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; more than two gain little at this size.")] = 2,
) -> None:
    """Train the demo's world."""
    torch.set_num_threads(threads)
    started_s = time.monotonic()
    with training_progress() as progress:
        world = make_world(out, scale=scale, seed=seed, progress=progress, only=only, start=start)
    print(f"{world.root} is ready after {time.monotonic() - started_s:.0f} s.")
    report = read_report(world.root)
    for dtype, matrix in report.get("exact_match", {}).items():
        print(f"\n{dtype}: share of held-out answers that are exactly right", matrix_table(matrix), sep="\n")
    if "speculation" in report:
        print("\ntokens per step of the model, greedily", speculation_table(report["speculation"]), sep="\n")


if __name__ == "__main__":
    typer.run(main)
