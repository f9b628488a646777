"""The scheduler's limits, checked once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What one step and the queue may hold, and how patient a waiting adapter has to be."""

    max_running: int  # rows: sequences in the batch
    max_step_tokens: int
    max_context_tokens: int  # prompt plus output of one sequence
    max_queued: int = 4096  # requests that have not begun
    model_digest: str = ""  # into every prefix-cache key
    # Free blocks that an admission leaves to those that run already, so that it does not cost a preemption at once.
    num_spare_blocks: int = 1
    # A request whose adapter finds no device slot is overtaken by requests for adapters that are there: by this many
    # sequences, or for this long. Then slots are made to drain for it.
    max_bypasses: int = 32
    max_adapter_wait_s: float = 1.0
    # A request without a deadline is refused, or ends, rather than wait for longer than this. 0: it waits for ever.
    max_queue_wait_s: float = 60.0
    # A sequence that has run for so long gives its row to a new one that is much shorter and has waited for so long.
    slice_s: float = 0.5

    def __post_init__(self) -> None:
        checks = (
            (self.max_running >= 1, "max_running must be at least 1"),
            # So that a decoding sequence never waits for the budget: policy has one case less.
            (self.max_step_tokens >= self.max_running, "max_step_tokens must be at least max_running"),
            (self.max_context_tokens >= 2, "max_context_tokens must be at least 2"),
            (self.max_queued >= 1, "max_queued must be at least 1"),
            (self.num_spare_blocks >= 0, "num_spare_blocks must not be negative"),
            (self.max_bypasses >= 0, "max_bypasses must not be negative"),
            (self.max_adapter_wait_s >= 0, "max_adapter_wait_s must not be negative"),
            (self.max_queue_wait_s >= 0, "max_queue_wait_s must not be negative"),
            (self.slice_s > 0, "slice_s must be above 0"),
        )
        for is_ok, rule in checks:
            if not is_ok:
                raise ValueError(rule)
