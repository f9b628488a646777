"""Progress of a model's weights: bytes fetched from the Hub, tensors read from files."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from tqdm.auto import tqdm
from transformers.utils.logging import set_tqdm_hook

from loraplex_runtime.reports import Progress, counted

_READING = "Loading weights"  # as Transformers calls it


@contextmanager
def telling_of_weights(progress: Progress) -> Generator[dict[str, Any]]:
    """Shows, within the block, Transformers' own bar of tensors as progress. Yields options of `from_pretrained` that
    make progress of its bars of bytes."""

    def hook(make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.get("desc") == _READING and args:
            return _counting(args[0], progress)
        return make(*args, **options)

    before = set_tqdm_hook(hook)
    try:
        yield {"tqdm_class": _fetching(progress)}
    finally:
        set_tqdm_hook(before)


def _counting(items: Iterable[Any], progress: Progress) -> Iterator[Any]:
    listed = list(items)
    tell = counted(progress, "reading weights", len(listed), "tensors")
    for number, item in enumerate(listed):
        tell(number)
        yield item
    tell(len(listed))


def _fetching(progress: Progress) -> type[Any]:
    """A bar that shows nothing and tells of its bytes, those of all files together."""
    files: dict[int, tuple[float, float]] = {}  # done and total, by number
    numbers = count()

    class Fetching(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("name", None)
            self._number = next(numbers)
            self._is_bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._is_bytes and self.total:
                files[self._number] = self.n, self.total
                done, total = (sum(sizes) / 1e9 for sizes in zip(*files.values(), strict=True))
                counted(progress, "fetching from the Hub", total, "GB")(done)
            return None

    return Fetching
