"""Makes the demo's world: tokenizer, base model, adapters, manifest and report, step by step.

    python -m loraplex_server.demo.train OUT --scale full|small [--only STEP]

Owns the order of the steps and what each writes. A step reads what earlier ones wrote from the world's directory and
from nowhere else, so one can be repeated alone and new kinds of weights join as further entries of `STEPS`.
How weights are fitted is `fitting`'s, what they are shown is `lessons`', sizes are `recipes`'.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from peft import LoraConfig, PeftModel, get_peft_model
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from loraplex_server.demo.evaluation import Matrix, answered_by_all, exact_match_matrix, matrix_table
from loraplex_server.demo.fitting import adapter_optimizers, base_optimizers, fit
from loraplex_server.demo.formats import BASE_FORMAT, FORMATS
from loraplex_server.demo.lessons import interleave, recall_batches, record_batches
from loraplex_server.demo.recipes import SCALES, AdapterRecipe, Scale, ScaleName
from loraplex_server.demo.records import draw_examples
from loraplex_server.demo.tokenizer import BOS_ID, EOS_ID, MAX_LENGTH, PAD_ID, train_tokenizer
from loraplex_server.demo.world import (
    REPORT,
    SHOWCASE,
    Adapter,
    Manifest,
    World,
    heldout_cases,
    open_world,
    records_digest,
    write_json,
    write_manifest,
)

BASE_NAME = "loraplex-demo-base"  # what adapters say they belong to; a name, never somebody's path
_NUM_TOKENIZER_RECORDS = 4000
_SHOWCASE_STREAM = "demo"
_NUM_SHOWCASE_DRAWN = 64
# The base model answers in its own format when nobody asks for another: that one needs a clear lead.
_BASE_FORMAT_SHARE = 5.0
_RECALL_EVERY = 6


@dataclass(frozen=True)
class Workshop:
    """What every step gets: where the world grows, how big it becomes, and where to show how far it is."""

    root: Path
    scale: Scale
    seed: int
    progress: Progress

    @property
    def base_path(self) -> Path:
        return self.root / "base"

    @property
    def adapters_root(self) -> Path:
        return self.root / "adapters"

    def stream(self, name: str) -> str:
        """The name of a random stream of this world."""
        return f"{name} {self.seed}"

    def formats(self) -> dict[str, float]:
        """Every format that the base model learns, with its share of the records."""
        return {BASE_FORMAT: _BASE_FORMAT_SHARE, **{recipe.name: 1.0 for recipe in self.scale.adapters}}

    @contextmanager
    def task(self, description: str, total: int) -> Generator[Callable[[str], None]]:
        """A progress bar, or a line where there is no terminal; call what it yields once per step with a short word."""
        task_id = self.progress.add_task(description, total=total, detail="")
        yield lambda detail: self.progress.update(task_id, advance=1, detail=detail)
        if not self.progress.console.is_terminal and not self.progress.disable:
            task = self.progress.tasks[-1]
            print(f"{description}: {total} steps in {task.elapsed or 0:.0f} s, {task.fields['detail']}", flush=True)


def make_tokenizer(shop: Workshop) -> None:
    texts: list[str] = []
    records = draw_examples(shop.stream("tokenizer"), "train", shop.scale.kinds)
    with shop.task("tokenizer", 1) as advance:
        for record, prompt in islice(records, _NUM_TOKENIZER_RECORDS):
            texts += [prompt, *(FORMATS[name](record) for name in shop.formats())]
        train_tokenizer(texts, shop.scale.vocab_size).save_pretrained(shop.base_path)
        advance(f"{len(texts)} texts")


def make_base(shop: Workshop) -> None:
    """Copying first, then records in all formats; stored in bfloat16, which is what the adapters are trained on."""
    tokenizer = _load_tokenizer(shop)
    model = LlamaForCausalLM(_base_config(shop.scale))
    scale = shop.scale
    recall = recall_batches(tokenizer, stream=shop.stream("recall"), num_rows=2 * scale.num_rows)  # rows half as long
    records = record_batches(
        tokenizer,
        stream=shop.stream("base"),
        kinds=scale.kinds,
        shares=shop.formats(),
        num_rows=scale.num_rows,
    )
    mixed = interleave(records, recall, every=_RECALL_EVERY)
    num_steps = scale.num_recall_steps + scale.num_base_steps
    with shop.task("base model", num_steps) as advance:
        fit(
            model,
            base_optimizers(model, lr=scale.base_lr),
            chain(islice(recall, scale.num_recall_steps), mixed),
            num_steps=num_steps,
            on_step=lambda loss: advance(f"loss {loss:.3f}"),
        )
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(shop.base_path)


def polish_base(shop: Workshop) -> None:
    """Another round on records, from where the base stands: its rate goes up and down once more."""
    tokenizer = _load_tokenizer(shop)
    model = LlamaForCausalLM.from_pretrained(shop.base_path, dtype=torch.float32)
    scale = shop.scale
    records = record_batches(
        tokenizer,
        stream=shop.stream("polish"),
        kinds=scale.kinds,
        shares=shop.formats(),
        num_rows=scale.num_rows,
    )
    with shop.task("polish", scale.num_polish_steps) as advance:
        fit(
            model,
            base_optimizers(model, lr=scale.polish_lr),
            records,
            num_steps=scale.num_polish_steps,
            on_step=lambda loss: advance(f"loss {loss:.3f}"),
        )
    torch.nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(shop.base_path)


def make_adapters(shop: Workshop) -> None:
    shutil.rmtree(shop.adapters_root, ignore_errors=True)
    for recipe in shop.scale.adapters:
        _make_adapter(shop, recipe)


def write_report(shop: Workshop) -> None:
    """How good the files are, in the dtypes that they are served in."""
    scale = shop.scale
    cases = heldout_cases(scale.num_eval_records, scale.kinds, "report")
    paths = [shop.adapters_root / recipe.name for recipe in scale.adapters]
    matrices: dict[str, Matrix] = {}
    with shop.task("exact match", 2 * (1 + len(paths))) as advance:
        for dtype_name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            matrices[dtype_name] = exact_match_matrix(
                shop.base_path, paths, cases, dtype, lambda name=dtype_name: advance(name)
            )
    write_json(shop.root / REPORT, {"num_heldout_records": len(cases), "exact_match": matrices})


def choose_showcase(shop: Workshop) -> None:
    """The held-out cases that the demo shows: those that are right with every adapter, in both dtypes."""
    cases = heldout_cases(_NUM_SHOWCASE_DRAWN, shop.scale.kinds, _SHOWCASE_STREAM)
    paths = {recipe.name: shop.adapters_root / recipe.name for recipe in shop.scale.adapters}
    chosen = set(range(len(cases)))
    with shop.task("showcase", 2) as advance:
        for dtype in (torch.float32, torch.bfloat16):
            chosen &= set(answered_by_all(shop.base_path, paths, BASE_FORMAT, cases, dtype))
            advance(f"{len(chosen)} of {len(cases)}")
    listed = {"stream": _SHOWCASE_STREAM, "num_drawn": len(cases), "cases": sorted(chosen)}
    write_json(shop.root / SHOWCASE, listed)


StepName = Literal["tokenizer", "base", "polish", "adapters", "report", "showcase"]
STEPS: dict[StepName, Callable[[Workshop], None]] = {
    "tokenizer": make_tokenizer,
    "base": make_base,
    "polish": polish_base,
    "adapters": make_adapters,
    "report": write_report,
    "showcase": choose_showcase,
}


def make_world(
    out_dir: Path,
    *,
    scale: ScaleName | Scale = "full",
    seed: int = 0,
    progress: Progress | None = None,
    only: StepName | None = None,
) -> World:
    """Trains a world into `out_dir`, or repeats one step of it, and opens it."""
    out_dir.mkdir(parents=True, exist_ok=True)
    shop = Workshop(
        out_dir, SCALES[scale] if isinstance(scale, str) else scale, seed, progress or Progress(disable=True)
    )
    with torch.random.fork_rng(devices=[]), _quiet_transformers():
        for name, step in STEPS.items():
            if only in (None, name):
                torch.manual_seed(seed)
                step(shop)
    write_manifest(out_dir, _manifest(shop))
    return open_world(out_dir)


def _manifest(shop: Workshop) -> Manifest:
    return Manifest(
        scale=shop.scale.name,
        seed=shop.seed,
        kinds=shop.scale.kinds,
        base_format=BASE_FORMAT,
        adapters=tuple(Adapter(each.name, each.name, each.rank, each.summary) for each in shop.scale.adapters),
        digest=records_digest(shop.scale.kinds),
    )


def _make_adapter(shop: Workshop, recipe: AdapterRecipe) -> None:
    tokenizer = _load_tokenizer(shop)
    base = AutoModelForCausalLM.from_pretrained(shop.base_path, dtype=torch.float32)
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
        stream=shop.stream(f"adapter {recipe.name}"),
        kinds=shop.scale.kinds,
        shares={recipe.name: 1.0},
        num_rows=shop.scale.num_rows,
    )
    num_steps = recipe.num_rounds * shop.scale.num_adapter_steps
    with shop.task(f"adapter {recipe.name}", num_steps) as advance:
        optimizers = adapter_optimizers(model, lr=shop.scale.adapter_lr)
        fit(model, optimizers, batches, num_steps=num_steps, on_step=lambda loss: advance(f"loss {loss:.3f}"))
    _save_adapter(model, shop.adapters_root / recipe.name, getattr(torch, recipe.dtype))


def _save_adapter(model: Any, path: Path, dtype: torch.dtype) -> None:
    """As PEFT writes it, less the empty model card."""
    assert isinstance(model, PeftModel)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    model.peft_config["default"].base_model_name_or_path = BASE_NAME
    # "auto" would ask the Hub whether the vocabulary has grown.
    model.save_pretrained(str(path), save_embedding_layers=False)
    (path / "README.md").unlink(missing_ok=True)


def _base_config(scale: Scale) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=scale.vocab_size,
        hidden_size=scale.hidden_size,
        intermediate_size=scale.intermediate_size,
        num_hidden_layers=scale.num_layers,
        num_attention_heads=scale.hidden_size // scale.head_dim,
        num_key_value_heads=scale.num_kv_heads,
        head_dim=scale.head_dim,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def _load_tokenizer(shop: Workshop) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(shop.base_path)


@contextmanager
def _quiet_transformers() -> Generator[None]:
    """Transformers' own bars for a file of 3 MB would tear ours apart, as would a warning that PEFT sets off in it."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*is_gradient_checkpointing")
            yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


def training_progress() -> Progress:
    """The bars of a training run; `detail` is a field of every task."""
    return Progress(
        TextColumn("{task.description:18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
    )


def main(
    out: Annotated[Path, typer.Argument(help="Directory to write the world to.")],
    scale: Annotated[ScaleName, typer.Option(help="small: minutes, for tests; full: what the package ships.")] = "full",
    seed: Annotated[int, typer.Option(help="Another seed gives another world of the same kind.")] = 0,
    only: Annotated[StepName | None, typer.Option(help="Repeat one step on what is already there.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; more than two gain little at this size.")] = 2,
) -> None:
    """Train the demo's world."""
    torch.set_num_threads(threads)
    started_s = time.monotonic()
    with training_progress() as progress:
        world = make_world(out, scale=scale, seed=seed, progress=progress, only=only)
    print(f"{world.root} is ready after {time.monotonic() - started_s:.0f} s.")
    if world.report_path.exists():
        for dtype, matrix in json.loads(world.report_path.read_text(encoding="utf-8"))["exact_match"].items():
            print(f"\n{dtype}: share of held-out answers that are exactly right", matrix_table(matrix), sep="\n")


if __name__ == "__main__":
    typer.run(main)
