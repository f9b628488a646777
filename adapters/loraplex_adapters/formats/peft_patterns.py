r"""PEFT's patterns of module paths: `rank_pattern` and `alpha_pattern`, and those of whole paths.

For the first two PEFT runs `re.match(rf"(.*\.)?({pattern})$", path)`. A hostile pattern would hang Python's
backtracking matcher or exhaust memory while it is compiled. RE2 matches in linear time; the cost of a pattern, and of
all patterns of an adapter together, is bounded here. Accepted is what `re` and RE2 read alike: literals, `.`, `\d \D \w
\W \s \S` and escaped punctuation, `[...]`, `(...)`, `(?:...)`, `(?i:...)`, `(?s:...)` and `(?P<name>...)`, `|`, `* + ?`
(lazy or not), `{m}` `{m,}` `{m,n}`, `^`, `$`, `\A`, `\b` and `\B`. Everything else is refused: backreferences,
lookaround, and flags for the whole pattern, which PEFT cannot use either. Paths are ASCII in practice; classes mean
their ASCII members.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from functools import cache
from typing import Any

from loraplex_adapters.io.throttle import checkpoint
from loraplex_contracts.errors import AdapterUnsupported

MAX_PATTERN_CHARS = 256
MAX_WHOLE_CHARS = 4096  # training programs write long ones
MAX_WHOLE_BYTES = 1 << 20
# Memory of one compiled pattern, RE2's caches included: room for 1,000 instructions and some states of its automaton.
MAX_PATTERN_BYTES = 64 << 10
# A pattern for each of 126 layers' seven linears, in both fields, takes about half of it.
MAX_INSTRUCTIONS = 1 << 18
# One character compared with one instruction takes a nanosecond at worst; a call is worth some 500 of those.
MAX_MATCH_STEPS = 1 << 26
CALL_STEPS = 512
PLAIN_STEPS = 64

_PLAIN = frozenset(string.ascii_letters + string.digits + "_.-")
# Each alternative begins with another character, so this takes linear time itself.
_ESCAPE = r"\\(?:[dDwWsS]|[^a-zA-Z0-9])"
_GROUP = r"\((?!\?)|\(\?[is]{0,2}:|\(\?P<[a-zA-Z_]\w{0,31}>"
_UNDERSTOOD = re.compile(
    rf"(?:{_ESCAPE}|\\[bBA]|\[\^?\]?(?:{_ESCAPE}|[^\\\[\]])*\]|{_GROUP}|\{{\d{{1,3}}(?:,\d{{0,3}})?\}}|[^\\\[({{])*",
    re.ASCII | re.DOTALL,
)


@dataclass(slots=True)
class Budget:
    """Cost that compiling, or matching, all patterns of one adapter may still have."""

    steps_left: int
    refusal: str

    def spend(self, num_steps: int) -> None:
        """Takes steps off the budget. Raises AdapterUnsupported when nothing is left."""
        checkpoint()
        self.steps_left -= num_steps
        if self.steps_left < 0:
            raise AdapterUnsupported(f"rank_pattern and alpha_pattern {self.refusal}; use fewer or simpler patterns")


def compile_budget() -> Budget:
    """The budget for compiling patterns, in instructions of RE2."""
    return Budget(MAX_INSTRUCTIONS, "are too large together")


def match_budget() -> Budget:
    """The budget for matching patterns, in nanoseconds at worst."""
    return Budget(MAX_MATCH_STEPS, "take too long to match")


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """One pattern with PEFT's meaning for module paths. `compiled` is RE2's; None for names and dots only."""

    text: str
    compiled: Any = None

    def matches(self, path: str, budget: Budget) -> bool:
        """True if the pattern matches the path. Raises AdapterUnsupported when the adapter has used up its budget."""
        if self.compiled is not None:
            budget.spend(CALL_STEPS + self.compiled.programsize * len(path))
            return self.compiled.fullmatch(_encoded(path)) is not None
        # The common case, faster than any engine. A dot means any character, as in PEFT.
        budget.spend(PLAIN_STEPS)
        start = len(path) - len(self.text)
        if start < 0 or (start > 0 and path[start - 1] != "."):
            return False
        return all(want in (".", have) for want, have in zip(self.text, path[start:], strict=True))


@dataclass(frozen=True, slots=True)
class WholePattern:
    """A pattern that PEFT matches with whole paths: `target_modules` or `exclude_modules`."""

    compiled: Any

    def cost(self, path: str) -> int:
        """Nanoseconds, at worst, that matching the path takes."""
        return CALL_STEPS + self.compiled.programsize * len(path)

    def matches(self, path: str) -> bool:
        return self.compiled.fullmatch(_encoded(path)) is not None


def compile_whole(text: str) -> WholePattern | None:
    """The compiled pattern; None where it is not understood or too large."""
    if len(text) > MAX_WHOLE_CHARS or _UNDERSTOOD.fullmatch(text) is None:
        return None
    import re2

    try:
        return WholePattern(re2.compile(_encoded(text), _options(MAX_WHOLE_BYTES)))
    except re2.error:
        return None


def compile_pattern(text: str, field_name: str, budget: Budget) -> ModulePattern:
    """The compiled pattern. Raises AdapterUnsupported, naming the field, when the pattern is not understood or too
    large."""
    if len(text) > MAX_PATTERN_CHARS:
        raise AdapterUnsupported(f"{field_name}: a pattern of {len(text)} characters; at most {MAX_PATTERN_CHARS}")
    budget.spend(1)
    if set(text) <= _PLAIN:
        return ModulePattern(text)
    if _UNDERSTOOD.fullmatch(text) is None:
        raise _refusal(text, field_name, "it uses more than literals, sets, groups, counts and `|`")
    import re2

    try:
        re2.compile(_encoded(text), _options())  # alone, because its parentheses could pair with ours
        compiled = re2.compile(_encoded(rf"(?:.*\.)?(?:{text})"), _options())
    except re2.error as error:
        raise _refusal(text, field_name, error.args[0].decode(errors="replace")) from None
    budget.spend(compiled.programsize)
    return ModulePattern(text, compiled)


def _encoded(text: str) -> bytes:
    """The text's bytes. JSON can hold lone surrogates; RE2 refuses their bytes."""
    return text.encode(errors="surrogatepass")


@cache
def _options(max_bytes: int = MAX_PATTERN_BYTES) -> Any:
    import re2

    options = re2.Options()
    options.max_mem = max_bytes
    options.never_capture = True
    options.log_errors = False
    return options


def _refusal(text: str, field_name: str, why: str) -> AdapterUnsupported:
    return AdapterUnsupported(f"{field_name}: pattern {text[:80]!a} is not served: {why}")
