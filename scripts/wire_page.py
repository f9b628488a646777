"""Generator of docs/wire.md from comments of .proto files and errors' classes.

python scripts/wire_page.py    # after a change to proto/**/*.proto or contracts/loraplex_contracts/errors.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loraplex_contracts.errors import by_reason

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/wire.md"
PACKAGE = ".loraplex.v1."
INTRODUCTION = """\
# Wire reference

Every call and message of the gRPC interface, made by `scripts/wire_page.py` from `proto/loraplex_proto/v1/`. Servers
answer reflection (v1 and v1alpha) and the standard health service too. Errors are statuses with
`google.rpc.ErrorInfo`, whose `reason` is one word, such as ADAPTER_NOT_FOUND. Fields are added, and none is removed or
renumbered (`docs/operations.md`, Upgrades).

A field marked `optional` tells unset from its default; of fields marked with the same *one of*, at most one is set.

## Clients in other languages

- The root of imports is `proto/`: `protoc -I proto … proto/loraplex_proto/v1/*.proto`. protoc 3.21 is new enough. The
  files have no `go_package`: for Go give one import path of yours to all of them, by
  `--go_opt=Mloraplex_proto/v1/FILE.proto=PATH` and `--go-grpc_opt=M…`, for FILE in adapter, inference, pooling, status
  and worker.
- Clients of gRPC refuse answers above 4 MiB unless told otherwise (`grpc.max_receive_message_length`,
  `MaxCallRecvMsgSize`, `maxInboundMessageSize`). Answers with logprobs or vectors may be larger; routers let up to
  64 MiB through. Requests may have 4 MiB (`--max-message` of the server).
- Clients may ping (`keepalive_time`) once a second, with or without calls.
- Give each call a deadline. A unary call whose message never comes stays open
  until its deadline.
- Seeds are 64 bits wide; those that a server chooses have 53, so that JavaScript's numbers hold them.
- A service config that checks health and tries again what failed as UNAVAILABLE, whose work may have begun; streams are
  tried again only until their first message:

```json
{
  "loadBalancingConfig": [{"round_robin": {}}],
  "healthCheckConfig": {"serviceName": "loraplex.v1.InferenceService"},
  "methodConfig": [{
    "name": [{"service": "loraplex.v1.InferenceService"}, {"service": "loraplex.v1.PoolingService"}],
    "retryPolicy": {
      "maxAttempts": 4, "initialBackoff": "0.5s", "maxBackoff": "5s", "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
}
```

## Details of errors

