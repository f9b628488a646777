"""`loraplex adapters convert`: pickled weights rewritten as safetensors, in a child process.

torch reads the pickle with `weights_only`, which builds tensors and plain containers alone. The child has bounds of
memory, time and file size, in case that a pickle finds a hole in it or expands without end. Before it reads, it gives
up the right to open anything: no file, no connection, no other process.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import IO, Any, Final, cast

import torch
from torch import Tensor

from loraplex_adapters.formats.files import (
    CONFIG_NAME,
    LORA_PICKLE_NAMES,
    MEDUSA_PICKLE_NAMES,
    MEDUSA_WEIGHTS_NAME,
    MODEL_CONFIG_NAME,
    MODEL_PICKLE_NAME,
    MODEL_WEIGHTS_NAME,
    PICKLE_NAMES,
    WEIGHTS_NAME,
    detect_kind,
)
from loraplex_adapters.formats.medusa import read_medusa_config
from loraplex_adapters.io.safetensors import DTYPE_BYTES, MAX_NAME_CHARS, MAX_TENSORS, read_header
from loraplex_adapters.io.source_files import AdapterFiles, SourceFile
from loraplex_adapters.sources.directory import open_folder
from loraplex_adapters.sources.remote import MAX_BYTES
from loraplex_contracts.errors import AdapterInvalid, DiskFull, InvalidArgument, Unavailable, UnsafeFormat
from loraplex_runtime.limited_process import LimitedProcess, LimitExceeded, Limits, ProcessFailed
from loraplex_server.config import bare_environment

_START_S: Final = 60.0
_BYTES_PER_S: Final = 20 << 20  # a slow disk
_SPARE_BYTES: Final = 512 << 20
_PIECE_BYTES: Final = 1 << 20
# What lies beside the weights and is data; training's own pickles (optimizer.pt, training_args.bin) stay behind.
_COPIED: Final = (".json", ".jinja", ".md", ".txt", ".model", ".safetensors")
_DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip


def convert_adapter(
    folder: Path,
    out: Path,
    max_bytes: int = MAX_BYTES,
    *,
    progress: Callable[[str], AbstractContextManager[None]],
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Writes `out`, complete or not at all: the adapter in `folder` with safetensors in the place of its pickles. Gives
    a description as plain data. `timeout_s` of each pickle: by its size unless it is given.

    Raises UnsafeFormat for a pickle that asks for more than tensors, AdapterInvalid for one that cannot be read within
    the bounds, InvalidArgument, DiskFull or SourceUnavailable."""
    if os.path.lexists(out):
        raise InvalidArgument(f"{out} exists already; name a folder that does not", field="--out")
    if not out.parent.is_dir():
        raise InvalidArgument(f"{out.parent} is not a folder", field="--out")
    converted: list[dict[str, Any]] = []
    with open_folder(folder, folder.name) as files:
        pickles = _pickles(files)
        incoming = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            for name, target in pickles.items():
                with progress(f"converting {name}"):
                    count = _convert(files.open(name), folder / name, incoming / target, max_bytes, timeout_s)
                converted.append({"from": name, "to": target, "tensors": count})
            for name in sorted(files.names):
                if name.endswith(_COPIED):
                    _copy(files.open(name), incoming / name, max_bytes)
            files.check_unchanged()
            with open_folder(incoming, folder.name) as made:
                detect_kind(made.names)
                for target in pickles.values():
                    read_header(made.open(target))
            incoming.chmod(0o755)
            incoming.rename(out)
        except OSError as error:
            shutil.rmtree(incoming, ignore_errors=True)
            raise DiskFull(f"{out} cannot be written ({error.strerror})", resource=str(out)) from error
        except BaseException:
            shutil.rmtree(incoming, ignore_errors=True)
            raise
    return {"out": str(out), "converted": converted}


