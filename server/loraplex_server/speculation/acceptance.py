"""What a proposer's drafts promise: what has been accepted so far, and when to stop trying. Pure.

`Acceptance` says how likely the tokens of a draft are to be accepted; `Backoff` keeps a proposer that misses from being
asked; `TrackRecord` is both for one sequence and one proposer. Steps are counted by the caller; nothing here knows
tokens, requests or clocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loraplex_server.speculation.base import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP, UNIVERSAL

# What to expect before anything is known: the chance that a draft token is accepted when those before it were, by
# level (see AcceptancePool); the last one holds for all levels beyond. Hopeful, for who is never tried is never known.
PRIORS: Mapping[str, tuple[float, ...]] = {
    PROMPT_LOOKUP: (0.3, 0.4, 0.7, 0.8, 0.85),
    MEDUSA: (0.9, 0.8, 0.7),
    DRAFT_MODEL: (0.9,),
    UNIVERSAL: (0.9,),
}
# Of what a lookup copies from elsewhere than its own text: what earlier outputs have in common is copied, and then a
# value comes that is another one; and behind a value or a key, where the draft goes on in another text.
SOURCE_PRIORS: Mapping[str, tuple[float, ...]] = {
    "history": (0.3, 0.3, 0.5, 0.8, 0.8, 0.7),
    "resumed": (0.3, 0.6, 0.8, 0.6),
    "behind": (0.7, 0.6, 0.8, 0.5),
    "value": (0.6, 0.8, 0.9),
    "mark": (0.5,),
}
DEFAULT_PRIOR = (0.9,)

_NUM_LEVELS = 32
_LEAST, _MOST = 0.01, 0.98  # of any rate: nothing is certain

# A pool's prior is worth this many trials, and no more than so many are remembered; half of them after so many steps.
_PRIOR_TRIALS = 4.0
_MOST_TRIALS = 400.0
_HALF_LIFE = 500

_SKILL_STEP = 0.2
_MOST_SKILL = 4.0
_IDLE_DECAY = 0.97  # per step

# Misses in a row mean that nothing is to be had when they are less likely than one in fifty to be chance: never two of
# them, always ten.
_NO_CHANCE = math.log(50.0)
_LEAST_MISSES, _MOST_MISSES = 3, 10
MAX_PAUSE = 128  # steps; a power of two, as all pauses
_NUM_DOUBLINGS = 4  # from the first pause to the longest
_NUM_PROBED = 1  # draft tokens


class AcceptancePool:
    """Acceptance rates by level over all sequences that share a proposer: one draft model, one set of heads, lookup.

    A level is the evidence that the draft began with plus the position in the draft. Of a draft model or of heads it
    is the position alone; of a lookup it is how many tokens match at that point, so that what a match of 5 is worth
    counts for the fourth token behind a match of 1 too.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = tuple(prior[min(level, len(prior) - 1)] for level in range(_NUM_LEVELS))
        self._accepted = [0.0] * _NUM_LEVELS
        self._tried = [0.0] * _NUM_LEVELS
        self._news: list[tuple[int, int, bool]] = []  # what has been observed since the step began
        self._forgot_step = 0
        # Up to the level that somebody has asked for, without and with bounds.
        self._estimates: list[float] = []
        self._rates: list[float] = []
        self._step = -1

    @classmethod
    def of(cls, proposer: str, source: str = "") -> AcceptancePool:
        """One with the prior of that kind of proposer, and of where it found its draft."""
        return cls(SOURCE_PRIORS.get(source) or PRIORS.get(proposer, DEFAULT_PRIOR))

    def rates(self, step: int, num_levels: int = _NUM_LEVELS) -> Sequence[float]:
        """The chance that a draft token is accepted when those before it are, of the first `num_levels` levels at
        least. The same all through a step."""
        if step != self._step:
            self._step = step
            self._take_news()
            self._forget(step)
        if len(self._rates) < num_levels:
            self._estimate(min(num_levels, _NUM_LEVELS))
        return self._rates

    def observe(self, level: int, num_accepted: int, *, is_rejected: bool) -> None:
        """From `level` on that many tokens were accepted one after another, and the next one was rejected or not."""
        self._news.append((level, num_accepted, is_rejected))

    def _take_news(self) -> None:
        accepted, tried = self._accepted, self._tried
        for level, num_accepted, is_rejected in self._news:
            for idx in range(level, level + num_accepted + is_rejected):
                at = idx if idx < _NUM_LEVELS else _NUM_LEVELS - 1
                if tried[at] >= _MOST_TRIALS:
                    tried[at] *= 0.5
                    accepted[at] *= 0.5
                tried[at] += 1.0
                accepted[at] += idx < level + num_accepted
            self._drop_estimates(min(level, _NUM_LEVELS - 1))
        self._news.clear()

    def _forget(self, step: int) -> None:
        num_steps = step - self._forgot_step
        if num_steps * 16 < _HALF_LIFE:
            return  # too little to be worth the sums
        kept = 0.5 ** (num_steps / _HALF_LIFE)
        self._tried = [count * kept for count in self._tried]
        self._accepted = [count * kept for count in self._accepted]
        self._forgot_step = step
        self._drop_estimates(0)

    def _drop_estimates(self, level: int) -> None:
        """What is known of one level is expected of those behind it."""
        del self._estimates[level:], self._rates[level:]

    def _estimate(self, num_levels: int) -> None:
        estimates, rates = self._estimates, self._rates
        rate = estimates[-1] if estimates else 0.0
        for level in range(len(estimates), num_levels):
            # Where the level before does better than expected, so may this one: nobody knows before it is tried.
            expected = max(rate, self.prior[level])
            rate = (self._accepted[level] + _PRIOR_TRIALS * expected) / (self._tried[level] + _PRIOR_TRIALS)
            estimates.append(rate)
            rates.append(min(max(rate, _LEAST), _MOST))


