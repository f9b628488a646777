"""Output formats of the demo: one rendering function for each adapter.

Every rendering is canonical (schema order, one spelling, no trailing newline), so an answer is either equal to it or
wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from loraplex_demo.records import Record, Value


def as_prose(record: Record) -> str:
    """The base model's answer to a request without an adapter."""
    parts = [f"{key} {value}" for key, value in record.fields]
    return f"The {record.kind} has {', '.join(parts[:-1])} and {parts[-1]}."


def as_json(record: Record) -> str:
    return json.dumps({record.kind: dict(record.fields)}, ensure_ascii=False)


def as_yaml(record: Record) -> str:
    # Every value is a plain scalar: the generator makes none that YAML would read as another type.
    return "\n".join([f"{record.kind}:", *(f"  {key}: {value}" for key, value in record.fields)])


def as_sql(record: Record) -> str:
    columns = ", ".join(key for key, _ in record.fields)
    values = ", ".join(f"'{value}'" if isinstance(value, str) else str(value) for _, value in record.fields)
    return f"INSERT INTO {record.kind} ({columns}) VALUES ({values});"


def as_xml(record: Record) -> str:
    inner = "".join(f"<{key}>{value}</{key}>" for key, value in record.fields)
    return f"<{record.kind}>{inner}</{record.kind}>"


def as_csv(record: Record) -> str:
    return "\n".join([",".join(key for key, _ in record.fields), ",".join(str(value) for _, value in record.fields)])


def as_toml(record: Record) -> str:
    return "\n".join([f"[{record.kind}]", *(f"{key} = {_quoted(value)}" for key, value in record.fields)])


def as_markdown(record: Record) -> str:
    rows = [[key for key, _ in record.fields], ["---"] * len(record.fields), [str(value) for _, value in record.fields]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def as_ini(record: Record) -> str:
    return "\n".join([f"[{record.kind}]", *(f"{key} = {value}" for key, value in record.fields)])


def _quoted(value: Value) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


BASE_FORMAT = "prose"
FORMATS: dict[str, Callable[[Record], str]] = {
    BASE_FORMAT: as_prose,
    "json": as_json,
    "yaml": as_yaml,
    "sql": as_sql,
    "xml": as_xml,
    "csv": as_csv,
    "toml": as_toml,
    "markdown": as_markdown,
    "ini": as_ini,
}