def _pickles(files: AdapterFiles) -> dict[str, str]:
    """The pickles that hold weights, each with the name of what replaces it."""
    has_config = CONFIG_NAME in files.names
    heads = None if has_config else read_medusa_config(files)
    of_model = MODEL_WEIGHTS_NAME if heads is not None and heads.is_heads_only else WEIGHTS_NAME
    targets = dict.fromkeys(LORA_PICKLE_NAMES, WEIGHTS_NAME) | {MODEL_PICKLE_NAME: of_model}
    targets |= dict.fromkeys(MEDUSA_PICKLE_NAMES, MEDUSA_WEIGHTS_NAME)
    found: dict[str, str] = {}
    for target in dict.fromkeys(targets.values()):
        there = [name for name, made in targets.items() if made == target and name in files.names]
        if target in files.names or not there:
            continue  # a server reads the safetensors and leaves a pickle beside them alone
        if len(there) > 1:
            raise AdapterInvalid(
                f"there are {' and '.join(there)}, and one of them has the weights; move the others elsewhere"
            )
        if target == WEIGHTS_NAME and not has_config:
            raise AdapterInvalid(
                f"{there[0]} is neither a LoRA nor Medusa heads: there is no {CONFIG_NAME} beside it, and no "
                f"{MODEL_CONFIG_NAME} whose model_type is medusa"
            )
        found[there[0]] = target
    if not found:
        raise AdapterInvalid(
            f"there is no pickle to convert: none of {', '.join(PICKLE_NAMES)} without safetensors beside it"
        )
    return found


def _convert(file: SourceFile, path: Path, target: Path, max_bytes: int, timeout_s: float | None) -> int:
    """Converts one pickle in a child. Returns the number of tensors that the child has written."""
    if file.num_bytes > max_bytes:
        raise AdapterInvalid(f"{file.name} has {file.num_bytes} bytes; at most {max_bytes} are read (--max-bytes)")
    allowed_s = _START_S + file.num_bytes / _BYTES_PER_S if timeout_s is None else timeout_s
    limits = Limits(
        memory_bytes=2 * file.num_bytes + _SPARE_BYTES,
        stack_bytes=8 << 20,
        cpu_s=int(allowed_s) + 1,
        file_bytes=max_bytes,
    )
    setup = {"pickle": str(path), "out": str(target), "max_bytes": max_bytes}
    process = LimitedProcess("loraplex_server.cli.convert:converting", setup, limits, bare_environment())
    try:
        answer = process.call(None, allowed_s)
    except LimitExceeded as limit:
        bound = f"{allowed_s:.3g} s" if limit.what == "time" else f"{limits.memory_bytes} bytes of memory"
        raise AdapterInvalid(f"{file.name} cannot be read within {bound}, which its size of {file.num_bytes} "
                             "bytes allows it; it expands, or is damaged")  from None  # fmt: skip
    except ProcessFailed as failure:
        raise Unavailable(f"the process that reads {file.name} has failed ({failure}); try again") from None
    finally:
        process.close()
    if (refusal := answer.get("refusal")) is not None:
        error = UnsafeFormat if answer["is_unsafe"] else AdapterInvalid
        raise error(f"{file.name} {refusal}")
    return int(answer["tensors"])


def _copy(file: SourceFile, target: Path, max_bytes: int) -> None:
    if file.num_bytes > max_bytes:
        raise AdapterInvalid(f"{file.name} has {file.num_bytes} bytes; at most {max_bytes} are read (--max-bytes)")
    buffer = memoryview(bytearray(_PIECE_BYTES))
    with target.open("xb") as out:
        for offset in range(0, file.num_bytes, _PIECE_BYTES):
            piece = buffer[: min(_PIECE_BYTES, file.num_bytes - offset)]
            file.read_into(piece, offset)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())


# --- in the child ----------------------------------------------------------------------------------------------------


class Refused(Exception):
    """A refusal of a pickle. The text goes on from the file's name."""

    def __init__(self, reason: str, *, is_unsafe: bool = False) -> None:
        super().__init__(reason)
        self.is_unsafe = is_unsafe


