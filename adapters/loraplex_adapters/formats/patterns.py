r"""Regular expressions that came with an adapter (`rank_pattern`, `alpha_pattern`), matched in bounded time.

PEFT runs `re.match(rf"(.*\.)?({pattern})$", path)`. A hostile pattern would hang a backtracking matcher, or exhaust
memory while it is compiled (counted repeats), so neither `re` nor `regex` ever sees one. Instead the subset that
adapters use is compiled to a small automaton here and simulated: time is at most len(program) * len(path), the program
is bounded, and so are the sums over all patterns (CompileWork) and all modules (MatchWork) of an adapter. Whether a
path matches does not depend on greediness, so the answer is the one `re` would give.

The subset: literals, `.`, `\d \D \w \W \s \S` and escaped punctuation, `[...]`, `(...)` and `(?:...)`, `|`, `* + ?`
(lazy or not), `{m}` `{m,}` `{m,n}`, `^` and `$`. Paths are ASCII in practice; classes mean their ASCII members.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from typing import Literal

from loraplex_adapters.io.throttle import Pace, no_pace
from loraplex_contracts.errors import AdapterUnsupported

MAX_PATTERN_CHARS = 256
MAX_PROGRAM = 2048
MAX_DEPTH = 32

_PLAIN = frozenset(string.ascii_letters + string.digits + "_.-")
_CLASSES = {
    "d": frozenset(string.digits),
    "w": frozenset(string.ascii_letters + string.digits + "_"),
    "s": frozenset(" \t\n\r\f\v"),
}


@dataclass(frozen=True, slots=True)
class _Chars:
    """A set of characters, or all but it."""

    members: frozenset[str]
    is_negated: bool = False

    def has(self, char: str) -> bool:
        return (char in self.members) is not self.is_negated


_ANY = _Chars(frozenset("\n"), is_negated=True)


@dataclass(slots=True)
class _Instruction:
    """One step of the automaton. `split` goes to both targets, `char` consumes one character and goes to the next."""

    op: Literal["char", "split", "start", "end", "match"]
    chars: _Chars | None = None
    targets: tuple[int, ...] = ()


# A parsed pattern: nested tuples, so that a counted repeat can emit its body several times.
_Node = tuple[str, object]


@dataclass(slots=True)
class CompileWork:
    """How much compiling one adapter may still cause, all its patterns together: seconds at most, with pauses. A
    pattern for each of 126 layers' seven linears, in both fields, takes about half of it."""

    pace: Pace = no_pace
    steps_left: int = 1 << 17

    def spend(self) -> None:
        """Raises AdapterUnsupported when the adapter has used up its share."""
        self.pace()
        self.steps_left -= 1
        if self.steps_left < 0:
            raise AdapterUnsupported(
                "rank_pattern and alpha_pattern are too large together; use fewer or simpler patterns"
            )


@dataclass(slots=True)
class MatchWork:
    """How much matching one adapter may still cause, all its patterns and modules together."""

    pace: Pace = no_pace
    steps_left: int = 1 << 20

    def spend(self, num_steps: int) -> None:
        """Raises AdapterUnsupported when the adapter has used up its share."""
        self.pace()
        self.steps_left -= num_steps
        if self.steps_left < 0:
            raise AdapterUnsupported(
                "rank_pattern and alpha_pattern take too long to match; use fewer or simpler patterns"
            )


