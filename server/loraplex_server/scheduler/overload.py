"""Overload control: measured step times, expected waits, early refusal.

A step takes what its decoding rows take, measured by their number, and a little for each prompt token beside them. From
that follow how soon one sequence gets its next token, and what work costs the whole engine when it is full. Cached
prompts and texts that end early make requests smaller than they might be; both are measured too. Newer measurements
count for more.

The expected wait of a request is the work ahead of it in the fair order over the measured speed. Of those that find
rows, blocks and slots only the prompts count, where no deadline keeps rows free: nobody waits for their texts to end.
It is compared with the time that the request's deadline leaves beside its own work, or with the server's bound where
it has none. No request is refused while nothing is measured or nothing waits ahead of it, so a wrong measurement is
soon replaced.
Pure; time is an argument.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.load import MUCH_SHORTER, Flow, Forecast, expected_tokens, overloaded, slack_s
from loraplex_contracts.request import Request
from loraplex_server.scheduler.sequence_table import RequestState, SequenceState, SequenceTable, StepSize


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Refuses what would wait for too long."""

    max_queue_wait_s: float
    max_step_tokens: int
    num_spare_blocks: int  # that an admission leaves to those that run
    table: SequenceTable
    speed: StepSpeed

    def check(self, request: Request, adapter_keys: Sequence[AdapterKey] | None, num_outputs: int, now: float) -> None:
        """Raises Overloaded where a request would wait for too long. `adapter_keys`: of adapters that it needs on the
        device, None: not known yet; `num_outputs`: output tokens that each completion may have at most."""
        if not self.table.waiting or not self.speed.is_work_known:
            return
        allowed_s = self._allowed_s(request, num_outputs, now)
        num_prompt = self.table.num_waiting_prompt_tokens
        whole_queue_s = self.speed.work_s(num_prompt, self.table.num_waiting_tokens - num_prompt)  # at most
        if allowed_s is None or whole_queue_s <= allowed_s:
            return
        wait_s = self.wait_s(request, adapter_keys, num_outputs)
        if wait_s > allowed_s:
            raise overloaded(wait_s, allowed_s, has_deadline=request.deadline_s is not None)

    def forecast(self) -> Forecast | None:
        """The expected waits of new requests; None while nobody has to wait, or nothing is known."""
        if not self.table.waiting or not self.speed.is_work_known:
            return None
        starts: list[float] = []
        waits_s: list[float] = []
        wait_s, passing_s, longest, room = 0.0, 0.0, 0, self._room()
        has_slots: dict[Flow, bool] = {}
        passing_waits_s: list[float] = []  # of those that pass whoever waits for an adapter's slot
        for seq in self.table.waiting:
            if seq.request.request.priority:
                continue  # lower ones are behind all of these; higher ones the engine counts when it decides
            num_prompt, num_output = _work(seq)
            passes = has_slots[seq.request.flow] = room.has_slots(seq.request.adapter_keys)
            if room.takes(seq):
                ahead_s = self.speed.prompts_s(num_prompt, self.max_step_tokens)
            else:
                ahead_s = self.speed.work_s(num_prompt, self.speed.num_outputs(num_output))
            wait_s += ahead_s
            passing_s += ahead_s if passes else 0.0
            longest = max(longest, num_prompt + num_output)
            starts.append(seq.order[1])
            waits_s.append(wait_s)
            passing_waits_s.append(passing_s)
        places = {flow: bisect_right(starts, self.table.clock.start_of(flow)) for flow in has_slots}
        return Forecast(
            prompt_token_s=self.speed.work_s(1, 0),
            interval_s=self.speed.interval_s(len(self.table.running) + 1),
            end_probability=self.speed.end_probability,
            max_queue_wait_s=self.max_queue_wait_s,
            waits_s={
                flow: (passing_waits_s if has_slots[flow] else waits_s)[place - 1]
                for flow, place in places.items()
                if place
            },
            longest_tokens=longest,
        )

    def wait_s(self, request: Request, adapter_keys: Sequence[AdapterKey] | None, num_outputs: int) -> float:
        """Time that the request would wait to begin: for all the work of those ahead of it in the order, except those
        that it would pass because it is much shorter, or because they wait for an adapter's slot and it does not."""
        order = (-request.priority, self.table.clock.start_of((request.tenant, request.adapter_name)))
        own = len(request.prompt_token_ids) + num_outputs * request.n
        entering, prompt, output, room = 0, 0, 0.0, self._room()
        for seq in self.table.waiting:
            if seq.order[:2] > order:
                break
            passes = adapter_keys is not None and room.has_slots(adapter_keys)
            if passes and not room.has_slots(seq.request.adapter_keys):
                continue
            num_prompt, num_output = _work(seq)
            if room.takes(seq):
                entering += num_prompt
                continue
            if num_prompt + num_output >= MUCH_SHORTER * own:
                num_prompt, num_output = 0, own
            prompt += num_prompt
            output += self.speed.num_outputs(num_output)
        return self.speed.prompts_s(entering, self.max_step_tokens) + self.speed.work_s(prompt, output)

    def _room(self) -> _Room:
        return _Room(self.table, self.num_spare_blocks)

    def is_too_late(self, state: RequestState, now: float) -> bool:
        """True if a request would miss its deadline if it began now, even with half as many rows beside it, and would
        have met it without waiting."""
        deadline_s = state.request.deadline_s
        if deadline_s is None or not self.speed.is_known:
            return False
        num_rows = (len(self.table.running) + 1) // 2
        own_s = self._own_s(state.num_prompt_tokens, state.max_total_tokens - state.num_prompt_tokens, num_rows)
        return deadline_s - now < own_s <= deadline_s - state.queued_s

    def _allowed_s(self, request: Request, num_outputs: int, now: float) -> float | None:
        if request.deadline_s is None:
            return self.max_queue_wait_s or None
        left_s = request.deadline_s - now
        return slack_s(left_s, self._own_s(len(request.prompt_token_ids), num_outputs, len(self.table.running) + 1))

    def _own_s(self, num_prompt: int, num_outputs: int, num_rows: int) -> float:
        """The likely time of one completion among so many, once it has begun."""
        return self.speed.work_s(num_prompt, 0) + self.speed.num_outputs(num_outputs) * self.speed.interval_s(num_rows)


