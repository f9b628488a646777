"""Locks of an engine with --take-over: its GPU, its adapter store's folder.

Whoever supervises workers may start the next one while the last one still ends its requests, on a device that counts
as free already.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from loraplex_adapters.store import LOCK_NAME
from loraplex_contracts.errors import FailedPrecondition
from loraplex_runtime.locks import hold
from loraplex_runtime.reports import Progress


def take_over(device: torch.device, store: Path | None, wait_s: float, progress: Progress) -> None:
    """Waits until no other process has the GPU, holds it until this process ends, and waits for the store, whose lock
    the store then takes itself. CPUs are shared. Raises FailedPrecondition."""
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        hold_device(uuid, Path(tempfile.gettempdir()), wait_s, progress)
    if store is not None:
        try:
            store.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise FailedPrecondition(f"the adapter store {store} cannot be used: {error.strerror}") from error
        os.close(hold(store / LOCK_NAME, f"the adapter store {store}", wait_s, progress))


def hold_device(uuid: str, folder: Path, wait_s: float, progress: Progress) -> int:
    """Holds the lock of a device and returns its descriptor; it is never closed, so that the lock ends with the
    process."""
    return hold(folder / f"loraplex-gpu-{uuid}.lock", f"the GPU {uuid}", wait_s, progress)
