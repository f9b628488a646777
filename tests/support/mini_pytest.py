"""Minimal pytest for machines without it: marks, parameters, fixtures, skips.

`install()` puts a module of that name in its place; `run_file` runs one file's test functions. No rewritten assertions,
no plugins, no conftest. A test that needs more than this fails there, and says what is missing.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


class Skipped(BaseException):
    """Raised by `skip`. No Exception, so that a test's own handlers let it pass."""


@dataclass(frozen=True)
class Mark:
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Decorates a function, or takes arguments first."""
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):
            args[0].__dict__.setdefault("marks", []).append(self)
            return args[0]
        return Mark(self.name, args, kwargs)


class _Marks:
    def __getattr__(self, name: str) -> Mark:
        return Mark(name, (), {})


@dataclass(frozen=True)
class Fixture:
    function: Callable[..., Any]
    scope: str = "function"
    params: tuple[Any, ...] = ()
    is_autouse: bool = False


@dataclass(frozen=True)
class Param:
    values: tuple[Any, ...]


@dataclass
class Result:
    """Result of one test."""

    name: str
    outcome: str  # passed, failed, skipped
    text: str = ""


def fixture(
    function: Callable[..., Any] | None = None,
    *,
    scope: str = "function",
    params: Iterable[Any] = (),
    autouse: bool = False,
    ids: object = None,
) -> Any:
    if function is not None:
        return Fixture(function)
    return lambda found: Fixture(found, scope, tuple(params), autouse)


def skip(reason: str = "", **_: object) -> None:
    raise Skipped(reason)


def importorskip(name: str, reason: str = "", **_: object) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skipped(reason or str(error)) from None


def fail(reason: str = "") -> None:
    raise AssertionError(reason)


@contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], match: str = "") -> Generator[Any]:
    found = SimpleNamespace(value=None)
    try:
        yield found
    except kind as error:
        found.value = error
        if not re.search(match, str(error)):
            raise AssertionError(f"{match!r} is not in {error}") from error
    else:
        raise AssertionError(f"nothing raised {kind}")


@dataclass(eq=False)
class Approx:
    """A number, or a sequence of numbers."""

    wanted: Any
    rel: float = 1e-6
    abs: float = 1e-12

    def __eq__(self, other: object) -> bool:
        if isinstance(self.wanted, int | float):
            return math.isclose(other, self.wanted, rel_tol=self.rel, abs_tol=self.abs)  # type: ignore[arg-type]
        others: Any = other
        return len(others) == len(self.wanted) and all(
            Approx(one, self.rel, self.abs) == found for one, found in zip(self.wanted, others, strict=True)
        )


def approx(wanted: Any, rel: float = 1e-6, abs: float = 1e-12) -> Approx:
    return Approx(wanted, rel, abs)


class MonkeyPatch:
    """Sets attributes, and back at the end."""

    def __init__(self) -> None:
        self._undo: list[tuple[object, str, Any]] = []

    def setattr(self, target: object, name: str, value: object) -> None:
        self._undo.append((target, name, getattr(target, name)))
        setattr(target, name, value)

    def undo(self) -> None:
        while self._undo:
            setattr(*self._undo.pop())


def install() -> None:
    """Stands for pytest from here on. Not where pytest can be imported."""
    module = ModuleType("pytest")
    for found in (fixture, skip, fail, importorskip, raises, approx, MonkeyPatch):
        setattr(module, found.__name__, found)
    module.mark = _Marks()  # type: ignore[attr-defined]
    module.param = lambda *values, **_: Param(values)  # type: ignore[attr-defined]
    sys.modules["pytest"] = module


# --- running ----------------------------------------------------------------------------------------------------------


@dataclass
class _Case:
    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    fixture_params: dict[str, Any]
    skip_reason: str | None


@dataclass
class _Run:
    """One file's fixtures."""

    fixtures: dict[str, Fixture]
    for_module: ExitStack = field(default_factory=ExitStack)
    values: dict[tuple[str, int], Any] = field(
        default_factory=dict[tuple[str, int], Any]
    )  # those of the module's scope

    def run(self, case: _Case) -> Result:
        if case.skip_reason is not None:
            return Result(case.name, "skipped", case.skip_reason)
        try:
            with ExitStack() as stack:
                known: dict[str, Any] = dict(case.arguments)
                for name, one in self.fixtures.items():
                    if one.is_autouse:
                        self._value(name, case, known, stack)
                names = list(inspect.signature(case.function).parameters)
                case.function(**{name: self._value(name, case, known, stack) for name in names})
        except Skipped as skipped:
            return Result(case.name, "skipped", str(skipped))
        except Exception:
            return Result(case.name, "failed", traceback.format_exc())
        return Result(case.name, "passed")

    def _value(self, name: str, case: _Case, known: dict[str, Any], stack: ExitStack) -> Any:
        if name in known:
            return known[name]
        if name in self.fixtures:
            known[name] = self._made(name, case, known, stack)
        elif name == "tmp_path":
            known[name] = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        elif name == "tmp_path_factory":
            root = stack.enter_context(tempfile.TemporaryDirectory())
            known[name] = SimpleNamespace(mktemp=lambda prefix: Path(tempfile.mkdtemp(prefix=prefix, dir=root)))
        elif name == "monkeypatch":
            known[name] = patch = MonkeyPatch()
            stack.callback(patch.undo)
        elif name == "request":
            known[name] = SimpleNamespace(node=SimpleNamespace(name=case.name))
        else:
            raise LookupError(f"no fixture {name!r} without pytest")
        return known[name]

    def _made(self, name: str, case: _Case, known: dict[str, Any], stack: ExitStack) -> Any:
        one = self.fixtures[name]
        param = case.fixture_params.get(name)
        key = (name, one.params.index(param) if one.params else 0)
        is_shared = one.scope != "function"
        if is_shared and key in self.values:
            return self.values[key]
        if is_shared:
            known, stack = {}, self.for_module
        request = SimpleNamespace(param=param, node=SimpleNamespace(name=case.name))
        arguments = {
            needed: request if needed == "request" else self._value(needed, case, known, stack)
            for needed in inspect.signature(one.function).parameters
        }
        made = one.function(**arguments)
        if inspect.isgenerator(made):
            generator = made
            made = next(generator)
            stack.callback(next, generator, None)
        if is_shared:
            self.values[key] = made
        return made