@dataclass(frozen=True, slots=True)
class ModulePattern:
    """One compiled pattern, with PEFT's meaning for module paths."""

    text: str
    program: tuple[_Instruction, ...] = field(repr=False)

    def matches(self, path: str, work: MatchWork) -> bool:
        if not self.program:
            work.spend(1)
            return self._matches_plain(path)
        # The optional prefix `(.*\.)?` ends at the start of the path or after any dot: begin the body at each of them.
        states: set[int] = set()
        for idx in range(len(path) + 1):
            if idx == 0 or path[idx - 1] == ".":
                self._add(states, 0, idx, len(path))
            if idx == len(path):
                break
            work.spend(len(states))
            following: set[int] = set()
            for state in states:
                instruction = self.program[state]
                if instruction.op == "char" and instruction.chars is not None and instruction.chars.has(path[idx]):
                    self._add(following, state + 1, idx + 1, len(path))
            states = following
        return any(self.program[state].op == "match" for state in states)

    def _matches_plain(self, path: str) -> bool:
        """A pattern of names and dots only, the common case. A dot still means any character, as in PEFT."""
        start = len(path) - len(self.text)
        if start < 0 or (start > 0 and path[start - 1] != "."):
            return False
        return all(want in (".", have) for want, have in zip(self.text, path[start:], strict=True))

    def _add(self, states: set[int], first: int, idx: int, length: int) -> None:
        """Adds `first` and all that it reaches without consuming a character."""
        todo = [first]
        while todo:
            state = todo.pop()
            if state in states:
                continue
            instruction = self.program[state]
            states.add(state)
            if instruction.op == "split":
                todo.extend(instruction.targets)
            elif (instruction.op == "start" and idx == 0) or (instruction.op == "end" and idx == length):
                todo.append(state + 1)


def compile_pattern(text: str, field_name: str, work: CompileWork) -> ModulePattern:
    """Raises AdapterUnsupported when the pattern is not in the subset, or too large for its bounds."""
    work.spend()
    if len(text) > MAX_PATTERN_CHARS:
        raise AdapterUnsupported(f"{field_name}: a pattern of {len(text)} characters; at most {MAX_PATTERN_CHARS}")
    if set(text) <= _PLAIN:
        return ModulePattern(text, ())
    parser = _Parser(text, field_name, work)
    program: list[_Instruction] = []
    _emit(parser.parse(), program, parser)
    program.append(_Instruction("match"))
    return ModulePattern(text, tuple(program))


class _Parser:
    """Recursive descent over the subset. Owns the position."""

    def __init__(self, text: str, field_name: str, work: CompileWork) -> None:
        self._text = text
        self._field = field_name
        self._work = work
        self._idx = 0
        self._num_emitted = 0

    def refuse(self, why: str) -> AdapterUnsupported:
        return AdapterUnsupported(f"{self._field}: pattern {self._text[:80]!a} is not served: {why}")

    def count(self) -> None:
        """One more node is emitted; bounds time as well as memory (repeats of nothing emit no instruction)."""
        self._num_emitted += 1
        if self._num_emitted > MAX_PROGRAM:
            raise self.refuse("it is too large")
        self._work.spend()

    def parse(self) -> _Node:
        node = self._alternatives(0)
        if self._idx < len(self._text):
            raise self.refuse("unbalanced ')'")
        return node

    def _peek(self) -> str:
        return self._text[self._idx] if self._idx < len(self._text) else ""

    def _next(self) -> str:
        char = self._peek()
        if not char:
            raise self.refuse("it ends too early")
        self._idx += 1
        return char

    def _alternatives(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise self.refuse("nested too deeply")
        branches = [self._sequence(depth)]
        while self._peek() == "|":
            self._next()
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else ("or", branches)

    def _sequence(self, depth: int) -> _Node:
        items: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            items.append(self._repeated(self._atom(depth)))
        return ("seq", items)

    def _atom(self, depth: int) -> _Node:
        char = self._next()
        if char == "(":
            if self._peek() == "?":
                self._next()
                if self._next() != ":":
                    raise self.refuse("of the groups with '(?', only '(?:' is served")
            node = self._alternatives(depth + 1)
            if self._next() != ")":
                raise self.refuse("unbalanced '('")
            return node
        if char == "[":
            return ("char", self._class())
        if char == ".":
            return ("char", _ANY)
        if char in "^$":
            return ("start" if char == "^" else "end", None)
        if char == "\\":
            return ("char", self._escape())
        if char in "*+?{":
            raise self.refuse(f"nothing to repeat before {char!r}")
        return ("char", _Chars(frozenset(char)))

    def _escape(self) -> _Chars:
        char = self._next()
        if char.lower() in _CLASSES:
            return _Chars(_CLASSES[char.lower()], is_negated=char.isupper())
        if char.isalnum():
            raise self.refuse(f"the escape '\\{ascii(char)[1:-1]}'")
        return _Chars(frozenset(char))

    def _class(self) -> _Chars:
        """After '['. A ']' that comes first is a member, as in `re`."""
        is_negated = self._peek() == "^"
        if is_negated:
            self._next()
        members: set[str] = set()
        is_first = True
        while True:
            char = self._next()
            if char == "]" and not is_first:
                return _Chars(frozenset(members), is_negated)
            is_first = False
            if char == "[":
                raise self.refuse("nested sets")
            low = self._class_member(char)
            if self._peek() == "-" and self._text[self._idx + 1 : self._idx + 2] not in ("]", ""):
                self._next()
                high = self._class_member(self._next())
                if len(low) != 1 or len(high) != 1 or min(low) > min(high) or not min(high).isascii():
                    raise self.refuse("a range that is none")
                low = frozenset(map(chr, range(ord(min(low)), ord(min(high)) + 1)))
            members |= low

    def _class_member(self, char: str) -> frozenset[str]:
        if char != "\\":
            return frozenset(char)
        escaped = self._escape()
        if escaped.is_negated:
            raise self.refuse("a negated class within a set")
        return escaped.members

    def _repeated(self, node: _Node) -> _Node:
        char = self._peek()
        if char == "" or char not in "*+?{":
            return node
        self._next()
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char) or self._counts()
        if self._peek() == "?":  # lazy: the same language
            self._next()
        if self._peek() != "" and self._peek() in "*+{":
            raise self.refuse("repeats of repeats")
        return ("repeat", (node, least, most))

    def _counts(self) -> tuple[int, int | None]:
        """After '{'."""
        end = self._text.find("}", self._idx)
        body = self._text[self._idx : end] if end >= 0 else ""
        low, comma, high = body.partition(",")
        if not all(part.isascii() and part.isdigit() and len(part) <= 3 for part in (low, high or "0")):
            raise self.refuse("counts are written {m}, {m,} or {m,n}")
        self._idx = end + 1
        least = int(low)
        most = least if not comma else int(high) if high else None
        if most is not None and most < least:
            raise self.refuse("counts the wrong way round")
        return least, most