class _Room:
    """Rows, blocks and slots that are free now, for those at the head of the queue. Where deadlines count, rows may
    stay free (Admission)."""

    def __init__(self, table: SequenceTable, num_spare_blocks: int) -> None:
        has_deadlines = any(seq.request.request.deadline_s is not None for seq in table.running)
        self._num_rows = 0 if has_deadlines else table.num_free_rows
        if table.states is not None:
            self._num_rows = min(self._num_rows, table.states.num_free)  # each row has one
        self._num_blocks = table.blocks.num_free - (num_spare_blocks if table.running else 0)
        self._blocks = table.blocks
        self._adapters = table.leased_adapters
        self._num_slots = table.num_adapter_slots

    def has_slots(self, adapter_keys: Sequence[AdapterKey]) -> bool:
        """True if these adapters have device slots, or could have. Others pass a sequence that finds none."""
        num_missing = sum(key not in self._adapters for key in adapter_keys)
        return not num_missing or len(self._adapters) + num_missing <= self._num_slots

    def takes(self, seq: SequenceState) -> bool:
        """Takes rows, blocks and slots for the next sequence and siblings that wait for it. False: it waits for more
        than prompts."""
        if not self.has_slots(seq.request.adapter_keys):
            return False
        if seq.request.request.deadline_s is not None:
            self._num_rows = 0
        self._num_rows -= _num_siblings(seq)
        self._num_blocks -= self._blocks.num_blocks_for(len(seq.token_ids))
        if self._num_rows < 0 or self._num_blocks < 0:
            return False
        self._adapters.update(seq.request.adapter_keys)
        return True


