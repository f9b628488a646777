"""Cluster specification: `cluster.yaml`, checked before anything is placed.

Whatever this file does not know is refused with its key. Flags of workers and routers are those of `loraplex worker`
and `loraplex router`, and pass through the same checks; files and folders are the nodes' own and looked at there.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from reprlib import Repr
from typing import Any, Final

from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_proto import __version__
from loraplex_proto.services import DEFAULT_PORT
from loraplex_router.config import RouterConfig
from loraplex_router.membership import is_address
from loraplex_runtime.flags import Flag, check, configure, flag_arguments, flags_of
from loraplex_runtime.near_words import did_you_mean
from loraplex_server.config import WorkerConfig

AUTO: Final = "auto"
VERSION: Final = "version"  # key of an application's arguments
MAX_COUNT: Final = 1000
MAX_TIME_S: Final = 86_400.0  # Ray counts in 64 bits
# Ray counts resources in parts of 10,000.
NUM_DECIMALS: Final = 4
# Resources that Ray takes by other ways than by name.
OF_RAY: Final = ("cpu", "gpu", "memory", "object_store_memory")
_SHORT: Final = Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,39}\Z")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h)?\Z")
_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}

# Flags that the fleet gives by itself, and the key that is meant instead.
_OWN: Final[Mapping[str, str]] = {
    "host": "router.host",
    "port": "router.port",
    "drain": "drain",
    "worker": "worker.count",
    "workers-from": "worker.count",
    "adapter-store": "worker.store",
    "auth-file": "secrets.auth-file",
    "worker-token-file": "secrets.worker-token-file",
    "worker-ca": "tls.ca",
    "take-over": "drain",
}
_OWN_OF_WORKERS: Final[Mapping[str, str]] = {
    **_OWN, "adapters": "adapters", "tls-cert": "tls.cert", "tls-key": "tls.key"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScaleSpec:
    """Bounds and pace of the number of workers (scaling.py)."""

    target_pending_tokens: float = 20_000.0  # of a worker: prompt tokens to compute and output tokens still allowed
    up_after_s: float = 10.0
    down_after_s: float = 300.0
    settle_s: float = 60.0


@dataclass(frozen=True, slots=True)
class CountSpec:
    """Bounds of the number of workers; equal where it is fixed."""

    min: int = 1
    max: int = 1

    @property
    def is_fixed(self) -> bool:
        return self.min == self.max


@dataclass(frozen=True, slots=True)
class ResourceSpec:
    """Resources of one worker or router, in Ray's terms."""

    cpu: float = 1.0
    gpu: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict[str, float])

    def actor_options(self) -> dict[str, Any]:
        return {"num_cpus": self.cpu, "num_gpus": self.gpu, "resources": dict(self.custom)}

    def text(self) -> str:
        parts = [f"{self.gpu:g} GPU"] if self.gpu else []
        parts += [f"{self.cpu:g} CPU"] if self.cpu else []
        return ", ".join([*parts, *(f"{amount:g} {name}" for name, amount in self.custom.items())]) or "nothing"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The workers, all alike."""

    count: CountSpec = CountSpec()
    resources: ResourceSpec = ResourceSpec()
    flags: tuple[str, ...] = ()  # of the command line
    store: str = ""  # folder on each node, one below it for each worker
    scale: ScaleSpec = ScaleSpec()


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """The routers. With a fixed port there is one on a node at most."""

    count: int = 1
    host: str = ""  # the node's own address where it is empty
    port: int = DEFAULT_PORT
    resources: ResourceSpec = ResourceSpec(cpu=0.0)
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SecretSpec:
    """Paths on every node, never values."""

    auth_file: str = ""
    worker_token_file: str = ""


@dataclass(frozen=True, slots=True)
class TlsSpec:
    """TLS between routers and workers: paths on every node."""

    cert: str = ""
    key: str = ""
    ca: str = ""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Everything about one fleet."""

    model: str
    name: str = "loraplex"
    address: str = AUTO  # of Ray
    adapters: str = ""
    worker: WorkerSpec = WorkerSpec()
    router: RouterSpec = RouterSpec()
    drain_s: float = 30.0
    secrets: SecretSpec = SecretSpec()
    tls: TlsSpec = TlsSpec()
    insecure: bool = False

    def check_reach(self, addresses: Collection[str]) -> None:
        """Raises InvalidArgument where workers would be open to others at one of these addresses of nodes."""
        open_to = sorted(address for address in addresses if not is_loopback(address))
        if not open_to:
            return
        if not self.secrets.worker_token_file:
            raise _wrong(
                "secrets.worker-token-file", f"is needed: workers listen on {open_to[0]}, where others may reach them"
            )
        if not (self.tls.cert and self.tls.ca) and not self.insecure:
            raise _wrong(
                "tls",
                f"is needed: workers listen on {open_to[0]}; give cert, key and ca, or write `insecure: true` for a "
                "network that only the fleet can reach",
            )

    def plain(self) -> dict[str, Any]:
        """The specification as JSON objects, without values that equal their defaults; `from_plain` reads it."""
        return {"model": self.model, **_plain(self)}


