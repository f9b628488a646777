"""What happens in the background: fetching adapters from their source into the store, and the threads that do it.

Everything a user's files can cause ends as a typed error. Knows nothing of tables, budgets or names' states.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from loraplex_adapters.formats.detect import WEIGHTS_NAME, detect_kind, ignored_template
from loraplex_adapters.formats.peft import LoraPlan, plan_lora
from loraplex_adapters.formats.peft_config import CONFIG_NAME, MAX_CONFIG_BYTES, parse_peft_config
from loraplex_adapters.formats.safetensors_header import read_header
from loraplex_adapters.key import AdapterKey
from loraplex_adapters.lora.convert import WriteFn, check_base_copies, write_payload
from loraplex_adapters.pace import GentlePace, Pace
from loraplex_adapters.sources.base import AdapterFiles, AdapterSource, SourceFile, read_all
from loraplex_adapters.store import AdapterStore
from loraplex_adapters.targets import BaseTargets
from loraplex_proto.errors import AdapterMemoryFull, DiskFull, LoraplexError, SourceUnavailable, unexpected

log = logging.getLogger(__name__)

# Beside a busy thread on the same core it gets about a quarter of it: steps come first, and a load still ends soon.
BACKGROUND_NICENESS = 5


@dataclass(frozen=True, slots=True)
class Imported:
    """An adapter whose verified bytes are in the store."""

    key: AdapterKey
    num_bytes: int
    rank: int


def import_adapter(
    adapter_id: str, source: AdapterSource, targets: BaseTargets, store: AdapterStore, pace: Pace
) -> Imported:
    """Reads the source, checks everything, stores. Raises a typed error, and then nothing is left behind."""
    with source.open(adapter_id) as files:
        detect_kind(files.names)
        config_file, weights_file = files.open(CONFIG_NAME), files.open(WEIGHTS_NAME)
        plan = _plan(files, config_file, weights_file, targets, pace)
        for warning in _warnings(plan, files):
            log.warning("adapter %s %s", ascii(adapter_id), warning)

        def fill(write: WriteFn) -> None:
            check_base_copies(plan, weights_file)
            write_payload(plan, weights_file, write)
            config_file.check_unchanged()
            weights_file.check_unchanged()

        key = store.put("lora", plan.layout.to_json(), plan.layout.num_bytes, fill)
    return Imported(key, plan.layout.num_bytes, plan.layout.max_rank)


def check_adapter(adapter_id: str, source: AdapterSource, targets: BaseTargets, pace: Pace) -> LoraPlan:
    """All checks that need only the header, for whoever wants to know without loading."""
    with source.open(adapter_id) as files:
        detect_kind(files.names)
        return _plan(files, files.open(CONFIG_NAME), files.open(WEIGHTS_NAME), targets, pace)


def _plan(
    files: AdapterFiles, config_file: SourceFile, weights_file: SourceFile, targets: BaseTargets, pace: Pace
) -> LoraPlan:
    config = parse_peft_config(read_all(config_file, MAX_CONFIG_BYTES, CONFIG_NAME))

    def read_at(offset: int, num_bytes: int) -> bytes:
        data = bytearray(num_bytes)
        weights_file.read_into(memoryview(data), offset)
        return bytes(data)

    tensors = read_header(read_at, weights_file.num_bytes, WEIGHTS_NAME, pace)
    return plan_lora(config, tensors, targets, pace)


def _warnings(plan: LoraPlan, files: AdapterFiles) -> list[str]:
    template = ignored_template(files.names)
    unused = [f"comes with {template}, which is not used: the base model's chat template is"] if template else []
    return [*plan.warnings, *unused]


def typed(error: BaseException, what: str) -> LoraplexError:
    """What a background job's exception becomes. The unknown is opaque outside and explained in the log."""
    if isinstance(error, LoraplexError):
        return error
    if isinstance(error, MemoryError):
        return AdapterMemoryFull(f"no memory for {what}; try again later", retry_after_s=5.0)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"no room on disk for {what}", resource="adapter store", retry_after_s=5.0)
    if isinstance(error, OSError):
        log.warning("%s: %s", what, error)
        return SourceUnavailable(f"{what} failed ({error.strerror or 'input or output'}); try again later")
    if type(error).__name__ == "OutOfMemoryError":  # torch's, on the device
        return AdapterMemoryFull(f"no device memory for {what}; try again later", retry_after_s=5.0)
    return unexpected(error, what)


class BackgroundThread:
    """Runs jobs one after another, each with the thread's pace. A job must not raise. Owns its thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[Pace], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[Pace], None]) -> None:
        self._jobs.put(job)

    def close(self, timeout_s: float) -> bool:
        """Drops the jobs that have not begun. False when the present one does not end in time (a source that hangs)."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # Gives way to the step loop, where the system lets each thread have a priority of its own.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BACKGROUND_NICENESS)
        pace = GentlePace()
        while True:
            job = self._jobs.get()
            if job is None:
                return
            job(pace)
            del job  # its closure may hold weights
