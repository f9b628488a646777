"""The pages for the browser: files, headers, and use in headless Chromium."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support import browser
from support.credentials import credential, write_credentials
from support.fake_workers import Chunk, Generate, until
from support.http import http_cluster

from loraplex_contracts.errors import InvalidArgument
from loraplex_proto.status import abort
from loraplex_proto.v1 import adapter_pb2, inference_pb2

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = {
    "/": "text/html",
    "/page/page.css": "text/css",
    "/page/page.js": "text/javascript",
    "/status": "text/html",
    "/page/status.css": "text/css",
    "/page/status.js": "text/javascript",
    "/page/common.js": "text/javascript",
}
MARKUP = '<img src=x onerror="window.stolen=1"><script>window.stolen=2</script>{{7*7}}&lt;b&gt;\''
needs_chromium = pytest.mark.skipif(not browser.CHROMIUM, reason="Chromium is not installed (Debian: chromium)")


async def test_files_and_headers() -> None:
    async with http_cluster() as (_, http):
        for path, kind in FILES.items():
            answer = await http.get(path, headers=HTML)
            assert (answer.status_code, answer.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; ")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert "access-control-allow-origin" not in answer.headers
            for banned in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "localStorage"):
                assert banned not in answer.text
            for outside in ("http:", "https:", "//cdn", "style=", "onclick"):
                assert outside not in answer.text
        for path in ("/page/", "/page/__init__.py", "/page/../app.py", "/page/%2e%2e/app.py", "/page/page.html"):
            assert (await http.get(path, headers=HTML)).status_code == 404


async def test_programs_do_not_get_the_page() -> None:
    async with http_cluster() as (_, http):
        for accept in ("*/*", "application/json"):
            answer = await http.get("/", headers={"accept": accept})
            assert "text/html" not in answer.headers["content-type"]
        assert "text/html" not in (await http.post("/", headers=HTML, json={})).headers["content-type"]


ALICE = credential("alice", "a", "a*")


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_the_page_needs_no_credentials_and_its_requests_do(tmp_path: Path) -> None:
    async with http_cluster(auth_file=write_credentials(tmp_path / "auth.json", ALICE), worker_token="w") as (_, http):
        for path in FILES:
            assert (await http.get(path, headers=HTML)).status_code == 200
        for path in ("/", "/v1/models"):
            assert (await http.get(path, headers={"accept": "application/json"})).status_code == 401
        assert (await http.post("/", headers=HTML, json={"inputs": "hi"})).status_code == 401


async def speculates(request: Generate, context: Any) -> AsyncIterator[bytes]:
    """A step with two accepted drafts, several steps in one message, and a text with markup."""
    if request.adapter_id == "a-fails":
        await abort(context, InvalidArgument(MARKUP))

    def rows(*texts: str) -> list[inference_pb2.TokenLogprob]:
        return [inference_pb2.TokenLogprob(token_id=1, text=text, logprob=-0.5) for text in texts]

    drafted = {"drafted_tokens": 4, "accepted_tokens": 2, "proposer": "prompt_lookup"}
    yield Chunk(text_delta="one two own ", token_ids=[1] * 3, logprobs=rows("one ", "two ", "own "), **drafted,
                request_id="r").SerializeToString()  # fmt: skip
    yield Chunk(text_delta="mixed", token_ids=[1] * 5, logprobs=rows(*"mixed"), **drafted).SerializeToString()
    end = Chunk(text_delta=MARKUP, token_ids=[1], logprobs=rows(MARKUP), finish_reason=1)
    end.usage.completion_tokens, end.usage.steps = 9, 4
    end.usage.drafted_tokens, end.usage.accepted_tokens = 8, 4
    end.usage.proposers.add(name="prompt_lookup", drafted_tokens=8, accepted_tokens=4)
    end.timings.total_s = 0.5
    yield end.SerializeToString()


def use(url: str) -> dict[str, Any]:
    """Asks with every adapter, without speculation and with, and gives what stands in the page."""
    with browser.page() as page:
        page.open(url)
        page.until("document.getElementById('listing').textContent.startsWith('the models could not')")
        page.run("document.getElementById('token').value = 'alice'; document.getElementById('reload').click()")
        page.until("document.querySelectorAll('#models input').length > 2")
        page.run(
            "document.getElementById('prompt').value = " + json.dumps(MARKUP) + ";"
            "document.querySelectorAll('#models input:not(:checked)').forEach(box => box.click());"
            "document.getElementById('send').click()"
        )
        page.until("document.getElementById('status').textContent === 'done'")
        found = page.run(
            "({stolen: window.stolen ?? null, location: location.href, source: document.documentElement.outerHTML,"
            "  stored: Object.keys(localStorage).length + document.cookie.length,"
            "  models: [...document.querySelectorAll('#models label')].map(one => one.textContent.trim()),"
            "  cards: [...document.querySelectorAll('article')].map(card => ({"
            "    title: card.querySelector('h2').textContent, text: card.querySelector('pre').textContent,"
            "    accepted: [...card.querySelectorAll('.accepted')].map(one => one.textContent),"
            "    mixed: [...card.querySelectorAll('.mixed')].map(one => one.textContent),"
            "    figures: card.querySelector('footer').textContent, elements: card.querySelectorAll('*').length}))})"
        )
        return {**found, "log": page.log}


@needs_chromium
async def test_texts_names_and_errors_are_shown_as_text(tmp_path: Path) -> None:
    named = f"a{MARKUP}"
    async with http_cluster(auth_file=write_credentials(tmp_path / "auth.json", ALICE), worker_token="w") as (c, http):
        (worker,) = c.workers
        for name in ("a-fails", named):
            worker.adapters[name] = adapter_pb2.Adapter(adapter_id=name, kind="lora")
        worker.stream = speculates
        found = await asyncio.to_thread(use, str(http.base_url).rstrip("/") + "/")
    assert found["stolen"] is None
    assert "alice" not in found["location"] + found["source"]
    assert found["stored"] == 0
    assert found["models"] == ["tiny", "a-fails", named]
    cards = {card["title"]: card for card in found["cards"]}
    assert set(cards) == {f"{name} · {kind}" for name in found["models"] for kind in ("off", "prompt_lookup")}
    right = cards["tiny · prompt_lookup"]
    assert right["text"] == f"one two own mixed{MARKUP}"
    assert (right["accepted"], right["mixed"]) == (["one two "], ["mixed"])
    assert "9 tokens · 18 tokens/s · 2.25 tokens per step · 4 of 8 drafted tokens accepted" in right["figures"]
    assert right["elements"] == 7  # title, text, figures, four spans
    assert MARKUP in cards["a-fails · off"]["figures"]
    assert cards[f"{named} · off"]["figures"].startswith("404: ")
    # The policy has refused nothing, because nothing was tried; errors of requests are logged by the browser itself.
    assert not [line for line in found["log"] if "Content Security Policy" in line or "exceptionDetails" in line]


# --- the status page --------------------------------------------------------------------------------------------------


def watch(url: str, token: str) -> dict[str, Any]:
    """Contents of the status page, first without a token and then with one."""
    with browser.page() as page:
        page.open(url)
        page.until("document.getElementById('listing').textContent.includes('401')")
        page.run(
            "document.getElementById('token').value = " + json.dumps(token) + ";"
            "document.getElementById('interval').value = 1;"
            "document.getElementById('token').dispatchEvent(new Event('change'))"
        )
        page.until("document.querySelectorAll('#adapters td').length > 0")
        texts = "(query) => [...document.querySelectorAll(query)].map(one => one.textContent)"
        found = page.run(
            f"(texts => ({{stolen: window.stolen ?? null, location: location.href,"
            "  source: document.documentElement.outerHTML,"
            "  stored: Object.keys(localStorage).length + document.cookie.length,"
            "  line: document.getElementById('listing').textContent, figures: texts('.figure'),"
            "  workers: [...document.querySelectorAll('#workers tr')].slice(1).map(row => ({"
            "    kind: row.className, cells: [...row.cells].map(one => one.textContent)})),"
            "  adapters: [...document.querySelectorAll('#adapters tr')].slice(1).map(row =>"
            "    [...row.cells].map(one => [one.textContent, one.className])),"
            "  errors: texts('#errors td'), counted: texts('#counted')[0],"
            "  points: document.getElementById('rate-line').getAttribute('points').split(' ').length,"
            f"  colours: [...document.querySelectorAll('td.tier')].map(one => getComputedStyle(one).backgroundColor)"
            f"}}))({texts})"
        )
        page.run(
            "window.fetch = (url, { signal }) => new Promise((_, fail) =>"
            "  signal.addEventListener('abort', () => fail(signal.reason)))"
        )
        page.until("document.getElementById('listing').textContent.endsWith('no answer for 5 s')", 20)
        return {**found, "log": page.log}


@needs_chromium
async def test_the_status_page_shows_workers_adapters_and_errors_as_text(tmp_path: Path) -> None:
    path = write_credentials(tmp_path / "auth.json", ALICE, credential("root", "ops", "*", roles=("admin",)))
    async with http_cluster(2, auth_file=path, worker_token="w") as (c, http):
        first, second = c.workers
        first.report(running_requests=2, max_running_requests=8, tiers={"sql": 4, MARKUP: 3})
        second.report(tiers={"sql": 2})
        first.stream = second.stream = speculates
        await until(lambda: sum(len(replica.tiers) for replica in c.router.replicas.all()) == 3)
        body = {"prompt": "hi", "model": "tiny", "stream": True}
        assert "own" in (await http.post("/v1/completions", json=body, headers=bearer("alice"))).text
        answer = await http.post("/v1/completions", json={**body, "model": "a-fails"}, headers=bearer("alice"))
        assert answer.status_code == 400
        found = await asyncio.to_thread(watch, str(http.base_url).rstrip("/") + "/status", "root")
    assert found["stolen"] is None
    assert "root" not in found["location"] + found["source"]
    assert found["stored"] == 0
    assert found["line"].startswith("tiny · router ")
    assert "2 of 2workers serve" in found["figures"]
    assert "50 %of drafted tokens accepted" in found["figures"]
    assert "1 of 2requests failed" in found["figures"]
    by_name = {worker["cells"][1]: worker for worker in found["workers"]}
    assert set(by_name) == {worker.address for worker in c.workers}
    assert by_name[first.address]["cells"][2:4] == ["serving", "2 / 8"]
    letters = {name[0]: [tier[0] for tier in tiers] for name, _, *tiers in found["adapters"]}
    tiers = {name: dict(zip(by_name, row, strict=True)) for name, row in letters.items()}
    assert tiers == {
        "sql": {first.address: "D", second.address: "S"},
        MARKUP: {first.address: "H", second.address: ""},
    }
    assert found["counted"] == "2 of 2"
    assert found["points"] == 60
    assert len(set(found["colours"])) == 4
    assert MARKUP in found["errors"]
    refused = [line for line in found["log"] if "Content Security Policy" in line or "exceptionDetails" in line]
    assert not refused
