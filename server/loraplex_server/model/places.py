"""Places of a server's models: folders, the Hub's cache, the Hub.

They are checked before anything is loaded. A Hub that cannot be reached is found out once, within seconds: its own
library asks six times for every file.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from loraplex_adapters.formats.files import CONFIG_NAME, MODEL_CONFIG_NAME
from loraplex_contracts.errors import AdapterNotFound, InvalidArgument, UnsupportedModel
from loraplex_server.config import EngineConfig

Model = tuple[str, str | None]  # directory or Hub id, and revision

HUB_ID: Final = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")
MAX_WAIT_S: Final = 4.0


def check_places(config: EngineConfig) -> None:
    """Raises UnsupportedModel for a model that is nowhere or is an adapter, InvalidArgument for one without a name,
    AdapterNotFound for default heads that are nowhere."""
    if not config.model.model:  # as a path that would be the working directory
        raise InvalidArgument("MODEL must not be empty; give a directory or a Hub id", field="MODEL")
    for name in (config.model.model, *(draft.model for draft in config.speculation.drafts)):
        _refuse_adapter(Path(name))
    with reaching_hub(models_of(config)):
        pass
    heads, adapters = config.speculation.default_medusa, config.adapters
    if not heads or adapters.hub or (adapters.root is not None and (adapters.root / heads).is_dir()):
        return
    from loraplex_server.model.medusa_model import MODEL_HEADS  # late: it imports torch

    if heads != MODEL_HEADS:
        raise no_heads(heads)


def no_heads(name: str) -> AdapterNotFound:
    """The error of default heads that are nowhere."""
    return AdapterNotFound(
        f"there are no Medusa heads {name!a} (--default-medusa); name a folder under --adapters",
        field="--default-medusa",
    )


def models_of(config: EngineConfig) -> list[Model]:
    """The base model, and draft models with their adapters."""
    drafts = [place for draft in config.speculation.drafts for place in (draft.model, draft.adapter) if place]
    return [(config.model.model, config.model.revision), *((place, None) for place in drafts)]


@contextmanager
def reaching_hub(models: Iterable[Model]) -> Generator[None]:
    """Keeps the block from asking a Hub that does not answer, where its cache has all models. Raises UnsupportedModel
    for a model that is neither a folder, nor in the cache, nor to be asked for."""
    on_hub = [model for model in models if not _is_folder(model[0])]
    if not on_hub:
        yield
        return
    from huggingface_hub import constants

    missing = [name for name, revision in on_hub if not _is_cached(name, revision)]
    trouble = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _trouble(constants.ENDPOINT)
    if trouble and missing:
        raise UnsupportedModel(
            f"{missing[0]} cannot be loaded: there is no such directory, and the Hub ({constants.ENDPOINT}) cannot be "
            f"asked ({trouble}); give a directory, or HF_ENDPOINT for another Hub{_near_folder(missing[0])}"
        )
    before: bool = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or bool(trouble)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _refuse_adapter(folder: Path) -> None:
    """Raises UnsupportedModel for the folder of an adapter that is given as a model."""
    if not (folder / CONFIG_NAME).is_file() or (folder / MODEL_CONFIG_NAME).exists():
        return
    try:
        base = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, LookupError, TypeError):
        base = None
    raise UnsupportedModel(
        f"{folder} cannot be loaded: it has an adapter, not a model; serve its base model"
        f"{f' ({base[:200]})' if isinstance(base, str) and base else ''} with --adapters {folder.parent}"
    )


def _is_folder(name: str) -> bool:
    """True if the name is that of a folder, False for that of a repository. Raises UnsupportedModel for what is
    neither."""
    path = Path(name)
    if path.is_dir():
        if not any((path / file).exists() for file in (MODEL_CONFIG_NAME, CONFIG_NAME)):
            raise UnsupportedModel(f"{name} cannot be loaded: this directory has no config.json")
        _refuse_unreadable(path)
        return True
    if path.exists():
        raise UnsupportedModel(f"{name} cannot be loaded: it is a file; give the directory of a checkpoint")
    if not HUB_ID.fullmatch(name):
        raise UnsupportedModel(f"{name} cannot be loaded: there is no such directory{_near_folder(name)}")
    return False


def _refuse_unreadable(folder: Path) -> None:
    """Raises UnsupportedModel for a model's files that this user may not read: safetensors says that there are none,
    and saves files that only their owner may read."""
    for file in (folder / MODEL_CONFIG_NAME, *folder.glob("*.safetensors")):
        if file.exists() and not os.access(file, os.R_OK):
            raise UnsupportedModel(
                f"{folder} cannot be loaded: the server's user {os.geteuid()} may not read {file.name}; change its "
                "permissions (chmod a+r)"
            )


def _near_folder(name: str) -> str:
    """A question for the end of a sentence: the folder of a model that the name may be meant for, if there is one."""
    path = Path(name)
    with contextlib.suppress(OSError):
        beside = [one.name for one in path.parent.iterdir() if (one / MODEL_CONFIG_NAME).is_file()]
        for found in difflib.get_close_matches(path.name, beside, n=1):
            return f"; did you mean {path.parent / found}?"
    return ""


def _is_cached(name: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = (MODEL_CONFIG_NAME, CONFIG_NAME)
    return any(isinstance(try_to_load_from_cache(name, file, revision=revision), str) for file in files)


def _trouble(endpoint: str) -> str:
    """The reason that the Hub does not answer; empty where it does, whatever it says."""
    from huggingface_hub import get_session

    session: Any = get_session()
    try:
        session.head(endpoint, timeout=MAX_WAIT_S)
    except Exception as error:  # of the library's HTTP client, which may be another one tomorrow
        return str(error) or type(error).__name__
    return ""