class Acceptance:
    """How likely drafts of one proposer are to be accepted in one sequence: the pool's rates, shifted by its skill.

    Skill is one number, added to the logarithm of the odds of every level, and moved by every token tried by as much as
    the outcome surprised (as players are rated by Elo's method): a few drafts tell it, and a miss where little was
    expected says little about where much is. It fades while nothing is tried, or what did not pay once never would.
    """

    def __init__(self, pool: AcceptancePool) -> None:
        self.pool = pool
        self._skill = 0.0
        self._step = 0  # of the last draft

    def survival(self, step: int, num_tokens: int, evidence: int = 0, *, is_probe: bool = False) -> tuple[float, ...]:
        """The chance, for each of `num_tokens` draft tokens, that it and all before it are accepted.

        Of a probe: if the proposer is still as good as one hopes before knowing anything.
        """
        shift = math.exp(self._faded(step))
        rates, prior = self.pool.rates(step, evidence + num_tokens), self.pool.prior
        curve: list[float] = []
        chance = 1.0
        for level in range(evidence, evidence + num_tokens):
            at = level if level < _NUM_LEVELS else _NUM_LEVELS - 1
            rate = rates[at]
            odds = shift * rate
            rate = odds / (1.0 - rate + odds)
            if is_probe and rate < prior[at]:
                rate = prior[at]
            chance *= rate
            curve.append(chance)
        return tuple(curve)

    def observe(self, step: int, num_drafted: int, num_accepted: int, evidence: int = 0) -> None:
        """`num_drafted` tokens were verified. Those behind the first that was rejected say nothing."""
        if num_drafted <= 0:
            return
        rates = self.pool.rates(step, evidence + num_accepted + 1)
        skill = self._faded(step)
        shift = math.exp(skill)
        for idx in range(min(num_accepted + 1, num_drafted)):
            rate = rates[min(evidence + idx, _NUM_LEVELS - 1)]
            odds = shift * rate
            skill += _SKILL_STEP * ((idx < num_accepted) - odds / (1.0 - rate + odds))
        self._skill = min(max(skill, -_MOST_SKILL), _MOST_SKILL)
        self._step = step
        self.pool.observe(evidence, num_accepted, is_rejected=num_accepted < num_drafted)

    def _faded(self, step: int) -> float:
        return self._skill * _IDLE_DECAY ** max(0, step - self._step - 1)