def _num_siblings(seq: SequenceState) -> int:
    """Number of sequences that the leader of a request stands for, itself included; 1 for the others."""
    return seq.request.num_open if seq.request.leader is seq else 1


def _work(seq: SequenceState) -> tuple[int, int]:
    """Tokens to compute and tokens to make of a sequence that waits, with those of siblings that wait for it."""
    return len(seq.token_ids), seq.num_left * _num_siblings(seq)


HALF_LIFE_S, HALF_LIFE_STEPS = 5.0, 64  # of a step's measurement: whichever is shorter
MAX_SURPRISE = 8.0  # a step that took longer than so many usual ones counts as so many
MIN_FULL_STEPS = 4  # before they say anything
MIN_STEPS = 8
MIN_WEIGHT = 8.0  # of a point that others follow
MEAN_STEP = 0.05  # what one more value changes in a mean
HALF_LIFE_TOKENS = 16_384  # of the end probability's measurement


@dataclass(slots=True)
class _Point:
    """Means over steps with about as many rows."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class _Curve:
    """Seconds of a step over its number of rows: a point for each power of two, straight lines between them. A change
    at one point scales the others too."""

    points: dict[int, _Point] = field(default_factory=dict[int, _Point])

    def add(self, num_rows: int, seconds: float, decay: float) -> None:
        point = self.points.setdefault(num_rows.bit_length(), _Point())
        point.weight = point.weight * decay + 1.0
        point.rows += (num_rows - point.rows) / point.weight
        before_s = point.seconds
        point.seconds += (seconds - point.seconds) / point.weight
        if point.weight >= MIN_WEIGHT and before_s and point.seconds:
            for other in self.points.values():
                if other is not point:
                    other.seconds *= point.seconds / before_s

    def at(self, num_rows: float) -> float:
        """Seconds with so many rows. Never less than with fewer rows, and constant beyond the points."""
        points: list[tuple[float, float]] = []
        for point in sorted(self.points.values(), key=lambda point: -point.rows):
            points.append((point.rows, min([point.seconds, *(seconds for _, seconds in points[-1:])])))
        if not points:
            return 0.0
        rows, seconds = points[0]
        for fewer_rows, fewer_seconds in points:
            if num_rows >= fewer_rows:
                share = min(1.0, (num_rows - fewer_rows) / max(rows - fewer_rows, 0.5))
                return fewer_seconds + (seconds - fewer_seconds) * share
            rows, seconds = fewer_rows, fewer_seconds
        return seconds


@dataclass(slots=True)
class _Slope:
    """Slope of y over x, by a decaying least-squares fit; 0 where x does not vary."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, decay: float) -> None:
        self.weight = self.weight * decay + 1.0
        self.x = self.x * decay + x
        self.y = self.y * decay + y
        self.xx = self.xx * decay + x * x
        self.xy = self.xy * decay + x * y

    def value(self) -> float:
        variance = self.xx * self.weight - self.x * self.x
        return max(0.0, (self.xy * self.weight - self.x * self.y) / variance) if variance > 1e-6 * self.xx else 0.0


