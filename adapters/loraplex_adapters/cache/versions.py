"""Versions of adapters: the contents that names have or had, and their sources.

`Versions` is pure. `VersionLog` keeps it in a file of the store, so that a restarted worker knows it again: one line
for each change, rewritten at a process's first change and where most lines are out of date. Contents prepared for
one base model are not served with another, so each has a file of its own, which the others leave alone.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, cast

from loraplex_contracts.adapters import OWN_ORIGIN, AdapterKey, AdapterKind, AdapterOrigin
from loraplex_contracts.errors import AdapterVersionNotFound

log = logging.getLogger(__name__)

MAX_VERSIONS: Final = 16  # of one name, that may be asked for by digest
SPARE_LINES: Final = 4096  # out of date, before the file is rewritten
# Another number is another file, so that a release leaves those of later ones alone. It goes up with the format, and
# where contents computed before may be wrong: up to 1, those of large tensors on float32 and float64 base models, of
# rotations that share a block of one input, and of DoRA or ties beside a weight that is not the base's.
_PREFIX: Final = "versions"
_FORMAT: Final = "2"
_LINE: Final = re.compile(r"([^\s:@]+) (?:(lora|medusa|combined)-([0-9a-f]{64})|-)\Z")
# Older releases leave such lines out.
_SOURCE: Final = re.compile(r'([^\s:@]+) from (\["(?:[^"\\]|\\.)*", "[^"\\]*"\])\Z')

# A name's latest content, its origin, or None where its versions are forgotten.
Change = tuple[str, AdapterKey | AdapterOrigin | None]


class Versions:
    """Owns the contents of each name, the latest last, and the origins of names that are not their own."""

    def __init__(self, changes: Iterable[Change] = ()) -> None:
        self._of_name: dict[str, OrderedDict[AdapterKey, None]] = {}
        self._num_contents = 0  # of all names
        self._origins: dict[str, AdapterOrigin] = {}
        self._changes: list[Change] = []
        for name, what in changes:
            if isinstance(what, AdapterOrigin):
                self.keep_origin(name, what)
            else:
                self.forget(name) if what is None else self.remember(name, what)
        self._changes.clear()

    def __len__(self) -> int:
        return self._num_contents + len(self._origins)

    def __iter__(self) -> Iterator[Change]:
        """Changes that lead here, without those that are out of date."""
        yield from ((name, key) for name, keys in self._of_name.items() for key in keys)
        yield from self._origins.items()

    def origin_of(self, name: str) -> AdapterOrigin:
        """The place that a load has bound the name from; its own where none has."""
        return self._origins.get(name, OWN_ORIGIN)

    def keep_origin(self, name: str, origin: AdapterOrigin) -> None:
        """Remembers where the name is bound from now, until it is forgotten. Tokens are not kept."""
        origin = origin.without_token if is_other_place(name, origin.source) else OWN_ORIGIN
        if origin == self.origin_of(name):
            return
        self._changes.append((name, origin))
        if origin == OWN_ORIGIN:
            del self._origins[name]
        else:
            self._origins[name] = origin

    def find(self, name: str, digits: str) -> AdapterKey | None:
        """The content that the name has or had and whose digest begins so; None where there is none. Raises
        AdapterVersionNotFound where there are several."""
        found = [key for key in self._of_name.get(name, ()) if key.digest.startswith(digits)]
        if len(found) > 1:
            raise AdapterVersionNotFound(
                f"{len(found)} versions of adapter {name!a} begin with {digits}; give more of the digest",
                field="adapter_id",
                resource=f"{name}@{digits}",
            )
        return found[0] if found else None

    def remember(self, name: str, key: AdapterKey) -> AdapterKey | None:
        """Remembers that the name has this content now. Returns one that is forgotten for it."""
        keys = self._of_name.setdefault(name, OrderedDict())
        if key in keys and next(reversed(keys)) == key:
            return None
        self._num_contents += key not in keys
        keys[key] = None
        keys.move_to_end(key)
        self._changes.append((name, key))
        if len(keys) <= MAX_VERSIONS:
            return None
        self._num_contents -= 1
        return keys.popitem(last=False)[0]

    def forget(self, name: str) -> list[AdapterKey]:
        """Forgets all of the name's contents, and returns them; its origin too."""
        keys, origin = self._of_name.pop(name, None), self._origins.pop(name, None)
        if keys is not None or origin is not None:
            self._changes.append((name, None))
        self._num_contents -= len(keys or ())
        return list(keys or ())

    def drop(self, name: str, key: AdapterKey) -> None:
        """Drops a content that cannot be had any more. A restart finds that out by itself."""
        if key in (keys := self._of_name.get(name, {})):
            del keys[key]
            self._num_contents -= 1

    def take_changes(self) -> list[Change]:
        """The changes since the last call."""
        taken, self._changes = self._changes, []
        return taken


class VersionLog:
    """Log of versions. Owns the file. What cannot be written is logged and not remembered beyond this process."""

    def __init__(self, folder: Path, base: str, is_stored: Callable[[AdapterKey], bool]) -> None:
        """`base` says in one word for which base model the contents were prepared; `is_stored`: the store has it."""
        self._path = folder / f"{_PREFIX}-{_FORMAT}-{base}"
        self._num_lines = 0
        self._fd = -1
        self.versions = Versions(
            (name, what) for name, what in self._read() if not isinstance(what, AdapterKey) or is_stored(what)
        )

    def save(self) -> None:
        """Writes what has changed since the last call."""
        changes = self.versions.take_changes()
        if not changes:
            return
        if self._fd < 0 or self._num_lines + len(changes) > len(self.versions) + SPARE_LINES:
            self._write_anew()
            return
        # A line begins with its line feed, so one that a full disk has cut spoils no other.
        data = "".join(f"\n{_line(*change)}" for change in changes).encode()
        try:
            if os.write(self._fd, data) < len(data):  # as much as there was room for
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._num_lines += len(changes)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> Iterator[Change]:
        try:
            lines = self._path.read_text(errors="replace").split("\n")
        except FileNotFoundError:
            others = self._path.parent / f"{_PREFIX}*"
            if any(others.parent.glob(others.name)):
                log.warning(
                    "no earlier version of an adapter (NAME@DIGEST) is known: those in %s, which stay, are of another "
                    "base model, dtype, --quantize, --max-lora-rank, --adapter-templates or release",
                    others,
                )
            return
        except OSError as error:
            self._give_up(error)
            return
        for line in lines:
            if found := _LINE.match(line):
                name, kind, digest = found.groups()
                yield name, AdapterKey(cast(AdapterKind, kind), digest) if kind else None
            elif found := _SOURCE.match(line):
                yield found[1], AdapterOrigin(*json.loads(found[2]))

    def _write_anew(self) -> None:
        self.close()
        temporary = self._path.with_name(f".{self._path.name}.new")
        try:
            temporary.write_text("\n".join(_line(*change) for change in self.versions))
            temporary.replace(self._path)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            self._num_lines = len(self.versions)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Gives up writing for now: the next change tries to write all of it."""
        self.close()
        log.warning("versions of adapters are not known after a restart: %s: %s", self._path, error.strerror)


def _line(name: str, what: AdapterKey | AdapterOrigin | None) -> str:
    if isinstance(what, AdapterOrigin):
        return f"{name} from {json.dumps([what.source, what.revision])}"
    return f"{name} -" if what is None else f"{name} {what.kind}-{what.digest}"


def is_other_place(name: str, source: str) -> bool:
    """True if the `source` of a load is another place than that of the adapter's own name."""
    return source not in ("", name)
