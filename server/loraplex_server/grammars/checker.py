"""Grammar checker: a child process compiles each grammar first, except simple ones.

A grammar may take the library minutes, or more than the stack. Here that costs its own request alone. The process
starts with the first grammar that is not simple.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from loraplex_contracts.errors import InvalidArgument, Unavailable
from loraplex_contracts.request import Grammar
from loraplex_runtime.limited_process import LimitedProcess, LimitExceeded, Limits, ProcessFailed
from loraplex_server.config import bare_environment
from loraplex_server.grammars.matcher import CompileLimit, Compiler
from loraplex_server.grammars.tokenizer import LibraryTokenizer, TokenSet

COMPILE_S: Final = 2.0
LIMITS: Final = Limits(memory_bytes=4 << 30, stack_bytes=2 << 20, cpu_s=10)  # a quarter of the engine's stack


class Checker:
    """The engine's side. `check` is for one thread at a time."""

    def __init__(self, tokenizer: LibraryTokenizer) -> None:
        setup = asdict(tokenizer)
        setup["tokens"]["eos_token_ids"] = sorted(tokenizer.tokens.eos_token_ids)
        function = "loraplex_server.grammars.checker:compiling"
        self._process = LimitedProcess(function, setup, LIMITS, bare_environment())

    @property
    def pid(self) -> int | None:
        """The process id; None while there is no process."""
        return self._process.pid

    def check(self, grammar: Grammar) -> None:
        """Raises InvalidArgument for a grammar that cannot be compiled, CompileLimit for one that comes to a bound, and
        Unavailable where there is no process to compile it."""
        try:
            refusal = self._process.call(asdict(grammar), COMPILE_S)
        except LimitExceeded as limit:
            if limit.what == "time":
                reason = f"it takes more than {COMPILE_S:g} s to compile; make it smaller or simpler"
            else:
                reason = "compiling it ended the process that does so, for lack of memory or stack; make it simpler"
            raise CompileLimit(reason) from None
        except ProcessFailed as failure:
            raise Unavailable(
                f"the process that compiles grammars has failed ({failure}); try again", retry_after_s=1.0
            ) from None
        if refusal is not None:
            raise InvalidArgument(refusal["message"], field=refusal["field"])

    def close(self) -> None:
        """Kills the process. From any thread: a `check` under way raises Unavailable."""
        self._process.close()


def compiling(setup: Any) -> Callable[[Any], Any]:
    """Set up in the process: returns a function that gives the reason why a grammar is refused, or None."""
    tokens = setup["tokens"]
    tokens = TokenSet(tokens["num_ids"], frozenset(tokens["eos_token_ids"]), tokens["end_id"])
    compiler = Compiler(LibraryTokenizer(setup["serialized"], tokens, tuple(setup["end_ids"]), setup["special_ids"]))

    def refusal_of(grammar: Any) -> Any:
        try:
            matcher = compiler.compile(Grammar(**grammar)).copy()
            matcher.num_legal(matcher.forced())
        except InvalidArgument as error:
            return {"message": error.message, "field": error.field}
        return None

    return refusal_of
