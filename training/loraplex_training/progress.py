"""Progress bars on a terminal, one line per finished task elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers.utils import logging as transformers_logging


class Advance(Protocol):
    """Callback after one step, or after `steps` of them, with a short status text."""

    def __call__(self, detail: str = "", steps: int = 1) -> None: ...


def training_progress(console: Console | None = None) -> Progress:
    """The bars of a training run; `detail` is a field of every task."""
    console = console or Console()
    return Progress(
        TextColumn("{task.description:18}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"),
        console=console,
        transient=not console.is_terminal,  # elsewhere `task` prints lines instead
    )


@contextmanager
def task(progress: Progress, description: str, total: int) -> Generator[Advance]:
    """A progress bar on a terminal, one line at the end elsewhere."""
    task_id = progress.add_task(description, total=total, detail="")

    def advance(detail: str = "", steps: int = 1) -> None:
        progress.update(task_id, advance=steps, detail=escape(detail))

    yield advance
    if not progress.console.is_terminal and not progress.disable:
        done = next(each for each in progress.tasks if each.id == task_id)
        line = f"{description}: {total} steps in {done.elapsed or 0:.0f} s, {done.fields['detail']}"
        print(line, file=progress.console.file, flush=True)


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Silences the progress bars and messages of Transformers and a PEFT warning, which would break up our own bars."""
    was_on, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, message=".*is_gradient_checkpointing")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if was_on:
            transformers_logging.enable_progress_bar()