def _plain(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in fields(part):
        value = getattr(part, one.name)
        default = one.default_factory() if one.default_factory is not MISSING else one.default
        if value != default:
            plain = _plain(value) if is_dataclass(value) else value
            found[one.name] = list(plain) if isinstance(plain, tuple) else plain
    return found


def from_plain(plain: Mapping[str, Any]) -> ClusterSpec:
    """The specification that `ClusterSpec.plain` wrote; a `version` beside it is passed over. Raises InvalidArgument
    for keys of another release."""
    return _of_plain(ClusterSpec, {name: value for name, value in plain.items() if name != VERSION}, "")


def _of_plain(cls: type, plain: Mapping[str, Any], path: str) -> Any:
    hints = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for name, value in plain.items():
        at = f"{path}.{name}" if path else name
        if name not in hints:
            raise _wrong(at, f"is unknown to Loraplex {__version__}: every node needs the packages of the same version")
        kind = hints[name]
        given[name] = (
            _of_plain(kind, value, at) if hasattr(kind, "__dataclass_fields__")
            else tuple(value) if isinstance(value, list) else value
        )  # fmt: skip
    return cls(**given)


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def load_spec(path: Path) -> ClusterSpec:
    """The specification in a YAML file. Raises InvalidArgument."""
    import yaml  # late: comes with Ray

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        _refuse_repeated_keys(node, "")
        given = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}", field="FILE") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument(f"{path} is not YAML: {' '.join(str(error).split())}", field="FILE") from error
    except RecursionError as error:
        raise InvalidArgument(f"{path} is nested too deeply", field="FILE") from error
    except (ValueError, LookupError, AttributeError) as error:  # of the constructors of dates and of tagged values
        raise InvalidArgument(
            f"{path} has a value that is not what it looks like ({error}); put texts in quotes", field="FILE"
        ) from error
    return parse_spec(given)


def _refuse_repeated_keys(node: Any, path: str) -> None:
    """Raises InvalidArgument for a key that YAML's nodes have twice: the loader would silently take the last one."""
    seen = set[str]()
    for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
        name = str(key.value)
        at = f"{path}.{name}" if path else name
        if name in seen:
            raise _wrong(at, f"is given twice, the second time in line {key.start_mark.line + 1}")
        seen.add(name)
        _refuse_repeated_keys(value, at)


def parse_spec(given: Any) -> ClusterSpec:
    """The specification from the parsed file. Raises InvalidArgument that names the key."""
    top = _Section(given, "", ("model", *(one for one in _keys(ClusterSpec) if one != "model")))
    adapters = top.text("adapters", _absolute)
    tls = _tls(top.section("tls", _keys(TlsSpec)))
    spec = ClusterSpec(
        model=top.text("model", _any) or _required("model"),
        name=top.text("name", _name) or "loraplex",
        address=top.text("address", _ray_address) or AUTO,
        adapters=adapters,
        worker=_worker(top.section("worker", _keys(WorkerSpec)), adapters),
        router=_router(top.section("router", _keys(RouterSpec))),
        drain_s=top.duration("drain", 30.0),
        secrets=_secrets(top.section("secrets", _keys(SecretSpec))),
        tls=tls,
        insecure=top.switch("insecure"),
    )
    if spec.secrets.auth_file and not spec.secrets.worker_token_file:
        raise _wrong("secrets.auth-file", "needs secrets.worker-token-file: workers tell tenants apart by the router's")
    return spec


def _keys(cls: type) -> tuple[str, ...]:
    return tuple(one.name.removesuffix("_s").replace("_", "-") for one in fields(cls))


def _worker(section: _Section, adapters: str) -> WorkerSpec:
    flags = list(flags_of(WorkerConfig))
    return WorkerSpec(
        count=_count(section),
        resources=_resources(section, cpu=1.0),
        flags=section.flags(flags, _OWN_OF_WORKERS, _try_worker),
        store=section.text("store", _absolute),
        scale=_scale(section.section("scale", _keys(ScaleSpec))),
    )


def _router(section: _Section) -> RouterSpec:
    port = section.number("port", RouterSpec().port, 0, 65535, whole=True)
    return RouterSpec(
        count=int(section.number("count", 1, 1, MAX_COUNT, whole=True)),
        host=section.text("host", _host),
        port=int(port),
        resources=_resources(section, cpu=0.0),
        flags=section.flags(list(flags_of(RouterConfig)), _OWN, _try_router),
    )


