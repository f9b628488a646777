"""Pooling that an adapter brings, as sentence-transformers saves it."""

from __future__ import annotations

from typing import Any, Final, cast

from loraplex_adapters.formats.files import POOLING_NAME
from loraplex_adapters.io.source_files import AdapterFiles, parse_object, read_all
from loraplex_contracts.errors import AdapterInvalid

MAX_POOLING_BYTES: Final = 1 << 16
MAX_MODE_CHARS: Final = 64
# Up to version 5 a mode is a flag of its own.
_FLAG: Final = "pooling_mode_"
_FLAGS: Final = {
    "cls_token": "cls", "lasttoken": "lasttoken", "max_tokens": "max", "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean_tokens": "weightedmean",
}  # fmt: skip


def read_pooling(files: AdapterFiles) -> str:
    """The pooling of an adapter, in sentence-transformers' words, such as `mean` and `lasttoken`; several are joined
    by a plus sign. Empty where its files name none. Raises AdapterInvalid for a file that names it wrongly."""
    file = files.find(POOLING_NAME)
    if file is None:
        return ""
    config = parse_object(read_all(file, MAX_POOLING_BYTES), POOLING_NAME, MAX_POOLING_BYTES)
    given: Any = config.get("pooling_mode")
    if given is None:
        modes: list[Any] = [mode for flag, mode in _FLAGS.items() if config.get(_FLAG + flag) is True]
    else:
        modes = cast("list[Any]", given) if isinstance(given, list) else [given]
    if not modes or not all(isinstance(one, str) and one.isidentifier() and one.isascii() for one in modes):
        raise AdapterInvalid(f"{POOLING_NAME} names no `pooling_mode`, as sentence-transformers writes it")
    return "+".join(modes)[:MAX_MODE_CHARS]
