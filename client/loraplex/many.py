"""Many prompts in one call: items, and the progress of their answers.

The clients send them, each in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Final, cast

from loraplex.types import GenerateOptions
from loraplex_contracts.errors import InvalidArgument

DEFAULT_CONCURRENCY: Final = 8

# A text, or options of this item alone, with its text under "prompt".
Prompt = str | Mapping[str, Any]
Progress = bool | Callable[[int, int], None]


def items_of(
    prompts: Iterable[Prompt], options: GenerateOptions, max_concurrency: int
) -> list[tuple[str | None, GenerateOptions]]:
    """Prompt and options of each item. An item's own options go before those of all. Raises InvalidArgument."""
    given: Any = max_concurrency
    if not (isinstance(given, int) and given >= 1):
        raise InvalidArgument(
            f"max_concurrency must be a number of requests of at least 1, not {given!a}", field="max_concurrency"
        )
    if isinstance(prompts, (str, bytes, Mapping)):
        raise InvalidArgument("generate_many takes a list of prompts; for one there is generate", field="prompts")
    return [_item(one, options) for one in prompts]


def _item(one: Any, options: GenerateOptions) -> tuple[str | None, GenerateOptions]:
    if not isinstance(one, Mapping):
        return one, options
    own = dict(cast("Mapping[str, Any]", one))
    prompt = own.pop("prompt", None)
    return prompt, cast("GenerateOptions", {**options, **own})


@contextmanager
def progress_of(wanted: Progress, total: int) -> Generator[Callable[[int], None], None, None]:
    """A function to call with the number of items that have ended: for a bar on stderr, the caller's own function, or
    none."""
    if callable(wanted):
        report = wanted
        yield lambda num_done: report(num_done, total)
        return
    if not (wanted and total):
        yield lambda num_done: None
        return
    from rich.console import Console  # late: few programs show a bar
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda num_done: bar.update(task, completed=num_done)