def _count(section: _Section) -> CountSpec:
    given = section.values.get("count", 1)
    if not isinstance(given, dict):
        count = int(section.number("count", 1, 1, MAX_COUNT, whole=True))
        return CountSpec(count, count)
    bounds = section.section("count", ("min", "max"))
    least = int(bounds.number("min", 1, 1, MAX_COUNT, whole=True))
    most = int(bounds.number("max", least, 1, MAX_COUNT, whole=True))
    if most < least:
        raise _wrong("worker.count.max", f"must be at least min, {least}")
    return CountSpec(least, most)


def _resources(section: _Section, cpu: float) -> ResourceSpec:
    own = section.section("resources", None)
    amounts = {name: own.number(name, 0.0, 0.0, 1e6) for name in own.values}
    for name, amount in amounts.items():
        if not name.strip():
            raise _wrong(own.at("''"), "is no name of a resource")
        if amount != round(amount, NUM_DECIMALS):
            raise _wrong(own.at(name), f"must have {NUM_DECIMALS} decimals at most, not {amount!r}")
        if name not in ("cpu", "gpu") and name.lower() in OF_RAY:
            raise _wrong(own.at(name), "is a name of Ray's own; there are cpu, gpu and your own")
        if name == "gpu" and amount > 1 and amount != int(amount):
            raise _wrong(own.at(name), f"must be a part of one or a whole number, not {amount:g}")
    return ResourceSpec(amounts.pop("cpu", cpu), amounts.pop("gpu", 0.0), amounts)


def _scale(section: _Section) -> ScaleSpec:
    default = ScaleSpec()
    return ScaleSpec(
        section.number("target-pending-tokens", default.target_pending_tokens, 1.0, 1e12),
        section.duration("up-after", default.up_after_s),
        section.duration("down-after", default.down_after_s),
        section.duration("settle", default.settle_s),
    )


def _secrets(section: _Section) -> SecretSpec:
    return SecretSpec(section.text("auth-file", _absolute), section.text("worker-token-file", _absolute))


def _tls(section: _Section) -> TlsSpec:
    tls = TlsSpec(*(section.text(key, _absolute) for key in ("cert", "key", "ca")))
    if any((tls.cert, tls.key, tls.ca)) and not all((tls.cert, tls.key, tls.ca)):
        raise _wrong("tls", "takes cert, key and ca together")
    return tls


# --- values -----------------------------------------------------------------------------------------------------------


