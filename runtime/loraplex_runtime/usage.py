"""Requests, tokens and refusals by adapter and tenant, for a bounded number of names.

A metric per name must not grow with the names that clients send. So the names that are asked for most have counts of
their own, and what the others do is counted together, as "(other)". A name that did not get to any weights has no
place: whoever invents names fills nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from loraplex_runtime.request_record import RequestRecord

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

MAX_NAMES: Final = 100
# No name of an adapter or tenant has parentheses.
OTHER: Final = "(other)"
BASE: Final = "(base)"

# Names whose use is known, for each that has a place, and uses after which older ones count half.
_CANDIDATES: Final = 4
_HALF_LIFE: Final = 64
# A name takes another's place when it is used so many times as often, so that two of them do not alternate.
_LEAD: Final = 2


@dataclass(slots=True)
class Usage:
    """Counts of one name, since it got its place."""

    requests: Counter[str] = field(default_factory=Counter[str])  # by gRPC code
    refusals: Counter[str] = field(default_factory=Counter[str])  # by reason
    prompt_tokens: int = 0
    output_tokens: int = 0
    drafted: Counter[str] = field(default_factory=Counter[str])  # by proposer
    accepted: Counter[str] = field(default_factory=Counter[str])
    num_first_tokens: int = 0
    first_token_s: float = 0.0  # all of them together

    def add(self, record: RequestRecord) -> None:
        self.requests[record.code] += 1
        if record.was_refused:
            self.refusals[record.reason] += 1
        else:
            self.prompt_tokens += record.num_prompt_tokens
        self.output_tokens += record.num_output_tokens
        for proposer, (num_drafted, num_accepted) in record.drafts.items():
            self.drafted[proposer] += num_drafted
            self.accepted[proposer] += num_accepted
        if record.first_token_s is not None:
            self.num_first_tokens += 1
            self.first_token_s += record.first_token_s


class UsageByName:
    """Owns the counts of the names that are used most, and of all others together.

    The counts of a name that loses its place are gone, rather than added to the others': no counter jumps.
    """

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._named: dict[str, Usage] = {}
        self._other = Usage()
        self._uses: dict[str, int] = {}  # of late: of those with a place, and of candidates
        self._num_uses = 0

    def add(self, name: str, record: RequestRecord, *, is_known: bool) -> None:
        """Counts a request under a name. `is_known`: there is something of that name. Others get no place."""
        usage = self._usage(name) if is_known else self._named.get(name, self._other)
        usage.add(record)

    def items(self) -> Iterator[tuple[str, Usage]]:
        """Usage by name; the other names' last, once there are some."""
        yield from self._named.items()
        if self._other.requests:
            yield OTHER, self._other

    def _usage(self, name: str) -> Usage:
        self._note_use(name)
        found = self._named.get(name)
        if found is not None:
            return found
        if len(self._named) >= self._max_names:
            rarest = min(self._named, key=lambda one: self._uses.get(one, 0))
            if self._uses.get(name, 0) <= _LEAD * self._uses.get(rarest, 0):
                return self._other
            del self._named[rarest]
        self._named[name] = usage = Usage()
        return usage

    def _note_use(self, name: str) -> None:
        self._num_uses += 1
        if self._num_uses % (_HALF_LIFE * self._max_names) == 0:
            self._uses = {one: uses // 2 for one, uses in self._uses.items() if uses > 1}
        if name in self._uses or len(self._uses) < _CANDIDATES * self._max_names:
            self._uses[name] = self._uses.get(name, 0) + 1


class UsageCollector:
    """Prometheus collector of both tables."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        """`prefix`: of the metrics' names."""
        self.adapters = UsageByName()
        self.tenants = UsageByName()
        self._prefix = prefix
        registry.register(self)  # pyright: ignore[reportArgumentType]  # the protocol is `collect` alone

    def add(self, record: RequestRecord) -> None:
        """Counts a request that computes, at its end."""
        is_known = not record.adapter or bool(record.adapter_digest) or record.code == "OK"
        # A client may send "(base)" as a name; there is no such adapter.
        name = {"": BASE, BASE: OTHER}.get(record.adapter, record.adapter)
        self.adapters.add(name, record, is_known=is_known)
        self.tenants.add(record.tenant, record, is_known=True)  # tenants are in the operator's file

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import SummaryMetricFamily

        for label, table in (("adapter", self.adapters), ("tenant", self.tenants)):
            rows = list(table.items())
            for name, text, values in _COUNTS:
                yield self._counter(f"{label}_{name}", text.format(label), (label,), rows, values)
            for name, text, labelled, values in _LABELLED:
                if label == "adapter" or labelled != "proposer":
                    yield self._counter(f"{label}_{name}", text.format(label), (label, labelled), rows, values)
            text = f"From a request's arrival to its first token, by {label}."
            seconds = SummaryMetricFamily(f"{self._prefix}{label}_time_to_first_token_seconds", text, labels=[label])
            for name, usage in rows:
                seconds.add_metric([name], usage.num_first_tokens, usage.first_token_s)
            yield seconds

    def _counter(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        rows: Iterable[tuple[str, Usage]],
        values: Callable[[Usage], Mapping[str, int]],
    ) -> Metric:
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(self._prefix + name, text, labels=list(labels))
        for row, usage in rows:
            for value, count in values(usage).items():
                family.add_metric([row, value] if len(labels) > 1 else [row], count)
        return family


_Values = Callable[[Usage], Mapping[str, int]]
_COUNTS: Final[tuple[tuple[str, str, _Values], ...]] = (
    (
        "prompt_tokens",
        "Tokens of prompts of requests that have ended and were not refused, by {}.",
        lambda one: {"": one.prompt_tokens},
    ),
    ("generation_tokens", "Tokens that clients got, by {}.", lambda one: {"": one.output_tokens}),
)
_LABELLED: Final[tuple[tuple[str, str, str, _Values], ...]] = (
    ("requests", "Requests that have ended, by {}.", "code", lambda one: one.requests),
    ("refusals", "Requests that ended with an error before any answer, by {}.", "reason", lambda one: one.refusals),
    ("draft_tokens", "Tokens that speculation has proposed, by {}.", "proposer", lambda one: one.drafted),
    ("accepted_tokens", "Proposed tokens that the model agreed with, by {}.", "proposer", lambda one: one.accepted),
)
