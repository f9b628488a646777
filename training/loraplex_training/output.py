"""All-or-nothing output directories and disk errors.

Temporary folders lie beside the result on the same file system, so that the last step is one rename.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from loraplex_contracts.errors import DiskFull, InvalidArgument, is_disk_full


def check_new(out: Path) -> None:
    """Raises InvalidArgument or DiskFull unless `out` can become a new directory. Nothing is ever overwritten, and
    nothing is left where a folder was made to try."""
    with disk_errors(out):
        is_empty = out.is_dir() and not out.is_symlink() and not any(out.iterdir())
        if is_empty or not os.path.lexists(out):
            above = out.absolute().parent
            while not os.path.lexists(above):
                above = above.parent
            os.rmdir(tempfile.mkdtemp(prefix=f".{out.name}-partial-", dir=above))
            return
    raise InvalidArgument(f"{out} exists already; name a new directory, or remove it first", field="--out")


@contextmanager
def new_directory(out: Path) -> Generator[Path]:
    """A folder to fill, which becomes `out` when the block ends well and is gone whenever it does not (Ctrl-C
    included). Raises InvalidArgument and DiskFull."""
    check_new(out)
    with _beside(out, "partial") as partial:
        yield partial
        with disk_errors(out):
            partial.chmod(0o755)  # mkdtemp gives 0o700
            partial.rename(out)


@contextmanager
def scratch_directory(out: Path) -> Generator[Path]:
    """A folder beside `out` for as long as the block runs."""
    with _beside(out, "states") as folder:
        yield folder


@contextmanager
def _beside(out: Path, what: str) -> Generator[Path]:
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-{what}-", dir=out.parent))
    try:
        yield folder
    except (DiskFull, InvalidArgument) as error:
        if isinstance(error.__cause__, OSError):  # about a file in the folder, a name that says nothing to the user
            with disk_errors(out):
                raise error.__cause__ from None
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes and syncs a file, so that a rename afterwards never shows an empty one."""
    with disk_errors(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def disk_errors(path: Path) -> Generator[None]:
    """Turns OSErrors of writing into DiskFull or InvalidArgument."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise DiskFull(
                f"the disk of {path.parent} is full; free some space or name another --out", resource=str(path.parent)
            ) from error
        raise InvalidArgument(f"{path} cannot be written: {error.strerror or error}", field="--out") from error