class _Section:
    """Part of the file: a mapping of which every key is known."""

    def __init__(self, given: Any, path: str, known: Collection[str] | None) -> None:
        """`known` None: any name goes."""
        if given is None:
            given = {}
        if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
            raise _wrong(path or "the file", f"must be a mapping of keys to values, not {_shown(given)}")
        self.values: dict[str, Any] = given
        self._path = path
        for key in given:
            if known is not None and key not in known:
                raise _wrong(self.at(key), f"is unknown{_near(key, known)}; there is {', '.join(known)}")

    def at(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def section(self, key: str, known: Collection[str] | None) -> _Section:
        return _Section(self.values.get(key), self.at(key), known)

    def text(self, key: str, check: Callable[[str], str]) -> str:
        """The text of a key, empty where it is not given; `check` says what is wrong."""
        value = self.values.get(key)
        if value is None:
            return ""
        if not isinstance(value, str) or not value:
            raise _wrong(self.at(key), f"must be a text, not {_shown(value)}")
        if wrong := check(value):
            raise _wrong(self.at(key), f"{wrong}, not {_shown(value)}")
        return value

    def switch(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise _wrong(self.at(key), f"must be true or false, not {_shown(value)}")
        return value

    def number(self, key: str, default: float, least: float, most: float, *, whole: bool = False) -> float:
        value = self.values.get(key, default)
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            what = "a whole number" if whole else "a number"
            raise _wrong(self.at(key), f"must be {what} from {least:g} to {most:g}, not {_shown(value)}")
        return value

    def duration(self, key: str, default: float) -> float:
        """The seconds of a key."""
        value = self.values.get(key, default)
        seconds = value
        if isinstance(value, str) and (found := _DURATION.match(value)):
            seconds = float(found[1]) * _UNITS_S[found[2] or "s"]
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= MAX_TIME_S:
            raise _wrong(self.at(key), f"must be a time such as 30s or 5m, a day at most, not {_shown(value)}")
        return float(seconds)

    def flags(
        self, known: list[Flag], own: Mapping[str, str], check: Callable[[list[Flag], dict[str, Any]], None]
    ) -> tuple[str, ...]:
        """Arguments of the command line."""
        by_name = {name.lstrip("-"): flag for flag in known for name in (flag.flag, *flag.aliases)}
        section = self.section("flags", None)
        values: dict[str, Any] = {}
        arguments: list[str] = []
        for key, value in section.values.items():
            at = section.at(key)
            flag = by_name.get(key)
            if flag is None:
                raise _wrong(at, f"is not a flag of the command{_near(key, by_name)}")
            name = flag.flag.lstrip("-")
            if name in own:
                raise _wrong(at, f"is given by {own[name]}")
            values[flag.parameter] = _flag_value(flag, value, at)
            # A relative path is one of the nodes, not of this machine.
            arguments += flag_arguments(flag, str(value) if isinstance(value, Path) else value)
        try:
            check(known, values)
        except LoraplexError as error:
            field = error.field or ""
            # The command says which flag is wrong, and the key here does so already.
            at = section.at(field.lstrip("-")) if field else self.at("flags")
            raise _wrong(at, error.message.removeprefix(f"{field} ")) from None
        return tuple(arguments)


def _flag_value(flag: Flag, value: Any, at: str) -> Any:
    """The flag's value as typer would give it. Raises InvalidArgument."""
    kind = flag.type
    arguments = [one for one in typing.get_args(kind) if one is not type(None)]
    if typing.get_origin(kind) is tuple:
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(one, (str, int, float)) and not isinstance(one, bool) for one in values):
            raise _wrong(at, f"must be a text or a list of texts, not {_shown(value)}")
        return [str(one) for one in values]
    if flag.is_bytes and isinstance(value, (str, int)) and not isinstance(value, bool):
        return str(value)
    if typing.get_origin(kind) is typing.Literal:
        kind = str
    elif arguments:  # X | None
        (kind,) = arguments
    takes = {int: (int,), float: (int, float), str: (str, int, float), Path: (str,), bool: (bool,)}[kind]
    if not isinstance(value, takes) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(at, f"must be {_WORDS[kind]}, not {_shown(value)}")
    return kind(value)


_WORDS: Final = {int: "a whole number", float: "a number", str: "a text", Path: "a path", bool: "true or false"}


def _try_worker(flags: list[Flag], given: dict[str, Any]) -> None:
    unfit = "is not for a fleet's workers: what looks after them shows no certificate; tls and secrets keep others out"
    check("tls_client_ca" not in given, "--tls-client-ca", unfit)
    _try(WorkerConfig, flags, given, {("engine", "model", "model"): "model"})


def _try_router(flags: list[Flag], given: dict[str, Any]) -> None:
    for parameter in ("worker_client_cert", "worker_client_key"):
        flag = "--" + parameter.replace("_", "-")
        check(parameter not in given, flag, "is of no use: a fleet's workers ask for no certificate")
    _try(RouterConfig, flags, given, {("workers",): ("127.0.0.1:1",)})


def _try(cls: type, flags: list[Flag], given: dict[str, Any], fixed: Mapping[tuple[str, ...], Any]) -> None:
    """Checks flags. Raises what the configuration raises. Paths are left out: they are the nodes' own."""
    values: dict[str, Any] = {flag.parameter: flag.default for flag in flags if flag.path not in fixed}
    values |= {name: value for name, value in given.items() if not isinstance(value, Path)}
    configure(cls, [flag for flag in flags if flag.path not in fixed], values, fixed)


def _any(text: str) -> str:
    return ""


def _host(text: str) -> str:
    host = f"[{text}]" if ":" in text and not text.startswith("[") else text
    return "" if is_address(f"{host}:1") else "must be a host name or an address"


def _absolute(text: str) -> str:
    return "" if text.startswith("/") else "must be an absolute path, the same on every node"


def _name(text: str) -> str:
    return "" if _NAME.match(text) else "must be small letters, digits and hyphens, 40 at most"


def check_address(text: str, field: str = "--address") -> None:
    """Raises InvalidArgument for what is no address of Ray."""
    if wrong := _ray_address(text):
        raise InvalidArgument(f"{field} {wrong}, not {text!a}", field=field)


def _ray_address(text: str) -> str:
    is_ray = text == AUTO or is_address(text) or (text.startswith("ray://") and is_address(text[6:]))
    return "" if is_ray else "must be auto or Ray's HOST:PORT"


def _near(key: str, known: Collection[str]) -> str:
    question = did_you_mean(key, known)
    return f" ({question})" if question else ""


def _required(key: str) -> str:
    raise _wrong(key, "must be given")


def _shown(value: Any) -> str:
    """A value of the file in a sentence: ASCII, and short, whatever it is."""
    return _SHORT.repr(value).encode("ascii", "backslashreplace").decode()


def _wrong(key: str, rule: str) -> InvalidArgument:
    return InvalidArgument(f"{key} {rule}", field=key)
