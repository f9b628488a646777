"""Paging of listings: requests, tokens and page sizes."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from loraplex_contracts.errors import Code, InvalidArgument, ListingTooLarge, Unimplemented
from loraplex_proto.paging import MAX_PAGE_SIZE, ListQuery, Page, list_query, page_token, visible_part
from loraplex_proto.v1 import adapter_pb2
from loraplex_proto.validate import check_list_adapters
from loraplex_runtime.auth import EVERYBODY

Request = adapter_pb2.ListAdaptersRequest
QUERY = ListQuery(include_unloaded=True, prefix="acme/", state=adapter_pb2.ADAPTER_STATE_KNOWN, page_size=10)


def row(adapter_id: str, **more: str) -> adapter_pb2.Adapter:
    return adapter_pb2.Adapter(adapter_id=adapter_id, **more)  # pyright: ignore[reportArgumentType]


def test_a_request_from_before_there_were_pages_asks_for_everything() -> None:
    assert check_list_adapters(Request.FromString(b"")) == ListQuery()
    assert check_list_adapters(Request.FromString(b"\x08\x01")) == ListQuery(include_unloaded=True)


def test_a_query_as_another_server_is_asked_for_it() -> None:
    query = replace(QUERY, after="acme/b")
    assert list_query(query.request()) == query
    assert list_query(ListQuery().request()) == ListQuery()


def test_large_pages_are_cut_to_the_largest() -> None:
    assert list_query(Request(page_size=2**31 - 1)).page_size == MAX_PAGE_SIZE


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(page_size=-1), "page_size"),
        (Request(prefix="../x y"), "prefix"),
        (Request(prefix="a" * 129), "prefix"),
        (Request(prefix="a\n"), "prefix"),
        (Request(page_token="?"), "page_token"),
        (Request(page_token="YWJj"), "page_token"),
        (Request(page_token="\u00e4"), "page_token"),
        (Request(page_token=base64.urlsafe_b64encode(b"\x02" + bytes(4) + b"a").decode()), "page_token"),
        (Request(page_token=base64.urlsafe_b64encode(b"\x01" + bytes(4) + b"../a").decode()), "page_token"),
        (Request(page_token=base64.urlsafe_b64encode(b"\x01" + bytes(4) + b"\xff").decode()), "page_token"),
        (Request(page_token=page_token(QUERY, "a")), "page_token"),
        (Request(page_token=page_token(QUERY, "a"), include_unloaded=True, prefix="acme/", state=6), "page_token"),
    ],
)
def test_what_is_refused(request_: adapter_pb2.ListAdaptersRequest, field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_list_adapters(request_)
    assert raised.value.field == field


def test_fields_of_a_later_version_are_refused() -> None:
    with pytest.raises(Unimplemented):
        check_list_adapters(Request.FromString(b"\x30\x01"))
    with pytest.raises(Unimplemented, match="`state` has the value 99"):
        check_list_adapters(Request.FromString(b"\x28\x63"))


def test_the_page_size_may_change_between_pages() -> None:
    token = page_token(QUERY, "acme/a")
    again = list_query(Request(include_unloaded=True, prefix="acme/", state=1, page_size=3, page_token=token))
    assert (again.after, again.page_size) == ("acme/a", 3)


@pytest.mark.parametrize(
    ("prefix", "globs", "expected"),
    [
        ("", ("*",), ""),
        ("x", ("*",), "x"),
        ("", ("acme/*",), "acme/"),
        ("a", ("acme/*",), "acme/"),
        ("acme/sql", ("acme/*",), "acme/sql"),
        ("b", ("acme/*",), None),
        ("", ("acme/a?", "acme/b[12]"), "acme/"),
        ("", ("acme/*", "b"), ""),
        ("", (), None),
    ],
)
def test_the_part_in_which_a_caller_may_see_anything(prefix: str, globs: tuple[str, ...], expected: str | None) -> None:
    part = visible_part(ListQuery(prefix=prefix), globs)
    assert (None if part is None else part.prefix) == expected
    assert visible_part(QUERY, EVERYBODY.adapters) == QUERY


def test_a_page_holds_whole_adapters_and_says_after_whom_the_next_one_begins() -> None:
    page = Page(ListQuery(page_size=2))
    assert page.add("a", [row("a", worker="1"), row("a", worker="2")])
    assert page.add("b", [row("b")])
    assert not page.response.next_page_token, "nobody knows of another adapter"
    assert not page.add("c", [row("c")])
    assert [one.adapter_id for one in page.response.adapters] == ["a", "a", "b"]
    assert list_query(Request(page_token=page.response.next_page_token)).after == "b"


def test_a_page_is_shorter_where_adapters_are_large() -> None:
    page = Page(ListQuery(page_size=10))
    long = "x" * 700_000
    assert page.add("a", [row("a", error=long + long)]), "one adapter always fits"
    assert not page.add("b", [row("b", error=long)])


def test_everything_at_once_has_an_end() -> None:
    page = Page(ListQuery())
    for number in range(4):
        assert page.add(f"a{number}", [row(f"a{number}", error="x" * 1_000_000)])
    with pytest.raises(ListingTooLarge, match="page_size") as raised:
        page.add("a4", [row("a4", error="x" * 300_000)])
    assert (raised.value.field, raised.value.code) == ("page_size", Code.RESOURCE_EXHAUSTED)
    assert raised.value.retry_after_s is None
    assert len(page.response.SerializeToString()) <= 4 << 20