def run_file(
    path: Path,
    choose: Callable[[list[Any]], list[Any]],
    on_collected: Callable[[list[str]], None],
    on_result: Callable[[Result], None],
) -> None:
    """Runs those tests of a file that `choose` leaves, in its order."""
    cases, fixtures = _collect(path)
    cases = choose(cases)
    on_collected([case.name for case in cases])
    run = _Run(fixtures)
    with run.for_module:
        for case in cases:
            on_result(run.run(case))


def collect(path: Path) -> list[str]:
    """The names of a file's tests."""
    return [case.name for case in _collect(path)[0]]


def _collect(path: Path) -> tuple[list[_Case], dict[str, Fixture]]:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    fixtures = {name: one for name, one in vars(module).items() if isinstance(one, Fixture)}
    found = getattr(module, "pytestmark", [])
    marks = found if isinstance(found, list) else [found]
    cases = [
        case
        for name, function in vars(module).items()
        if name.startswith("test_") and inspect.isfunction(function)
        for case in _cases(name, function, marks, fixtures)
    ]
    return cases, fixtures


def _cases(
    name: str, function: Callable[..., Any], module_marks: Sequence[Mark], fixtures: dict[str, Fixture]
) -> Iterator[_Case]:
    marks = [*module_marks, *function.__dict__.get("marks", ())]
    skips = [mark.kwargs.get("reason", "") for mark in marks if mark.name == "skipif" and mark.args[0]]
    skips += [mark.kwargs.get("reason", "") for mark in marks if mark.name == "skip"]
    axes = [list(_arguments(mark)) for mark in marks if mark.name == "parametrize"]
    used = [one for one in _needed(function, fixtures) if fixtures[one].params]
    for chosen in itertools.product(*axes):
        for params in itertools.product(*(fixtures[one].params for one in used)):
            arguments = {key: value for part in chosen for key, value in part.items()}
            words = [str(value).removeprefix("torch.") for value in (*arguments.values(), *params)]
            label = f"{name}[{'-'.join(words)}]" if words else name
            yield _Case(
                label, function, arguments, dict(zip(used, params, strict=True)), "; ".join(skips) if skips else None
            )


def _arguments(mark: Mark) -> Iterator[dict[str, Any]]:
    names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else list(mark.args[0])
    for found in mark.args[1]:
        values = found.values if isinstance(found, Param) else found if len(names) > 1 else (found,)
        yield dict(zip(names, values, strict=True))


def _needed(function: Callable[..., Any], fixtures: dict[str, Fixture]) -> list[str]:
    """The file's fixtures that a test uses, by way of others too."""
    found: list[str] = []
    waiting = [*inspect.signature(function).parameters, *(n for n, one in fixtures.items() if one.is_autouse)]
    while waiting:
        name = waiting.pop(0)
        if name in fixtures and name not in found:
            found.append(name)
            waiting += inspect.signature(fixtures[name].function).parameters
    return found