class Backoff:
    """When nothing is accepted any more: no drafts for ever more steps, then a probe of few tokens.

    Begins when misses in a row are no chance: the likelier a proposer usually is to be right, the sooner. Pauses end at
    steps that are multiples of their length: sequences that probe do so together, and share the call. A pause gives way
    to a match twice as long as the ones that failed: that is news.
    """

    def __init__(self) -> None:
        self._num_misses = 0  # since something was accepted
        self._doubt = 0.0  # how unlikely that was: minus the logarithm of the chance
        self._num_pauses = 0  # each twice as long as the one before
        self._last_step: int | None = None  # of the last draft; before it, the first one that could have had one
        self._failed_evidence = 0

    def limit(self, step: int, num_tokens: int, evidence: int = 0, max_pause: int = MAX_PAUSE) -> int:
        """How many of `num_tokens` draft tokens may be tried."""
        if self._last_step is None:
            self._last_step = step
        if not self.is_dry:
            return num_tokens
        if self.is_probe(step, max_pause):
            return min(num_tokens, _NUM_PROBED)
        return min(num_tokens, evidence) if evidence > 2 * self._failed_evidence else 0

    def is_probe(self, step: int, max_pause: int = MAX_PAUSE) -> bool:
        """Whether a draft of this step would be there to see whether anything is accepted again.

        Also after a long time without a draft, though nothing was missed: because others had no luck, say.
        """
        if self._last_step is None:
            return False
        pause = self._pause(max_pause) if self.is_dry else MAX_PAUSE
        return step >= (self._last_step // pause + 1) * pause

    def observe(self, step: int, num_drafted: int, num_accepted: int, evidence: int = 0, *, rate: float = 0.5) -> None:
        """`rate`: how likely the first of the draft's tokens was to be accepted, so far as others know."""
        if num_drafted <= 0:
            return
        self._last_step = step
        if num_accepted > 0:
            # One token may be chance.
            is_well = num_accepted > 1 or num_accepted == num_drafted
            self._num_misses, self._doubt = 0, 0.0
            self._num_pauses = 0 if is_well else self._num_pauses // 2
            self._failed_evidence = 0
            return
        self._failed_evidence = max(evidence, self._failed_evidence // 2)
        self._num_misses += 1
        self._doubt += max(-math.log1p(-min(rate, _MOST)), _NO_CHANCE / _MOST_MISSES)
        if self.is_dry:
            self._num_pauses = min(self._num_pauses + 1, _NUM_DOUBLINGS + 1)

    @property
    def is_dry(self) -> bool:
        """Whether there are pauses, up to a `max_pause`, now."""
        return self._num_misses >= _LEAST_MISSES and self._doubt > _NO_CHANCE * 0.999

    def _pause(self, max_pause: int) -> int:
        return max(1, max_pause >> max(0, _NUM_DOUBLINGS + 1 - self._num_pauses))


@dataclass(slots=True)
class TrackRecord:
    """One proposer's luck with one sequence: what its next draft promises."""

    acceptance: Acceptance
    backoff: Backoff = field(default_factory=Backoff)

    @classmethod
    def new(cls, pool: AcceptancePool) -> TrackRecord:
        return cls(Acceptance(pool))

    @property
    def is_dry(self) -> bool:
        """Whether it matters how long pauses may be."""
        return self.backoff.is_dry

    def survival(
        self,
        step: int,
        num_tokens: int,
        evidence: int = 0,
        *,
        max_pause: int = MAX_PAUSE,
        holds_back: bool = True,
    ) -> tuple[float, ...]:
        """The chances of the draft tokens that may be tried now, `num_tokens` at most, none during a pause.

        `evidence`: how many tokens match, of a lookup; else 0. `max_pause`: see `longest_pause`. Without `holds_back`
        nothing is left out: for requests of fixed length.
        """
        if not holds_back:
            return self.acceptance.survival(step, num_tokens, evidence)
        num_tokens = self.backoff.limit(step, num_tokens, evidence, max_pause)
        if num_tokens == 0:
            return ()
        return self.acceptance.survival(step, num_tokens, evidence, is_probe=self.backoff.is_probe(step, max_pause))

    def observe(self, step: int, num_drafted: int, num_accepted: int, evidence: int = 0) -> None:
        """A draft was verified, of which `num_drafted` tokens had room; with none nothing is learned."""
        at = min(evidence, _NUM_LEVELS - 1)
        rate = self.acceptance.pool.rates(step, at + 1)[at]
        self.backoff.observe(step, num_drafted, num_accepted, evidence, rate=rate)
        self.acceptance.observe(step, num_drafted, num_accepted, evidence)
