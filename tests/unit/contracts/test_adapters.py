"""Names of adapters, versions, sources and digests."""

from __future__ import annotations

import pytest

from loraplex_contracts.adapters import (
    AdapterKey,
    AdapterKind,
    check_adapter_id,
    check_adapter_ref,
    check_adapter_source,
    check_digest,
    name_in,
)
from loraplex_contracts.errors import InvalidAdapterId, InvalidArgument, Unimplemented


@pytest.mark.parametrize(
    ("kind", "has_heads", "changes_kv"), [("lora", False, True), ("medusa", True, False), ("combined", True, True)]
)
def test_what_a_kind_of_adapter_does(kind: AdapterKind, has_heads: bool, changes_kv: bool) -> None:
    key = AdapterKey(kind, "0" * 64)
    assert (key.has_heads, key.changes_kv) == (has_heads, changes_kv)


@pytest.mark.parametrize("ref", ["sql", "acme/sql", "sql@0123abcd", "acme/sql@" + "a" * 64])
def test_references(ref: str) -> None:
    assert check_adapter_ref(ref) == ref
    assert name_in(ref) in ("sql", "acme/sql")


@pytest.mark.parametrize(
    "ref", ["", "@0123abcd", "sql@", "sql@0123abc", "sql@0123ABCD", "sql@" + "a" * 65, "sql@0123abcd@0123abcd",
            "sql@0123abcg", "sql@../../..", "sql@0123abcd\n", "sql @0123abcd", "s\u0445l@0123abcd"],
)  # fmt: skip
def test_what_is_no_reference(ref: str) -> None:
    with pytest.raises(InvalidAdapterId):
        check_adapter_ref(ref)


def test_a_name_has_no_version() -> None:
    with pytest.raises(InvalidAdapterId):
        check_adapter_id("sql@0123abcd")


@pytest.mark.parametrize(
    "source", ["sql", "team/sql/v2", "/srv/sql", "/srv/sql/", "with space", "hub:org/sql", "s3:bucket/a"]
)
def test_sources(source: str) -> None:
    assert check_adapter_source(source) == source


@pytest.mark.parametrize("source", ["", "/", "..", "a/../b", "a//b", "./a", "a\0b", "a\nb", "a" * 1025, "/a/../../etc"])
def test_what_is_no_source(source: str) -> None:
    with pytest.raises(InvalidArgument):
        check_adapter_source(source)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("hub:org", "'org' is not a repository on the Hub: write hub:ORG/NAME,"),
        ("hub:org/../x", "'org/../x' is not a repository on the Hub: write hub:ORG/NAME,"),
        ("hub:org/sql/v2", "write hub:ORG/NAME,"),
        ("hub:org/" + "x" * 128, "128 characters at most"),
        ("s3:bucket/../x", "is not a place in a bucket: write s3:BUCKET/PREFIX without"),
        ("a/../b", "is not the path of a folder: write it without"),
    ],
)
def test_refusals_of_a_source_say_how_its_kind_is_written(source: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as raised:
        check_adapter_source(source)
    assert raised.value.field == "source"


def test_addresses_are_refused_as_sources() -> None:
    with pytest.raises(Unimplemented):
        check_adapter_source("http://169.254.169.254/x")


@pytest.mark.parametrize("digest", ["", "a" * 63, "A" * 64, "g" * 64, "a" * 64 + "\n"])
def test_what_is_no_digest(digest: str) -> None:
    with pytest.raises(InvalidArgument):
        check_digest(digest)
