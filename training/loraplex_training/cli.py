"""Command `loraplex train-medusa`.

Parses the command line and prints the report. torch is imported only after the arguments and files were checked.
"""

from __future__ import annotations

import json as jsonlib
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.shutdown import SIGNALS
from loraplex_training.corpus import Prompt, read_prompts, read_texts

if TYPE_CHECKING:
    from loraplex_training.medusa import MedusaRecipe, Report


def train_medusa(
    base: Annotated[str, typer.Argument(help="Directory of a Hugging Face checkpoint, or its Hub id.")],
    out: Annotated[Path, typer.Option(help="New directory for the heads.")],
    adapter: Annotated[
        Path | None, typer.Option(help="Directory of a PEFT LoRA: the heads draft for the base with this adapter.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Prompts like those of your users, .txt or .jsonl; the model answers them. Best."),
    ] = None,
    texts: Annotated[
        Path | None, typer.Option(help="Texts like those that the model writes, .txt or .jsonl, learned as they are.")
    ] = None,
    combined: Annotated[
        bool, typer.Option("--combined", help="Copy the LoRA beside the heads: one adapter id then brings both.")
    ] = False,
    num_heads: Annotated[int, typer.Option(min=1, max=16, help="Tokens that are drafted beyond the next one.")] = 4,
    num_layers: Annotated[int, typer.Option(min=1, max=8, help="Residual blocks in each head.")] = 1,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1, help="How often each position is learned; if not given, 2 to 20 times, by how many there are."
        ),
    ] = None,
    lr: Annotated[float, typer.Option(help="Highest learning rate of AdamW. Small models take 0.01.")] = 1e-3,
    max_new_tokens: Annotated[int, typer.Option(min=4, help="Length of an answer to a prompt, at most.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts or texts that the model runs at once.")] = 32,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    seed: Annotated[int, typer.Option(help="Which examples are held out, and the order of the rest.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Train Medusa heads, so that the server writes several tokens per step with this model and adapter.

    A share of the examples is held out to measure how good the heads are. Nothing is written to --out before
    everything is there.

    In a .txt, each line is one prompt or text. In a .jsonl, each line is a string or an object: with `prompt` or
    `messages` for prompts, with `text` for texts.

    Example: loraplex train-medusa Qwen/Qwen2.5-0.5B --adapter ./sql --prompts questions.txt --out ./sql-heads
    """
    if (prompts is None) == (texts is None):
        raise InvalidArgument("give either --prompts or --texts", field="--prompts")
    if combined and adapter is None:
        raise InvalidArgument("--combined copies the LoRA of --adapter; give one", field="--combined")
    if not 0 < lr < 1:
        raise InvalidArgument(f"--lr {lr} is not a learning rate; 0.001 is a good start", field="--lr")
    # Files are read before anything slow, so that their errors are reported at once.
    given_prompts = read_prompts(prompts) if prompts is not None else []
    given_texts = read_texts(texts) if texts is not None else []

    from loraplex_training.fitting import FitRecipe
    from loraplex_training.medusa import MedusaRecipe

    fit = FitRecipe(epochs=epochs, lr=lr, seed=seed)
    recipe = MedusaRecipe(num_heads, num_layers, fit, max_new_tokens, batch_size)
    with _signals_end_tidily():
        report = _run(base, out, adapter, given_prompts, given_texts, combined, recipe, dtype, device)
    if json:
        print(jsonlib.dumps(_as_json(report, out)))
    else:
        _print(report, out)


@contextmanager
def _signals_end_tidily() -> Generator[None]:
    """Removes temporary files when a signal ends the run. Raises SystemExit with the status of the signal."""
    status = 0

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal status
        status = 128 + signum
        raise SystemExit(status)

    heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield
    except Exception:
        # C code that is interrupted may raise another error instead.
        if status:
            raise SystemExit(status) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(
    base: str,
    out: Path,
    adapter: Path | None,
    prompts: list[Prompt],
    texts: list[str],
    combined: bool,
    recipe: MedusaRecipe,
    dtype: str,
    device: str,
) -> Report:
    from loraplex_server.model.loader import DTYPES, resolve_device
    from loraplex_training.medusa import examples_of_prompts, examples_of_texts, train_medusa
    from loraplex_training.output import check_new
    from loraplex_training.progress import quiet_transformers, training_progress
    from loraplex_training.target import load_target

    check_new(out)
    if dtype != "auto" and dtype not in DTYPES:
        raise InvalidArgument(f"{dtype!r} is not a dtype; use auto or one of {', '.join(DTYPES)}", field="--dtype")
    with training_progress(Console(stderr=True)) as progress, quiet_transformers():
        target = load_target(base, adapter, dtype=DTYPES.get(dtype), device=resolve_device(device))
        if prompts:
            examples = examples_of_prompts(target, prompts, recipe, progress)
        else:
            examples = examples_of_texts(target, texts)
        return train_medusa(
            target,
            examples,
            recipe,
            out=out,
            base_name=str(Path(base).resolve()) if Path(base).is_dir() else base,
            combine_with=adapter if combined else None,
            progress=progress,
            num_given=len(prompts) + len(texts),
        )


def _as_json(report: Report, out: Path) -> dict[str, object]:
    accuracy = report.accuracy
    return {
        "out": str(out),
        "num_train_positions": report.num_train_positions,
        "num_heldout_positions": accuracy.num_positions,
        "num_skipped": report.num_skipped,
        "top1": accuracy.top1,
        "top5": accuracy.top5,
        "tokens_per_step": round(accuracy.tokens_per_step, 4),
    }


def _print(report: Report, out: Path) -> None:
    accuracy = report.accuracy
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(title=f"on {accuracy.num_positions} held-out positions", title_justify="left", box=None)
    for column in ("head", "foresees", "right", "among its first 5"):
        table.add_column(column, justify="right")
    for i, (top1, top5) in enumerate(zip(accuracy.top1, accuracy.top5, strict=True)):
        table.add_row(str(i), f"token +{i + 2}", f"{top1:.1%}", f"{top5:.1%}")
    console.print(table)
    if report.num_skipped:
        console.print(
            f"{report.num_skipped} examples were left out: given twice, too long for the context, or too short"
        )
    console.print(
        f"{accuracy.tokens_per_step:.2f} tokens per step of the model, greedily; heads are in [bold]{escape(str(out))}"
    )
