"""Models with Medusa heads: which base to load, and where the heads are.

MODEL may be a whole model that holds its heads (Medusa-2), or a directory of heads that names its base; both may be a
Hub id. Looks at names and configurations only; the heads themselves are loaded as any adapter, under MODEL_HEADS.
"""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from loraplex_adapters.formats.files import MEDUSA_WEIGHTS_NAME, MODEL_CONFIG_NAME, MODEL_INDEX_NAME, MODEL_WEIGHTS_NAME
from loraplex_adapters.formats.medusa import MedusaModel, describe_medusa_model
from loraplex_adapters.sources.directory import open_folder
from loraplex_contracts.errors import LoraplexError, UnsupportedModel

log = logging.getLogger(__name__)

# The adapter id of the model's own heads.
MODEL_HEADS = "model-heads"
_SMALL_FILES = (MODEL_CONFIG_NAME, MODEL_INDEX_NAME, MEDUSA_WEIGHTS_NAME)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The meaning of MODEL on the command line."""

    base: str  # directory or Hub id of the base model
    revision: str | None = None
    heads: Path | None = None  # the directory that holds its heads


@contextlib.contextmanager
def served_model(model: str, revision: str | None) -> Generator[ServedModel]:
    """Resolves `model`. Downloads made for it are deleted after the block: heads are on the device, pinned, by then.

    Raises UnsupportedModel for heads that name no base, or cannot be fetched. Unreadable files are left to loading,
    which reports them.
    """
    with tempfile.TemporaryDirectory(prefix="loraplex-model-") as temporary:
        folder = Path(model) if Path(model).is_dir() else _small_files(model, revision, Path(temporary))
        if folder is None:
            yield ServedModel(model, revision)
            return
        found = _describe(folder)
        if found.content == "none":
            yield ServedModel(model, revision)
        elif found.content == "with_heads":
            if folder != Path(model):
                _fetch_heads(model, revision, folder)
            yield ServedModel(model, revision, folder)
        elif not found.base_model:
            raise UnsupportedModel(
                f"{model} holds Medusa heads and no model, and its config.json names none (base_model_name_or_path); "
                "give the base model as MODEL and the heads with --default-medusa"
            )
        else:
            log.info("%s holds Medusa heads of %s", model, found.base_model)
            beside = folder / found.base_model  # a path in config.json is relative to the folder of the heads
            yield ServedModel(str(beside) if beside.is_dir() else found.base_model, None, folder)


def _describe(folder: Path) -> MedusaModel:
    try:
        with open_folder(folder, MODEL_HEADS) as files:
            return describe_medusa_model(files)
    except LoraplexError as error:
        log.debug("no look at %s: %s", folder, error)
        return MedusaModel("none")


def _small_files(model: str, revision: str | None, folder: Path) -> Path | None:
    """The small files of a Hub repository; None where the Hub cannot be asked: loading the model will tell why."""
    try:
        _fetch(model, revision, folder, _SMALL_FILES)
    except Exception as error:
        log.warning("whether %s comes with Medusa heads cannot be seen (%s); it is served without", model, error)
        return None
    return folder if (folder / MODEL_CONFIG_NAME).exists() else None


def _fetch_heads(model: str, revision: str | None, folder: Path) -> None:
    try:
        _fetch(model, revision, folder, _shards_with_heads(folder))
    except Exception as error:  # of the Hub's library
        raise UnsupportedModel(
            f"{model} cannot be loaded: its Medusa heads cannot be fetched ({type(error).__name__}: {error})"
        ) from error


def _fetch(model: str, revision: str | None, folder: Path, names: tuple[str, ...]) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(model, revision=revision, local_dir=folder, allow_patterns=list(names))


def _shards_with_heads(folder: Path) -> tuple[str, ...]:
    index = folder / MODEL_INDEX_NAME
    if not index.exists():
        return (MODEL_WEIGHTS_NAME, *_SMALL_FILES)
    weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    return tuple({file for name, file in weight_map.items() if name.startswith("medusa_head")})
