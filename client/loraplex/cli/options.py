"""Options that commands share: server, connection, sampling and speculation.

Fields of a request carry the names of the SDK's options, so `options_of` translates nothing.
"""

from __future__ import annotations

import builtins
import json
import logging
import sys
from collections import abc
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

import typer

from loraplex import (
    AnySpeculation,
    AsyncClient,
    CallRecord,
    Client,
    GenerateOptions,
    InvalidArgument,
    LoraplexError,
    Tls,
)
from loraplex.cli import terminal
from loraplex.config import DEFAULT_SERVER as DEFAULT_SERVER
from loraplex.config import RETRIES_VARIABLE, SERVER_VARIABLE, TOKEN_VARIABLE
from loraplex_contracts.mixtures import DEFAULT_WEIGHT
from loraplex_contracts.sampling import SAMPLING_OPTIONS
from loraplex_proto.speculation import KINDS, put_kind
from loraplex_proto.v1 import inference_pb2
from loraplex_runtime.flags import configure, flags_of, option

_connection = partial(option, panel="Connection")
_sampling = partial(option, panel="Sampling")
_drafting = partial(option, panel="Speculation: the same text, sooner")

_ADDRESS_VARIABLE = SERVER_VARIABLE
_TAB_S = 2.0  # somebody has pressed Tab and waits

