"""Record of a request, from arrival to end, for log, metrics and traces."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Any, Final

from loraplex_contracts.adapters import MAX_ADAPTER_ID_CHARS, MAX_ID_CHARS
from loraplex_contracts.errors import LoraplexError

log = logging.getLogger("loraplex.requests")

# Calls that compute, and calls that change what is served; the others are questions about the server, and only their
# failures are logged.
COMPUTING: Final = frozenset({"Generate", "GenerateStream", "Embed", "Classify", "Score"})
CHANGING: Final = frozenset({"LoadAdapter", "UnloadAdapter"})

_MAX_NAME_CHARS: Final = MAX_ADAPTER_ID_CHARS + 65  # with a version


@dataclass(slots=True)
class RequestRecord:
    """One call. Written by its handler, read at its end. Never holds a word of a prompt or an answer."""

    method: str
    tenant: str = ""
    started_s: float = field(default_factory=time.monotonic)
    request_id: str = ""
    adapter: str = ""  # or the name of a mixture; empty for the base model
    adapter_digest: str = ""
    worker_id: str = ""  # that answered, in a router
    num_retries: int = 0  # on other workers
    num_prompt_tokens: int = 0  # in a router an estimate, until a worker has said it at the end of a completion
    num_cached_tokens: int = 0  # of the prompt, out of the prefix cache
    num_output_tokens: int = 0  # that the client got
    drafts: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # drafted, accepted
    # Seconds from the arrival; None where it did not come so far.
    queue_s: float | None = None
    first_token_s: float | None = None  # in a router its first message
    adapter_wait_s: float = 0.0  # of `queue_s`, for its adapter's weights
    total_s: float = 0.0
    code: str = ""  # name of a gRPC status code, at the end
    reason: str = ""  # of an error
    error: str = ""  # its sentence
    waited_s: float | None = None  # in the place of `queue_s`, of one that ended before its first step
    peer: str = ""  # the caller's address, of a call that no handler saw

    @property
    def computes(self) -> bool:
        return self.method in COMPUTING

    @property
    def was_refused(self) -> bool:
        """True if it ended with an error before its client got anything."""
        return bool(self.reason) and self.first_token_s is None

    @property
    def decode_s(self) -> float | None:
        """Seconds from the first token to the end; None without a token."""
        return None if self.first_token_s is None else max(0.0, self.total_s - self.first_token_s)

    def ask_for(self, request_id: str, adapter: str) -> None:
        """Notes the names that a client sent, cut to the length of valid ones: they have not been checked yet."""
        self.request_id, self.adapter = request_id[:MAX_ID_CHARS], adapter[:_MAX_NAME_CHARS]

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    def add_drafts(self, proposer: str, num_drafted: int, num_accepted: int) -> None:
        before = self.drafts.get(proposer, (0, 0))
        self.drafts[proposer] = before[0] + num_drafted, before[1] + num_accepted

    def fail(self, error: LoraplexError) -> None:
        self.code, self.reason, self.error = error.code.name, error.reason, error.message

    def end(self, code: str = "") -> None:
        """Takes the time of the end. `code` is that of a call that did not fail."""
        self.code = self.code or code
        self.total_s = self.elapsed_s()

    def fields(self) -> dict[str, Any]:
        """Known facts by the documentation's names, for a line of the log and the attributes of a span."""
        found: dict[str, Any] = {
            "method": self.method,
            "code": self.code,
            "reason": self.reason,
            "tenant": self.tenant,
            "adapter": self.adapter,
            "digest": self.adapter_digest,
            "worker": self.worker_id,
            "peer": self.peer,
            "retries": self.num_retries,
        }
        found = {name: value for name, value in found.items() if value}
        if self.computes:
            found |= {"prompt_tokens": self.num_prompt_tokens, "tokens": self.num_output_tokens}
            found |= _rounded(queue_s=self.queue_s, ttft_s=self.first_token_s)
        return found | _rounded(total_s=self.total_s)


def _rounded(**seconds: float | None) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items() if value is not None}


def log_end(record: RequestRecord) -> None:
    """One line for a request that has ended. Questions about the server that were answered get none."""
    is_question = not record.computes and record.method not in CHANGING
    if (is_question and not record.reason) or not log.isEnabledFor(logging.INFO):
        return
    fields = record.fields()
    text = " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("method", "code", "reason"))
    if record.reason:
        log.info(
            "%s failed: %s: %s (%s)",
            *(record.method, record.code, record.error, text),
            extra={"request_id": record.request_id, "error": record.error, **fields},
        )
    else:
        log.info(
            "%s ended: %s (%s)",
            *(record.method, record.code, text),
            extra={"request_id": record.request_id, **fields},
        )