@dataclass(slots=True)
class StepSpeed:
    """Owns the measurements of step times."""

    _decode: _Curve = field(default_factory=_Curve)  # without what prompts in the same step took
    _prompt: _Slope = field(default_factory=_Slope)
    _num_steps: int = 0
    _num_full: int = 0
    _full_rows: float = 1.0  # mean over full steps
    # Decaying sums: rows that decoded, the tokens that they gave (with drafts these are more), prompt tokens beside.
    _rows: float = 0.0
    _outputs: float = 0.0
    _prompts: float = 0.0
    _prompt_share: float = 1.0  # of prompt tokens that are computed: not cached
    _ends: float = 0.0  # texts that ended before their limit, among so many tokens
    _tokens: float = 0.0

    def on_step(self, step: StepSize, num_outputs: int, elapsed_s: float) -> None:
        """Takes in a step that has ended, `elapsed_s` after the one before it."""
        prompt_s = self._prompt.value()
        if usual_s := self._decode.at(step.num_rows):
            elapsed_s = min(elapsed_s, MAX_SURPRISE * (usual_s + prompt_s * step.num_prompt_tokens))
        decay = 0.5 ** max(elapsed_s / HALF_LIFE_S, 1 / HALF_LIFE_STEPS)
        self._prompt.add(step.num_prompt_tokens, elapsed_s, decay)
        if step.num_rows:
            self._decode.add(step.num_rows, max(0.0, elapsed_s - prompt_s * step.num_prompt_tokens), decay)
        self._rows = self._rows * decay + step.num_rows
        self._outputs = self._outputs * decay + num_outputs
        self._prompts = self._prompts * decay + step.num_prompt_tokens
        token_decay = 0.5 ** (num_outputs / HALF_LIFE_TOKENS)
        self._ends *= token_decay
        self._tokens = self._tokens * token_decay + num_outputs
        self._num_steps += 1
        if step.is_full:
            self._num_full += 1
            self._full_rows += max(MEAN_STEP, 1.0 / self._num_full) * (step.num_rows - self._full_rows)

    def on_entry(self, num_cached: int, num_tokens: int) -> None:
        """Counts a request that begins; `num_cached` of its prompt's tokens need not be computed."""
        self._prompt_share += MEAN_STEP * (1.0 - num_cached / num_tokens - self._prompt_share)

    def on_early_end(self) -> None:
        """Counts a text that has ended before its limit."""
        self._ends += 1.0

    @property
    def is_known(self) -> bool:
        """True if there are measurements enough to say how long a step takes."""
        return self._num_steps >= MIN_STEPS

    @property
    def is_work_known(self) -> bool:
        """True if there are measurements enough to say what work costs."""
        return self._num_full >= MIN_FULL_STEPS and self.is_known

    def work_s(self, num_prompt_tokens: float, num_outputs: float) -> float:
        """The time in which the whole engine, when it is full, does so much work."""
        num_rows = max(1.0, self._full_rows)
        output_s = self._decode.at(num_rows) / (num_rows * self._tokens_per_row())
        return num_prompt_tokens * self._prompt_share * self._prompt.value() + num_outputs * output_s

    def prompts_s(self, num_tokens: int, max_step_tokens: int) -> float:
        """The time in which full steps do so many prompt tokens, with the rows that decode beside them."""
        num_computed = num_tokens * self._prompt_share
        return num_computed * (self._prompt.value() + self._decode.at(self._full_rows) / max_step_tokens)

    def prompt_s(self, num_tokens: int) -> float:
        """The time in which so many tokens are computed as a prompt; 0 while nothing is known."""
        return num_tokens * self._prompt.value()

    def interval_s(self, num_rows: int) -> float:
        """Seconds from one token of a sequence to its next, among so many rows and with as many prompts beside as of
        late."""
        prompts_s = self._prompts / self._rows * num_rows * self._prompt.value() if self._rows else 0.0
        return (self._decode.at(num_rows) + prompts_s) / self._tokens_per_row()

    def num_outputs(self, num_allowed: int) -> float:
        """Expected number of further tokens of a text, at most `num_allowed`: it ends at each with the same
        probability."""
        return expected_tokens(num_allowed, self.end_probability)

    @property
    def end_probability(self) -> float:
        """Measured probability that a text ends at its next token; 0 without measurements."""
        return min(1.0, (self._ends + 1.0) / self._tokens) if self._tokens else 0.0

    def _tokens_per_row(self) -> float:
        return max(1.0, self._outputs / self._rows) if self._rows else 1.0