ServerOption = Annotated[
    str,
    typer.Option(
        "--server",
        "-s",
        envvar=_ADDRESS_VARIABLE,
        help="Address of a router or worker, as host:port.",
        rich_help_panel="Connection",
    ),
]
ServerArgument = Annotated[
    str, typer.Argument(metavar="ADDR", envvar=_ADDRESS_VARIABLE, help="Address of a router or worker.")
]
RouterArgument = Annotated[str, typer.Argument(metavar="ADDR", envvar=_ADDRESS_VARIABLE, help="Address of a router.")]
HUB_TOKEN_HELP = (
    "Token for the Hub, in the place of the server's own. Better in the environment than on the command line, where "
    "others on this machine can read it."
)
HUB_TOKEN_VARIABLE = "LORAPLEX_HUB_TOKEN"
HubTokenOption = Annotated[
    str, typer.Option("--hub-token", envvar=HUB_TOKEN_VARIABLE, help=HUB_TOKEN_HELP, show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Connection:
    """Flags of the connection to a server."""

    token: str | None = _connection(
        None,
        "Token, where the server asks for one. Better in the environment than on the command line, where others on "
        "this machine can read it.",
        "--token",
        env=TOKEN_VARIABLE,
    )
    timeout_s: float = _connection(120.0, "Give up after this many seconds; 0 waits for ever.", "--timeout")
    tls: bool = _connection(False, "Encrypt the connection.", "--tls")
    ca_cert: Path | None = _connection(
        None, "File with the certificate that the server's is checked against. Implies --tls.", "--ca-cert"
    )
    tls_name: str = _connection(
        "", "Name in the server's certificate, where it is not the address. Implies --tls.", "--tls-name"
    )
    client_cert: Path | None = _connection(
        None, "File with this side's certificate, where the server asks for one. Needs --client-key.", "--client-cert"
    )
    client_key: Path | None = _connection(None, "File with the key of --client-cert.", "--client-key")
    retries: int | None = _connection(
        None,
        "Send a request again so often where the server is away or full. Default: 3.",
        "--retries",
        env=RETRIES_VARIABLE,
    )
    connect_timeout_s: float = _connection(10.0, "Seconds that an attempt to connect may take.", "--connect-timeout")

    def __post_init__(self) -> None:
        if not self.timeout_s >= 0:  # NaN too
            raise InvalidArgument("--timeout must be 0, for ever, or above", field="--timeout")

    def client(self, server: str) -> Client:
        """A client of the server. Raises InvalidArgument."""
        return Client(server, **self._settings(), on_call=_tell_of_retry)

    def async_client(self, server: str) -> AsyncClient:
        """A client of the server for asyncio. Raises InvalidArgument."""
        return AsyncClient(server, **self._settings())

    def _settings(self) -> dict[str, Any]:
        return {
            "token": self.token or "",
            "timeout_s": self.timeout_s or None,
            "tls": self._certificates(),
            "retries": self.retries,
            "connect_timeout_s": self.connect_timeout_s,
        }

    def _certificates(self) -> bool | Tls:
        files = (self.ca_cert, self.client_key, self.client_cert)
        if not any((*files, self.tls_name)):
            return self.tls
        if (self.client_key is None) != (self.client_cert is None):
            raise InvalidArgument("--client-cert and --client-key go together", field="--client-cert")
        flags = ("--ca-cert", "--client-key", "--client-cert")
        ca, key, certificate = (
            None if one is None else _read_pem(one, flag) for one, flag in zip(files, flags, strict=True)
        )
        return Tls(ca, key, certificate, self.tls_name or None)


def complete_adapter(ctx: typer.Context, incomplete: str) -> list[str]:
    """Adapters of the server that the command line, or the environment, names; none, and no words, where it does not
    answer: they would land in the user's command line."""
    log, params = logging.getLogger("loraplex"), cast("Any", ctx.params)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        connection = configure(Connection, list(flags_of(Connection)), params, {})
        quick = replace(connection, timeout_s=_TAB_S, connect_timeout_s=_TAB_S, retries=0)
        with quick.client(params["server"]) as client:
            return [one.adapter_id for one in client.adapters.list(prefix=incomplete)]
    except LoraplexError:
        return []
    finally:
        log.setLevel(level)


NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The adapter's name, as in requests.", autocompletion=complete_adapter)
]


def _complete_speculation(ctx: typer.Context, incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def _read_pem(path: Path, flag: str) -> bytes:
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{path}, the file of {flag}, cannot be read: {error.strerror}", field=flag) from error
    if b"-----BEGIN" not in pem:
        raise InvalidArgument(f"{path}, the file of {flag}, is not PEM: it has no line -----BEGIN ...-----", field=flag)
    return pem


def _tell_of_retry(record: CallRecord) -> None:
    if record.error is not None and record.retry_in_s is not None:
        terminal.remark(f"{record.error.message}; next try in {record.retry_in_s:.1f} s")


def parse_speculation(text: str) -> AnySpeculation:
    """KIND or KIND:NAME. Raises InvalidArgument."""
    put_kind(inference_pb2.Speculation(), text)
    return text


def parse_members(text: str) -> dict[str, float]:
    """NAME:WEIGHT,... Raises InvalidArgument."""
    found: dict[str, float] = {}
    for member in text.split(","):
        name, has_weight, weight = member.partition(":")
        try:
            value = float(weight) if has_weight else DEFAULT_WEIGHT
        except ValueError:
            value = None
        if not name or value is None or name in found:
            raise InvalidArgument(
                f"--adapters takes names and weights, sql:0.7,terse:0.3, each name once, not {text!a}",
                field="--adapters",
            )
        found[name] = value
    return found


def _sampling_flag(name: str) -> tuple[str, Any, Any]:
    """Name, type and flag of a sampling option, from the table of options and `GenerateOptions`."""
    flag, text = "--" + name.replace("_", "-"), SAMPLING_OPTIONS[name].help
    kind = get_args(get_type_hints(GenerateOptions)[name])[0]
    match get_origin(kind) or kind:
        case abc.Mapping:
            parse = partial(_parse_pairs, flag=flag)
            return name, Any, _sampling(None, text, flag, metavar="ID:VALUE,...", parse=parse)
        case abc.Sequence:
            return name, Any, _sampling(None, text, flag, metavar="ID,...", parse=partial(parse_ids, flag=flag))
        case builtins.str:
            return name, tuple[str, ...], _sampling((), f"{text} May be given several times.", flag)
        case _:
            return name, kind | None, _sampling(None, text, flag)


def read_text(path: str, *, flag: str) -> str:
    """The text of a file, or of standard input for `-`. Raises InvalidArgument."""
    if path == "-" and sys.stdin.closed:
        raise InvalidArgument("standard input can be read once; name a file for all but one", field=flag)
    try:
        if path != "-":
            return Path(path).read_text(encoding="utf-8")
        with sys.stdin:  # whoever wants it again is told so
            return sys.stdin.read()
    except UnicodeDecodeError as error:
        where = "standard input" if path == "-" else f"the file of {flag}"
        raise InvalidArgument(f"{where} is not text in UTF-8", field=flag) from error
    except OSError as error:
        raise InvalidArgument(f"{path}, the file of {flag}, cannot be read: {error.strerror}", field=flag) from error


def read_json(path: str, *, flag: str) -> Any:
    """The value in a JSON file, or in standard input for `-`. Raises InvalidArgument."""
    text = read_text(path, flag=flag)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the file of {flag} is not JSON: {error}", field=flag) from error


def parse_tool_choice(text: str) -> Any:
    """A kind of choice, or the call of one tool."""
    return text if text in ("none", "auto", "required") else {"function": {"name": text}}


def parse_ids(text: str, *, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument(f"{flag} takes token ids, 5,17, not {text!a}", field=flag) from None


def _parse_pairs(text: str, *, flag: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token_id): float(value) for token_id, value in pairs}
    except ValueError:
        raise InvalidArgument(f"{flag} takes token ids and values, 5:-1.5,17:2, not {text!a}", field=flag) from None


if TYPE_CHECKING:

    class Sampling:
        """The flags of all sampling options."""

else:
    Sampling = make_dataclass("Sampling", [_sampling_flag(name) for name in SAMPLING_OPTIONS], frozen=True)


@dataclass(frozen=True, slots=True)
class Drafting:
    """Flags of speculation."""

    speculation: AnySpeculation | None = _drafting(
        None,
        "Who guesses the tokens that the model then checks: prompt_lookup (copies from the text so far), medusa (extra "
        "heads; with medusa:ADAPTER_ID those of that adapter), draft_model (a smaller model; with draft_model:NAME one "
        "of several), auto or off. Default: as the server and the adapter have it.",
        "--speculation",
        metavar="KIND[:NAME]",
        parse=parse_speculation,
        complete=_complete_speculation,
    )
    max_draft_tokens: int | None = _drafting(None, "Guess this many tokens at a time at most.", "--max-draft-tokens")
    fixed_draft_length: bool = _drafting(
        False, "Always guess as many, instead of fewer where guesses miss.", "--fixed-length"
    )


def options_of(*groups: Any) -> GenerateOptions:
    """The options that are set in the dataclasses `groups`; those that are unset are left out."""
    values = {one.name: getattr(group, one.name) for group in groups for one in fields(group)}
    return cast(GenerateOptions, {name: value for name, value in values.items() if _is_given(value)})


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value not in ("", ())