def _emit(node: _Node, program: list[_Instruction], parser: _Parser) -> None:
    """Appends the instructions of `node`; bounded, whatever the repeats say."""
    parser.count()
    kind, value = node
    if kind == "char":
        assert isinstance(value, _Chars)
        program.append(_Instruction("char", value))
    elif kind in ("start", "end"):
        program.append(_Instruction("start" if kind == "start" else "end"))
    elif kind == "seq":
        assert isinstance(value, list)
        for item in value:
            _emit(item, program, parser)
    elif kind == "or":
        assert isinstance(value, list)
        _emit_alternatives(value, program, parser)
    else:
        assert isinstance(value, tuple)
        _emit_repeat(value[0], value[1], value[2], program, parser)


def _emit_alternatives(branches: list[_Node], program: list[_Instruction], parser: _Parser) -> None:
    jumps: list[_Instruction] = []
    for branch in branches[:-1]:
        fork = _Instruction("split")
        program.append(fork)
        here = len(program)
        _emit(branch, program, parser)
        jump = _Instruction("split")
        program.append(jump)
        jumps.append(jump)
        fork.targets = (here, len(program))
    _emit(branches[-1], program, parser)
    for jump in jumps:
        jump.targets = (len(program),)


def _emit_repeat(body: _Node, least: int, most: int | None, program: list[_Instruction], parser: _Parser) -> None:
    for _ in range(least):
        _emit(body, program, parser)
    if most is None:
        fork = _Instruction("split")
        program.append(fork)
        here = len(program)
        _emit(body, program, parser)
        program.append(_Instruction("split", targets=(here - 1,)))
        fork.targets = (here, len(program))
        return
    forks: list[tuple[_Instruction, int]] = []
    for _ in range(most - least):
        fork = _Instruction("split")
        program.append(fork)
        forks.append((fork, len(program)))
        _emit(body, program, parser)
    for fork, here in forks:
        fork.targets = (here, len(program))