def converting(setup: Any) -> Callable[[Any], Any]:
    """Set up in the child, before the bounds hold: opens the two files, and has torch import what it reads pickles
    with. Returns the conversion."""
    source, out = open(setup["pickle"], "rb"), open(setup["out"], "xb")  # noqa: SIM115 - the process owns them
    for is_zip in (True, False):
        sample = BytesIO()
        torch.save({"x": torch.zeros(1)}, sample, _use_new_zipfile_serialization=is_zip)
        sample.seek(0)
        torch.load(sample, map_location="cpu", weights_only=True)

    def convert(_: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # nothing can be opened from here on
        try:
            tensors = read_pickle(source)
            write_safetensors(tensors, out, setup["max_bytes"])
        except Refused as refused:
            return {"refusal": str(refused), "is_unsafe": refused.is_unsafe}
        return {"tensors": len(tensors)}

    return convert


def read_pickle(source: IO[bytes]) -> dict[str, Tensor]:
    """The state dict of the pickle, checked. Raises Refused."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's of other protocols than its own
            loaded: Any = torch.load(source, map_location="cpu", weights_only=True)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:
        if "can't allocate memory" in str(error):
            raise MemoryError from None
        # torch puts its own advice around the reason: to switch the checks off.
        cause = error.__context__ or error if isinstance(error, pickle.UnpicklingError) else error
        asked = re.search(r"GLOBAL (\S{1,200})", str(cause))
        if asked is not None:
            what = f"asks for {asked[1]!a}, which is not part of a tensor; nothing of it was run"
            raise Refused(what, is_unsafe=True) from None
        if f"operand {pickle.FRAME[0]}" in str(cause):  # with which those protocols begin
            raise Refused(
                "is a pickle of protocol 4 or above, which cannot be read safely; write it again with `torch.save` and "
                "its own protocol, 2"
            ) from None
        raise Refused(f"is cut short, damaged, or holds more than tensors ({_first_line(cause)})") from None
    if isinstance(loaded, dict) and list(cast("dict[Any, Any]", loaded)) == ["state_dict"]:
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not loaded:
        raise Refused("does not hold a dict of tensors")
    if len(loaded) > MAX_TENSORS:
        raise Refused(f"has {len(loaded)} tensors; at most {MAX_TENSORS} are read")
    return {_name(name): _tensor(name, value) for name, value in loaded.items()}


def _name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or name == "__metadata__":
        raise Refused(f"has the key {ascii(name)[:80]}, which is not a tensor's name")
    return name


def _tensor(name: object, value: object) -> Tensor:
    """The checked tensor of an entry. Raises Refused for what safetensors cannot hold, and for a tensor that is larger
    than its own memory."""
    where = f"holds {ascii(name)[:160]},"
    if not isinstance(value, Tensor):
        raise Refused(f"{where} which is a {type(value).__name__} and not a tensor")
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        raise Refused(f"{where} which is a sparse, quantized or empty (meta) tensor")
    if value.dtype not in _DTYPES:
        raise Refused(f"{where} of {value.dtype}, which safetensors files here do not have")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise Refused(f"{where} whose shape {list(value.shape)} has more elements than the file gives it")
    return value.detach()


def write_safetensors(tensors: Mapping[str, Tensor], out: IO[bytes], max_bytes: int) -> None:
    """Writes a safetensors file. Written here: torch's tensors may share memory, which the library refuses."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, tensor in tensors.items():
        dtype = _DTYPES[tensor.dtype]
        end = position + tensor.numel() * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    if position > max_bytes:
        raise Refused(f"has tensors of {position} bytes; at most {max_bytes} are written (--max-bytes)")
    encoded = json.dumps(header).encode()
    encoded = encoded.ljust(-(-len(encoded) // 8) * 8)
    out.write(len(encoded).to_bytes(8, "little") + encoded)
    for tensor in tensors.values():
        for piece in _bytes_of(tensor):
            out.write(piece)
    out.flush()
    os.fsync(out.fileno())


def _bytes_of(tensor: Tensor) -> Iterator[bytes]:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _PIECE_BYTES):
        yield flat[start : start + _PIECE_BYTES].numpy().tobytes()


def _first_line(error: BaseException) -> str:
    return ascii(f"{type(error).__name__}: {error}".splitlines()[0][:200])[1:-1]