The trailer `grpc-status-details-bin` of a failed call has a `google.rpc.Status` (in base64 without padding on the wire,
as all of gRPC's `-bin` headers) with the call's code and message. Libraries have a function that reads it, such as Go's
`status.FromError(err)`, Java's `StatusProto.fromThrowable(e)` or Python's `grpc_status.rpc_status.from_call(e)`. Its
`details` are messages of `google/rpc/error_details.proto`, each packed in an `Any` and at most once:

| detail | where | what it says |
|---|---|---|
| `ErrorInfo` | always | `reason` (below); `metadata`: further words that belong to it |
| `RequestInfo` | the request is known | `request_id`, which logs have too |
| `BadRequest` | a field is at fault | `field_violations[0].field`: its path, such as `sampling.top_p` |
| `ResourceInfo` | something named is at fault | `resource_name`, such as an adapter's name |
| `QuotaFailure` | something named is full | `violations[0].subject`: its name |
| `RetryInfo` | another try may succeed | `retry_delay`: not before |

A status without `ErrorInfo` of the domain `loraplex.dev` is a proxy's, or the library's own: UNAVAILABLE without a
connection, or DEADLINE_EXCEEDED.

## Reasons of errors

`reason` of `google.rpc.ErrorInfo` (domain `loraplex.dev`), with the status that it comes with. More may be added.

| reason | status | meaning |
|---|---|---|
"""
# Numbers of the fields of FileDescriptorProto, DescriptorProto and others by which source positions are paths.
MESSAGES, ENUMS, SERVICES, FIELDS, NESTED, VALUES, METHODS = 4, 5, 6, 2, 3, 2, 2

Comments = dict[tuple[int, ...], str]


def files() -> list[dict[str, Any]]:
    buf = Path(sys.executable).parent / "buf"
    made = subprocess.run([buf, "build", "-o", "-#format=json"], cwd=ROOT, check=True, capture_output=True)
    return [file for file in json.loads(made.stdout)["file"] if file["package"] == "loraplex.v1"]


def comments_of(file: dict[str, Any]) -> Comments:
    """Comments by path: the text before a declaration, and that behind it on its line."""
    return {
        tuple(place["path"]): " ".join(
            f"{place.get('leadingComments', '')} {place.get('trailingComments', '')}".split()
        )
        for place in file["sourceCodeInfo"]["location"]
        if "leadingComments" in place or "trailingComments" in place
    }


def head_of(file: dict[str, Any]) -> str:
    """The comment of the whole file, which stands in front of its first line."""
    text = (ROOT / "proto" / file["name"]).read_text(encoding="utf-8")
    lines = text.partition("syntax =")[0].splitlines()
    return " ".join(line.removeprefix("//").strip() for line in lines).strip()


def cell(text: str) -> str:
    """Escapes what Markdown would take for markup."""
    return "".join(f"\\{char}" if char in "|<>*[]" else char for char in text)


def paragraph(text: str) -> str:
    return textwrap.fill(cell(text), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def link(type_name: str) -> str:
    name = type_name.removeprefix(PACKAGE)
    return f"[{name}](#{name.lower().replace('.', '')})"


def type_of(field: dict[str, Any], nested: dict[str, dict[str, Any]]) -> str:
    entry = nested.get(field.get("typeName", "").rpartition(".")[2])
    if entry is not None and entry.get("options", {}).get("mapEntry"):
        key, value = entry["field"]
        return f"map of {type_of(key, {})} to {type_of(value, {})}"
    name = field.get("typeName")
    shown = link(name) if name else field["type"].removeprefix("TYPE_").lower()
    return f"repeated {shown}" if field["label"] == "LABEL_REPEATED" else shown


def how(field: dict[str, Any], message: dict[str, Any]) -> str:
    if field.get("proto3Optional"):
        return "optional"
    return f"one of *{message['oneofDecl'][field['oneofIndex']]['name']}*" if "oneofIndex" in field else ""


def message_section(message: dict[str, Any], path: tuple[int, ...], comments: Comments, outer: str) -> Iterator[str]:
    name = f"{outer}{message['name']}"
    yield f"\n### {name}\n\n"
    if text := comments.get(path):
        yield f"{paragraph(text)}\n"
    nested = {one["name"]: one for one in message.get("nestedType", [])}
    fields = message.get("field", [])
    if fields:
        yield "| field | type | | meaning |\n|---|---|---|---|\n"
    for idx, field in enumerate(fields):
        meaning = cell(comments.get((*path, FIELDS, idx), ""))
        yield f"| `{field['name']}` | {type_of(field, nested)} | {how(field, message)} | {meaning} |\n"
    if not fields:
        yield "No fields.\n"
    for idx, inner in enumerate(message.get("nestedType", [])):
        if not inner.get("options", {}).get("mapEntry"):
            yield from message_section(inner, (*path, NESTED, idx), comments, f"{name}.")
    for idx, enum in enumerate(message.get("enumType", [])):
        yield from enum_section(enum, (*path, 4, idx), comments, f"{name}.")


def enum_section(enum: dict[str, Any], path: tuple[int, ...], comments: Comments, outer: str = "") -> Iterator[str]:
    yield f"\n### {outer}{enum['name']}\n\n"
    if text := comments.get(path):
        yield f"{paragraph(text)}\n"
    yield "| value | number | meaning |\n|---|---|---|\n"
    for idx, value in enumerate(enum["value"]):
        meaning = cell(comments.get((*path, VALUES, idx), ""))
        yield f"| `{value['name']}` | {value.get('number', 0)} | {meaning} |\n"


def service_section(service: dict[str, Any], path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"\n### {service['name']}\n\n"
    if text := comments.get(path):
        yield f"{paragraph(text)}\n"
    yield "| call | takes | answers | |\n|---|---|---|---|\n"
    for idx, method in enumerate(service["method"]):
        takes, answers = (
            f"{'stream of ' if method.get(streams) else ''}{link(method[kind])}"
            for kind, streams in (("inputType", "clientStreaming"), ("outputType", "serverStreaming"))
        )
        meaning = cell(comments.get((*path, METHODS, idx), ""))
        yield f"| `{method['name']}` | {takes} | {answers} | {meaning} |\n"


def page() -> str:
    parts = [INTRODUCTION]
    for reason, error in by_reason().items():
        meaning = " ".join((error.__doc__ or "").split())
        parts.append(f"| {reason} | {error.code.name} | {cell(meaning)} |\n")
    for file in files():
        comments = comments_of(file)
        parts.append(f"\n## {Path(file['name']).name}\n\n{paragraph(head_of(file))}")
        for idx, service in enumerate(file.get("service", [])):
            parts += service_section(service, (SERVICES, idx), comments)
        for idx, message in enumerate(file.get("messageType", [])):
            parts += message_section(message, (MESSAGES, idx), comments, "")
        for idx, enum in enumerate(file.get("enumType", [])):
            parts += enum_section(enum, (ENUMS, idx), comments)
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
