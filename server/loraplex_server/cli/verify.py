"""`loraplex adapters verify`: the checks of a server on one adapter folder.

Runs the checks; the command shows the result.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from loraplex_adapters.cache.storage import check_adapter, import_adapter
from loraplex_adapters.formats.files import detect_kind
from loraplex_adapters.sources.directory import FolderSource
from loraplex_adapters.store import AdapterStore
from loraplex_contracts.adapters import check_adapter_id
from loraplex_contracts.errors import InvalidAdapterId
from loraplex_server.config import AdaptersConfig
from loraplex_server.model.loader import load_model


def verify_adapter(
    folder: Path,
    base: str,
    dtype: str,
    max_rank: int | None,
    progress: Callable[[str], AbstractContextManager[None]],
) -> dict[str, Any]:
    """A description of the adapter in `folder`, as plain data. Raises the error that a server would answer with.
    `progress(text)` shows a text while its block runs."""
    name = folder.resolve().name
    source = FolderSource(name, folder)
    with source.open(name) as files:
        detect_kind(files.names)  # before the base model is loaded in vain
    disable_progress_bar()  # it would break the command's own
    with progress(f"loading {base}"):
        model = load_model(base, dtype=dtype, device="cpu")
    targets = model.base_targets(max_rank or AdaptersConfig().max_rank)
    plan = check_adapter(name, source, targets)
    with tempfile.TemporaryDirectory(prefix="loraplex-verify-") as scratch, progress(f"reading {name}"):
        store = AdapterStore(Path(scratch), budget_bytes=1 << 50)
        try:
            imported = import_adapter(name, source, targets, store)
        finally:
            store.close()
    warnings = list(plan.warnings)
    if any(path.is_symlink() for path in folder.iterdir()):
        warnings.append("has links in it: a server follows only those that stay inside its directory of adapters")
    try:
        check_adapter_id(name)
    except InvalidAdapterId as error:
        warnings.append(f"a server would not serve it under this folder's name: {error.message}")
    return {
        "valid": True,
        "kind": imported.key.kind,
        "digest": imported.key.digest,
        "rank": imported.layout.max_rank,
        "modules": len(plan.modules),
        "num_bytes": imported.layout.num_bytes,
        "dtype": targets.dtype,
        "warnings": warnings,
    }
