"""The modules that a PEFT configuration chooses, by its target_modules, exclude_modules and layers_to_transform.

PEFT makes terms for chosen modules alone and leaves out tensors of others. It writes no such tensors: where there are
some, the configuration is not theirs. What cannot be told is no reason to refuse a file: patterns that RE2 and `re` may
read differently, or that cost too much, choose every module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from loraplex_adapters.formats.files import CONFIG_NAME
from loraplex_adapters.formats.peft_patterns import ModulePattern, WholePattern, compile_whole
from loraplex_adapters.formats.peft_patterns import match_budget as layers_budget
from loraplex_adapters.io.throttle import checkpoint
from loraplex_contracts.errors import AdapterInvalid

MAX_TARGETS = 4096
MAX_LAYERS_PATTERNS: Final = 16
# Cost of matching all paths of an adapter with its patterns: half a second at worst. See `peft_patterns`.
MAX_STEPS: Final = 1 << 29
_PLAIN_NAME: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.")


class TargetChoice:
    """The modules that one configuration chooses."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """`fields`: of the configuration. Raises AdapterInvalid."""
        target, exclude = fields.get("target_modules"), fields.get("exclude_modules")
        self.names = parse_targets(target)  # None: a pattern or a shorthand
        self._pattern = _whole_pattern("" if _is_shorthand(target) else target)
        self._excluded = _names_of(exclude)
        self._excluded_pattern = _whole_pattern(exclude)
        self._layers = None if isinstance(target, str) else _layers(fields.get("layers_to_transform"))
        self._layers_patterns = _layers_patterns(fields.get("layers_pattern"))
        if self._layers_patterns is None:
            self._layers, self._layers_patterns = None, ()
        self._steps_left = MAX_STEPS

    def field_against(self, path: str) -> str:
        """The field by which PEFT leaves the module out; empty where it is chosen, or where that cannot be told."""
        ends = list(path_ends(path))
        if not self._excluded.isdisjoint(ends) or self._matches(self._excluded_pattern, path):
            return "exclude_modules"
        if self.names is not None and self.names.isdisjoint(ends):
            return "target_modules"
        if self._pattern is not None and self._matches(self._pattern, path) is False:
            return "target_modules"
        is_whole = self.names is not None and path in self.names  # for which PEFT does not look at layers
        if self._layers is not None and not is_whole and self._layers.isdisjoint(self._layers_of(path)):
            return "layers_to_transform"
        return ""

    def _matches(self, pattern: WholePattern | None, path: str) -> bool | None:
        """None where there is no pattern, or the adapter has used up what matching may cost."""
        if pattern is None:
            return None
        checkpoint()
        self._steps_left -= pattern.cost(path)
        return None if self._steps_left < 0 else pattern.matches(path)

    def _layers_of(self, path: str) -> Iterator[int]:
        """Numbers in the path that PEFT may take for that of a layer: this release takes the first one, others took the
        last."""
        words = path.split(".")
        for idx, word in enumerate(words[:-1]):
            above = ".".join(words[:idx])
            is_number = word.isdecimal() and len(word) < 10
            if is_number and (idx > 1 if not self._layers_patterns else _is_below(above, self._layers_patterns)):
                yield int(word)


def parse_targets(value: Any, name: str = "target_modules") -> frozenset[str] | None:
    """The listed targets; None for a pattern, for 'all-linear' or where nothing is said. Raises AdapterInvalid."""
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or len(value) > MAX_TARGETS or not all(isinstance(item, str) for item in value):
        raise AdapterInvalid(f"{CONFIG_NAME}: {name} must be a string or a list of at most {MAX_TARGETS} names")
    return frozenset(cast("list[str]", value))


def path_ends(path: str) -> Iterator[str]:
    """'c', 'b.c' and 'a.b.c' of 'a.b.c': what a target may call the module."""
    words = path.split(".")
    return (".".join(words[idx:]) for idx in range(len(words) - 1, -1, -1))


def _is_below(above: str, names: tuple[str, ...]) -> bool:
    return any(ModulePattern(name).matches(above, layers_budget()) for name in names)


def _is_shorthand(target: Any) -> bool:
    return isinstance(target, str) and target.lower() == "all-linear"


def _whole_pattern(value: Any) -> WholePattern | None:
    return compile_whole(value) if isinstance(value, str) and value else None


def _names_of(value: Any) -> frozenset[str]:
    found = cast("list[Any]", value) if isinstance(value, list) else []
    return frozenset(item for item in found if isinstance(item, str))


def _layers(value: Any) -> frozenset[int] | None:
    """The layers that are named; None for all."""
    found = cast("list[Any]", value) if isinstance(value, list) else [] if value is None else [value]
    return frozenset(found) if found and all(type(one) is int for one in found) else None


def _layers_patterns(value: Any) -> tuple[str, ...] | None:
    """Names above a layer's number; none where every name is meant, None where one is a pattern of another kind."""
    found = cast("list[Any]", value) if isinstance(value, list) else [value] if value else []
    is_plain = all(isinstance(one, str) and one and set(one) <= _PLAIN_NAME for one in found)
    return tuple(found) if is_plain and len(found) <= MAX_LAYERS_PATTERNS else None
