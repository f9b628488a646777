"""Command `loraplex train-medusa`.

Parses the command line and prints the report. torch is imported only after the arguments and files were checked.
"""

from __future__ import annotations

import json as jsonlib
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_runtime.shutdown import SIGNALS
from loraplex_training.corpus import Prompt, read_prompts, read_texts, without_duplicates

if TYPE_CHECKING:
    from rich.progress import Progress

    from loraplex_training.decoding import Decoded
    from loraplex_training.medusa import MedusaRecipe, Report


@dataclass(frozen=True, slots=True)
class Trained:
    """A training run, and what its heads give when they are served."""

    report: Report
    num_duplicates: int
    decoded: Decoded | None
    why_not: str = ""  # it was not decoded


def train_medusa(
    base: Annotated[str, typer.Argument(help="Directory of a Hugging Face checkpoint, or its Hub id.")],
    out: Annotated[Path, typer.Option(help="New directory for the heads.")],
    adapter: Annotated[
        Path | None, typer.Option(help="Directory of a PEFT adapter: the heads draft for the base with this adapter.")
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

    A share of the examples is held out to measure how good the heads are: by position, and by decoding with the engine.
    What is given twice counts once. Nothing is written to --out before everything is there.

    In a .txt, each line is one prompt or text. In a .jsonl, each line is a string or an object: with `prompt` or
    `messages` (and `tools`, if the model is to see any) for prompts, with `text` for texts.

    Example: loraplex train-medusa Qwen/Qwen2.5-0.5B --adapter ./sql --prompts questions.txt --out ./sql-heads
    """
    if (prompts is None) == (texts is None):
        raise InvalidArgument("give either --prompts or --texts", field="--prompts")
    if combined and adapter is None:
        raise InvalidArgument("--combined copies the LoRA of --adapter; give one", field="--combined")
    if not 0 < lr < 1:
        raise InvalidArgument(f"--lr {lr} is not a learning rate; 0.001 is a good start", field="--lr")
    if not -(2**63) <= seed < 2**63:
        raise InvalidArgument(f"--seed must fit in 64 bits; {seed} does not", field="--seed")
    # Files are read before anything slow, so that their errors are reported at once.
    all_prompts = read_prompts(prompts) if prompts is not None else []
    all_texts = read_texts(texts) if texts is not None else []
    given_prompts, given_texts = without_duplicates(all_prompts), without_duplicates(all_texts)
    num_duplicates = len(all_prompts) + len(all_texts) - len(given_prompts) - len(given_texts)

    from loraplex_training.fitting import FitRecipe
    from loraplex_training.medusa import MedusaRecipe

    fit = FitRecipe(epochs=epochs, lr=lr, seed=seed)
    recipe = MedusaRecipe(num_heads, num_layers, fit, max_new_tokens, batch_size)
    with _signals_end_tidily():
        report, decoded, why_not = _run(base, out, adapter, given_prompts, given_texts, combined, recipe, dtype, device)
    trained = Trained(report, num_duplicates, decoded, why_not)
    if json:
        print(jsonlib.dumps(_as_json(trained, out)))
    else:
        _print(trained, out)


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
) -> tuple[Report, Decoded | None, str]:
    from loraplex_server.model.loader import dtype_of, resolve_device
    from loraplex_training.medusa import examples_of_prompts, examples_of_texts, train_medusa
    from loraplex_training.output import check_new
    from loraplex_training.progress import quiet_transformers, training_progress
    from loraplex_training.target import load_target

    check_new(out)
    chosen = dtype_of(dtype)
    with training_progress(Console(stderr=True)) as progress, quiet_transformers():
        target = load_target(base, adapter, dtype=chosen, device=resolve_device(device))
        if prompts:
            examples = examples_of_prompts(target, prompts, recipe, progress)
        else:
            examples = examples_of_texts(target, texts)
        report = train_medusa(
            target,
            examples,
            recipe,
            out=out,
            base_name=str(Path(base).resolve()) if Path(base).is_dir() else base,
            combine_with=adapter if combined else None,
            progress=progress,
            num_given=len(prompts) + len(texts),
        )
        del target, examples  # the engine loads the model again
        try:
            return report, _decode(base, out, adapter, report, recipe, dtype, device, progress), ""
        except LoraplexError as error:
            # The heads are there; another server may take them.
            return report, None, error.message


def _decode(
    base: str,
    out: Path,
    adapter: Path | None,
    report: Report,
    recipe: MedusaRecipe,
    dtype: str,
    device: str,
    progress: Progress,
) -> Decoded:
    from loraplex_training.decoding import decode, prompts_of
    from loraplex_training.progress import task

    prompts = prompts_of(report.heldout)
    with task(progress, "decoding", len(prompts)) as advance:
        return decode(
            base,
            out,
            prompts,
            adapter=adapter,
            max_new_tokens=recipe.max_new_tokens,
            dtype=dtype,
            device=device,
            advance=advance,
        )


def _as_json(trained: Trained, out: Path) -> dict[str, object]:
    report, decoded = trained.report, trained.decoded
    accuracy = report.accuracy
    return {
        "out": str(out),
        "num_train_positions": report.num_train_positions,
        "num_heldout_positions": accuracy.num_positions,
        "num_duplicates": trained.num_duplicates,
        "num_skipped": report.num_skipped,
        "top1": accuracy.top1,
        "top5": accuracy.top5,
        "tokens_per_step": None if decoded is None else round(decoded.tokens_per_step, 4),
        "num_decoded_prompts": 0 if decoded is None else decoded.num_prompts,
        "num_decoded_tokens": 0 if decoded is None else decoded.num_tokens,
    }


def _print(trained: Trained, out: Path) -> None:
    report, decoded = trained.report, trained.decoded
    accuracy = report.accuracy
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(title=f"on {accuracy.num_positions} held-out positions", title_justify="left", box=None)
    for column in ("head", "foresees", "right", "among its first 5"):
        table.add_column(column, justify="right")
    for i, (top1, top5) in enumerate(zip(accuracy.top1, accuracy.top5, strict=True)):
        table.add_row(str(i), f"token +{i + 2}", f"{top1:.1%}", f"{top5:.1%}")
    console.print(table)
    if trained.num_duplicates:
        console.print(f"{trained.num_duplicates} examples were left out because they were given before")
    if report.num_skipped:
        console.print(f"{report.num_skipped} examples were left out: too long for the context, or too short")
    if decoded is None:
        console.print(f"tokens per step were not measured: {escape(trained.why_not)}")
    else:
        console.print(
            f"{decoded.tokens_per_step:.2f} tokens per step of the model, greedily, from {decoded.num_tokens} tokens "
            f"that the engine decoded for {decoded.num_prompts} held-out prompts"
        )
    console.print(f"heads are in [bold]{escape(str(out))}")
