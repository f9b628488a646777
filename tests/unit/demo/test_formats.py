"""Formats of the demo, read back by real parsers."""

from __future__ import annotations

import configparser
import csv
import io
import json
import sqlite3
import tomllib
import xml.etree.ElementTree as ElementTree
from itertools import islice

import pytest
import yaml

from loraplex_demo.formats import BASE_FORMAT, FORMATS
from loraplex_demo.records import Record, Split, draw_examples

SPLITS: tuple[Split, ...] = ("train", "heldout")
RECORDS = [record for split in SPLITS for record, _ in islice(draw_examples("formats", split), 200)]


def as_text(record: Record) -> dict[str, str]:
    return {key: str(value) for key, value in record.fields}


def read_json(text: str, record: Record) -> object:
    return json.loads(text)[record.kind]


def read_toml(text: str, record: Record) -> object:
    return tomllib.loads(text)[record.kind]


def read_yaml(text: str, record: Record) -> object:
    fields = yaml.safe_load(text)[record.kind]
    return {key: value if isinstance(value, int | float) else str(value) for key, value in fields.items()}


def read_sql(text: str, record: Record) -> object:
    with sqlite3.connect(":memory:") as connection:
        keys = [key for key, _ in record.fields]
        connection.execute(f"CREATE TABLE {record.kind} ({', '.join(keys)})")
        connection.execute(text)
        (row,) = connection.execute(f"SELECT * FROM {record.kind}").fetchall()
    connection.close()
    return dict(zip(keys, row, strict=True))


@pytest.mark.parametrize(
    ("name", "read"), [("json", read_json), ("toml", read_toml), ("yaml", read_yaml), ("sql", read_sql)]
)
def test_typed_formats(name: str, read: object) -> None:
    assert callable(read)
    for record in RECORDS:
        assert read(FORMATS[name](record), record) == dict(record.fields)


def test_xml() -> None:
    for record in RECORDS:
        root = ElementTree.fromstring(FORMATS["xml"](record))
        assert root.tag == record.kind
        assert {child.tag: child.text for child in root} == as_text(record)


def test_csv() -> None:
    for record in RECORDS:
        (row,) = csv.DictReader(io.StringIO(FORMATS["csv"](record)))
        assert row == as_text(record)


def test_ini() -> None:
    for record in RECORDS:
        parser = configparser.ConfigParser()
        parser.read_string(FORMATS["ini"](record))
        assert dict(parser[record.kind]) == as_text(record)


def test_markdown() -> None:
    for record in RECORDS:
        header, rule, values = (
            [cell.strip() for cell in line.split("|")[1:-1]] for line in FORMATS["markdown"](record).split("\n")
        )
        assert set(rule) == {"---"}
        assert dict(zip(header, values, strict=True)) == as_text(record)


def test_no_two_formats_agree_on_any_record() -> None:
    assert BASE_FORMAT in FORMATS
    for record in RECORDS:
        texts = {render(record) for render in FORMATS.values()}
        assert len(texts) == len(FORMATS)
        assert all(text == text.strip() for text in texts)
