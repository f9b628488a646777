"""Background loading of adapters from their source into the store.

Everything that a user's files can cause ends as a typed error. Knows nothing of tables, budgets or names' states.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from loraplex_adapters.cache.storage import ImportedAdapter, RecentImports
from loraplex_adapters.formats.adapter import AdapterPlan, plan_adapter
from loraplex_adapters.formats.files import OpenedFiles
from loraplex_adapters.formats.medusa import without_base_head, write_heads
from loraplex_adapters.formats.peft import check_base_copies, write_payload
from loraplex_adapters.io.source_files import AdapterSource
from loraplex_adapters.io.tensor_pieces import PieceReader, WriteFn, bytes_of
from loraplex_adapters.io.throttle import Throttle, throttled
from loraplex_adapters.store import AdapterStore
from loraplex_adapters.targets import BaseTargets
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import AdapterMemoryFull, DiskFull, LoraplexError, SourceUnavailable, unexpected

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Imported:
    """An adapter whose verified bytes are in the store."""

    key: AdapterKey
    num_bytes: int
    rank: int
    num_heads: int = 0


def import_adapter(
    adapter_id: str,
    source: AdapterSource,
    targets: BaseTargets,
    store: AdapterStore,
    recent: RecentImports | None = None,
) -> Imported:
    """Reads the source, checks everything, stores. With `recent` the adapter stays in memory for its first move. Raises
    a typed error, and then nothing is left behind."""
    reader = PieceReader()
    with source.open(adapter_id) as found:
        files = OpenedFiles(found)
        plan = plan_adapter(files, targets)
        for warning in plan.warnings:
            log.warning("adapter %s %s", ascii(adapter_id), warning)
        if plan.heads is not None:
            plan = plan.with_heads(without_base_head(plan.heads, files.opened, targets, reader))
        layout = plan.layout

        def fill(write: WriteFn) -> None:
            if plan.lora is not None:
                file = files.opened[plan.lora.file]
                check_base_copies(plan.lora, file, reader)
                write_payload(plan.lora, file, write, reader)
            if plan.heads is not None and layout.heads is not None:
                write_heads(plan.heads, layout.heads, files.opened, targets.vocab_size, write, reader)
            files.check_unchanged()

        payload = recent.allocate(layout.num_bytes) if recent is not None else None
        memory = None if payload is None else bytes_of(payload)
        key = store.put(layout.kind, layout.to_json(), layout.num_bytes, fill, memory)
        if recent is not None and payload is not None:
            recent.keep(ImportedAdapter(key, layout, payload))
    return Imported(key, layout.num_bytes, layout.max_rank, layout.num_heads)


def check_adapter(adapter_id: str, source: AdapterSource, targets: BaseTargets) -> AdapterPlan:
    """Runs all checks that need only the headers, without loading."""
    with source.open(adapter_id) as files:
        return plan_adapter(OpenedFiles(files), targets)


def typed(error: BaseException, what: str) -> LoraplexError:
    """The typed error for a background job's exception. An unknown one is opaque outside and explained in the log."""
    if isinstance(error, LoraplexError):
        return error
    if isinstance(error, MemoryError):
        return AdapterMemoryFull(f"no memory for {what}; try again later", retry_after_s=5.0)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"the disk is full while {what}; make room on it", resource="disk", retry_after_s=5.0)
    if isinstance(error, OSError):
        log.warning("%s: %s", what, error)
        return SourceUnavailable(
            f"{what} failed ({error.strerror or 'input or output'}); try again later", retry_after_s=5.0
        )
    if type(error).__name__ == "OutOfMemoryError":  # torch's, on the device
        return AdapterMemoryFull(f"no device memory for {what}; try again later", retry_after_s=5.0)
    return unexpected(error, what)


class BackgroundThread:
    """Runs jobs one after another on a throttled thread. A job must not raise. Owns its thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Drops the jobs that have not begun. False when the present one does not end in time: its source hangs."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # At the steps' priority: at a lower one a load is under way for longer, and no step is the shorter for it.
        with throttled(Throttle(self._jobs.qsize)):
            while (job := self._jobs.get()) is not None:
                job()
                del job  # its closure may hold weights
